"""`fab` itself: Invoke's parser and executor with this checkout's commands, from whatever folder it is called.

Fabric's own `fab` finds a fabfile by the folder that one stands in, gives `--` a meaning of its own, sorts the commands
by their letters and ends with 1 where a word is mistyped. It has options besides that no command of ours heeds
(`--dry` would carry everything out).
"""

from __future__ import annotations

import functools
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Collection as Names
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from invoke.collection import Collection
from invoke.completion.complete import complete, print_completion_script
from invoke.exceptions import Exit, ParseError
from invoke.executor import Executor
from invoke.parser import Parser, ParseResult
from invoke.parser.argument import Argument
from invoke.parser.context import ParserContext

from contracts.errors import DONE, RequestError
from fabfile.command import exit_code
from fabfile.commands import COMMANDS, HEADINGS
from fabfile.slips import Line, unknown_command

CHECKOUT = Path(__file__).resolve().parent.parent
LIST_HINT = "`fab help COMMAND` shows a command's options, `fab jobs` the jobs, and with --job theirs."


def main() -> NoReturn:
    """Carry out this process's command line: the entry point `fab`."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us, as by `>&-`
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            setattr(sys, name, open(descriptor, "w", encoding="utf-8"))  # noqa: SIM115 - open until the end
        elif isinstance(stream, io.TextIOWrapper):
            # A terminal may lack …, a file's name need not be UTF-8.
            stream.reconfigure(errors="backslashreplace")
    fab(sys.argv[1:])


def fab(tokens: Sequence[str]) -> NoReturn:
    """Carry out a command line and end: 2 where it is wrong, 130 interrupted, else the command's own exit code."""

    def carry_out() -> int:
        try:
            _carry_out(tokens)
        except ParseError as error:
            raise RequestError(str(error)) from None
        except Exit as end:
            return int(end.code)
        return DONE

    sys.exit(exit_code(carry_out))


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


def _carry_out(tokens: Sequence[str]) -> None:
    """Check the whole command line, then carry it out."""
    tokens = ["--help", *tokens[1:2]] if tokens[:1] == ["help"] else [*tokens]
    own = own_options()
    parsed = Parser(initial=own, ignore_unknown=True).parse_argv(tokens)
    options = parsed[0].args
    if options.complete.value:
        _complete(parsed, own)
    after = tokens[tokens.index("--") + 1 :] if "--" in tokens else []
    line = Line(parsed.unparsed, after, COMMANDS, options_after_dashes)
    line.check()
    help_text = line.help_command or options.help.value
    if options.version.value:
        import importlib.metadata  # slow, and only needed here

        print(f"tpu-stack {importlib.metadata.version('tpu-stack')}, {CHECKOUT}")
    elif options["print-completion-script"].value:
        print_completion_script(shell=options["print-completion-script"].value, names=["fab"])
    elif isinstance(help_text, str):
        _show_command(help_text)
    elif options.list.value:
        _show_commands()
    elif help_text or not parsed.unparsed:
        print("Usage: fab COMMAND [--options]\n")
        _show_commands()
        _print_columns(own.help_tuples())
        print(LIST_HINT)
    else:
        _refuse_another_checkout()
        # What is wrong with a later command is said before the first is carried out.
        calls = [
            (str(call.name), {"args": COMMANDS[str(call.name)].read(call.as_kwargs, line.after)})
            for call in line.calls
        ]
        Executor(namespace({name for name, _ in calls})).execute(*calls)


def _complete(parsed: ParseResult, own: ParserContext) -> None:
    """Print what may come next on the line that a shell has so far: jobs after --job, else what Invoke knows."""
    *_, option, word = ["", *parsed.remainder.split()]
    if "--job" in (option, word):
        from launch import jobs

        if word not in jobs.names():
            print(*jobs.names(), sep="\n")
            raise Exit
    parser = Parser(initial=own, contexts=[command.parser_context for command in COMMANDS.values()])
    complete(names=["fab"], core=parsed, initial_context=own, collection=namespace(COMMANDS), parser=parser)


def namespace(names: Iterable[str]) -> Collection:
    """Return commands as Invoke's completion and executor take them."""
    tasks = Collection()
    for name in names:
        tasks.add_task(COMMANDS[name])
    return tasks


@functools.cache
def options_after_dashes(owner: str) -> Mapping[str, Names[str]]:
    """Return the options of every job by its name, or of the server."""
    from launch import jobs

    if owner == "server":
        return {"the server": jobs.find(jobs.SERVER).options()}
    return {name: jobs.find(name).options() for name in jobs.names()}


def _show_commands() -> None:
    width = max(len(name) for name in COMMANDS)
    for heading, _, names in HEADINGS:
        print(f"{heading}:")
        _print_columns([(f"{name:{width}}", COMMANDS[name].summary) for name in names])


def _show_command(name: str) -> None:
    if name not in COMMANDS:
        raise unknown_command(name, COMMANDS)
    command = COMMANDS[name]
    print(f"Usage: {command.usage}\n\n{command.text}\n\nExamples:")
    print(*(f"  {example}" for example in command.examples), "", sep="\n")
    _print_columns(command.parser_context.help_tuples())


def _print_columns(rows: Iterable[tuple[str, str | None]]) -> None:
    rows = [*rows]
    indent = 2 + max(len(name) for name, _ in rows) + 3
    width = max(shutil.get_terminal_size().columns, indent + 20)
    for name, text in rows:
        lines = textwrap.wrap(text or "", width - indent, break_on_hyphens=False, break_long_words=False)
        print(f"  {name:{indent - 2}}{f'\n{indent * " "}'.join(lines)}".rstrip())
    print()


def _refuse_another_checkout() -> None:
    """Refuse to start the code of this checkout from within another one.

    Raises:
        RequestError: the folder is in another checkout of tpu-stack, or gone.
    """
    try:
        cwd = Path.cwd()
    except FileNotFoundError:
        raise RequestError("the folder that you are in was removed; `cd` to another one") from None
    for folder in (cwd, *cwd.parents):
        if folder == CHECKOUT:
            return
        if (folder / "fabfile" / "command_line.py").is_file() and (folder / "launch" / "jobs.py").is_file():
            raise RequestError(
                f"this `fab` starts the code of {CHECKOUT}, and you are in another checkout, {folder}; call that one's "
                f"own, {folder}/.venv/bin/fab (`make install` makes it)"
            )
