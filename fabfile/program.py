"""`fab` itself: Invoke's parser and executor with this checkout's commands, from whatever folder it is called.

Fabric's own `fab` finds a fabfile by the folder that one stands in, gives `--` a meaning of its own, sorts the commands
by their letters and ends with 1 where a word is mistyped. It has options besides that no command of ours heeds
(`--dry` would carry everything out).
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import shutil
import sys
import textwrap
from collections.abc import Collection as Names
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from invoke.collection import Collection
from invoke.completion.complete import complete, print_completion_script
from invoke.config import Config
from invoke.exceptions import Exit, ParseError
from invoke.executor import Executor
from invoke.parser import Parser
from invoke.parser.argument import Argument
from invoke.parser.context import ParserContext

from contracts.errors import RequestError
from fabfile import hints
from fabfile.hosts import deploy, doctor, get, jupyter, put, run, ssh, ssh_config, trust, verify
from fabfile.tasks import (
    accelerators,
    build,
    fill_mask,
    images,
    jobs,
    logs,
    push,
    recover,
    rehearsal,
    runs,
    status,
    stop,
    train,
)

CHECKOUT = Path(__file__).resolve().parent.parent
LIST_HINT = "`fab help COMMAND` shows a command's options, `fab jobs` the jobs and theirs."

namespace = Collection()
"""In the order in which a user meets them, which `fab --list` keeps."""
for command in (
    *(train, status, logs, stop, recover, runs, fill_mask, jobs),
    *(deploy, verify, doctor, trust, run, put, get, ssh, ssh_config, jupyter),
    *(build, push, images),
    *(rehearsal, accelerators),
):
    namespace.add_task(command)


def main() -> NoReturn:
    """The entry point `fab`."""
    fab(sys.argv[1:])


def fab(words: Sequence[str]) -> NoReturn:
    """Carry out a command line and end: 2 where it is wrong, 130 interrupted, else the command's own exit code."""
    try:
        _carry_out(words)
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
    sys.exit(0)


@functools.cache
def commands() -> Mapping[str, ParserContext]:
    """Return the commands as Invoke's parser takes them; a task can be converted only once."""
    return {str(each.name): each for each in namespace.to_contexts()}


def own_options() -> ParserContext:
    """Return the options of `fab` itself, before any command."""
    return ParserContext(
        args=[
            Argument(names=("help", "h"), optional=True, help="show this, or a command's options: fab help COMMAND"),
            Argument(names=("list", "l"), kind=bool, default=False, help="list the commands"),
            Argument(names=("version", "V"), kind=bool, default=False, help="say which tpu-stack this is, and where"),
            Argument(names=("print-completion-script",), help="for bash, zsh or fish: what completes commands"),
            Argument(names=("complete",), kind=bool, default=False, help="used by that script"),
        ]
    )  # fmt: skip


def _carry_out(words: Sequence[str]) -> None:
    """Check the whole command line, then carry it out."""
    words = ["--help", *words[1:2]] if words[:1] == ["help"] else [*words]
    own = own_options()
    given = Parser(initial=own, ignore_unknown=True).parse_argv(words)
    parser = Parser(initial=own, contexts=commands().values())
    options = given[0].args
    if options.complete.value:
        complete(names=["fab"], core=given, initial_context=own, collection=namespace, parser=parser)
    after = after_dashes(words)
    line = hints.Line(words=given.unparsed, after=after, commands=commands(), job_options=job_options)
    help_of = line.check() or options.help.value
    if options.version.value:
        print(f"tpu-stack {importlib.metadata.version('tpu-stack')}, {CHECKOUT}")
    elif options["print-completion-script"].value:
        print_completion_script(shell=options["print-completion-script"].value, names=["fab"])
    elif isinstance(help_of, str):
        _show_command(help_of)
    elif options.list.value:
        print("The commands:\n")
        _print_columns(_listed())
    elif help_of or not given.unparsed:
        print("Usage: fab COMMAND [--options]\n")
        _print_columns(_listed())
        _print_columns(own.help_tuples())
        print(LIST_HINT)
    else:
        _refuse_another_checkout(Path.cwd())
        _, *tasks = parser.parse_argv(given.unparsed)
        Executor(namespace, Config(overrides={"after_dashes": after}), given).execute(*tasks)


def _listed() -> list[tuple[str, str | None]]:
    """Return the commands in the order of the namespace, each with its summary."""
    return [(name, (inspect.getdoc(task) or "").partition("\n")[0]) for name, task in namespace.tasks.items()]


def _show_command(name: str) -> None:
    if name not in commands():
        raise hints.unknown_command(name, commands())
    command = commands()[name]
    print(f"Usage: {hints.usage(command)}\n\n{inspect.getdoc(namespace[name])}\n")
    _print_columns(command.help_tuples())


def after_dashes(argv: Sequence[str]) -> list[str]:
    """Return the words after the first `--`."""
    return [*argv[argv.index("--") + 1 :]] if "--" in argv else []


def job_options() -> Mapping[str, Names[str]]:
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
    """Refuse to start the code of this checkout from within another one.

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
