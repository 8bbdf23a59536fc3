"""The liveness client of one process: tells the server how it fares, and learns when all have to stop."""

from __future__ import annotations

import collections
import json
import select
import socket
import threading
import time

from contracts.host_interface import HANG_FLOOR_S, HEARTBEAT_LIMIT_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Phase = tuple[object, object]
    from .protocol import Json


ASSEMBLE_S = 30.0
SILENCE_S = 15.0
GRACE_SHARE = 1 / 3
"""Of the silence limit: time for a connection that ended to come back, 5 s."""
PING_S = 2.0
LOOK_S = 0.2
RETRY_S = 0.2
CONNECT_LIMIT_S = 2.0


class LivenessClient:
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
        """The hosts that were here when the server was last heard of."""
        self.is_noted = threading.Event()
        """Set when the server has heard how the process ended."""
        self._address, self._hello, self._notify = (host, port), hello, notify
        self._assemble_s, self._silence_s = assemble_s, silence_s
        self._grace_s = silence_s * GRACE_SHARE
        self._lock = threading.Lock()
        self._progress: Json = {}
        self._outbox: list[Json] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="liveness-client", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def progress(self, progress: Json) -> None:
        """Set the progress of the process, which the next ping sends."""
        self._progress = progress

    def tell(self, message: Json) -> None:
        """Say a message that has to arrive: it is said again over every new connection."""
        with self._lock:
            self._outbox.append(message)

    def end(self, timeout_s: float) -> bool:
        """Leave, when the server has heard how the process ended, or the time is over; whether it has heard."""
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline and not self.is_noted.wait(LOOK_S):
            pass
        self._is_over.set()
        self._thread.join(CONNECT_LIMIT_S + 1)
        return self.is_noted.is_set()

    def _serve(self) -> None:
        reason = "this host's liveness client broke; supervisor.log says how"
        try:
            reason = self._keep()
        finally:
            if self.order is None and not self._is_over.is_set():
                self._take({"outcome": "failed", "rank": 0, "reason": reason})

    def _take(self, order: Json) -> None:
        self.order = order
        self._notify()

    def _keep(self) -> str:
        """Keep up the connection. Returns why host 0 was given up, or ""."""
        at = "{}:{}".format(*self._address)
        reason = f"host 0 was not reached at {at} within {self._assemble_s:g} s"
        limit_s = self._assemble_s
        while not self._is_over.is_set():
            channel, last = self._connect(time.monotonic() + limit_s)
            if channel is None:
                return f"{reason} ({last})"
            try:
                reason = self._talk(channel)
            finally:
                channel.close()
            limit_s = self._grace_s
        return reason

    def _connect(self, deadline: float) -> tuple[Channel | None, str]:
        """A channel that the server has answered; None and the last reason when there is none at the deadline."""
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
        """Exchange messages until the end or until the connection is lost. Returns how it was lost, or ""."""
        sent_count = 0
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
                unsent, sent_count = self._outbox[sent_count:], len(self._outbox)
            if now - pinged >= PING_S and self._progress:
                pinged = now
                unsent.append({"ping": self._progress})
            for message in unsent:
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


PATIENCE_S = 1800.0
"""For what is slow and done seldom: everything before the first step, compiling, saving, the export."""
TIMES_THE_MEDIAN = 20
FEWEST_GAPS = 3
GAPS_KEPT = 101
LONGEST_LOOK_S = 5.0
"""More than this between two looks, and the watcher itself was not running: that time is not held against the job."""
SILENT_S = 5.0
"""A heartbeat is renewed every second by a thread that does nothing else; compilers leave it the interpreter."""
LARGEST = 2**63


class Watchdog:
    """Watches one process.

    floor_s: least limit, however quick the steps are. heartbeat_limit_s: limit for silent_s, in any state.
    stood_s: seconds since the process's step, or its `tick`, last moved. silent_s: since its heartbeat was renewed.
    """

    def __init__(self, floor_s: float = HANG_FLOOR_S, heartbeat_limit_s: float = HEARTBEAT_LIMIT_S) -> None:
        self.stood_s = self.silent_s = 0.0
        self.beat: Json = {}
        self._floor_s, self._heartbeat_limit_s = floor_s, heartbeat_limit_s
        self._looked: float | None = None
        self._gaps: collections.deque[float] = collections.deque(maxlen=GAPS_KEPT)
        self._progressed: set[Phase] = set()

    def look(self, beat: Json, now: float) -> None:
        """Take in the heartbeat as it is at `now` (monotonic); an empty one is one that could not be read."""
        elapsed = 0.0 if self._looked is None else min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
        self.stood_s += elapsed
        self.silent_s += elapsed
        if not beat:
            return
        before, self.beat = self.beat, beat
        if beat.get("time") != before.get("time"):
            self.silent_s = 0.0
        has_moved = _progress(beat) != _progress(before)
        if has_moved or _phase(beat) != _phase(before):
            self.stood_s = 0.0
        if has_moved and before and _phase(beat) == _phase(before):
            self._progressed.add(_phase(beat))
            self._learn(before, beat)

    def _learn(self, before: Json, beat: Json) -> None:
        steps = _number(beat, "step") - _number(before, "step")
        seconds = _number(beat, "step_time") - _number(before, "step_time")
        if beat.get("state") == "stepping" and steps > 0 and seconds > 0:
            # Quick steps are seen many at a time, and each of them counts.
            self._gaps.extend([seconds / steps] * min(int(steps), GAPS_KEPT))

    @property
    def median_s(self) -> float | None:
        """The usual time from one step to the next; None as long as too few are known."""
        if len(self._gaps) < FEWEST_GAPS:
            return None
        return sorted(self._gaps)[len(self._gaps) // 2]

    @property
    def limit_s(self) -> float:
        """How long the process may make no progress in its current phase."""
        if self.beat.get("hangs_at_floor"):
            return self._floor_s
        is_measured = self.beat.get("state") == "stepping" and _phase(self.beat) in self._progressed
        median_s = self.median_s
        if not is_measured or median_s is None:
            return max(PATIENCE_S, self._floor_s)
        return max(self._floor_s, TIMES_THE_MEDIAN * median_s)

    @property
    def is_hung(self) -> bool:
        """Whether a limit is over. A process that never wrote a heartbeat is not judged: there is nothing to see."""
        return bool(self.beat) and (self.stood_s > self.limit_s or self.silent_s > self._heartbeat_limit_s)

    def progress(self) -> Json:
        """The progress of this process, as the others are told."""
        return {
            "step": int(_number(self.beat, "step")),
            "state": self.beat.get("state"),
            "stood_s": round(self.stood_s, 3),
            "silent_s": round(self.silent_s, 3),
            "is_silent": self.silent_s > SILENT_S,
            "heartbeat_limit_s": self._heartbeat_limit_s,
            "limit_s": round(self.limit_s, 3),
            "median_s": self.median_s,
        }


def _progress(beat: Json) -> tuple[object, object]:
    return beat.get("step"), beat.get("step_time")


def _phase(beat: Json) -> Phase:
    """The phase of a process: a first evaluation is compiled, although the steps before it were quick."""
    return beat.get("state"), beat.get("message")


def _number(beat: Json, name: str) -> float:
    value = beat.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < LARGEST:
        return 0.0
    return value
