"""The end of a process, put on record: on this host, in the run directory, with the others of its attempt."""

from __future__ import annotations

import contextlib
import json
import os
import signal

from .files import read_json, remove, tail_of, write_json
from .notes import tried
from .process import exit_record, signal_name
from .verdict import DONE, LOST_A_PEER, SAVED, heartbeats, saved_step, step_of, stopped_result
from .waiting import wait_until

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .attempt import Attempt
    from .process import Process
    from .protocol import Json
    from .run_files import RunFiles
    from .siblings import Siblings


def conclude(
    process: Process,
    files: RunFiles,
    others: Siblings | Attempt | None,
    ended: Json,
    order: Json | None,
) -> None:
    """Put the end on record: in exit.json and, unless it was a good one, in the heartbeat and the result.

    ended: code, signal and time. order: why the supervisor ended the process, if it did. others: None where they are
    told by somebody else.
    """
    code, signum = ended["code"], ended["signal"]
    how = f"exit code {code}" if signum is None else f"killed by signal {signum} ({signal_name(signum)})"
    if ended.get("words"):
        how += f": {ended['words']}"
    stopped_because = None if order is None else f"stopped because {order['reason']}"
    lines = tail_of(process.record["log_path"])
    record = exit_record(code, signum, ended["time"], stopped_because or how, lines)
    tried("removing the reserve", lambda: remove(process.reserve_path))
    recorded = tried("writing exit.json", lambda: write_json(process.exit_path, record))
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.record["pid"], 0)
    # A job takes SIGTERM from the moment on that it has a heartbeat: whoever dies of it had not begun.
    not_begun = signum == signal.SIGTERM and order is None and not os.path.exists(process.beat_path)
    ending: Json = {
        "is_good": code in (DONE, SAVED) or not_begun,
        "is_saved": code == SAVED or not_begun,
        "was_asked": os.path.exists(process.stop_path),  # who asked knows why, and what the outcome is called
        "was_stopped": order is not None,
        "was_killed": ended.get("was_killed", False),
        "how": {
            "exit_code": code,
            "message": how
            if signum is not None or ended.get("words") or not lines
            else f"{how}: {lines[-1]}",
        },
        "lines": lines,
        "beat": last_heartbeat(process, files.dir, record),
    }
    beat = ending["beat"]
    if ended.get("words"):
        beat.update(message=how, says_all=False)
    if ending["was_asked"]:
        beat["state"] = "stopped"
    elif not_begun:
        beat["state"] = "preempted"
    elif order is not None and process.process_id in order.get("ranks", ()):
        beat["message"] = order["message"]
    elif order is not None:
        beat.update(message=stopped_because, exit_code=LOST_A_PEER, says_all=False)
    if others is not None:
        others.tell(ending)
    texts = dict(ended.get("texts", {}))
    if not ending["is_good"] or not_begun:
        # What the job kept free for its last words; one that was killed could not give it back itself.
        files.remove(f"heartbeats/.host-{process.process_id}.reserve")
        texts[f"heartbeats/host-{process.process_id}.json"] = json.dumps(beat)
        tried("writing the heartbeat", lambda: write_json(process.beat_path, beat))
    files.end_log()
    if not files.is_remote:
        files.put(texts)  # by which the others on a shared disk learn of it
        texts = {}
    result = None if others is None else others.result(ending)
    if result is None and not_begun and process.process_id == 0:
        result = stopped_result(beat, saved_step(files.dir))
    files.put(texts, {} if result is None else {"result.json": json.dumps(result)})
    if not recorded:  # the disk may have been freed meanwhile
        wait_until(lambda: tried("writing exit.json", lambda: write_json(process.exit_path, record)), 60, 1)


def last_heartbeat(process: Process, run_dir: str | None, record: Json) -> Json:
    """What the process can no longer say itself; its own last words, if it had time for any, are kept."""
    in_run_dir: Json = next(
        (beat for beat in heartbeats(run_dir, process.attempt) if beat["rank"] == process.process_id), {}
    )
    mine = read_json(process.beat_path) or in_run_dir
    own_words = mine.get("message") if mine.get("state") == "failed" else None
    words = own_words or next((line for line in reversed(record["tail"]) if line.strip()), None)
    how = f"exit code {record['code']}"
    says_all = bool(own_words and mine.get("says_all") and record["code"] is not None)
    return {
        "rank": process.process_id,
        "attempt": process.attempt,
        "state": "failed",
        "step": step_of(mine),
        "time": record["time"],
        "step_time": mine.get("step_time"),
        "pid": process.record["pid"],
        "message": own_words
        if says_all
        else record["reason"]
        if record["code"] is None or not words
        else f"{how}: {words}",
        "says_all": says_all,
        "warnings": mine.get("warnings") or [],
        "exit_code": record["code"],
    }
