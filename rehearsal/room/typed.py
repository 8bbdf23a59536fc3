"""What was typed behind `pulumi`, as something to do on the rehearsal's stack. Pure.

The real command line would start the program through its language host; here the program runs in the daemon, so what
needs it (up, preview, refresh, destroy) is told apart from what the command line can do by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args

from rehearsal.engine_operation import Kind
from rehearsal.state import STACK, RehearsalError

OPERATIONS: tuple[str, ...] = get_args(Kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Typed:
    """kind: an operation of the engine with its options, the outputs, or "other": words for the command line itself."""

    kind: Kind | Literal["output", "other"]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    words: tuple[str, ...] = ()


def understood(arguments: Sequence[str]) -> Typed:
    """Raises RehearsalError, in Pulumi's own words where it has some."""
    kind: Kind
    for kind in get_args(Kind):
        if arguments[:1] == [kind]:
            return _operation(kind, arguments[1:])
    if list(arguments[:2]) == ["stack", "output"]:
        return _output(arguments[2:])
    return Typed(kind="other", words=tuple(arguments))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RehearsalError(
            f"{self.prog}: {message}; the rehearsal's pulumi takes {self.format_usage()}".strip()
        )


def _parser(words: str) -> _Parser:
    parser = _Parser(prog=f"pulumi {words}", add_help=False, allow_abbrev=False)
    parser.add_argument("--stack", "-s", default=STACK)
    return parser


def _operation(kind: Kind, arguments: Sequence[str]) -> Typed:
    parser = _parser(kind)
    parser.add_argument("--refresh", "-r", action="store_true")
    parser.add_argument("--yes", "-y", action="store_true")
    parser.add_argument("--skip-preview", "-f", action="store_true")
    parser.add_argument("--diff", action="store_true")
    parser.add_argument("--target", "-t", action="append")
    parser.add_argument("--replace", action="append")
    given = vars(parser.parse_args(list(arguments)))
    _require_stack(given.pop("stack"))
    skips = given.pop("skip_preview")
    if not given.pop("yes") and kind != "preview" and not skips:
        raise RehearsalError(
            "--yes or --skip-preview must be passed in to proceed when running in non-interactive mode"
        )
    if given["replace"] and kind not in ("up", "preview"):
        raise RehearsalError(f"pulumi {kind}: unknown flag: --replace")
    if kind == "refresh":
        given.pop("refresh")
        given.pop("diff")
    return Typed(kind=kind, options={name: value for name, value in given.items() if value})


def _output(arguments: Sequence[str]) -> Typed:
    parser = _parser("stack output")
    parser.add_argument("--json", "-j", action="store_true")
    parser.add_argument("--show-secrets", action="store_true")
    parser.add_argument("name", nargs="?")
    given = parser.parse_args(list(arguments))
    _require_stack(given.stack)
    return Typed(kind="output", options={"json": given.json, "name": given.name})


def _require_stack(name: str) -> None:
    if name != STACK:
        raise RehearsalError(f"no stack named '{name}' found; the rehearsal's is called {STACK}")
