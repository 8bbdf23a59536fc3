"""An operation of the engine that is going on: followed, interrupted, killed, waited for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pulumi import automation
from pulumi.automation.errors import CommandError

from rehearsal.engine_command import EngineCommand
from rehearsal.engine_report import EngineTimeoutError, Recorder, Report

Kind = Literal["preview", "up", "refresh", "destroy"]
Say = Callable[[str], None]

OPERATION_LIMIT_S = 300.0


class Operation:
    """An operation that is going on."""

    def __init__(
        self,
        kind: Kind,
        stack: automation.Stack,
        command: EngineCommand,
        say: Say | None,
        options: Mapping[str, Any],
    ) -> None:
        self._recorder = Recorder(kind)
        self._command = command
        self._ok = False
        self._outputs: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(getattr(stack, kind), say, options), name=kind, daemon=True
        )
        self._thread.start()

    def wait_for(self, text: str, limit_s: float = 60.0) -> None:
        """Returns when a line or message with that text has come. Raises EngineTimeoutError."""
        self._recorder.wait_for(text, limit_s)

    def interrupt(self) -> None:
        """One Ctrl-C."""
        self._command.signal(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL to the command, not to its plugins."""
        self._command.signal(signal.SIGKILL)

    def wait(self, limit_s: float) -> bool:
        """Whether it has ended within that time."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def report(self, limit_s: float = OPERATION_LIMIT_S) -> Report:
        """Waits for the end. Raises EngineTimeoutError."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            said = self._recorder.report(ok=False, outputs={}).text
            raise EngineTimeoutError(f"the operation is not done after {limit_s} s; it said:\n{said}")
        if self._error is not None:
            raise self._error
        return self._recorder.report(ok=self._ok, outputs=self._outputs)

    def _run(self, run: Callable[..., Any], say: Say | None, options: Mapping[str, Any]) -> None:
        def hear(line: str) -> None:
            self._recorder.line(line)
            if say is not None:
                say(line)

        try:
            result = run(on_output=hear, on_error=hear, on_event=self._recorder.event, **options)
            self._outputs = {name: each.value for name, each in getattr(result, "outputs", {}).items()}
            self._ok = True
        except CommandError:
            self._ok = False
        except BaseException as error:  # told to whoever asks for the report
            self._error = error
