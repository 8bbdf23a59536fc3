"""A process's part in its attempt, where that has a lifeline: it is heard of, watched, and stopped with the others."""

from __future__ import annotations

import time

from . import hub as hubs
from .files import read_json
from .group import Group
from .lifeline import Lifeline
from .notes import note
from .siblings import SETTLE_S, log_of
from .verdict import by_itself, culprit, failed_result, heartbeats, step_of
from .watchdog import Watchdog

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from .process import Process
    from .protocol import Json

LINES, LINE_LENGTH = 20, 400
"""Of a failed process's log, as much as fits into one message whatever its characters."""
NOTED_LIMIT_S = 10.0
BACKUP_S = 4.0
"""When host 0 is lost, the first host that is left writes the result; the others only if it has not by then."""


class Attempt:
    """The lifeline's end of one process, and the hub when it is process 0.

    listener: where the hub listens; None on all hosts but that of process 0.
    """

    def __init__(
        self,
        request: Json,
        process: Process,
        listener: socket.socket | None,
        notify: Callable[[], None],
    ) -> None:
        self._request, self._run_dir, self._rank = request, request["run_dir"], request["process_id"]
        self._process, self._beat_path = process, process.beat_path
        hello = {"token": request["hub_token"], "run_id": request["run_id"], "attempt": request["attempt"]}
        limits = {name: request[name] for name in ("assemble_s", "silence_s") if request[name] is not None}
        self._group = Group(request["num_processes"], time.monotonic(), **limits)
        self._hub = hubs.Hub(listener, self._group, hello, note) if listener is not None else None
        address = request["hub_host"], request["hub_port"]
        self._line = Lifeline(*address, {**hello, "rank": self._rank}, notify, **limits)
        limits = {"floor_s": request["hang_floor_s"], "heartbeat_limit_s": request["heartbeat_limit_s"]}
        self._watchdog = Watchdog(
            **{name: limit_s for name, limit_s in limits.items() if limit_s is not None}
        )
        self._said_hung = self._has_passed_on = False

    def start(self) -> None:
        self._line.progress(self._watchdog.progress())
        if self._hub is not None:
            self._hub.start()
        self._line.start()

    def look(self) -> Json | None:
        """The order to stop, when there is one; called once or twice a second."""
        self._watchdog.look(read_json(self._beat_path), time.monotonic())
        self._line.progress(self._watchdog.progress())
        if self._watchdog.is_hung and not self._said_hung:
            self._said_hung = True
            note(
                f"no progress for {self._watchdog.stood_s:.1f} s, no heartbeat for {self._watchdog.silent_s:.1f} s"
            )
            self._line.tell({"hung": self._watchdog.progress()})
        if self._line.has_to_leave and not self._has_passed_on:
            self._has_passed_on = True
            note("another host was told to stop and has left, so this process is told too")
            self._process.terminate()
        return self._line.order

    def tell(self, ending: Json) -> None:
        """Say to the others how the process ended; they are told before any disk is written."""
        if ending["is_good"] or ending["was_asked"]:
            self._line.tell({"left": {"was_asked": ending["was_asked"], "is_saved": ending["is_saved"]}})
            return
        beat = ending["beat"]
        report = {
            "message": str(beat["message"])[:2000],
            "says_all": beat["says_all"],
            "exit_code": beat["exit_code"],
            "step": step_of(beat),
            "ago_s": max(0.0, time.time() - beat["time"]),
            "was_stopped": ending["was_stopped"],
            # It may have failed by itself, before it could lose the peer that the order is about.
            "ended_by_itself": None if ending["was_killed"] else ending["how"],
            "lines": [line[:LINE_LENGTH] for line in ending["lines"][-LINES:]],
        }
        self._line.tell({"ended": report})

    def result(self, ending: Json) -> Json | None:
        """result.json, where it is this host's to write: it is process 0, or that one is lost."""
        is_noted = self._line.end(NOTED_LIMIT_S)
        if self._hub is not None:
            while not self._hub.wait(60):
                note(f"waiting for hosts {self._group.left_over()} to end")
            return self._verdict_of_all()
        if is_noted or ending["is_good"] or ending["was_asked"]:
            return None
        left = [rank for rank in self._line.left_over if rank != 0] or [self._rank]
        settle_s = SETTLE_S if self._request["settle_s"] is None else self._request["settle_s"]
        time.sleep(settle_s if left[0] == self._rank else settle_s + BACKUP_S)
        return self._verdict_without_host_0(ending)

    def _verdict_of_all(self) -> Json | None:
        verdict = self._group.verdict()
        if verdict is None:
            return None
        lines = verdict["lines"]
        if verdict["outcome"] == "hung":
            folder = "{}/stacks/{}".format(self._request["env"].get("RUN_DIR"), self._request["attempt"])
            verdict["message"] += f"; what every process was doing then is in {folder}"
        elif not lines:
            lines = log_of(self._run_dir, self._request["attempt"], verdict["rank"])
        blamed = {**verdict, "attempt": self._request["attempt"], "time": time.time()}
        return failed_result(blamed, verdict["steps"], lines)

    def _verdict_without_host_0(self, ending: Json) -> Json:
        mine = ending["beat"]
        beats = heartbeats(self._run_dir, mine["attempt"])
        order = self._line.order or {"reason": "its connection ended"}
        lost = {**mine, "rank": 0, "message": f"lost: {order['reason']}"}
        lost.update(exit_code=None, says_all=False)
        blamed = culprit(by_itself(beats)) or lost
        lines: list[str] = log_of(self._run_dir, mine["attempt"], blamed["rank"])
        return failed_result(blamed, max(map(step_of, [*beats, mine])), lines)
