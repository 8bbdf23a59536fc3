"""Programs that run by turns: the table of their medians, and what is said of one that fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench import rounds


def test_the_medians_of_rounds_are_compared_with_the_best_of_ours_and_turns_alternate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    order: list[str] = []

    def program(name: str, rates: list[float]) -> rounds.Turn:
        left: Iterator[float] = iter(rates)

        def turn() -> rounds.Measured:
            order.append(name)
            return {"rate": next(left), **({"wait": 0.125} if name == "ours" else {})}

        return turn

    rounds.compare(
        {"ours": program("ours", [9.0, 30.0, 33.0]), "ours, slow": program("slow", [1.0, 2.0, 3.0])},
        {"theirs": program("theirs", [20.0, 20.0, 1.0])},
        rounds=3,
        columns={"rate": ("rows/s", ".1f"), "wait": ("waiting", ".1%")},
    )
    assert order == ["ours", "slow", "theirs"] * 3
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| ours | 30.0 | 12.5% |  |",
        "| ours, slow | 2.0 |  |  |",
        "| theirs | 20.0 |  | 1.50 times that |",
    ]


def test_a_program_that_fails_ends_the_comparison_and_is_named() -> None:
    with pytest.raises(SystemExit, match="bench.no_such_program 3: ended with 1"):
        rounds.ask("bench.no_such_program", "jax", [3])
