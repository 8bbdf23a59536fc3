"""metrics.jsonl read on while it grows, and thinned to what a chart can show."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.files import DiskFiles, Piece
from jobs.flax_mlm import METRICS
from jobs.runtime.report import curves
from jobs.runtime.report.curves import History, thin
from jobs.runtime.report.render import render

VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=400)


def history(path: Path, limit: int | None = None) -> History:
    def read(offset: int, limit_bytes: int) -> Piece | None:
        places = [(str(path.parent), path.name)]
        return DiskFiles().read_inside(places, [offset], limit or limit_bytes)[0]

    return History(read)


def points(read: History, name: str, axis: str = "step") -> list[tuple[float, float | None]]:
    read.read_on(9.0)
    series = {each["name"]: each for each in read.curves(METRICS, axis, 1000)["series"]}
    return list(zip(series[name]["x"], series[name]["y"], strict=True)) if name in series else []


@given(VALUES, st.integers(4, 60))
def test_a_thinned_curve_has_the_ends_the_extremes_and_every_gap_of_the_whole(
    values: list[float], wanted: int
) -> None:
    y = np.array(values)
    kept = thin(y, wanted)
    assert len(kept) <= max(wanted, 3 * math.ceil(wanted / 2) + 2)
    assert list(kept) == sorted({*kept}) and {0, len(y) - 1} <= {*kept}
    if not np.isnan(y).all():
        assert (np.nanmin(y[kept]), np.nanmax(y[kept])) == (np.nanmin(y), np.nanmax(y))
    assert bool(np.isnan(y).any()) == bool(np.isnan(y[kept]).any())


def test_a_file_that_grows_in_pieces_is_read_once_and_a_torn_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = "".join(f'{{"step": {step}, "loss": {step / 2}, "time": {1.8e9 + step}}}\n' for step in range(40))
    read = history(path, limit=177)
    assert points(read, "loss") == []
    for end in (7, 500, 501, 1111, len(whole)):
        path.write_text(whole[:end])
        expected = [(step, step / 2) for step in range(whole[:end].count("\n"))]
        assert points(read, "loss") == expected
    assert points(read, "loss", "time") == [(step, step / 2) for step in range(40)]
    assert read.is_complete and read.problems == []


@pytest.mark.parametrize("after", [1, 30, 90], ids=["shorter", "as long", "longer"])
def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path, after: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 1.5}}\n' for step in range(30)))
    read = history(path)
    assert len(points(read, "loss")) == 30
    path.write_text("".join(f'{{"step": {step}, "loss": 2.5}}\n' for step in range(after)))
    assert points(read, "loss") == [(step, 2.5) for step in range(after)]
    path.unlink()
    assert points(read, "loss") == []


def test_what_is_no_line_of_metrics_is_counted_and_the_others_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "PIECE_BYTES", 1000)
    deep = '{"step": 1, "loss": ' + "[" * 700 + "]" * 700 + "}"
    bad = ["", "torn {", "[1, 2]", "7", "null", "\x00\x01", '{"loss": 3.0}', '{"step": "4", "loss": 3}', deep]
    odd = [
        '{"step": 10, "loss": NaN}',
        '{"step": 20, "loss": "3.0"}',
        '{"step": 30, "loss": {"a": []}}',
        '{"step": 40, "loss": 1e400}',
        f'{{"step": 50, "loss": {"9" * 400}}}',
        '{"step": 60, "loss": true, "time": "noon"}',
        '{"step": 70, "loss": null}',
    ]
    lines = ['{"step": 0, "loss": 1.0}', *bad, *odd, '{"step": 80, "loss": 2}']
    (tmp_path / "metrics.jsonl").write_bytes(
        "\n".join([*lines, "\udcff", '{"step": 90, "loss": 3}', ""]).encode("utf-8", "surrogateescape")
    )
    read = history(tmp_path / "metrics.jsonl")
    known = points(read, "loss")
    assert [point for point in known if point[1] is not None] == [(0, 1), (4, 3), (20, 3), (80, 2), (90, 3)]
    assert {step for step, value in known if value is None} == {10, 40, 50, 70}
    assert read.problems == [
        'metrics.jsonl: a line is torn, or no JSON object, and is left out: "torn {" (the first of 6)',
        f"metrics.jsonl: loss is {'[' * 59}…, which is no number and is left out (3 times)",
        'metrics.jsonl: time is "noon", which is no date (Unix seconds, or ISO 8601) and is left out',
        "metrics.jsonl: lines without a step, left out: 1",
    ]


def test_of_steps_that_a_resumed_script_takes_again_the_curves_and_the_report_show_the_later_attempt(
    tmp_path: Path,
) -> None:
    lines = [
        {"step": step, "loss": float(attempt), "tokens_per_s": 10.0, "step_s": 1.0}
        for attempt, steps in enumerate((range(1, 9), range(5, 9), range(7, 8)))
        for step in steps
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = history(tmp_path / "metrics.jsonl")
    read.read_on(9.0)
    expected = [(1, 0.0), (2, 0.0), (3, 0.0), (4, 0.0), (5, 1.0), (6, 1.0), (7, 2.0)]
    message = "metrics.jsonl: steps 5 to 8 were measured again, as after a resume; the later values count"
    for axis, unit in (("step", 1), ("units", 10)):
        drawn = read.curves(METRICS, axis, 1000, attempts=3)
        (loss,) = (each for each in drawn["series"] if each["name"] == "loss")
        assert [*zip(loss["x"], loss["y"], strict=True)] == [(unit * step, value) for step, value in expected]
        assert drawn["problems"] == [message]
    assert len(points(read, "loss")) == 8  # of one attempt, which may write steps in any order
    attempts = [{"attempt": number, "started": "2026-11-20T21:45:00Z"} for number in range(3)]
    run = {"run_id": "a", "job": "command", "attempts": attempts}
    page = render(run, lines, None, [])
    assert message in page


def test_a_million_names_of_metrics_do_not_become_a_million_charts(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, f"name {step}": 1.0}) for step in range(3000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    read = history(tmp_path / "metrics.jsonl")
    read.read_on(9.0)
    assert len(read.curves(METRICS, "step", 100)["series"]) == curves.MOST_METRICS
    assert read.problems == [f"metrics.jsonl: {curves.MOST_METRICS} metrics are shown"]
