"""The daemon's socket, which only its user can open: a request is one line, answered by any number of lines.

    → {"do": "pulumi", "with": {"arguments": ["up"]}}
    ← {"say": "…"} as often as there is something to say, then {"end": 0, "answer": …} or {"error": "…"}

Whoever hangs up before the end has left, as by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from contracts.aliases import Say
from rehearsal.state import RehearsalError

LOG = logging.getLogger("rehearsal")
LONGEST_REQUEST = 1 << 20
REQUEST_LIMIT_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Caller:
    """The client of a request. say: sends it a line. has_left: whether it has hung up."""

    say: Say
    has_left: Callable[[], bool]


Answerer = Callable[[str, Mapping[str, Any], Caller], Any]


class ControlSocket:
    """A context that serves the socket. answer: gets the action, its arguments and the caller, and returns JSON."""

    def __init__(self, path: Path, answer: Answerer) -> None:
        self._server = _Server(str(path), answer)
        path.chmod(0o600)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="control-socket"
        )

    def __enter__(self) -> ControlSocket:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True  # one that carries out a long request must not hold up the end

    def __init__(self, path: str, answer: Answerer) -> None:
        self.answer = answer
        super().__init__(path, _Handler)


class _Handler(socketserver.StreamRequestHandler):
    server: _Server
    timeout = REQUEST_LIMIT_S

    def handle(self) -> None:
        try:
            message = json.loads(self.rfile.readline(LONGEST_REQUEST))
            do, arguments = str(message["do"]), dict(message.get("with", {}))
        except (OSError, ValueError, KeyError, TypeError):
            self._write({"error": 'a request is a line such as {"do": "status"}'})
            return
        self.connection.settimeout(None)
        try:
            answer = self.server.answer(do, arguments, Caller(say=self._say, has_left=self._is_gone))
        except RehearsalError as error:
            self._write({"error": str(error)})
        except Exception as error:
            LOG.exception("%s failed", do)
            self._write({"error": f"{do}: {type(error).__name__}: {error}"})
        else:
            self._write({"answer": answer, "end": 0})

    def _say(self, line: str) -> None:
        self._write({"say": line})

    def _write(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # has left
            self.wfile.write(json.dumps(message).encode() + b"\n")

    def _is_gone(self) -> bool:
        try:
            left: bytes = self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return left == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def ask(
    socket_path: str, do: str, arguments: Mapping[str, Any], *, say: Say | None = None, limit_s: float = 120.0
) -> Any:
    """The daemon's answer. limit_s: for how long it may be silent.

    Raises:
        RehearsalError: the daemon refuses, does not answer or ends meanwhile.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(limit_s)
            connection.connect(socket_path)
            connection.sendall(json.dumps({"do": do, "with": dict(arguments)}).encode() + b"\n")
            with connection.makefile(encoding="utf-8") as lines:
                for line in lines:
                    message = json.loads(line)
                    if "say" in message and say is not None:
                        say(message["say"])
                    if "error" in message:
                        raise RehearsalError(message["error"])
                    if "end" in message:
                        return message["answer"]
    except TimeoutError:
        raise RehearsalError(
            f"the rehearsal said nothing for {limit_s:.0f} s; `fab rehearsal status` shows its log's place"
        ) from None
    except OSError as error:
        raise RehearsalError(
            f"the rehearsal does not answer ({error.strerror or error}); `fab rehearsal down`, then up again"
        ) from None
    raise RehearsalError("the rehearsal ended meanwhile; its log says why")
