"""`fab` itself: Invoke's program with this checkout's commands, from whatever folder it is called.

Fabric's own `fab` finds a fabfile by the folder that one stands in, gives `--` a meaning of its own, sorts the commands
by their letters and ends with 1 where a word is mistyped. It has options besides that no command of ours heeds
(`--dry` would carry everything out).
"""

from __future__ import annotations

import importlib.metadata
import inspect
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from invoke.completion.complete import complete, print_completion_script
from invoke.exceptions import Exit, ParseError
from invoke.parser.argument import Argument
from invoke.parser.context import ParserContext
from invoke.program import Program

from contracts.errors import RequestError
from fabfile import hints

CHECKOUT = Path(__file__).resolve().parent.parent
LIST_HINT = "`fab help COMMAND` shows a command's options, `fab jobs` the jobs and theirs."


class Fab(Program):
    """The command line: what it asks for is checked as a whole, then carried out."""

    def core_args(self) -> list[Argument]:
        return [
            Argument(names=("help", "h"), optional=True, help="show this, or a command's options: fab help COMMAND"),
            Argument(names=("list", "l"), kind=bool, default=False, help="list the commands"),
            Argument(names=("version", "V"), kind=bool, default=False, help="say which tpu-stack this is, and where"),
            Argument(names=("print-completion-script",), help="for bash, zsh or fish: what completes commands"),
            Argument(names=("complete",), kind=bool, default=False, help="used by that script"),
        ]  # fmt: skip

    def run(self, argv: Any = None, exit: bool = True) -> None:  # noqa: ARG002
        """Carry out a command line. Exit codes: 2 where it is wrong, 130 interrupted, else the command's own."""
        try:
            self._carry_out([*(sys.argv if argv is None else argv)])
        except (RequestError, ParseError) as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except Exit as end:
            sys.exit(end.code)
        except BrokenPipeError:
            sys.stderr.close()  # the reader of our output went away; nothing to tell it
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    def _carry_out(self, argv: list[str]) -> None:
        self.argv = ["fab", *(["--help", *argv[2:3]] if argv[1:2] == ["help"] else argv[1:])]
        self.parse_core_args()
        self.create_config()
        assert self.namespace is not None
        self.collection = self.namespace
        self.parser = self._make_parser()
        if self.args.complete.value:
            complete(
                names=self.binary_names,
                core=self.core,
                initial_context=self.initial_context,
                collection=self.collection,
                parser=self.parser,
            )
        after = after_dashes(self.argv)
        line = hints.Line(
            words=self.core.unparsed, after=after, commands=self.parser.contexts, job_options=job_options
        )
        self._show(line.check() or self.args.help.value)
        _refuse_another_checkout(Path.cwd())
        self.tasks = self.parser.parse_argv(self.core.unparsed)
        self.tasks.pop(0)  # what stands before the first command
        self.config.load_overrides({"after_dashes": after})
        self.execute()

    def _show(self, help_of: str | bool | None) -> None:
        """Print what is asked for instead of carrying something out, and end."""
        if self.args.version.value:
            print(f"tpu-stack {importlib.metadata.version('tpu-stack')}, {CHECKOUT}")
        elif self.args["print-completion-script"].value:
            print_completion_script(shell=self.args["print-completion-script"].value, names=self.binary_names)
        elif isinstance(help_of, str):
            self.print_task_help(help_of)
        elif self.args.list.value:
            print("The commands:\n")
            _print_columns(self._listed())
        elif help_of or not self.core.unparsed:
            print("Usage: fab COMMAND [--options]\n")
            _print_columns(self._listed())
            _print_columns(self.initial_context.help_tuples())
            print(LIST_HINT)
        else:
            return
        raise Exit

    def _listed(self) -> list[tuple[str, str | None]]:
        """The commands in the order a user meets them, which is that of the namespace."""
        return [
            (name, (inspect.getdoc(task) or "").partition("\n")[0])
            for name, task in self.collection.tasks.items()
        ]

    def print_task_help(self, name: str) -> None:
        if name not in self.parser.contexts:
            raise hints.unknown_command(name, self.parser.contexts)
        command: ParserContext = self.parser.contexts[name]
        print(f"Usage: {hints.usage(command)}\n\n{inspect.getdoc(self.collection[name])}\n")
        _print_columns(command.help_tuples())


def after_dashes(argv: Sequence[str]) -> list[str]:
    """What comes after the first `--`."""
    return [*argv[argv.index("--") + 1 :]] if "--" in argv else []


def job_options() -> Mapping[str, Collection[str]]:
    from launch import jobs

    return {name: jobs.find(name).options() for name in jobs.names()}


def _print_columns(rows: Iterable[tuple[str, str | None]]) -> None:
    rows = [*rows]
    indent = 2 + max(len(name) for name, _ in rows) + 3
    width = max(shutil.get_terminal_size().columns, indent + 20)
    for name, text in rows:
        lines = textwrap.wrap(text or "", width - indent, break_on_hyphens=False, break_long_words=False)
        print(f"  {name:{indent - 2}}{f'\n{indent * " "}'.join(lines)}".rstrip())
    print()


def _refuse_another_checkout(cwd: Path) -> None:
    """This program would start the code of its own checkout, and not the one that a person is looking at.

    Raises:
        RequestError: the folder is in another checkout of tpu-stack.
    """
    for folder in (cwd, *cwd.parents):
        if folder == CHECKOUT:
            return
        if (folder / "fabfile" / "tasks.py").is_file() and (folder / "launch" / "jobs.py").is_file():
            raise RequestError(
                f"this `fab` starts the code of {CHECKOUT}, and you are in another checkout, {folder}; call that one's "
                f"own, {folder}/.venv/bin/fab (`make install` makes it)"
            )


def program() -> Fab:
    from fabfile import namespace

    return Fab(namespace=namespace, name="tpu-stack", binary="fab", binary_names=["fab"])


def main() -> None:
    program().run()
    sys.exit()
