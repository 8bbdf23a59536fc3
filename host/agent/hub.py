"""The middle of an attempt's lifeline, at process 0: hears all hosts, and tells all to stop when one fails.

A line of JSON each way. From a host: hello (token, run_id, attempt, rank) first, then ping with its progress every
two seconds, hung, and at the end ended or left. To a host: ping, leave (as others have, who were told to stop), stop
(the order), noted (its end has been heard).
Who does not say hello with the token is dropped, unanswered.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import selectors
import socket
import threading
import time

from .channel import LINE_LIMIT, STRANGER_LIMIT, Channel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .group import Group
    from .protocol import Json

PING_S = 2.0
LOOK_S = 0.2
HELLO_LIMIT_S = 5.0
STRANGERS = 64
"""Connections that have not said who they are; one more, and the oldest of them is dropped."""
NUMBERS = (int, float)


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens where the other hosts look for this one.

    Raises:
        OSError: the port is taken, or `host` is no address.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(
                ("", port)
            )  # the others reach this host through an address that it does not have itself
        listener.listen(backlog)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


class Hub:
    """Serves one attempt in a thread of its own, so that no slow disk holds up a ping."""

    def __init__(
        self, listener: socket.socket, group: Group, hello: Json, note: Callable[[str], None]
    ) -> None:
        self._listener, self._group, self._hello, self._note = listener, group, hello, note
        self._channels: dict[int, Channel] = {}
        self._strangers: dict[Channel, float] = {}
        self._told: dict[int, Channel] = {}
        self._told_to_leave: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="hub", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether all hosts have ended, or had their time to, within the limit."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        pinged = time.monotonic()
        with contextlib.closing(self._selector), contextlib.closing(self._listener):
            while not self._group.is_over(time.monotonic()):
                for key, _ in self._selector.select(LOOK_S):
                    self._read(key.data)
                now = time.monotonic()
                self._group.look(now)
                self._drop_strangers(now)
                if now - pinged >= PING_S:
                    pinged = now
                    self._tell_all({"ping": self._group.left_over()})
                self._pass_on_the_order()
                self._tell_to_leave(now)
                for channel in list(self._channels.values()):
                    channel.flush()
                    if channel.broken is not None:
                        self._drop(channel)
        for channel in [*self._channels.values(), *self._strangers]:
            channel.close()

    def _pass_on_the_order(self) -> None:
        order = self._group.order
        for rank, channel in self._channels.items() if order is not None else ():
            if self._told.get(rank) is not channel:
                self._told[rank] = channel
                channel.send({"stop": order})

    def _tell_to_leave(self, now: float) -> None:
        for rank, channel in self._channels.items() if self._group.has_to_leave(now) else ():
            if rank not in self._told_to_leave:
                self._told_to_leave.add(rank)
                channel.send({"leave": True})

    def _tell_all(self, message: Json) -> None:
        for channel in self._channels.values():
            channel.send(message)

    def _read(self, source: Channel | None) -> None:
        if source is None:
            self._accept()
            return
        for message in source.receive():
            rank = next((rank for rank, channel in self._channels.items() if channel is source), None)
            if rank is None:
                self._welcome(source, message)
            else:
                self._hear(rank, source, message)
        if source.broken is not None:
            self._drop(source)

    def _accept(self) -> None:
        with contextlib.suppress(
            OSError
        ):  # it went again, or there are no descriptors left: it will come again
            sock, _ = self._listener.accept()
            stranger = Channel(sock, STRANGER_LIMIT)
            self._strangers[stranger] = time.monotonic()
            self._selector.register(sock, selectors.EVENT_READ, stranger)
            if len(self._strangers) > STRANGERS:
                self._drop(next(iter(self._strangers)))

    def _drop_strangers(self, now: float) -> None:
        for stranger, since in list(self._strangers.items()):
            if now - since > HELLO_LIMIT_S:
                self._drop(stranger)

    def _drop(self, channel: Channel) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel.sock)
        reason = channel.broken
        channel.close()
        self._strangers.pop(channel, None)
        for rank, known in list(self._channels.items()):
            if known is channel:
                del self._channels[rank]
                self._note(f"the connection of host {rank}: {reason}")
                self._group.went(rank, time.monotonic())

    def _welcome(self, stranger: Channel, message: Json) -> None:
        hello = message.get("hello")
        rank = hello.get("rank") if isinstance(hello, dict) else None
        if not isinstance(hello, dict) or not self._is_ours(hello) or not isinstance(rank, int):
            stranger.broken = "it does not belong to this attempt"
            return
        if not 0 <= rank < len(self._group.hosts):
            stranger.broken = f"there is no process {rank}"
            return
        if rank in self._channels:  # it has lost its connection, and this end does not know yet
            self._channels[rank].broken = "it has connected again"
            self._drop(self._channels[rank])
        self._strangers.pop(stranger, None)
        stranger.line_limit = LINE_LIMIT
        self._channels[rank] = stranger
        self._group.came(rank, time.monotonic())
        stranger.send({"ping": self._group.left_over()})

    def _is_ours(self, hello: Json) -> bool:
        token = hello.get("token")
        same_token = isinstance(token, str) and hmac.compare_digest(
            token.encode("utf-8", "replace"), self._hello["token"].encode()
        )
        return same_token and all(hello.get(name) == self._hello[name] for name in ("run_id", "attempt"))

    def _hear(self, rank: int, channel: Channel, message: Json) -> None:
        now = time.monotonic()
        problem = mistakes(message)
        if problem:
            self._note(f"host {rank} said something that is not understood: {problem}")
            self._group.heard(rank, now)
            return
        self._group.heard(rank, now, message.get("ping") or message.get("hung"))
        if "hung" in message:
            self._group.hung(rank, now)
        elif "left" in message:
            self._group.left(rank, message["left"]["was_asked"], message["left"]["is_saved"])
        elif "ended" in message:
            self._group.ended(rank, message["ended"], now)
        if "left" in message or "ended" in message:
            channel.send({"noted": True})


PROGRESS: dict[str, Any] = {
    "step": int,
    "stood_s": NUMBERS,
    "limit_s": NUMBERS,
    "silent_s": NUMBERS,
    "heartbeat_limit_s": NUMBERS,
    "is_silent": bool,
}
FIELDS: dict[str, dict[str, Any]] = {
    "ping": PROGRESS,
    "hung": PROGRESS,
    "left": {"was_asked": bool, "is_saved": bool},
    "ended": {"message": str, "step": int, "ago_s": NUMBERS, "was_stopped": bool, "lines": list},
}


def mistakes(message: Json) -> list[str]:
    """What keeps a message from being understood; nothing as a rule."""
    kind, fields = next(iter(message.items()), ("", None))
    if len(message) != 1 or kind not in FIELDS or not isinstance(fields, dict):
        return ["it is none of " + ", ".join(sorted(FIELDS))]
    wanted = FIELDS[kind]
    return [name for name, kinds in wanted.items() if not isinstance(fields.get(name), kinds)]
