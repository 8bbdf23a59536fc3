"""The liveness server of an attempt, at process 0: hears all hosts, and tells all to stop when one fails."""

from __future__ import annotations

import contextlib
import errno
import hmac
import re
import selectors
import socket
import threading
import time

from contracts import causes
from contracts.errors import PEER_LOST

from .liveness_client import (
    ASSEMBLE_S,
    GRACE_SHARE,
    LINE_LIMIT,
    LOOK_S,
    PING_S,
    SILENCE_S,
    STRANGER_LIMIT,
    Channel,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from .protocol import Json


HELLO_LIMIT_S = 5.0
STRANGERS = 64
"""Connections that have not said who they are; one more, and the oldest of them is dropped."""
NUMBERS = (int, float)
ABORTED = "(SIGABRT)"
COMMAND_FAILED = re.compile(r"(?:the command|rank (?P<rank>\d+)) ended with exit code \d+")
"""As `jobs.runtime.ranks.rank_supervisor` says it."""


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
            # The others reach this host through an address that it does not have itself.
            listener.bind(("", port))
        listener.listen(backlog)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


class LivenessServer:
    """Serves one attempt in a thread of its own, so that no slow disk holds up a ping."""

    def __init__(
        self, listener: socket.socket, group: Group, hello: Json, note: Callable[[str], None]
    ) -> None:
        self._listener, self._group, self._hello, self._note = listener, group, hello, note
        self._channels: dict[int, Channel] = {}
        self._strangers: dict[Channel, float] = {}
        self._ordered_channels: dict[int, Channel] = {}
        self._dismissed: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="liveness-server", daemon=True)

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
            if self._ordered_channels.get(rank) is not channel:
                self._ordered_channels[rank] = channel
                channel.send({"stop": order})

    def _tell_to_leave(self, now: float) -> None:
        for rank, channel in self._channels.items() if self._group.has_to_leave(now) else ():
            if rank not in self._dismissed:
                self._dismissed.add(rank)
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
        # It went again, or there are no descriptors left: it will come again.
        with contextlib.suppress(OSError):
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
        for rank, connected in list(self._channels.items()):
            if connected is channel:
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
    """What is wrong with a message; usually nothing."""
    kind, fields = next(iter(message.items()), ("", None))
    if len(message) != 1 or kind not in FIELDS or not isinstance(fields, dict):
        return ["it is none of " + ", ".join(sorted(FIELDS))]
    expected = FIELDS[kind]
    return [name for name, kinds in expected.items() if not isinstance(fields.get(name), kinds)]


ENDING_SILENCE_S = 6.0
"""Three pings: once all are told to stop, whoever is silent is not waited for as long."""
ENDING_LIMIT_S = 30.0
"""Time for every host to save stacks, to end its process and to say so."""
LEAVE_TOGETHER_S = 3.0
"""A job that is told to stop leaves on all hosts at once. Where one host could not tell the others, the server does."""
SAME_MOMENT_S = 3.0
"""A standstill is seen at each look, a second apart, and told with each ping, two seconds apart."""


class HostState:
    def __init__(self, now: float) -> None:
        self.state = "absent"
        self.heard = self.away_since = now
        self.progress: Json = {}
        self.report: Json = {}
        """How its process ended, or why the host counts as lost; `at`: when, by the server's clock."""

    @property
    def is_over(self) -> bool:
        return self.state in ("left", "ended", "lost")


class Group:
    """The hosts 0 to `size` - 1 of one attempt."""

    def __init__(
        self,
        size: int,
        now: float,
        assemble_s: float = ASSEMBLE_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.hosts = [HostState(now) for _ in range(size)]
        self.order: Json | None = None
        self._assemble_s, self._silence_s = assemble_s, silence_s
        self._grace_s = silence_s * GRACE_SHARE
        self._began_at = self._looked = self._ordered = now
        self._stop_requested_at: float | None = None
        self._saved: float | None = None

    def came(self, rank: int, now: float) -> None:
        host = self.hosts[rank]
        host.heard = now
        if not host.is_over:
            host.state = "here"

    def heard(self, rank: int, now: float, progress: Json | None = None) -> None:
        self.hosts[rank].heard = now
        if progress is not None:
            self.hosts[rank].progress = progress

    def went(self, rank: int, now: float) -> None:
        """The connection of `rank` ended without a goodbye; it may come again."""
        if self.hosts[rank].state == "here":
            self.hosts[rank].state, self.hosts[rank].away_since = "away", now

    def left(self, rank: int, was_asked: bool, is_saved: bool = False) -> None:
        """The process of `rank` ended well, or because somebody asked it to. is_saved: to be resumed."""
        if is_saved and self._saved is None:
            self._saved = self._looked
        if not self.hosts[rank].is_over:
            self.hosts[rank].state = "left"
            self.hosts[rank].report = {"was_asked": was_asked}
            if was_asked and self._stop_requested_at is None:
                self._stop_requested_at = self._looked

    def ended(self, rank: int, report: Json, now: float) -> None:
        """The process of `rank` failed, or was stopped by the order.

        report: message, says_all, exit_code, step, lines (the last of its log), ago_s, was_stopped.
        """
        host = self.hosts[rank]
        if host.is_over:
            return
        host.state = "ended"
        host.report = {**report, "rank": rank, "at": now - report["ago_s"]}
        if not report["was_stopped"] or self.order is None:
            self._stop(now, rank, f"host {rank} failed: {report['message']}")

    def hung(self, rank: int, now: float) -> None:
        """The process of `rank` is over one of its limits: of the heartbeat, which is its own fault, or of progress,
        where it need not be the one to blame."""
        present = [rank for rank, host in enumerate(self.hosts) if host.state == "here" and host.progress]
        if self.order is not None or rank not in present:
            return

        def seconds(rank: int, name: str) -> float:
            host = self.hosts[rank]
            return float(host.progress[name]) + now - host.heard

        def longest(name: str) -> tuple[float, list[int]]:
            longest_s = max(seconds(rank, name) for rank in present)
            return longest_s, [rank for rank in present if seconds(rank, name) > longest_s - SAME_MOMENT_S]

        judge = self.hosts[rank].progress
        if seconds(rank, "silent_s") > judge["heartbeat_limit_s"]:
            silent_s, blamed = longest("silent_s")
            step = self.hosts[blamed[0]].progress["step"]
            message = (
                f"{named(blamed)} had no heartbeat for {silent_s:.0f} s at step {step} "
                f"(limit {judge['heartbeat_limit_s']:.0f} s): stopped from outside, or blocked outside Python"
            )
        else:
            stood_s, still = longest("stood_s")
            silent = [rank for rank in still if self.hosts[rank].progress["is_silent"]]
            blamed = silent or still
            step, median_s = self.hosts[blamed[0]].progress["step"], judge.get("median_s")
            usual = "" if median_s is None else f"; a step took {median_s:.3g} s until then"
            message = (
                f"{named(blamed)} stood still at step {step} for {stood_s:.0f} s "
                f"(limit {judge['limit_s']:.0f} s{usual})"
            )
            if silent:
                message += ", and so did the heartbeat: stopped from outside, or blocked outside Python"
        self._stop(now, blamed[0], f"the run hung: {message}", outcome="hung", message=message, ranks=blamed)

    def look(self, now: float) -> None:
        """Let time pass."""
        asleep = now - self._looked
        self._looked = now
        if asleep > self._silence_s / 2:
            # It was this process that did not run: what the others sent meanwhile still has to be read.
            self._began_at += asleep
            for host in self.hosts:
                host.heard, host.away_since = host.heard + asleep, host.away_since + asleep
        silence_s = self._silence_s if self.order is None else min(self._silence_s, ENDING_SILENCE_S)
        for rank, host in enumerate(self.hosts):
            if host.state == "here" and now - host.heard > silence_s:
                self._lose(rank, now, host.heard, f"it has not been heard of for {silence_s:g} s")
            elif host.state == "away" and now - host.away_since > self._grace_s:
                message = f"its connection ended and did not come back within {self._grace_s:g} s"
                self._lose(rank, now, host.away_since, message)
        absent = [rank for rank, host in enumerate(self.hosts) if host.state == "absent"]
        if self._stop_requested_at is not None and now - self._stop_requested_at > ENDING_SILENCE_S:
            # Somebody stops the attempt, as after a start that failed: who has not come by now will not.
            for rank in absent:
                self.hosts[rank].state = "left"
            absent = []
        is_late = now - self._began_at > self._assemble_s
        if absent and (is_late or (self.order is not None and now - self._ordered > ENDING_SILENCE_S)):
            started = [rank for rank in range(len(self.hosts)) if rank not in absent]
            reason = f"only {named(started)} of {len(self.hosts)} were started"
            for rank in absent:
                self._lose(rank, now, now, f"it was not started, or cannot reach host 0: {reason}", reason)

    def _lose(self, rank: int, now: float, at: float, message: str, reason: str | None = None) -> None:
        self.hosts[rank].state = "lost"
        self.hosts[rank].report = {"rank": rank, "at": at, "message": f"lost: {message}", "exit_code": None}
        self._stop(now, rank, reason or f"host {rank} was lost: {message}")

    def _stop(self, now: float, rank: int, reason: str, outcome: str = "failed", **more: object) -> None:
        if self.order is None:
            self.order = {"outcome": outcome, "rank": rank, "reason": reason, **more}
            self._ordered = now

    def has_to_leave(self, now: float) -> bool:
        """Whether the remaining hosts are to be told to stop, as those that have left were."""
        return self._saved is not None and self.order is None and now - self._saved > LEAVE_TOGETHER_S

    def is_over(self, now: float) -> bool:
        """Whether nothing more is to come: every host has ended, or had its time to."""
        return all(host.is_over for host in self.hosts) or (
            self.order is not None and now - self._ordered > ENDING_LIMIT_S
        )

    def left_over(self) -> list[int]:
        """The hosts that are here, in order: the first of them speaks for the run when host 0 cannot."""
        return [rank for rank, host in enumerate(self.hosts) if host.state == "here"]

    def verdict(self) -> Json | None:
        """How the attempt ended, unless it ended well: outcome, rank to blame, message, says_all, exit_code,
        lines, steps."""
        if self.order is None:
            return None
        reports = [host.report for host in self.hosts if host.state in ("ended", "lost")]
        steps = [int(host.report.get("step") or host.progress.get("step") or 0) for host in self.hosts]
        if self.order["outcome"] == "hung":
            blamed: Json = self.order
        else:
            first = [report for report in reports if not report.get("was_stopped")] or reports
            by_itself = [
                {**report, **report["ended_by_itself"]} for report in reports if report.get("ended_by_itself")
            ]
            own_fault = own_faults(first) or own_faults(by_itself)
            # A process that has lost a peer may end, and JAX aborts it, before that peer has said why it ends.
            if own_fault and all(may_have_lost_a_peer(report) for report in own_fault):
                explained = [report for report in own_faults(by_itself) if not may_have_lost_a_peer(report)]
                own_fault = explained or own_fault
            else:
                own_fault = [report for report in own_fault if not may_have_lost_a_peer(report)]
            if not own_fault and any(host.report.get("was_asked") for host in self.hosts):
                return None  # the others lost a peer that somebody had asked to stop
            blamed = min(own_fault or first, key=lambda report: (report["at"], report["rank"]))
        return {
            "outcome": self.order["outcome"],
            "rank": blamed["rank"],
            "ranks": blamed.get("ranks", [blamed["rank"]]),
            "message": blamed["message"],
            "says_all": blamed.get("says_all", False),
            "exit_code": blamed.get("exit_code"),
            "lines": blamed.get("lines", []),
            "steps": max(steps),
        }


def own_faults(reports: Iterable[Json]) -> list[Json]:
    """The failures that are not another host's."""
    return [report for report in reports if report.get("exit_code") != PEER_LOST]


def may_have_lost_a_peer(report: Json) -> bool:
    """Whether the process ended by abort(), as C++ does that gives up, or is a command whose rank failed, nobody knows
    why, with last lines of a peer that is gone. A job says that by its exit code."""
    message = str(report.get("message"))
    if report.get("exit_code") is None and ABORTED in message:
        return True
    failed = COMMAND_FAILED.fullmatch(message)
    lines = report.get("lines", ())
    if failed is None:
        return False
    if failed["rank"] is not None:  # the host has several, whose lines are in one log
        lines = [line for line in lines if line.startswith(f"[{failed['rank']}] ")]
    return causes.may_have_lost_a_peer("\n".join(lines))


def named(ranks: list[int]) -> str:
    """Hosts for a message: host 2; hosts 0, 2, 5; hosts 0-63."""
    if len(ranks) == 1:
        return f"host {ranks[0]}"
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts: list[str] = []
    for first, last in spans:
        parts += [f"{first}-{last}"] if last > first + 1 else map(str, sorted({first, last}))
    return f"hosts {', '.join(parts)}"
