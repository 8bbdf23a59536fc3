"""The report of a damaged run: files of the right shape with anything at all in their fields."""

import re
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.flax_mlm import METRICS
from jobs.runtime.metric_definitions import as_json
from jobs.runtime.report.chart import GRID_HEIGHT, GRID_WIDTH
from jobs.runtime.report.render import render

RUN_KEYS = [
    "run_id",
    "name",
    "job",
    "platform",
    "args",
    "config",
    "code",
    "slice",
    "hosts",
    "created",
    "versions",
    "attempts",
    "image",
    "cwd",
    "metric_definitions",
    "settings",
]
RESULT_KEYS = [
    "outcome",
    "steps",
    "wall_s",
    "tokens_per_s",
    "eval_loss",
    "eval_accuracy",
    "unigram_entropy",
    "error",
    "failed_host",
    "attempt",
    "time_s",
    "warnings",
    "outliers",
]

loose = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["0", 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def objects(*keys: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={**dict.fromkeys(keys, loose), "extra": loose})


run_objects = objects(*RUN_KEYS).flatmap(
    lambda run: st.fixed_dictionaries(
        {},
        optional={
            "hosts": st.lists(objects("index", "name", "address"), max_size=3),
            "attempts": st.lists(objects("attempt", "started", "processes", "outcome"), max_size=3),
            "config": objects("steps"),
            "metric_definitions": st.fixed_dictionaries(
                {"headline": st.sampled_from(["loss", "eval_loss", "x"]) | loose},
                optional={
                    "progress": st.lists(st.sampled_from(["loss", "mfu"]) | loose, max_size=3) | loose,
                    "metrics": st.lists(
                        objects("name", "title", "unit", "better", "baseline", "is_evaluation", "chart"),
                        max_size=3,
                    ),
                },
            )
            | st.just(as_json(METRICS)),
        },
    ).map(lambda more: {**run, **more})
)
steps = st.integers(-5, 10**6) | loose
values = st.floats() | loose
lines = st.fixed_dictionaries(
    {"step": steps, "loss": values},
    optional=dict.fromkeys(
        ("eval_loss", "tokens_per_s", "step_s", "input_wait_s", "grad_norm", "time", "mfu"), values
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    run=run_objects,
    metrics=st.lists(lines, max_size=25),
    result=st.none() | objects(*RESULT_KEYS),
    beats=st.lists(objects("rank", "state", "step", "time", "message", "warnings"), max_size=3),
)
def test_no_input_stops_the_page_or_draws_outside_the_plot(
    run: dict[str, Any],
    metrics: list[dict[str, Any]],
    result: dict[str, Any] | None,
    beats: list[dict[str, Any]],
) -> None:
    page = render(run, metrics, result, beats)
    assert "nan" not in "".join(re.findall(r'(?: d|cx|cy|data-x|data-y|x1|y1)="([^"]*)"', page)).lower()
    for path in re.findall(r' d="([^"]*)"', page):
        for x, y in re.findall(r"(-?\d+),(-?\d+)", path):
            assert 0 <= int(x) <= GRID_WIDTH and 0 <= int(y) <= GRID_HEIGHT
    for share in re.findall(r'"(-?[\d.]+)%"', page):
        assert 0.0 <= float(share) <= 100.0
