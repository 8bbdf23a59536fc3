"""The report of a run: right for an ordinary run, whole for a damaged one, and safe to open in a browser."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.flax_mlm import METRICS
from jobs.runtime.host_samples import read
from jobs.runtime.metric_definitions import Metric, Metrics, as_json
from jobs.runtime.metrics import Part
from jobs.runtime.report.chart import (
    GRID_HEIGHT,
    GRID_WIDTH,
    charts,
    curve,
    input_wait,
    resumes,
    smooth,
    step_axis,
    thin,
    value_axis,
)
from jobs.runtime.report.page import escape, number
from jobs.runtime.report.render import MEANINGS, read_and_render, render, spent

RUN: dict[str, Any] = {
    "version": 1,
    "run_id": "flax_mlm-20261120-214500-abcd",
    "name": None,
    "job": "flax_mlm",
    "platform": "tpu",
    "args": ["--steps", "100", "--note", "two words"],
    "config": {"steps": 100, "model": "small", "learning_rate": None},
    "metric_definitions": as_json(METRICS),
    "code": {"bundle": "9f2c", "git_commit": "4be81c0", "git_dirty": True},
    "slice": {"name": "pod", "accelerator_type": "v5litepod-8"},
    "hosts": [
        {"index": 0, "name": "pod-w-0", "address": "10.0.0.2"},
        {"index": 1, "name": "pod-w-1", "address": "10.0.0.3"},
    ],
    "created": "2026-11-20T21:45:00Z",
    "versions": {"python": "3.12.8"},
    "attempts": [
        {"attempt": 0, "started": "2026-11-20T21:45:00Z", "processes": 2, "outcome": "preempted"},
        {"attempt": 1, "started": "2026-11-20T22:00:00Z", "processes": 2, "outcome": None},
    ],
}
RESULT: dict[str, Any] = {
    "outcome": "done",
    "steps": 100,
    "wall_s": 252.0,
    "tokens_per_s": 12345.6,
    "eval_loss": 4.93,
    "eval_accuracy": 0.231,
    "unigram_entropy": 6.35,
    "attempt": 1,
}
STARTED_S = 1795211100.0  # 2026-11-20T21:45:00Z


def training(steps: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "loss": 5 + 5 / step + 0.1 * math.sin(step * 1.7),
            "grad_norm": 1.0 + 0.3 * math.cos(step),
            "learning_rate": 1e-4 * step / steps,
            "tokens_per_s": 12000.0 + 500 * math.sin(step),
            "step_s": 0.2,
            "input_wait_s": 0.01 * (1 + math.sin(step)),
            "time": STARTED_S + 15 * step,
        }
        for step in range(1, steps + 1)
    ]


class Words(HTMLParser):
    """The page as a reader sees it, and the tags and attributes that a browser would act on."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend(attrs)

    def handle_data(self, data: str) -> None:
        if self.lasttag not in ("style", "script"):
            self.words.append(data)


EVALUATIONS = [{"step": step, "eval_loss": loss} for step, loss in ((10, 5.0), (20, 4.5), (30, 4.93))]
WARNED = {"warnings": ["step 97: <leapt>"]}
REWARD = Metrics(
    headline="reward", metrics=(Metric(name="reward", title="mean reward", unit="points", better="higher"),)
)
REWARDS = [{"step": step, "reward": step / 10, "games_per_s": 5.0, "time": STARTED_S} for step in range(1, 6)]
TIME_S = {"start": 20.0, "compute": 970.0, "input_wait": 0.0, "evaluation": 10.0}
ONE = {
    "before": "Return the",
    "after": " of <b>x</b>",
    "truth": "length",
    "guesses": [["size", 0.52], ["length", 0.3], [",", 0.1], ["", 0.05], ["v2", 0.01]],
}


def words(lines: Sequence[Any] = (), run: Any = None, beats: Sequence[Any] = (), **result: Any) -> str:
    """What a reader sees of RUN and RESULT with some fields changed."""
    log_tail = ["line <one>", "line two"]
    return Words(render({**RUN, **(run or {})}, lines, {**RESULT, **result}, beats, log_tail)).text


def test_the_page_says_what_was_measured_and_what_ran() -> None:
    page = words(training(100), steps=80)
    for part in (
        "Eval loss 4.930 nats , 1.420 below the unigram baseline of 6.350",
        "Accuracy 23.1% of the masked tokens",
        "Speed 12,346 tokens/s",
        "Wall time 4 min 12 s",
        "Steps 80 of 100",
        "--note 'two words'",
        "4be81c0 with local changes",
        "model small",
        "learning_rate none",
        "pod-w-1",
        "python 3.12.8",
        "2026-11-20T22:00:00Z 2 done",  # the last attempt has the outcome of the result
    ):
        assert part in page
    for absent in ("--resume", "Warnings", "Where the time went", "What it has learned"):
        assert absent not in page
    assert "0.200 above the unigram baseline" in words(eval_loss=6.55)
    assert "Best eval loss 4.500 nats at step 20" in words(EVALUATIONS)
    assert "local changes" not in words(run={"code": {"git_commit": "4be81c0", "git_dirty": False}})
    decided = words(run={"settings": {"learning_rate": 0.003, "dtype": "bfloat16"}})
    assert "learning_rate 0.003" in decided and "dtype bfloat16" in decided and "model small" in decided


def test_a_job_of_other_metrics_has_a_report_in_its_own_words() -> None:
    run = {**RUN, "metric_definitions": as_json(REWARD), "job": "game", "run_id": "game-1"}
    page = Words(render(run, REWARDS, {"outcome": "done", "steps": 5, "games": 1200}, [])).text
    for part in ("Mean reward 0.500 points at step 5", "higher is better", "Games 1,200", "Games per s"):
        assert part in page
    assert not re.search("token|nats|unigram|eval", page, re.IGNORECASE)


def test_all_curves_of_a_chart_and_its_baseline_are_drawn_to_the_scale_of_the_metric_that_it_is_of() -> None:
    lines = [{"step": step, "score": 0.5, "right": 0.5, "sure": 0.25, "guess": 0.1} for step in (1, 2)]
    for unit, label, values in (("", "guess 0.1", {0.5, 0.25}), ("%", "guess 10", {50.0, 25.0})):
        metrics = (
            Metric(name="score", title="score", unit=unit, baseline="guess"),
            Metric(name="right", title="right", unit="%", chart="score"),
            Metric(name="sure", title="sure", chart="score"),
        )
        run = {**RUN, "metric_definitions": as_json(Metrics(headline="score", metrics=metrics))}
        chart = charts(run, lines, {"guess": 0.1})[0]
        assert {value for series in chart.series for _, value in series.points} == values
        assert chart.level is not None and chart.level.label == label


def test_a_failure_names_the_host_the_error_the_log_and_the_way_on_and_warnings_are_told_once() -> None:
    page = words(
        training(20), outcome="failed", failed_host=1, error="out of memory", beats=[{"rank": 0, **WARNED}]
    )
    for part in (
        "Host 1 (pod-w-1, 10.0.0.3) failed first.",
        "out of memory",
        "line <one> line two",
        "fab train --resume flax_mlm-20261120-214500-abcd",
        "Warnings step 97: <leapt>",
    ):
        assert part in page
    assert words(beats=[{"rank": 0, **WARNED}], **WARNED).count("step 97: <leapt>") == 1
    assert "--resume" in words(outcome="preempted")


def test_what_the_run_has_learned_is_shown_and_the_parts_of_its_time_with_their_shares_the_largest_first() -> (
    None
):
    page = render(RUN, [], {**RESULT, "pseudo_perplexity": 41.26, "fillings": [ONE], "time_s": TIME_S}, [])
    assert "What it has learned" in page and "Where the time went" in page
    assert "<dt>Pseudo-perplexity</dt><dd>41.3</dd>" in page
    assert "Return the <mark>length</mark> of &lt;b&gt;x&lt;/b&gt;" in page
    assert "size 52 % · <b>length</b> 30 % · “,” 10 % · “” 5 % · v2 1 %" in page
    found = re.findall(r"<tr><td>(.*?)</td><td>(.*? s)</td><td>(.*?)</td>", page)
    assert [part for part, *_ in found] == ["compute", "start", "evaluation", "input wait"]
    assert [share for *_, share in found] == ["97.0%", "2.0%", "1.0%", "0.0%"]
    assert set(get_args(Part)) == MEANINGS.keys()


PNG = b"\x89PNG\r\n\x1a\n<b>"
SAMPLES: dict[str, Any] = {
    "confusion": {"labels": ["cat", "<form>"], "counts": [[3, 1], [0, 0]]},
    "texts": [{"texts": ["one <b>", "two"], "truth": "cat", "prediction": "<form>", "probability": 0.93}],
    "questions": [
        {
            "question": "Who?",
            "context": f"{'w ' * 200}it was <u>me</u>.",
            "truth": ["you"],
            "answer": "<u>me",
            "probability": 0.5,
        },
        {"question": "When?", "context": "Then.", "truth": [], "answer": "", "probability": None},
    ],
    "pictures": [
        {"png": base64.b64encode(PNG).decode(), "truth": "cat", "prediction": "cat", "probability": 0.6},
        *({"png": png, "truth": "cat", "prediction": "dog"} for png in ("aGVsbG8=", 'x" onerror=', 7)),
    ],
}


def sampled(**changed: Any) -> str:
    return render(RUN, [], RESULT, [], samples_file=json.dumps({**SAMPLES, **changed}))


def test_what_the_model_says_of_held_out_rows_is_shown_and_nothing_of_it_is_obeyed() -> None:
    page = sampled()
    seen = Words(page)
    assert "3 of 4 held-out rows are right (75.0%)" in seen.text and "cat 3 1 75%" in seen.text
    assert '<td class="wrong" style="--share:0.250">1</td>' in page and "<th>&lt;form&gt;</th>" in page
    assert "one <b> two cat <form> 93 %" in seen.text
    assert "<mark>&lt;u&gt;me</mark>&lt;/u&gt;." in page and "(true: you )" in seen.text.replace(
        "you)", "you )"
    )
    assert '<b class="good">no answer</b>' in page
    assert [value for name, value in seen.attributes if name == "src"] == [
        f"data:image/png;base64,{SAMPLES['pictures'][0]['png']}"
    ]
    assert not {"form", "u"} & {*seen.tags}
    many = [f"class {n}" for n in range(40)]
    counts = [
        [int(truth == said) * 9 + int(said == truth + 1) * truth for said in range(40)] for truth in range(40)
    ]
    assert (
        "class 38 class 39 38 class 37 class 38 37"
        in Words(sampled(confusion={"labels": many, "counts": counts})).text
    )


def test_samples_that_are_torn_or_not_as_they_should_be_are_said_and_left_out(tmp_path: Path) -> None:
    for file in ('{"confusion": {"lab', "[1]", "[" * 100_000):
        assert "samples.json is torn, or no JSON object" in render(RUN, [], RESULT, [], samples_file=file)
    foreign: list[dict[str, Any]] = [
        {"confusion": {"labels": ["a", "b"], "counts": [[1, 2]]}},
        {"confusion": {"labels": ["a"], "counts": [["<b>"]]}},
        {"confusion": {"labels": ["a"], "counts": [[-1]]}},
        {"texts": {"a": 1}},
        {"questions": [{"question": "Who?"}]},
        {"pictures": [{"png": "aGVsbG8=", "truth": "a", "prediction": "b"}]},
    ]
    for changed in foreign:
        (name,) = changed
        assert f"samples.json: {name} cannot be understood and is not shown." in sampled(**changed)
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    (tmp_path / "samples.json").write_text(json.dumps(SAMPLES))
    assert "Confusion matrix" in read_and_render(tmp_path)


def test_hosts_have_curves_over_the_time_that_the_run_ran_and_what_is_wrong_with_them_is_said(
    tmp_path: Path,
) -> None:
    (tmp_path / "hosts").mkdir()
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    for host, duty in ((0, 96.0), (1, 60.0)):
        times = [
            1e9 + 10 * index + (86_400 if index >= 30 else 0) for index in range(60)
        ]  # resumed a day later
        points = {"time": times, "cpu_pct": [50.0] * 60, "duty_pct": [duty] * 60, "memory_mib": [3072] * 60}
        file = {
            "host": host,
            "interval_s": 10.0,
            "capacity": {"memory_mib": 4096},
            "latest": {},
            "points": points,
        }
        (tmp_path / "hosts" / f"host-{host}.json").write_text(json.dumps(file))
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, "step_s": 1.0, "time": 1e9 + 1000 * n}) + "\n" for n in range(100))
    )
    page = read_and_render(tmp_path)
    assert [page.count(f">{title}</b>") for title in ("CPU", "Memory", "Devices busy", "HBM")] == [1, 1, 1, 0]
    assert "4.0 GiB" in page and "Host 1 (60 % busy, the others 96): slower than the other hosts" in page
    (ends,) = set(re.findall(r'data-x="([^"]*)" data-y="[^"]*" data-across="minute"', page))
    assert ends == f"0.0 {58 * 10 / 60}"


def test_losses_that_are_not_finite_break_the_curve_and_are_marked() -> None:
    lines: list[dict[str, Any]] = [{"step": step, "loss": 2.0} for step in range(1, 8)]
    lines[2]["loss"], lines[3]["loss"], lines[4]["loss"] = math.nan, math.inf, None
    page = render(RUN, lines, None, [])
    assert "not a finite number (3)" in page
    [path] = re.findall(r'<path class="smooth" data-label="loss" d="([^"]*)"', page)
    assert path.count("M") == 2
    assert "none of the 2 values is a finite number" in render(
        RUN, [{"step": 1, "loss": "x"}, {"step": 2, "loss": None}], None, []
    )


def test_markup_in_any_field_is_shown_and_not_obeyed_and_the_page_loads_nothing_and_forbids_loading() -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>\"' onload='x"
    run = json.loads(
        json.dumps(RUN).replace('"flax_mlm', json.dumps(evil)[:-1]).replace("pod", "<b onclick=x>")
    )
    run |= {"config": {evil: evil}, "versions": {evil: evil}, "name": evil, "attempts": [{"attempt": evil}]}
    result = {**RESULT, "outcome": evil, "error": evil, "failed_host": 1}
    beats = [{"rank": 0, "state": evil, "message": evil, "step": evil}]
    page = Words(render(run, training(20), result, beats, [evil]))
    assert evil in page.text and page.tags.count("script") == 1
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    attributes = {name for name, _ in page.attributes}
    assert not {"src", "href", "srcset", "action", "poster", "xlink:href"} & attributes
    assert not [name for name in attributes if name.startswith("on")]
    assert any(value and value.startswith("default-src 'none'") for _, value in page.attributes)
    plain = render(RUN, training(50), RESULT, [])
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttp|WebSocket", plain)
    assert escape("<" * 600) == "&lt;" * 499 + "…"  # cut before it is escaped
    render({**RUN, "name": "half \ud800 pair"}, [], None, []).encode("utf-8")


def test_a_run_directory_is_read_with_a_torn_last_line_and_the_failed_hosts_log(tmp_path: Path) -> None:
    result = {**RESULT, "outcome": "failed", "failed_host": 1, "error": None, "eval_loss": None}
    files = {
        "run.json": json.dumps(RUN),
        "metrics.jsonl": '{"step": 1, "loss": 7.5}\n{"step": 2, "loss": 7.25}\n{"step": 3, "lo',
        "result.json": json.dumps(result),
        "heartbeats/host-1.json": '{"rank": 1, "state": "failed", "message": "told by host 1"}',
        "logs/1/host-1.log": "\n".join(f"line {i}" for i in range(100)),
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(FileNotFoundError, match=r"run\.json: there is no such file"):
        read_and_render(tmp_path / "logs")
    text = Words(read_and_render(tmp_path)).text
    assert "Loss 7.250 nats at step 2" in text
    assert "told by host 1" in text and "line 99" in text and "line 59 " not in text


RUN_KEYS = [*RUN, "image", "cwd", "settings"]
RESULT_KEYS = [
    *RESULT,
    "error",
    "failed_host",
    "time_s",
    "fillings",
    "pseudo_perplexity",
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


def objects(*keys: str, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={**dict.fromkeys(keys, loose), "extra": loose, **known})


names = st.sampled_from(["loss", "eval_loss", "mfu", "x"]) | loose
definitions = objects(
    headline=names,
    progress=st.lists(names, max_size=3) | loose,
    metrics=st.lists(
        objects("name", "title", "unit", "better", "baseline", "is_evaluation", "chart"), max_size=3
    ),
)
run_objects = objects(
    *RUN_KEYS,
    hosts=loose | st.lists(objects("index", "name", "address"), max_size=3),
    attempts=loose | st.lists(objects("attempt", "started", "processes", "outcome"), max_size=3),
    config=loose | objects("steps"),
    metric_definitions=loose | definitions | st.just(as_json(METRICS)),
)
values = st.floats() | loose
COLUMNED = ("time", "cpu_pct", "memory_mib", "duty_pct", "duty_least_pct", "throttled_pct", "step")
line_keys = ("loss", "eval_loss", "tokens_per_s", "step_s", "input_wait_s", "grad_norm", "time", "mfu")
lines = objects(**dict.fromkeys(line_keys, values), step=st.integers(-5, 10**6) | loose)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    run=run_objects,
    metrics=st.lists(lines, max_size=25),
    result=st.none() | objects(*RESULT_KEYS),
    beats=st.lists(objects("rank", "state", "step", "time", "message", "warnings"), max_size=3),
    samples=objects(
        confusion=objects("labels", "counts") | loose,
        **{
            name: st.lists(objects(*SAMPLES[name][0]), max_size=3) | loose
            for name in ("texts", "questions", "pictures")
        },
    ),
    hosts=st.lists(
        st.integers(0, 4).flatmap(
            lambda count: st.fixed_dictionaries(
                {
                    "host": loose,
                    "interval_s": loose,
                    "capacity": objects("memory_mib", memory_mib=st.floats()),
                    "points": st.fixed_dictionaries(
                        dict.fromkeys(COLUMNED, st.lists(values, min_size=count, max_size=count))
                    ),
                }
            )
        ),
        max_size=3,
    ),
)
def test_no_input_stops_the_page_or_draws_outside_the_plot(
    run: dict[str, Any],
    metrics: list[dict[str, Any]],
    result: dict[str, Any] | None,
    beats: list[dict[str, Any]],
    samples: dict[str, Any],
    hosts: list[dict[str, Any]],
) -> None:
    sampled = [host for each in hosts if (host := read(each)) is not None]
    page = render(run, metrics, result, beats, samples_file=json.dumps(samples), hosts=sampled)
    assert "nan" not in "".join(re.findall(r'(?: d|cx|cy|data-x|data-y|x1|y1)="([^"]*)"', page)).lower()
    for path in re.findall(r' d="([^"]*)"', page):
        for x, y in re.findall(r"(-?\d+),(-?\d+)", path):
            assert 0 <= int(x) <= GRID_WIDTH and 0 <= int(y) <= GRID_HEIGHT
    for share in re.findall(r'"(-?[\d.]+)%"', page):
        assert 0.0 <= float(share) <= 100.0


def test_a_curve_has_a_point_a_step_and_a_resume_is_marked_at_the_first_line_written_after_it() -> None:
    again = [{"step": step, "loss": loss} for step, loss in ((2, 3.0), (3, 2.0), (2, 5.0), (1, 9.0))]
    assert curve(again, "loss") == [
        (1.0, 9.0),
        (2.0, 5.0),
        (3.0, 2.0),
    ]  # of two with one step the later counts
    timed = [{"step": step, "time": STARTED_S + 15 * step} for step in range(1, 100)]
    assert [(mark.step, mark.label) for mark in resumes(RUN, timed)] == [(60.0, "attempt 1")]
    waited: list[dict[str, float]] = [
        {"step": 1, "input_wait_s": 0.05, "step_s": 0.2},
        {"step": 2, "input_wait_s": 1, "step_s": 0},
    ]
    [(_, share), (_, gap)] = input_wait(waited)
    assert share == pytest.approx(25.0) and math.isnan(gap)


def test_among_many_points_smoothing_lets_no_spike_through_and_thinning_keeps_it_with_dips_and_gaps() -> None:
    spiked = [(float(step), 1e9 if step == 500 else 2.0) for step in range(1000)]
    assert {value for _, value in smooth(spiked)} == {2.0}
    points = [(float(step), 1.0 + (step % 7) / 10) for step in range(10_000)]
    points[5003], points[5007], points[5011] = (5003.0, 99.0), (5007.0, -99.0), (5011.0, math.nan)
    kept = thin(points, 600, lambda step: step / 10_000)
    assert len(kept) <= 1801
    assert (5003.0, 99.0) in kept and (5007.0, -99.0) in kept
    assert [step for step, value in kept if math.isnan(value)] == [5011.0]
    metrics = training(10_000)
    for line in metrics:
        line["eval_loss"] = line["loss"] + math.sin(line["step"] * 2.3)
        line["loss"] = math.nan if line["step"] % 3 == 0 else line["loss"]
    assert len(render(RUN, metrics, RESULT, []).encode()) < 100_000


def test_ticks_are_round_numbers_with_labels_that_differ() -> None:
    axis = value_axis([4.13, 9.87], from_zero=False)
    assert axis.ticks == (4.0, 6.0, 8.0, 10.0) and axis.labels() == ["4", "6", "8", "10"]
    assert step_axis(1, 1200).labels() == ["0", "200", "400", "600", "800", "1,000", "1,200"]
    narrow = value_axis([6.93141, 6.93149], from_zero=False).labels()
    assert len(set(narrow)) == len(narrow)
    axis = value_axis([5.0, 5.0 + 1e-15], from_zero=False)  # too near each other for ticks between them
    assert axis.low <= 4.5 and axis.high >= 5.5 and len(set(axis.labels())) == len(axis.ticks) < 10


def test_an_axis_turns_to_a_log_scale_where_a_value_diverges_and_draws_what_lies_beyond_at_its_end() -> None:
    axis = value_axis([5.0, 5.1, 4.9, 2e6], from_zero=False)
    assert axis.log and axis.part(5.0) > 0.05 and axis.part(2e6) > 0.9
    assert number(5e-324) == 0.0  # too small for such a scale
    nothing: list[object] = [True, "1", None, math.nan, math.inf, 10**400, 1e101, [1]]
    assert [number(value) for value in nothing] == [None] * len(nothing)
    axis = step_axis(0, 10)
    assert (axis.part(-1), axis.part(5), axis.part(11)) == (0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("price", "said"),
    [
        ({"usd_per_hour": 4.0, "billed_usd_per_hour": 4.0}, "2.00 USD <small>at list prices</small>"),
        (
            {"usd_per_hour": 4.0, "billed_usd_per_hour": 0.0},
            "free by the grant <small>2.00 USD at list prices</small>",
        ),
        (
            {"usd_per_hour": 4.0, "billed_usd_per_hour": None},
            "2.00 USD <small>at list prices, less what a grant covers</small>",
        ),
        (None, None),
        ("x", None),
        ({"usd_per_hour": "4"}, None),
        ({"usd_per_hour": float("nan")}, None),
    ],
)
def test_the_cost_is_told_where_it_is_known(price: object, said: str | None) -> None:
    assert spent({"attempts": [{"attempt": 0, "price": price}]}, 1800.0) == said
    assert spent({"attempts": [{"attempt": 0, "price": price}]}, None) is None
    assert spent({"attempts": "x"}, 1800.0) is None
