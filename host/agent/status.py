"""The verb status: what became of each process."""

from __future__ import annotations

import contextlib
import os

from .files import read_json
from .process import Process, processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json


def status(request: Json) -> Json:
    """What became of each process that the request means."""
    return {"processes": [entry(process) for process in processes(request)]}


def entry(process: Process) -> Json:
    """One process: what is on record of it, its state, and its last heartbeat on this host's disk."""
    state, ended = process.state()
    log_path, log_bytes = process.record.get("log_path"), 0
    with contextlib.suppress(OSError):
        log_bytes = os.path.getsize(log_path or "")
    return {
        **{name: getattr(process, name) for name in ("run_id", "attempt", "process_id")},
        **{name: process.record.get(name) for name in ("pid", "started", "log_path", "container")},
        **{name: ended.get(name) for name in ("code", "signal", "reason")},
        "ended": ended.get("time"),
        "state": state,
        "beat": read_json(process.beat_path) or None,
        "log_bytes": log_bytes,
        "supervised": process.is_supervised(),
    }
