"""Training to a target: the plan of the steps, the curves, and what they say."""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import mlm_target
from bench.curve_image import image
from bench.mlm_target import Point, first_to, next_turn, planned_steps


class Played:
    """A program with its own speed; it learns 1 nat in 10 steps."""

    def __init__(self, name: str, step_s: float, begins_at: float = 9.0) -> None:
        self.name, self.step_s, self.begins_at = name, step_s, begins_at
        self.wall_s: list[float] = []
        self.steps = 0

    def compile(self) -> None:
        self.steps = 1

    def turn(self, steps: int) -> None:
        self.steps += steps
        self.wall_s.append(self.step_s)

    def evaluate(self) -> float:
        return self.begins_at - self.steps / 10


ASKED = argparse.Namespace(minutes=1.0, turn_s=5.0, evaluate_every_s=20.0)


def curves(*programs: Played, **planned: int) -> dict[str, list[Point]]:
    return mlm_target.train(programs, planned, ASKED)  # type: ignore[arg-type]


def test_both_use_up_the_same_time_though_one_is_faster() -> None:
    found = curves(Played("ours", 0.5), Played("peer", 1.5), ours=121, peer=41)
    ours, peer = found["ours"][-1], found["peer"][-1]
    assert (ours.stepping_s, ours.steps, peer.stepping_s, peer.steps) == (60.0, 121, 60.0, 41)
    assert [ours.eval_loss, peer.eval_loss] == pytest.approx([-3.1, 4.9])


def test_an_evaluation_comes_when_it_is_due_and_after_the_last_step() -> None:
    found = curves(Played("ours", 0.5), Played("peer", 1.5), ours=120, peer=40)
    assert [point.stepping_s for point in found["ours"]] == [0.0, 20.0, 40.0, 59.5]


def test_programs_that_do_not_begin_with_the_same_evaluation_are_not_compared() -> None:
    with pytest.raises(SystemExit, match="do not hide the same tokens"):
        curves(Played("ours", 0.5), Played("peer", 1.5, begins_at=9.01), ours=9, peer=9)


@given(
    planned=st.integers(2, 500), turn_s=st.floats(0.1, 30), step_s=st.lists(st.floats(0.001, 60), min_size=1)
)
def test_turns_come_to_exactly_the_planned_steps(planned: int, turn_s: float, step_s: list[float]) -> None:
    def all_turns() -> Iterator[int]:
        taken = 1
        while steps := next_turn(taken, planned, turn_s, step_s[taken % len(step_s)]):
            taken += steps
            yield steps

    assert sum(all_turns()) == planned - 1


def test_one_slow_turn_does_not_shorten_the_plan() -> None:
    assert planned_steps(60.0, [0.5, 9.0, 0.5]) == 120


def test_the_time_to_a_loss_lies_on_the_line_between_two_evaluations() -> None:
    curve = [
        Point(stepping_s=at, steps=0, eval_loss=loss) for at, loss in ((0.0, 9.0), (10.0, 7.0), (30.0, 6.0))
    ]
    assert first_to(curve, 6.5) == pytest.approx(20.0)
    assert first_to(curve, 7.0) == pytest.approx(10.0)
    assert first_to(curve, 5.9) is None


def test_the_table_shows_the_longer_curve_whole_and_says_when_ours_is_level() -> None:
    found = curves(Played("ours", 0.5), Played("peer", 1.5), ours=101, peer=41)
    lines = mlm_target.table(found).splitlines()
    body = [line for line in lines if line.startswith("|")]
    assert len(body) == 2 + max(map(len, found.values()))
    assert len({line.count("|") for line in body}) == 1
    assert "ours is at peer's last loss after 20 s" in lines[-1]


def test_both_configurations_are_of_one_model_and_one_corpus() -> None:
    asked = argparse.Namespace(
        data="texts", model="small", length=128, peer_batch_size=None, peer_learning_rate=None
    )
    ours, peer = mlm_target.configurations(asked).values()
    for same in ("data", "model", "sequence_length", "batch_size", "weight_decay", "warmup_share", "seed"):
        assert getattr(ours, same) == getattr(peer, same), same
    assert ours.peak_learning_rate == peer.peak_learning_rate
    assert (peer.mask_share, peer.dropout, peer.dtype) == (0.15, 0.1, "float32")


def test_the_image_of_the_curves_is_xml_with_every_curve_and_its_name() -> None:
    drawn = ET.fromstring(
        image("a < b & c", "s", {"x & y": [(0, 5.0), (60, 2.0)], "z": [(0, 6.0), (60, 3.0)]})
    )
    space = "{http://www.w3.org/2000/svg}"
    assert len(drawn.findall(f"{space}path")) == 2
    words = [element.text for element in drawn.findall(f"{space}text")]
    assert {"a < b & c", "s", "x & y", "z"} <= set(words)


def test_a_lower_loss_is_drawn_lower_and_a_later_one_further_right() -> None:
    drawn = ET.fromstring(image("t", "s", {"x": [(0, 5.0), (60, 2.0)]}))
    [path] = drawn.findall("{http://www.w3.org/2000/svg}path")
    first, last = (tuple(map(float, point.split(","))) for point in path.attrib["d"][1:].split("L"))
    assert last[0] > first[0] and last[1] > first[1]
