"""The options of a command: what each value may be, and what is read of a command line."""

import dataclasses
from typing import Any

import pytest

from contracts.errors import RequestError
from fabfile.command import Command
from fabfile.command_options import (
    argument,
    declared,
    flag,
    group,
    option,
    options,
    port,
    positionals,
    read,
    repeatable,
    usd,
    whole_number,
)
from fabfile.commands import COMMANDS
from fabfile.selector import Selector


@pytest.mark.parametrize("text", ["-1", "2", "two", "3.5", "³", " 3", "3_0", "9" * 5000])
def test_a_whole_number_of_at_least_the_least_is_read_and_nothing_else(text: str) -> None:
    assert whole_number(3)("--lines", "3") == 3
    with pytest.raises(RequestError, match=f"--lines {text}: must be a whole number of at least 3"):
        whole_number(3)("--lines", text)


def test_a_priority_may_be_negative() -> None:
    assert whole_number()("--priority", "-3") == -3
    with pytest.raises(RequestError, match="--priority low: must be a whole number$"):
        whole_number()("--priority", "low")


@pytest.mark.parametrize("text", ["0", "-1", "1e3", "five", "1,50", "nan", "0.0", "9" * 12])
def test_an_amount_that_is_none_is_refused(text: str) -> None:
    assert usd("--max-usd", "2.50") == 2.5
    with pytest.raises(RequestError, match="must be an amount of USD above 0"):
        usd("--max-usd", text)


@pytest.mark.parametrize("text", ["-1", "65536", "http", "8e3"])
def test_a_port_that_is_none_is_refused(text: str) -> None:
    assert port("--port", "0") == 0
    with pytest.raises(RequestError, match=f"--port {text}: must be a whole number from 0 to 65535"):
        port("--port", text)


@options
class Limits:
    max_usd: float | None = option("dollars", usd)
    lines: int = option("lines", whole_number(0), default=40)


@options
class Sample:
    run: str = argument("a run")
    all: bool = flag("all of them")
    send: tuple[str, ...] = repeatable("files")
    limits: Limits = group(Limits)
    selector: Selector = group(Selector, "stack", "runs", runs="a folder")
    positionals: tuple[str, ...] = positionals("[-- WORDS]")


@Command
def sample(args: Sample) -> int:
    return 0


def typed(*argv: str) -> dict[str, Any]:
    from invoke.parser import Parser

    (call,) = Parser(contexts=[sample.parser_context]).parse_argv(["sample", *argv])
    return dict(call.as_kwargs)


def test_a_class_has_its_groups_options_and_what_was_typed_becomes_its_value() -> None:
    assert {name: one.help for name, one in declared(Sample)}.items() >= {
        "runs": "a folder",
        "lines": "lines",
    }.items()
    assert "slice" not in dict(declared(Sample))
    given = typed("x", "--lines", "0", "--send", "a", "--send=b", "-t", "dev", "--all")
    assert read(Sample, given, ["w"]) == Sample(
        run="x",
        all=True,
        send=("a", "b"),
        limits=Limits(lines=0),
        selector=Selector(stack="dev"),
        positionals=("w",),
    )
    assert read(Sample, typed("x")) == Sample(run="x"), "what is not typed is its default, of its own type"


def test_all_values_that_are_wrong_are_named_at_once() -> None:
    with pytest.raises(RequestError) as refused:
        read(Sample, typed("x", "--lines", "-2", "--max-usd", "five"))
    assert [line.partition(":")[0] for line in str(refused.value).splitlines()] == [
        "--max-usd five",
        "--lines -2",
    ]


def test_every_command_reads_frozen_options_each_with_its_help() -> None:
    for name, command in COMMANDS.items():
        assert command.options.__dataclass_params__.frozen, name  # type: ignore[attr-defined]
        assert all(one.help for _, one in declared(command.options)), name
        assert command.parser_context.name == name == command.name


def test_where_is_what_the_backends_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_STACK", "dev")
    wanted = Selector(slice="", hosts="0-3").request()
    assert (wanted.stack, wanted.slice, wanted.hosts) == ("dev", None, "0-3")
    assert dataclasses.replace(Selector(), stack="local").request().stack == "local"
