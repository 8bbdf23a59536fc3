"""The words after `--` on the command line, for the one task that takes them: `fab run -- COMMAND ARGUMENT …`.

Fabric has a meaning of its own for them: a command for the hosts that `fab -H` names, its words joined by spaces, and
without -H an error with a traceback. So they are taken from it while this fabfile is loaded, which is after the command
line has been read and before anything of it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from invoke.exceptions import Exit


def after_dashes(argv: Sequence[str]) -> tuple[str, ...]:
    """What comes after the first `--`."""
    return tuple(argv[argv.index("--") + 1 :]) if "--" in argv else ()


def take(program: Any, task: str) -> tuple[str, ...]:
    """The words after `--` where `task` is among those to be carried out. program: Fabric's, which then has none.

    Raises:
        Exit: there are such words, and no task that takes them.
    """
    core = getattr(program, "core", None)
    if core is None or not core.remainder or program.args.complete.value:
        return ()
    if task not in core.unparsed:
        raise Exit(f"error: -- {core.remainder}: only `fab {task}` takes words after --", code=2)
    core.remainder = ""
    return after_dashes(program.argv)
