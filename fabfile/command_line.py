"""`fab` itself: Invoke's parser and executor with this checkout's commands, from whatever folder it is called.

Fabric's own `fab` finds a fabfile by the folder that one stands in, gives `--` a meaning of its own, sorts the commands
by their letters and ends with 1 where a word is mistyped. It has options besides that no command of ours heeds
(`--dry` would carry everything out). Invoke's own parser answers "No idea what 'trian' is!", and takes an option that
it does not know for the value of a positional argument (`fab recover --help`): so `Line` checks every word first, and
says what was meant.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import inspect
import io
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Collection as Names
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from invoke.collection import Collection
from invoke.completion.complete import complete, print_completion_script
from invoke.config import Config
from invoke.exceptions import Exit, ParseError
from invoke.executor import Executor
from invoke.parser import Parser
from invoke.parser.argument import Argument
from invoke.parser.context import ParserContext

from contracts.errors import DONE, RequestError
from contracts.suggestions import copied_character, suggestion
from fabfile.host_tasks import deploy, doctor, get, jupyter, put, run, ssh, ssh_config, trust, verify
from fabfile.options import exit_code
from fabfile.queue_tasks import queue, submit, sweep
from fabfile.tasks import (
    accelerators,
    build,
    capacity,
    compare,
    dashboard,
    export,
    images,
    jobs,
    keep,
    keeper,
    logs,
    notify,
    predict,
    prune,
    push,
    recover,
    rehearsal,
    rm,
    runs,
    serve,
    status,
    stop,
    track,
    train,
    unkeep,
    zombies,
)

CHECKOUT = Path(__file__).resolve().parent.parent
LIST_HINT = "`fab help COMMAND` shows a command's options, `fab jobs` the jobs, and with --job theirs."

namespace = Collection()
"""In the order in which a user meets them, which `fab --list` keeps."""
for command in (
    *(
        train,
        status,
        logs,
        stop,
        recover,
        keep,
        unkeep,
        keeper,
        runs,
        compare,
        dashboard,
        predict,
        serve,
        export,
        track,
        notify,
        rm,
        prune,
        jobs,
    ),
    *(submit, sweep, queue),
    *(deploy, verify, doctor, trust, run, put, get, ssh, ssh_config, jupyter),
    *(build, push, images),
    *(rehearsal, accelerators, capacity, zombies),
):
    namespace.add_task(command)


def main() -> NoReturn:
    """Carry out this process's command line: the entry point `fab`."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us, as by `>&-`
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            setattr(sys, name, open(descriptor, "w", encoding="utf-8"))  # noqa: SIM115 - open until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a terminal may lack …, a file's name need not be UTF-8
    fab(sys.argv[1:])


def fab(words: Sequence[str]) -> NoReturn:
    """Carry out a command line and end: 2 where it is wrong, 130 interrupted, else the command's own exit code."""

    def carry_out() -> int:
        try:
            _carry_out(words)
        except ParseError as error:
            raise RequestError(str(error)) from None
        except Exit as end:
            return int(end.code)
        return DONE

    sys.exit(exit_code(carry_out))


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
    line = Line(words=given.unparsed, after=after, commands=commands(), job_options=job_options)
    checked = line.check()
    help_of = checked.help_of or options.help.value
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
        try:
            cwd = Path.cwd()
        except FileNotFoundError:
            raise RequestError("the folder that you are in was removed; `cd` to another one") from None
        _refuse_another_checkout(cwd)
        _, *tasks = parser.parse_argv([*checked.words])
        Executor(namespace, Config(overrides={"after_dashes": checked.after}), given).execute(*tasks)


def _listed() -> list[tuple[str, str | None]]:
    """Return the commands in the order of the namespace, each with its summary."""
    return [(name, (inspect.getdoc(task) or "").partition("\n")[0]) for name, task in namespace.tasks.items()]


def _show_command(name: str) -> None:
    if name not in commands():
        raise unknown_command(name, commands())
    command = commands()[name]
    print(f"Usage: {usage(command)}\n\n{inspect.getdoc(namespace[name])}\n")
    _print_columns(command.help_tuples())


def after_dashes(argv: Sequence[str]) -> list[str]:
    """Return the words after the first `--`."""
    return [*argv[argv.index("--") + 1 :]] if "--" in argv else []


def job_options() -> Mapping[str, Names[str]]:
    from launch import jobs

    return {name: jobs.find(name).options() for name in jobs.names()}


def server_options() -> Names[str]:
    from launch import jobs

    return jobs.find(jobs.SERVER).options()


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


HELP = ("-h", "--help")
AFTER_DASHES = {
    "train": "OPTIONS OF THE JOB",
    "submit": "OPTIONS OF THE JOB",
    "sweep": "OPTIONS OF THE JOB",
    "run": "COMMAND …",
    "compare": "RUN …",
    "predict": "INPUT …",
    "serve": "OPTIONS OF THE SERVER",
}
"""The commands that take the words after `--`, and what those words are."""
INPUTS = {
    "compare": "RUNs to compare",
    "predict": "INPUT (a text, a question, or the path of a picture)",
    "queue": "",
}
"""The commands that take as many words as there are before `--` too, and what they need; each ends its line."""
WITH_A_RUN = ("status", "logs", "stop", "ssh")
"""The commands that may be given a RUN, as those that need one are: as the word behind them, or with --run."""
TRAINERS = ("train", "submit", "sweep")
"""The commands that take a job's options."""

JobOptions = Callable[[], Mapping[str, Names[str]]]
"""Gives each job's options as they are typed: {"flax_mlm": ["--steps", …]}."""


class Checked(NamedTuple):
    """help_of: the command whose help is asked for. words: as Invoke's parser takes them. after: what the command is
    given besides: the words after `--`, and inputs before it."""

    help_of: str | None
    words: Sequence[str]
    after: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A command line: `words` from the first command on, `after` what follows `--`."""

    words: Sequence[str]
    after: Sequence[str]
    commands: Mapping[str, ParserContext]
    job_options: JobOptions

    def check(self) -> Checked:
        """Return the words as they are to be carried out, where every one is in order.

        Raises:
            RequestError: a word is unknown, missing or out of place; the message says what was meant.
        """
        command: ParserContext | None = None
        waiting = ""  # the option whose value comes next
        missing: list[str] = []  # positional arguments
        named: set[str] = set()  # the command's options that are given
        words: list[str] = []
        inputs: list[str] = []
        for word in self.words:
            words.append(word)
            is_input = command is not None and command.name in INPUTS and not missing
            if not is_input and (copied := copied_character(word)):
                raise RequestError(copied)
            if waiting:
                if command is None or word in command.flags:
                    break
                waiting = ""
            elif command is None or (word in self.commands and not missing and command.name not in INPUTS):
                command = self._command(word)
                missing = [str(argument.name) for argument in command.positional_args]
                named.clear()
            elif word in HELP:
                return Checked(str(command.name), words, inputs)
            elif word.startswith("-") and word != "-":
                waiting = self._option(command, word)
                given = command.flags.get(word.partition("=")[0])
                missing = [name for name in missing if given is None or given.name != name]
                if given and given.name in named and given.kind is not list:
                    raise RequestError(f"{word.partition('=')[0]}: is given twice; leave one out")
                named.update([str(given.name)] if given else [])
            elif missing:
                missing.pop(0)
            elif command.name in INPUTS:
                inputs.append(words.pop())
            elif command.name in WITH_A_RUN and "run" not in named:
                named.add("run")
                words[-1:] = ["--run", word]
            else:
                raise self._unexpected(command, word)
        if command and waiting:
            raise RequestError(f"{waiting} needs a value: {command.flags[waiting].help}")
        if command and missing:
            needed = " and ".join(f"{name.upper()} ({command.args[name].help})" for name in missing)
            raise RequestError(f"`fab {command.name}` needs {needed}: {usage(command)}")
        needs = INPUTS.get(str(command.name)) if command and not self._values("--sweep") else None
        if command and needs and not [*inputs, *self.after]:
            raise RequestError(f"`fab {command.name}` needs {needs}: {usage(command)}")
        self._check_after()
        return Checked(None, words, [*inputs, *self.after])

    def _command(self, word: str) -> ParserContext:
        if word in self.commands:
            return self.commands[word]
        if not word.startswith("-"):
            raise unknown_command(word, self.commands)
        named = next((each for each in self.words if each in self.commands), None)
        if named and word.partition("=")[0] in self.commands[named].flags:
            raise RequestError(f"{word}: the command comes first, its options after it: fab {named} {word} …")
        raise RequestError(f"`fab` has no option {word}; `fab help` lists those it has")

    def _option(self, command: ParserContext, word: str) -> str:
        """Return the option whose value is to follow; "" if none is.

        Raises:
            RequestError: the command has no such option.
        """
        name, equals, _ = word.partition("=")
        flags: Mapping[str, Any] = command.flags
        if name in command.inverse_flags:
            return ""
        if name in flags:
            return name if flags[name].takes_value and not equals else ""
        if word.startswith("--") or word[:2] not in flags or f"-{name}" in self._options(command):
            raise self._unknown_option(command, name)
        for place, letter in enumerate(word[1:], start=1):  # -da: several in one word, or one with its value
            if f"-{letter}" not in flags:
                raise self._unknown_option(command, name)
            if flags[f"-{letter}"].takes_value:
                return f"-{letter}" if place == len(word) - 1 else ""
        return ""

    def _options(self, command: ParserContext) -> set[str]:
        """Return the long options that a word of this command may have meant."""
        own = {flag for flag in command.flags if flag.startswith("--")}
        return {"--help", *own} | {option for options in self._jobs(command).values() for option in options}

    def _jobs(self, command: ParserContext) -> Mapping[str, Names[str]]:
        """Return the options of the named job, or of all jobs; of `fab serve`, the server's; else none."""
        if command.name == "serve":
            return {"the server": {*server_options()} - {*command.flags, "--job", "--export"}}
        if command.name not in TRAINERS or self._values("--workdir"):
            return {}
        jobs = self.job_options()
        return {name: options for name, options in jobs.items() if name in self._values("--job")} or jobs

    def _values(self, option: str) -> list[str]:
        pairs = zip(self.words, self.words[1:], strict=False)
        joined = [word.partition("=")[2] for word in self.words if word.startswith(f"{option}=")]
        return [value for word, value in pairs if word == option] + joined

    def _unknown_option(self, command: ParserContext, name: str) -> RequestError:
        if " " in name:
            return RequestError(f"{name}: is one word; write it without the quotes")
        long = name if name.startswith("--") else f"-{name}"
        # A run is no folder of runs.
        near = suggestion(long, self._options(command) - ({"--runs"} if long == "--run" else set()))
        owners = [job for job, options in self._jobs(command).items() if near in options]
        said = f"`fab {command.name}` has no option {name}; `fab help {command.name}` lists those it has"
        if owners and near not in command.flags:
            named = self._values("--job") or self._values("--resume")
            chosen = (
                ""
                if named or command.name not in TRAINERS
                else f" --job {owners[0] if len(owners) == 1 else 'JOB'}"
            )
            meant = (
                self._moved(command)
                .replace(f" {name}", f" {near}")
                .replace(f"fab {command.name}", f"fab {command.name}{chosen}")
            )
            said = (
                f"`fab {command.name}` has no option {name}; {near} is an option of {' and '.join(owners)}, and "
                f"{'a job' if command.name in TRAINERS else 'the server'}'s options come after --:\n  {meant}"
            )
        elif near:
            said = f"`fab {command.name}` has no option {name}; did you mean {near}?"
        return RequestError(said)

    def _unexpected(self, command: ParserContext, word: str) -> RequestError:
        name, line = command.name, f'"{word}" is not a command, nor an argument of `fab {command.name}`'
        given = self._values("--args")
        if name in TRAINERS and given and given[-1].startswith("-") and " " not in given[-1]:
            return RequestError(
                "--args takes the job's options as one word, in quotes; without quotes they come after --:\n  "
                + self._moved(command)
            )
        if "--job" in command.flags and word in self.job_options():
            return RequestError(f"{line}; did you mean --job {word}?")
        if "--resume" in command.flags and word.partition(":")[0] == "latest":
            return RequestError(f"{line}; did you mean --resume {word}?")
        if name == "run" or (name in TRAINERS and not self._values("--job") + self._values("--resume")):
            whose = "for the hosts" if name == "run" else "of your own"
            folder = ["--workdir", "."] if name in TRAINERS and not self._values("--workdir") else []
            start = list(self.words).index(word)
            return RequestError(
                f"{line}; a command {whose} comes after --:\n  "
                f"fab {shlex.join([*self.words[:start], *folder])} -- "
                f"{shlex.join([*self.words[start:], *self.after])}"
            )
        if name in WITH_A_RUN:
            return RequestError(
                f"{word}: `fab {name}` takes one RUN, and another one is named: {usage(command)}"
            )
        if near := suggestion(word, self.commands):
            return RequestError(f"{line}; did you mean `{near}`?")
        return RequestError(f"{line}; `fab help {name}` shows what it takes")

    def _moved(self, command: ParserContext) -> str:
        """Return the command line with the job's or the server's own options moved behind `--`."""
        kept: list[str] = []
        moved: list[str] = []
        places = len(command.positional_args)
        waiting = ""
        for word in self.words[list(self.words).index(str(command.name)) :]:
            name = word.partition("=")[0]
            argument = command.flags.get(name)
            if argument is not None and argument.name == "args":
                waiting, moved = "args", moved + [word.partition("=")[2]] * ("=" in word)
            elif argument is not None or name in command.inverse_flags:
                waiting = "value" if argument is not None and argument.takes_value and "=" not in word else ""
                kept.append(word)
            elif waiting == "value":
                kept, waiting = [*kept, word], ""
            elif word == command.name and not kept:
                kept.append(word)
            elif places and not word.startswith("-") and not (moved and moved[-1].startswith("-")):
                kept, places = [*kept, word], places - 1
            else:
                moved.append(word)
        return f"fab {shlex.join(kept)} -- {shlex.join([*moved, *self.after])}"

    def _check_after(self) -> None:
        named = [word for word in self.words if word in self.commands]
        takers = [name for name in named if name in AFTER_DASHES]
        if self.after and not takers:
            *several, last = (f"`fab {name}`" for name in AFTER_DASHES)
            only = f"{', '.join(several)} and {last}"
            raise RequestError(f"-- {shlex.join(self.after)}: only {only} take words after --")
        if self.after and (trainer := next((name for name in takers if name in (*TRAINERS, "serve")), None)):
            command = self.commands[trainer]
            theirs = {option for options in self._jobs(command).values() for option in options}
            for word in self.after:
                name = word.partition("=")[0]
                if name in command.flags and name.startswith("--") and name not in theirs:
                    whose = "job" if trainer in TRAINERS else "server"
                    raise RequestError(
                        f"{name} is an option of `fab {trainer}`, not of the {whose}: write it before --"
                    )


def unknown_command(word: str, commands: Iterable[str]) -> RequestError:
    if near := suggestion(word, commands):
        return RequestError(f'"{word}" is not a command; did you mean `fab {near}`?')
    return RequestError(f'"{word}" is not a command; `fab --list` lists them')


def usage(command: ParserContext) -> str:
    """Return how a command is typed: "fab recover RUN [--options]"."""
    places = [str(argument.name).upper() for argument in command.positional_args]
    places += ["[RUN]"] * (command.name in WITH_A_RUN)
    after = AFTER_DASHES.get(str(command.name))
    if command.name in INPUTS:
        return " ".join(["fab", str(command.name), *places, after or "[WORDS]", "[--options]"])
    dashes = [] if after is None else ([f"-- {after}"] if command.name == "run" else [f"[-- {after}]"])
    return " ".join(["fab", str(command.name), *places, "[--options]", *dashes])
