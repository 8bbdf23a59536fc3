"""What a command can be given: a frozen dataclass whose fields say how each option is typed, described and read.

    @options
    class Logs:
        run: str = argument(RUN, default="latest")
        lines: int = option("how many of the last lines to print first", whole_number(0), default=40)
        selector: Selector = group(Selector, "stack", "slice", "runs")

`fabfile.command` makes Invoke's arguments of the fields, and `read` makes the value of what was typed. An option whose
value is empty counts as not given.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, dataclass_transform

from contracts.errors import RequestError

Reader = Callable[[str, str], Any]
"""Gives the value of an option, such as --lines, and a text. Raises RequestError: the text has none."""

USD = re.compile(r"\d{1,9}(\.\d{1,6})?")
WHOLE_NUMBER = re.compile(r"-?\d{1,9}", re.ASCII)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options[T](cls: type[T]) -> type[T]:
    """Make a class the options of a command, or a group of options that several commands share."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """kind: as Invoke's Argument has it. place: whether it may be typed without its name."""

    help: str
    read: Reader
    kind: type = str
    place: Literal["", "optional", "required"] = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Positionals:
    """What a command takes without options: the words after `--`.

    usage: how they are typed. owner: whose options they are, if they are options. needs: of words that may stand before
    `--` as well, what at least one has to be; "": none has to be there. unless: the option that replaces them.
    """

    usage: str
    owner: Literal["", "job", "server"] = ""
    needs: str | None = None
    unless: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Options of another class. names: those that the command has; empty: all. help: where it differs, by name."""

    cls: type
    names: Collection[str]
    help: Mapping[str, str]


def _as_typed(_option: str, typed: Any) -> Any:
    return typed


def option(help: str, read: Reader = _as_typed, *, default: Any = None) -> Any:
    """Declare an option that has a value."""
    return dataclasses.field(default=default, metadata={"option": Option(help=help, read=read)})


def flag(help: str) -> Any:
    """Declare an option that is on or off."""
    return dataclasses.field(default=False, metadata={"option": Option(help=help, read=_as_typed, kind=bool)})


def repeatable(help: str) -> Any:
    """Declare an option that may be given several times; its value is a tuple."""
    list_option = Option(help=help, read=lambda _option, values: tuple(values), kind=list)
    return dataclasses.field(default=(), metadata={"option": list_option})


def argument(help: str, **default: Any) -> Any:
    """Declare an option that may be typed without its name; without a default it has to be given."""
    place: Literal["optional", "required"] = "optional" if default else "required"
    return dataclasses.field(**default, metadata={"option": Option(help=help, read=_as_typed, place=place)})


def group(cls: type, *names: str, **help: str) -> Any:
    """Declare the options of another class, or those of them that are named, as options of this one."""
    return dataclasses.field(default_factory=cls, metadata={"group": Group(cls=cls, names=names, help=help)})


def positionals(usage: str, **more: Any) -> Any:
    """Declare that a command takes words after `--`; `more` as `Positionals` has it."""
    return dataclasses.field(default=(), metadata={"positionals": Positionals(usage=usage, **more)})


def declared(
    cls: type, names: Collection[str] = (), help: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Option]]:
    """Return the options of a class by the names of their fields, those of its groups included."""
    for field in dataclasses.fields(cls):
        if inner := field.metadata.get("group"):
            yield from declared(inner.cls, inner.names, {**inner.help, **(help or {})})
        elif (own_option := field.metadata.get("option")) and (not names or field.name in names):
            yield (
                field.name,
                dataclasses.replace(own_option, help=(help or {}).get(field.name, own_option.help)),
            )


def declared_positionals(cls: type) -> Positionals | None:
    """Return what a class says of the words after `--`; None: there are to be none."""
    inner = (field.metadata["group"].cls for field in dataclasses.fields(cls) if "group" in field.metadata)
    own = (
        field.metadata["positionals"] for field in dataclasses.fields(cls) if "positionals" in field.metadata
    )
    return next(own, None) or next(filter(None, map(declared_positionals, inner)), None)


def read[T](cls: type[T], typed: Mapping[str, Any], after: Sequence[str] = ()) -> T:
    """Return the options that were typed. after: the words that belong to none.

    Raises:
        RequestError: with every value that is wrong.
    """
    # Such as of a shell's variable that is not set: what is done without the option is not what was asked for.
    empty = [long(name) for name, _ in declared(cls) if typed.get(name) == "" and name != "args"]
    if empty:
        raise RequestError(
            "\n".join(f"{name}: its value is empty; give one, or leave it out" for name in empty)
        )
    mistakes: list[str] = []
    values = _read(cls, typed, after, (), mistakes)
    if mistakes:
        raise RequestError("\n".join(mistakes))
    return values


def _read[T](
    cls: type[T], typed: Mapping[str, Any], after: Sequence[str], names: Collection[str], mistakes: list[str]
) -> T:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # a class of `options`
        if inner := field.metadata.get("group"):
            values[field.name] = _read(inner.cls, typed, after, inner.names, mistakes)
        elif "positionals" in field.metadata:
            values[field.name] = tuple(after)
        elif typed.get(field.name) and (not names or field.name in names):
            try:
                values[field.name] = field.metadata["option"].read(long(field.name), typed[field.name])
            except RequestError as error:
                mistakes.append(str(error))
    return cls(**values)


def long(name: str) -> str:
    """Return how an option is typed: "--dry-run" of dry_run."""
    return f"--{name.replace('_', '-')}"


# --- what a value may be -------------------------------------------------------------------------------------------


def whole_number(minimum: int | None = None) -> Reader:
    """Read whole numbers, from `minimum` on.

    Invoke would read numbers itself, but answers what is none with a traceback.
    """

    def read(option: str, text: str) -> int:
        is_whole = WHOLE_NUMBER.fullmatch(text)
        if minimum is not None and not (is_whole and int(text) >= minimum):
            raise RequestError(f"{option} {text}: must be a whole number of at least {minimum}")
        if not is_whole:
            raise RequestError(f"{option} {text}: must be a whole number")
        return int(text)

    return read


def seconds(minimum: int) -> Reader:
    """Read whole seconds, as a float."""
    return lambda option, text: float(whole_number(minimum)(option, text))


def usd(option: str, text: str) -> float:
    """Read an amount of USD above 0."""
    if not USD.fullmatch(text) or float(text) == 0:
        raise RequestError(f"{option} {text}: must be an amount of USD above 0, such as 25 or 2.50")
    return float(text)


def number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RequestError(f'{option}: "{text}" is not a number') from None


def port(option: str, text: str) -> int:
    """Read a port, 0 for any that is free."""
    if not WHOLE_NUMBER.fullmatch(text) or not 0 <= int(text) < 2**16:
        raise RequestError(f"{option} {text}: must be a whole number from 0 to {2**16 - 1}")
    return int(text)


def trackers(option: str, text: str) -> tuple[str, ...]:
    """Read a list of trackers; empty where there is to be none."""
    from console import track

    return track.parse(option, text)
