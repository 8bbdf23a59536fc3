"""Runs on a host: carries out the steps of a deployment, one after the other, and says of each how it went.

`python3 -S -E -c TEXT STEPS`: TEXT is this file, STEPS the JSON of `backends.vm.steps`. An answer is a line of JSON:
step, state (doing, ok, changed, skipped, warned, failed), message, remedy, took_s. Exit status 1 where a step failed.
Python 3.10 or later on Linux, and only its standard library: the agent, which is there already, needs no less.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SAYS = "say: "
"""Begins a line of a step that is shown at once; all else that it prints is kept for the case that it fails."""
# The input is a pipe that only the runner holds: a line says that the step has ended, its end without one that the
# runner was killed; then the step is ended too, as root where it is root's. Nothing of a step reads from it.
PRELUDE = """
exec 3<&0 </dev/null
( trap '' TERM; read -r _ <&3 && exit; kill -TERM 0; sleep 5; kill -KILL 0 ) >/dev/null 2>&1 &
exec 3<&-
export LC_ALL=C DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a PYTHON={python}
say() {{ printf 'say: %s\\n' "$*"; }}
as_root() {{ if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n -- "$@"; fi; }}
"""
SETTLED = {0: "ok", 3: "warned"}
"""Exit status of a check → what has become of the step, where there is nothing to wait for."""
GRACE_S = 5
LOOK_AGAIN_S = 2.0
NO_SUDO = (
    "this user may not use sudo without a password: have an administrator of the stack do it, or become one"
)
MOST_LINES = 20
LONGEST_LINE = 400


def as_words(text: str, limit_s: float, root: bool) -> list[str]:
    """Return the command for some shell text, ended after `limit_s` by a program that may do so as root too."""
    shell = PRELUDE.format(python=shlex.quote(sys.executable)) + text
    arguments = ["timeout", "-k", str(GRACE_S), str(limit_s), "sh", "-c", shell]
    return ["sudo", "-n", "--", *arguments] if root and os.geteuid() != 0 else arguments


def run(text: str, limit_s: float, root: bool, show: Callable[[str], None]) -> tuple[int | None, list[str]]:
    """Exit status (None: its time was over) and the last lines of some shell text; `show` is given what it says."""
    process = subprocess.Popen(
        as_words(text, limit_s, root),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    lines: list[str] = []
    assert process.stdin is not None and process.stdout is not None
    try:
        with process.stdout:
            while data := process.stdout.readline(4 * LONGEST_LINE):
                line = data.decode(errors="replace").rstrip()[:LONGEST_LINE]
                if line.startswith(SAYS):
                    show(line.removeprefix(SAYS))
                elif line:
                    lines = [*lines[1 - MOST_LINES :], line]
        status = process.wait()
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(b"\n")
    finally:
        if process.poll() is None:  # whoever asked is gone; what runs as root is ended by its own watcher
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    return (None if status in (124, 137, -signal.SIGKILL) else status), lines


class Steps:
    """The steps of one host, and what has become of them so far."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self.failed: set[str] = set()
        self.sudo: bool | None = None

    def tell(
        self, step: dict[str, Any], state: str, message: str, remedy: str = "", took_s: float = 0
    ) -> None:
        answer = {"step": step["name"], "state": state, "message": message, "remedy": remedy}
        self.write(json.dumps({**answer, "took_s": round(took_s, 2)}))

    def carry_out(self, step: dict[str, Any]) -> None:
        began_s = time.monotonic()
        state, message, remedy = self.outcome(step)
        if state == "failed" and not step["needed"]:
            state = "warned"
        if state == "failed":
            self.failed.add(step["name"])
        self.tell(step, state, message, remedy, time.monotonic() - began_s)

    def outcome(self, step: dict[str, Any]) -> tuple[str, str, str]:
        lacking = [name for name in step["needs"] if name in self.failed]
        if lacking:
            self.failed.add(step["name"])
            return "skipped", "not tried, for it needs: " + ", ".join(lacking), ""
        if step["when"]:
            status, lines = self.look(step, step["when"])
            if status != 0:
                return "skipped", last(lines), ""
        status, lines = self.look(step, step["check"])
        if status in SETTLED:
            return SETTLED[status], last(lines), step["remedy"] if status else ""
        if not step["change"]:
            return self.wait(step, lines)
        if step["root"] and not self.may_be_root():
            return "failed", last(lines) + "; fixing that needs root", NO_SUDO
        self.tell(step, "doing", last(lines))
        status, output = run(
            step["change"], step["limit_s"], step["root"], lambda text: self.tell(step, "doing", text)
        )
        if status is None:
            return "failed", late(step["limit_s"]) + ": " + last(output), step["remedy"]
        if status != 0:
            return "failed", " | ".join(output[-3:]) or f"exit status {status}", step["remedy"]
        status, lines = self.look(step, step["check"])
        if status != 0:
            return "failed", "changed, and yet: " + last(lines), step["remedy"]
        return "changed", last(lines), ""

    def look(self, step: dict[str, Any], text: str) -> tuple[int | None, list[str]]:
        status, lines = run(text, step["look_limit_s"], False, lambda text: self.tell(step, "doing", text))
        if status is None:
            lines = [late(step["look_limit_s"])]
        return status, lines

    def wait(self, step: dict[str, Any], lines: list[str]) -> tuple[str, str, str]:
        """Until the check holds, where there is nothing to do about it; a check without a limit is not waited for."""
        deadline, reported = time.monotonic() + step["limit_s"], None
        while time.monotonic() < deadline:
            if last(lines) != reported:
                reported = last(lines)
                self.tell(step, "doing", "waiting: " + reported)
            time.sleep(min(LOOK_AGAIN_S, step["limit_s"]))
            status, lines = self.look(step, step["check"])
            if status in SETTLED:
                return SETTLED[status], last(lines), step["remedy"] if status else ""
        waited = f" (waited {step['limit_s']:g} s)" if step["limit_s"] else ""
        return "failed", last(lines) + waited, step["remedy"]

    def may_be_root(self) -> bool:
        if self.sudo is None:
            self.sudo = os.geteuid() == 0
            if not self.sudo:
                try:
                    self.sudo = run("sudo -n true", 10, False, lambda _: None)[0] == 0
                except OSError:
                    self.sudo = False
        return self.sudo


def last(lines: list[str]) -> str:
    return lines[-1] if lines else "it does not say why"


def late(limit_s: float) -> str:
    return f"not done after {limit_s:g} s"


def main(text: str) -> int:
    steps = Steps(functools.partial(print, flush=True))
    for step in json.loads(text):
        try:
            steps.carry_out(step)
        except BrokenPipeError:
            return 1  # whoever asked is gone: nothing more is begun
        except OSError as error:
            steps.failed.add(step["name"])
            steps.tell(step, "failed", f"cannot be carried out: {error}", step["remedy"])
    return 1 if steps.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
