"""Slips on a command line. Invoke's parser reads it, and where that stops, `Line` says what was meant.

Invoke's own answers are "No idea what 'trian' is!" and the like, and it takes an option that it does not know for the
value of an argument (`fab recover --help`).
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from invoke.exceptions import ParseError
from invoke.parser import Parser
from invoke.parser.context import ParserContext

from contracts.errors import RequestError
from contracts.suggestions import copied_character, suggestion
from fabfile.command import Command

HELP = ("-h", "--help")
OPTION = re.compile(r"-[^\d]")
"""What an option begins with; -5 is a number, and - an argument."""

Commands = Mapping[str, Command]
OptionsOf = Callable[[str], Mapping[str, Collection[str]]]
"""Gives the options of every "job", or those of the "server", as they are typed: {"flax_mlm": ["--steps", …]}."""


def unknown_command(word: str, commands: Commands) -> RequestError:
    if near := suggestion(word, commands):
        return RequestError(f'"{word}" is not a command; did you mean `fab {near}`?')
    return RequestError(f'"{word}" is not a command; `fab --list` lists them')


class Line:
    """A command line, out of which words are taken until Invoke's parser takes the others.

    tokens: from the first command on. after: what commands are given besides, inputs and what follows `--`. calls: the
    commands as they are parsed. help_command: the command whose help is asked for. strays: words that
    `command` does not take; is_lost: the first of them is no option, and nobody knows what those behind it are.
    """

    def __init__(
        self, tokens: Sequence[str], after: Sequence[str], commands: Commands, options_by_owner: OptionsOf
    ) -> None:
        self.tokens, self.after, self.help_command = [*tokens], [*after], ""
        self.calls: list[ParserContext] = []
        self.strays: list[str] = []
        self.is_lost = False
        self._commands, self._options_by_owner, self._behind_dashes = commands, options_by_owner, after
        self._inputs: list[str] = []
        self._mistakes: list[str] = []

    def check(self) -> None:
        """Parse the line.

        Raises:
            RequestError: with every word that is unknown, missing or out of place; the message says what was meant.
        """
        if not self.tokens:
            return
        input_place = next(
            (place for place, word in enumerate(self.tokens) if self._takes_inputs(word)), None
        )
        until = None if input_place is None else input_place + 1
        named = [name for name in self._commands if name in self.tokens[:until]]
        self._contexts = [self._commands[name].parser_context for name in named]
        if copied := next(filter(None, map(copied_character, self.tokens[:until])), None):
            raise RequestError(copied)
        self.command = self._first(self.tokens[0])
        while self._step():
            pass
        self.after = [*self._inputs, *self._behind_dashes]
        if self.help_command:
            return
        strays = [self._lost_word()] if self.is_lost else self._stray_options()
        mistakes = [*strays, *self._mistakes, *self._lacking(), *self._after_dashes()]
        if mistakes:
            raise RequestError("\n".join(mistakes))

    def _takes_inputs(self, name: str | None) -> bool:
        positionals = self._commands[name].positionals if name and name in self._commands else None
        return positionals is not None and positionals.needs is not None

    def _first(self, word: str) -> Command:
        if word in self._commands:
            return self._commands[word]
        if not word.startswith("-"):
            raise unknown_command(word, self._commands)
        named = next((name for name in self.tokens if name in self._commands), None)
        if named and word.partition("=")[0] in self._commands[named].parser_context.flags:
            raise RequestError(f"{word}: the command comes first, its options after it: fab {named} {word} …")
        raise RequestError(f"`fab` has no option {word}; `fab help` lists those it has")

    # --- what Invoke's parser does not take ---------------------------------------------------------------------------

    def _step(self) -> bool:
        """Parse the line, and take out of it the first word that is in the way; return whether there was one."""
        for place, word in enumerate(self.tokens):  # -job, which would be -j with the value "ob"
            if re.match(r"-[^\d-].", word) and f"-{word.partition('=')[0]}" in self._options:
                self._take_stray(place)
                return True
        try:
            parsed = Parser(contexts=self._contexts, ignore_unknown=True).parse_argv([*self.tokens])
        except ParseError as error:
            if error.context and (at := self._option_as_argument(error.context)) is not None:
                return self._take(error.context, at)
            self._mistakes.append(self._without_value(error))
            return False
        self.calls = [*parsed]
        for call in parsed:
            if (at := self._option_as_argument(call)) is not None:
                return self._take(call, at)
        if not parsed.unparsed:
            return False
        # The last words are as they were typed; the first may be a part of one, as 200 is of --steps=200.
        pairs = zip(reversed(self.tokens), reversed(parsed.unparsed), strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        place = len(self.tokens) - same - (same < len(parsed.unparsed))
        return self._take(parsed[-1], place)

    def _option_as_argument(self, call: ParserContext) -> int | None:
        """Return the place of an option that Invoke's parser took for an argument of the command."""
        values = [str(argument.value) for argument in call.positional_args]
        option = next(filter(OPTION.match, values), None)
        return next(
            (place for place, word in enumerate(self.tokens) if option and word.startswith(option)), None
        )

    def _take(self, call: ParserContext, place: int) -> bool:
        """Take out the word at a place, or move it to where it belongs; return whether to parse again."""
        word, command = self.tokens[place], self._commands[str(call.name)]
        name, equals, _ = word.partition("=")
        option = name if equals else self.tokens[place - 1]
        argument = command.optional_argument
        if word in HELP:
            self.help_command = str(call.name)
            return False
        if OPTION.match(word) and name not in call.flags:
            self.command = command
            self._take_stray(place)
        elif option in call.flags and call.flags[option].takes_value:
            self._mistakes.append(f"{option}: is given twice; leave one out")
            del self.tokens[place if equals else place - 1 : place + 1]
        elif OPTION.match(word):
            self._mistakes.append(f"{word}: {name} has no value; leave it out")
            del self.tokens[place]
        elif self._takes_inputs(call.name) or self._is_script(command, word):
            self._inputs.append(self.tokens.pop(place))
        elif argument and not call.args[argument].got_value:
            self.tokens.insert(place, f"--{argument}")
        elif self.strays:
            self.strays.append(self.tokens.pop(place))
        elif (args := self._value("args")).startswith("-") and " " not in args:
            self.strays = [args, self.tokens.pop(place)]
        else:
            self.command, self.strays, self.is_lost = command, self.tokens[place:], True
            del self.tokens[place:]
        return True

    def _is_script(self, command: Command, word: str) -> bool:
        """Whether a word is a script to train with, whose folder or job nobody names."""
        trains = command.positionals is not None and command.positionals.owner == "job"
        names = {token.partition("=")[0] for token in self.tokens}
        return (
            trains
            and word.endswith(".py")
            and not self._inputs
            and not names & {"--workdir", "--job", "--resume"}
        )

    def _take_stray(self, place: int) -> None:
        """Take out an option that the command does not have, and the next word if that may be its value."""
        word, flags = self.tokens.pop(place), self.command.parser_context.flags
        self.strays.append(word)
        flag = flags.get(suggestion(word, flags) or "")
        has_value = "=" not in word and (flag is None or flag.takes_value)
        if has_value and place < len(self.tokens) and not OPTION.match(self.tokens[place]):
            self.strays.append(self.tokens.pop(place))

    def _without_value(self, error: ParseError) -> str:
        """Return what is missing where Invoke's parser gave up: an argument, or the value of an option."""
        call = error.context or ParserContext()
        name = str(call.name)
        if missing := call.missing_positional_args:
            needs = " and ".join(f"{str(argument.name).upper()} ({argument.help})" for argument in missing)
            return f"`fab {name}` needs {needs}: {self._commands[name].usage}"
        for word, following in itertools.pairwise([*self.tokens, "--help"]):
            option = word if word.startswith("--") else f"-{word[-1:]}"
            waits = OPTION.match(word) and option in call.flags and call.flags[option].takes_value
            if waits and (following in call.flags or following in HELP):
                return f"{word} needs a value: {call.flags[option].help}"
        return str(error)

    # --- what was meant ---------------------------------------------------------------------------------------------

    def _value(self, name: str) -> str:
        """Return the value of an option of the command, "" if it has none."""
        call = next((call for call in self.calls if call.name == self.command.name), None)
        return str(call.args[name].value or "") if call and name in call.args else ""

    @property
    def _trains(self) -> bool:
        return self.command.positionals is not None and self.command.positionals.owner == "job"

    @property
    def _owners(self) -> Mapping[str, Collection[str]]:
        """The options that come after `--`, by whose they are: the job that is named, or all jobs; the server."""
        positionals = self.command.positionals
        if positionals is None or not positionals.owner or self._value("workdir") or self._inputs:
            return {}
        owners, job = self._options_by_owner(positionals.owner), self._value("job")
        is_server = positionals.owner == "server"
        own = {*self.command.parser_context.flags, "--job", "--export"} if is_server else set()
        return {
            name: {*options} - own
            for name, options in owners.items()
            if job in (name, "") or job not in owners
        }

    @property
    def _options(self) -> set[str]:
        """The long options that a word may have meant."""
        own = {flag for flag in self.command.parser_context.flags if flag.startswith("--")}
        return {"--help", *own, *(option for options in self._owners.values() for option in options)}

    def _moved(self, strays: Sequence[str], more: Sequence[str] = ()) -> str:
        """Return the command line with the strays behind `--`."""
        name, *tokens = self.tokens
        return f"fab {shlex.join([name, *tokens, *more])} -- {shlex.join([*strays, *self._behind_dashes])}"

    def _stray_options(self) -> Iterator[str]:
        flags = self.command.parser_context.flags
        if self.strays[:1] == [self._value("args")]:
            names = [word.partition("=")[0] for word in self.tokens]
            place = names.index("--args" if "--args" in names else "-a")
            del self.tokens[place : place + (1 if "=" in self.tokens[place] else 2)]
            yield (
                "--args takes the job's options as one word, in quotes; without quotes they come after --:\n  "
                + self._moved(self.strays)
            )
            return
        moved: list[str] = []
        corrected: list[str] = []
        group, theirs, job = moved, "", ""
        for word in self.strays:
            name = word.partition("=")[0]
            if not OPTION.match(word):
                group.append(word)
                continue
            # A run is no folder of runs.
            near = suggestion(name, self._options - ({"--runs"} if name == "--run" else set()))
            owners = [owner for owner, options in self._owners.items() if near in options]
            is_theirs = bool(owners) and near not in flags
            group = corrected if near and not is_theirs else moved
            group.append(f"{near or name}{word[len(name) :]}")
            no_option = f"`fab {self.command.name}` has no option {name}"
            if " " in name:
                yield f"{name}: is one word; write it without the quotes"
            elif is_theirs:
                theirs = theirs or f"{no_option}; {near} is an option of {' and '.join(owners)}"
                job = owners[0] if len(owners) == 1 else "JOB"
            elif near:
                yield f"{no_option}; did you mean {near}?"
            elif self._trains and self._inputs:
                yield f"{no_option}; the script's come after --:\n  {self._moved(self.strays, self._inputs)}"
                return
            else:
                yield f"{no_option}; `fab help {self.command.name}` lists those it has"
        if theirs:
            named = not self._trains or self._value("job") or self._value("resume")
            yield (
                f"{theirs}, and {'a job' if self._trains else 'the server'}'s options come after --:\n  "
                + self._moved(moved, [*corrected, *(() if named else ("--job", job))])
            )

    def _lost_word(self) -> str:
        word, name = self.strays[0], self.command.name
        message = f'"{word}" is not a command, nor an argument of `fab {name}`'
        options = {name.partition("=")[0] for name in [*self.tokens, *self.strays]}
        if "--job" in self.command.parser_context.flags and word in self._options_by_owner("job"):
            return f"{message}; did you mean --job {word}?"
        if "--resume" in self.command.parser_context.flags and word.partition(":")[0] == "latest":
            return f"{message}; did you mean --resume {word}?"
        if name == "run" or (self._trains and not {"--job", "--resume"} & options):
            owner = "of your own" if self._trains else "for the hosts"
            folder = ("--workdir", ".") if self._trains and "--workdir" not in options else ()
            return f"{message}; a command {owner} comes after --:\n  {self._moved(self.strays, folder)}"
        if self.command.optional_argument:
            return f"{word}: `fab {name}` takes one RUN, and another one is named: {self.command.usage}"
        if near := suggestion(word, self._commands):
            return f"{message}; did you mean `{near}`?"
        return f"{message}; `fab help {name}` shows what it takes"

    def _lacking(self) -> Iterator[str]:
        for call in self.calls:
            positionals = self._commands[str(call.name)].positionals
            is_replaced = positionals and positionals.unless and call.args[positionals.unless].got_value
            if positionals and positionals.needs and not self.after and not is_replaced:
                yield f"`fab {call.name}` needs {positionals.needs}: {self._commands[str(call.name)].usage}"

    def _after_dashes(self) -> Iterator[str]:
        """Return what is wrong with the words after `--`."""
        after = self._behind_dashes
        if after and not any(self._commands[str(call.name)].positionals for call in self.calls):
            *earlier, last = (
                f"`fab {name}`" for name, command in self._commands.items() if command.positionals
            )
            yield f"-- {shlex.join(after)}: only {', '.join(earlier)} and {last} take words after --"
        elif after and after[0].startswith("-") and self._owners:
            theirs = {option for options in self._owners.values() for option in options}
            names = {word.partition("=")[0] for word in after if word.startswith("--")}
            for name in sorted((names & {*self.command.parser_context.flags}) - theirs):
                owner = "job" if self._trains else "server"
                yield f"{name} is an option of `fab {self.command.name}`, not of the {owner}: write it before --"
