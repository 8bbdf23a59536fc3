"""What the hub of an attempt knows of its hosts, and what follows. It reads no clock: `now` is monotonic seconds.

Every host is absent, here, away (its connection ended), left (its process ended well), ended (its process failed or
was stopped, and it said how) or lost. The first failure, loss or hang makes the one `order` to stop.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from .protocol import Json

LOST_A_PEER, WRONG_REQUEST = 76, 2
ASSEMBLE_S = 30.0
SILENCE_S = 15.0
GRACE_SHARE = 1 / 3
"""Of the silence limit: time for a connection that ended to come back, 5 s."""
ENDING_SILENCE_S = 6.0
"""Three pings: once all are told to stop, whoever is silent is not waited for as long."""
ENDING_LIMIT_S = 30.0
"""Time for every host to save stacks, to end its process and to say so."""
LEAVE_TOGETHER_S = 3.0
"""A job that is told to stop leaves on all hosts at once. Where one host could not tell the others, the hub does."""
SAME_MOMENT_S = 3.0
"""A standstill is seen at each look, a second apart, and told with each ping, two seconds apart."""


class Host:
    def __init__(self, now: float) -> None:
        self.state = "absent"
        self.heard = self.away_since = now
        self.progress: Json = {}
        self.report: Json = {}
        """How its process ended, or why the host counts as lost; `at` is when, by the hub's clock."""

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
        self.hosts = [Host(now) for _ in range(size)]
        self.order: Json | None = None
        self._assemble_s, self._silence_s = assemble_s, silence_s
        self._grace_s = silence_s * GRACE_SHARE
        self._begun = self._looked = self._ordered = now
        self._asked: float | None = None
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
            if was_asked and self._asked is None:
                self._asked = self._looked

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
        here = [rank for rank, host in enumerate(self.hosts) if host.state == "here" and host.progress]
        if self.order is not None or rank not in here:
            return

        def seconds(rank: int, name: str) -> float:
            host = self.hosts[rank]
            return float(host.progress[name]) + now - host.heard

        def longest(name: str) -> tuple[float, list[int]]:
            most = max(seconds(rank, name) for rank in here)
            return most, [rank for rank in here if seconds(rank, name) > most - SAME_MOMENT_S]

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
            self._begun += asleep
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
        if self._asked is not None and now - self._asked > ENDING_SILENCE_S:
            # Somebody stops the attempt, as after a start that failed: who has not come by now will not.
            for rank in absent:
                self.hosts[rank].state = "left"
            absent = []
        is_late = now - self._begun > self._assemble_s
        if absent and (is_late or (self.order is not None and now - self._ordered > ENDING_SILENCE_S)):
            there = [rank for rank in range(len(self.hosts)) if rank not in absent]
            reason = f"only {named(there)} of {len(self.hosts)} were started"
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
        """Whether whoever is still here is to be told to stop, as others were who have left."""
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
            own_fault = own_faults(first) or own_faults(
                {**report, **report["ended_by_itself"]} for report in reports if report.get("ended_by_itself")
            )
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
    return [report for report in reports if report.get("exit_code") != LOST_A_PEER]


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
