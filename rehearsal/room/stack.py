"""The rehearsal's stack: the program of `infra/` on the real engine, with a configuration for so many hosts."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra import catalogue
from infra.program import declare
from rehearsal.engine import ROOT, Cli, Engine
from rehearsal.engine_operation import Kind
from rehearsal.engine_report import Report
from rehearsal.room.outputs import with_registry
from rehearsal.room.wanted import configuration
from rehearsal.state import STACK, RehearsalError

UP_LIMIT_S = 900.0
LOOK_AGAIN_S = 0.2
PASSING = re.compile(
    r"^@ |^ .*(?:refreshing|refresh|creating|replacing|deleting|running)(?: original| replacement)? \(\d"
    r"|^    (?!pulumi:pulumi:Stack )[\w-]+(?::[\w/]+)+ "
)

Say = Callable[[str], None]
Gone = Callable[[], bool]


class RehearsalStack:
    """One operation at a time, as with any stack. folder: a new one."""

    def __init__(
        self,
        *,
        folder: Path,
        cli: Cli,
        tpu_url: str,
        accelerator: catalogue.Accelerator,
        registry: str | None = None,
    ) -> None:
        """registry: host and port of the one that stands for Google's; None: there is none."""
        self.inventory = ""
        self.outputs: dict[str, Any] = {}
        self._registry = registry
        self._engine = Engine(
            folder=folder,
            cli=cli,
            program=declare,
            tpu_url=tpu_url,
            project_file=ROOT / "Pulumi.yaml",
            stack=STACK,
        )
        self._engine.configure(configuration(accelerator))
        self._busy = threading.Lock()

    def carry_out(self, kind: Kind, say: Say, gone: Gone, **options: Any) -> Report:
        """gone: whether whoever asked has left; the operation is then interrupted, as by Ctrl-C.

        Raises:
            RehearsalError: another operation is going on.
        """
        if not self._busy.acquire(blocking=False):
            raise RehearsalError(
                "the stack is locked: another `pulumi` command of this rehearsal is running; wait for it to end"
            )
        if kind == "up":
            options = {"suppress_outputs": True, **options}
        try:
            operation = self._engine.begin(kind, say=lambda line: _tell_news(line, say), **options)
            interrupted = False
            while not operation.wait(LOOK_AGAIN_S):
                if gone() and not interrupted:
                    operation.interrupt()
                    interrupted = True
            report = operation.report(UP_LIMIT_S)
        finally:
            self._busy.release()
        if kind == "up" and report.ok:
            self.outputs = with_registry(report.outputs, self._registry)
            self.inventory = str(report.outputs["inventory"])
        return report

    def type(self, *arguments: str) -> tuple[bool, str]:
        """What a user types behind `pulumi` that needs no program: whether it succeeded, and all that it said."""
        return self._engine.type(*arguments)

    def close(self) -> None:
        """Ends what the engine has left running."""
        self._engine.end_orphans()


def _tell_news(line: str, say: Say) -> None:
    """Less what a terminal would show and take away again: signs of life, what begins, what stays as it is."""
    if line.strip() and not PASSING.search(line):
        say(line)
