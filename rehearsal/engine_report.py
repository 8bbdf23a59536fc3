"""What an operation of the engine said and did, put together from its output and its events while it runs."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import Any

from pulumi.automation import EngineEvent


class EngineTimeoutError(Exception):
    """The engine has not come so far within the limit; the message holds what it has said."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Something that the engine did, or in a preview would do: create, update, delete, replace, same, read …

    parent: the urn of what it belongs to; empty of the stack itself."""

    op: str
    type: str
    name: str
    urn: str
    parent: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """A message for the user: info, info#err, warning or error; urn is empty for the engine's own."""

    severity: str
    message: str
    urn: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One operation. changes: counts by create, update, same, delete, replace; empty where it did not get so far."""

    kind: str
    ok: bool
    lines: tuple[str, ...]
    changes: Mapping[str, int]
    steps: tuple[Step, ...]
    diagnostics: tuple[Diagnostic, ...]
    outputs: Mapping[str, Any]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def of(self, op: str) -> list[str]:
        """The names of the resources with which that was done, sorted."""
        return sorted(step.name for step in self.steps if step.op == op)

    def messages(self, severity: str) -> list[str]:
        return [each.message for each in self.diagnostics if each.severity == severity]


class Recorder:
    """Collects, from several threads, what an operation says."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._steps: list[Step] = []
        self._diagnostics: list[Diagnostic] = []
        self._changes: dict[str, int] = {}

    def line(self, text: str) -> None:
        with self._changed:
            self._lines.append(text)
            self._changed.notify_all()

    def event(self, event: EngineEvent) -> None:
        with self._changed:
            if event.resource_pre_event is not None:
                meta = event.resource_pre_event.metadata
                state = meta.new or meta.old
                self._steps.append(
                    Step(
                        op=str(getattr(meta.op, "value", meta.op)),
                        type=meta.type,
                        name=meta.urn.split("::", 3)[3],
                        urn=meta.urn,
                        parent=state.parent if state is not None else "",
                    )
                )
            if event.diagnostic_event is not None and not event.diagnostic_event.ephemeral:
                said = event.diagnostic_event
                text = _plain(said.message)
                found = Diagnostic(severity=said.severity, message=text, urn=said.urn or "")
                self._diagnostics.append(found)
            if event.summary_event is not None:
                changes = event.summary_event.resource_changes
                self._changes = {str(getattr(op, "value", op)): count for op, count in changes.items()}
            self._changed.notify_all()

    def wait_for(self, text: str, limit_s: float) -> None:
        """Returns when a line or a message with that text has come. Raises EngineTimeoutError."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            while not self._has(text):
                if not self._changed.wait(deadline - time.monotonic()) and not self._has(text):
                    said = "\n".join(self._lines) or "(nothing)"
                    raise EngineTimeoutError(
                        f"{self._kind} has not said {text!r} within {limit_s} s; it said:\n{said}"
                    )

    def report(self, *, ok: bool, outputs: Mapping[str, Any]) -> Report:
        with self._changed:
            return Report(
                kind=self._kind,
                ok=ok,
                lines=tuple(self._lines),
                changes=dict(self._changes),
                steps=tuple(self._steps),
                diagnostics=tuple(self._diagnostics),
                outputs=outputs,
            )

    def _has(self, text: str) -> bool:
        said = [each.message for each in self._diagnostics]
        return any(text in line for line in (*self._lines, *said))


def _plain(message: str) -> str:
    """Without the engine's marks for colours, <{%reset%}> and the like."""
    while (start := message.find("<{%")) >= 0 and (end := message.find("%}>", start)) >= 0:
        message = message[:start] + message[end + 3 :]
    return message.strip()
