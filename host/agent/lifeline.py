"""One host's end of an attempt's lifeline: tells the hub how its process fares, and learns when all have to stop.

The hub is in the supervisor of process 0. Whoever has not heard of it for the silence limit, and cannot reach it again
within the grace time, stops its own process: without host 0 there is no run. Clocks are monotonic and stand still with
the machine: a laptop that slept, all its processes with it, goes on; of several hosts, one that was away for longer
than the silence limit was given up by the others, and finds that out when it wakes.
"""

from __future__ import annotations

import select
import socket
import threading
import time

from .channel import Channel
from .group import ASSEMBLE_S, GRACE_SHARE, SILENCE_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .protocol import Json

PING_S = 2.0
LOOK_S = 0.2
RETRY_S = 0.2
CONNECT_LIMIT_S = 2.0


class Lifeline:
    """Serves one process in a thread of its own; `notify` is called, there, when an order has come.

    hello: token, run_id, attempt and rank.
    """

    def __init__(
        self,
        host: str,
        port: int,
        hello: Json,
        notify: Callable[[], None],
        assemble_s: float = ASSEMBLE_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.order: Json | None = None
        self.has_to_leave = False
        """Whether the process is to be told to stop: others were, who could not tell it."""
        self.left_over: list[int] = []
        """The hosts that were here when the hub was last heard of."""
        self.is_noted = threading.Event()
        """Set when the hub has heard how the process ended."""
        self._address, self._hello, self._notify = (host, port), hello, notify
        self._assemble_s, self._silence_s = assemble_s, silence_s
        self._grace_s = silence_s * GRACE_SHARE
        self._lock = threading.Lock()
        self._progress: Json = {}
        self._told: list[Json] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="lifeline", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def progress(self, progress: Json) -> None:
        """How the process fares; goes with the next ping."""
        self._progress = progress

    def tell(self, message: Json) -> None:
        """Say a message that has to arrive: it is said again over every new connection."""
        with self._lock:
            self._told.append(message)

    def end(self, timeout_s: float) -> bool:
        """Leave, when the hub has heard how the process ended, or the time is over; whether it has heard."""
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline and not self.is_noted.wait(LOOK_S):
            pass
        self._is_over.set()
        self._thread.join(CONNECT_LIMIT_S + 1)
        return self.is_noted.is_set()

    def _serve(self) -> None:
        reason = "this host's lifeline broke; supervisor.log says how"
        try:
            reason = self._keep()
        finally:
            if self.order is None and not self._is_over.is_set():
                self._take({"outcome": "failed", "rank": 0, "reason": reason})

    def _take(self, order: Json) -> None:
        self.order = order
        self._notify()

    def _keep(self) -> str:
        """Keep up the connection; why host 0 is given up, when it is."""
        at = "{}:{}".format(*self._address)
        why = f"host 0 was not reached at {at} within {self._assemble_s:g} s"
        limit_s = self._assemble_s
        while not self._is_over.is_set():
            channel, last = self._connect(time.monotonic() + limit_s)
            if channel is None:
                return f"{why} ({last})"
            try:
                why = self._talk(channel)
            finally:
                channel.close()
            limit_s = self._grace_s
        return why

    def _connect(self, deadline: float) -> tuple[Channel | None, str]:
        """A channel that the hub has answered; None and the last reason when there is none at the deadline."""
        last = "no time was left"
        while time.monotonic() < deadline and not self._is_over.is_set():
            try:
                sock = socket.create_connection(self._address, timeout=CONNECT_LIMIT_S)
            except OSError as error:
                last = str(error.strerror or error)
            else:
                channel = Channel(sock)
                channel.send({"hello": self._hello})
                if self._is_answered(channel):
                    return channel, ""
                last = channel.broken or "no answer"
                channel.close()
            self._is_over.wait(RETRY_S)
        return None, last

    def _is_answered(self, channel: Channel) -> bool:
        deadline = time.monotonic() + CONNECT_LIMIT_S
        while channel.broken is None and time.monotonic() < deadline:
            select.select([channel.sock], [], [], LOOK_S)
            messages = channel.receive()
            for message in messages:
                self._hear(message)
            if messages:
                return True
        return False

    def _talk(self, channel: Channel) -> str:
        """Until the end, or until the hub is not heard of any more: how that showed."""
        said = 0
        heard = looked = time.monotonic()
        pinged = looked - PING_S
        while not self._is_over.is_set():
            select.select([channel.sock], [channel.sock] if channel.has_unsent else [], [], LOOK_S)
            messages = channel.receive()
            now = time.monotonic()
            if messages:
                heard = now
            elif now - looked > self._silence_s / 2:
                heard += now - looked  # it was this process that did not run
            looked = now
            for message in messages:
                self._hear(message)
            if now - heard > self._silence_s:
                return f"host 0 has not been heard of for {self._silence_s:g} s"
            with self._lock:
                news, said = self._told[said:], len(self._told)
            if now - pinged >= PING_S and self._progress:
                pinged = now
                news.append({"ping": self._progress})
            for message in news:
                channel.send(message)
            channel.flush()
            if channel.broken is not None:
                return f"host 0 was lost: {channel.broken}, and it was not back within {self._grace_s:g} s"
        return ""

    def _hear(self, message: Json) -> None:
        if isinstance(message.get("ping"), list):
            self.left_over = message["ping"]
        if message.get("leave"):
            self.has_to_leave = True
            self._notify()
        if isinstance(message.get("stop"), dict) and self.order is None:
            self._take(message["stop"])
        if message.get("noted"):
            self.is_noted.set()
