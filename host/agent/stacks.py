"""The verb stacks: where the threads of a process are."""

from __future__ import annotations

import os
import signal
import time

from .proc import catches
from .process import known_process, signal_quietly
from .protocol import Failed
from .waiting import wait_until

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json


def stacks(request: Json) -> Json:
    """The stacks of all threads of a process, as its own SIGUSR1 handler writes them."""
    process = known_process(request)
    name, pid = f"process {process.process_id}", process.record["pid"]
    if not process.is_alive():
        raise Failed(f"{name} (pid {pid}) is not running", "ask `status` how it ended")
    pid = process.pid()
    if pid is None:
        raise Failed(
            f"the container of {name} has not started it yet", "ask again when it is past its start-up"
        )
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        if not catches(file.read(), signal.SIGUSR1):
            message = f"{name} (pid {pid}) has no SIGUSR1 handler, and the signal would kill it"
            raise Failed(message, "ask again when it is past its start-up")

    def written() -> int:
        try:
            return os.path.getsize(process.stacks_path)
        except OSError:
            return 0

    before = size = written()
    container = process.container
    if container is None:
        signal_quietly(os.kill, pid, signal.SIGUSR1)
    else:
        container.signal(signal.SIGUSR1)
    changed = time.monotonic()

    def is_written() -> bool:
        nonlocal size, changed
        if written() != size:
            size, changed = written(), time.monotonic()
        return size > before and time.monotonic() - changed >= 0.2

    if not wait_until(is_written, request["timeout_s"]):
        message = f"{name} (pid {pid}) did not answer SIGUSR1 within {request['timeout_s']:g} s"
        raise Failed(message, "it hangs outside Python's reach; `stop` it")
    with open(process.stacks_path, "rb") as stacks_file:
        stacks_file.seek(before)
        return {"text": stacks_file.read().decode(errors="replace")}
