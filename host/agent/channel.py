"""Lines of JSON over a socket that never blocks, bounded both ways: no peer can hold up us or fill its memory."""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from .protocol import Json

LINE_LIMIT = 64 << 10
STRANGER_LIMIT = 4 << 10
UNSENT_LIMIT = 512 << 10


class Channel:
    """One connection. `broken` says why nothing more will come or go; it is None as long as all is well.

    sock: a connected stream socket, the channel's own from now on.
    line_limit: bytes; a longer line breaks the channel.
    """

    def __init__(self, sock: socket.socket, line_limit: int = LINE_LIMIT) -> None:
        sock.setblocking(False)
        self.sock, self.line_limit = sock, line_limit
        self.broken: str | None = None
        self._unread, self._unsent = b"", b""

    def send(self, message: Json) -> None:
        """Put the message on its way; what the socket does not take now goes with a later `flush`."""
        self._unsent += json.dumps(message, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        self.flush()
        if len(self._unsent) > UNSENT_LIMIT:
            self.broken = self.broken or "it does not read what it is sent"

    def flush(self) -> None:
        while self._unsent and self.broken is None:
            try:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.broken = str(error.strerror or error)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent) and self.broken is None

    def receive(self) -> list[Json]:
        """The messages that have come since; those that came before the channel broke are among them."""
        messages: list[Json] = []
        while self.broken is None:
            try:
                data = self.sock.recv(65536)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self.broken = str(error.strerror or error)
                break
            if not data:
                self.broken = "the connection ended"
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._read(line, messages)
            if len(self._unread) > self.line_limit:
                self.broken = f"a line is longer than {self.line_limit} bytes"
        return messages

    def _read(self, line: bytes, messages: list[Json]) -> None:
        try:
            if len(line) > self.line_limit:
                raise ValueError("too long")
            message = json.loads(line.decode())
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict):
            messages.append(message)
        else:
            self.broken = self.broken or "a line is no JSON object"

    def close(self) -> None:
        self.broken = self.broken or "closed"
        self.sock.close()
