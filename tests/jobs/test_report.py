"""The report of a run: right for an ordinary run, whole for a damaged one, and safe to open in a browser."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jobs.flax_mlm import METRICS
from jobs.runtime.metric_definitions import Metric, Metrics, as_json
from jobs.runtime.report.page import escape
from jobs.runtime.report.render import read_and_render, render

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


def test_the_headline_compares_the_evaluation_loss_with_the_unigram_baseline() -> None:
    text = Words(render(RUN, training(100), RESULT, [])).text
    assert "Eval loss 4.930 nats , 1.420 below the unigram baseline of 6.350" in text
    assert (
        "0.200 above the unigram baseline" in Words(render(RUN, [], {**RESULT, "eval_loss": 6.55}, [])).text
    )


def test_the_tiles_say_accuracy_rate_time_and_steps_in_units() -> None:
    text = Words(render(RUN, training(100), {**RESULT, "steps": 80}, [])).text
    for part in (
        "Accuracy 23.1% of the masked tokens",
        "Speed 12,346 tokens/s",
        "Wall time 4 min 12 s",
        "Steps 80 of 100",
    ):
        assert part in text


def test_a_job_of_other_metrics_has_a_report_in_its_own_words() -> None:
    reward = Metric(name="reward", title="mean reward", unit="points", better="higher")
    run = {**RUN, "metric_definitions": as_json(Metrics(headline="reward", metrics=(reward,)))}
    lines = [
        {"step": step, "reward": step / 10, "games_per_s": 5.0, "time": STARTED_S} for step in range(1, 6)
    ]
    page = render(run, lines, {"outcome": "done", "steps": 5, "games": 1200}, [])
    text = Words(page).text
    for part in ("Mean reward 0.500 points at step 5", "higher is better", "Games 1,200", "Games per s"):
        assert part in text
    assert not re.search("token|nats|unigram|eval", text.replace("flax_mlm", ""), re.IGNORECASE)


def test_the_best_evaluation_is_told_where_it_was_not_the_last() -> None:
    lines = [{"step": step, "eval_loss": loss} for step, loss in ((10, 5.0), (20, 4.5), (30, 4.93))]
    assert "Best eval loss 4.500 nats at step 20" in Words(render(RUN, lines, RESULT, [])).text


def test_settings_are_told_as_they_were_decided() -> None:
    assert "learning_rate none" in Words(render(RUN, [], RESULT, [])).text
    decided = {**RUN, "settings": {"learning_rate": 0.003, "dtype": "bfloat16"}}
    text = Words(render(decided, [], RESULT, [])).text
    assert "learning_rate 0.003" in text and "dtype bfloat16" in text and "model small" in text


@pytest.mark.parametrize("of_result", [True, False])
def test_what_was_warned_of_is_in_the_report_whether_the_run_is_done_or_not(of_result: bool) -> None:
    warned = {"warnings": ["step 97: <leapt>"]}
    beats = [{"rank": 0, "state": "failed", **warned}]
    page = render(RUN, [], {**RESULT, **(warned if of_result else {"outcome": "failed"})}, beats)
    assert Words(page).text.count("step 97: <leapt>") == 1
    assert "Warnings" not in Words(render(RUN, [], RESULT, [])).text


def test_the_facts_name_arguments_options_code_and_hosts() -> None:
    text = Words(render(RUN, [], RESULT, [])).text
    for part in (
        "--note 'two words'",
        "4be81c0 with local changes",
        "model small",
        "pod-w-1",
        "python 3.12.8",
    ):
        assert part in text


def test_a_clean_commit_is_not_said_to_have_local_changes() -> None:
    run = {**RUN, "code": {"git_commit": "4be81c0", "git_dirty": False}}
    assert "local changes" not in render(run, [], RESULT, [])


def test_a_failure_names_the_host_the_error_the_log_and_the_way_on() -> None:
    result = {**RESULT, "outcome": "failed", "failed_host": 1, "error": "out of memory"}
    text = Words(render(RUN, training(20), result, [], ["line <one>", "line two"])).text
    assert "Host 1 (pod-w-1, 10.0.0.3) failed first." in text
    assert "out of memory" in text and "line <one> line two" in text
    assert "fab train --resume flax_mlm-20261120-214500-abcd" in text


def test_a_done_run_offers_no_resume_and_a_preempted_one_does() -> None:
    assert "--resume" not in render(RUN, [], RESULT, [])
    assert "--resume" in render(RUN, [], {**RESULT, "outcome": "preempted"}, [])


def test_an_attempt_without_outcome_has_the_outcome_of_the_result() -> None:
    assert (
        "2026-11-20T22:00:00Z 2 stopped" in Words(render(RUN, [], {**RESULT, "outcome": "stopped"}, [])).text
    )


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


@pytest.mark.parametrize("count", [0, 1, 2, 30])
def test_a_run_at_any_moment_of_its_life_has_a_report(count: int) -> None:
    page = render(RUN, training(count), None, [{"rank": 0, "state": "stepping"}])
    assert "no result yet" in page and "1 stepping" in page


def test_ten_thousand_lines_make_a_page_under_100_kb() -> None:
    lines = training(10_000)
    for line in lines:
        line["eval_loss"] = line["loss"] + math.sin(line["step"] * 2.3)
        line["loss"] = math.nan if line["step"] % 3 == 0 else line["loss"]
    assert len(render(RUN, lines, RESULT, []).encode()) < 100_000


def test_markup_in_any_field_is_shown_and_not_obeyed() -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>\"' onload='x"
    run = json.loads(
        json.dumps(RUN).replace('"flax_mlm', json.dumps(evil)[:-1]).replace("pod", "<b onclick=x>")
    )
    run |= {"config": {evil: evil}, "versions": {evil: evil}, "name": evil, "attempts": [{"attempt": evil}]}
    result = {**RESULT, "outcome": evil, "error": evil, "failed_host": 1}
    beats = [{"rank": 0, "state": evil, "message": evil, "step": evil}]
    page = Words(render(run, training(20), result, beats, [evil]))
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert evil in page.text


def test_the_page_loads_nothing_and_forbids_loading() -> None:
    page = render(RUN, training(50), RESULT, [])
    seen = Words(page)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(seen.tags)
    assert not {"src", "href", "srcset", "action", "poster", "xlink:href"} & {
        name for name, _ in seen.attributes
    }
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttp|WebSocket", page)
    assert any(value and value.startswith("default-src 'none'") for _, value in seen.attributes)


def test_half_a_surrogate_pair_does_not_stop_the_page_from_being_written() -> None:
    render({**RUN, "name": "half \ud800 pair"}, [], None, []).encode("utf-8")


def test_long_text_is_cut_before_it_is_escaped() -> None:
    assert escape("<" * 600) == "&lt;" * 499 + "…"


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
    text = Words(read_and_render(tmp_path)).text
    assert "Loss 7.250 nats at step 2" in text
    assert "told by host 1" in text and "line 99" in text and "line 59 " not in text


def test_a_directory_without_run_json_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run\.json: there is no such file"):
        read_and_render(tmp_path)
