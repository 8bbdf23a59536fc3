"""The report of a run: right for an ordinary run, whole for a damaged one, and safe to open in a browser."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jobs.flax_mlm import METRICS
from jobs.runtime.monitoring.metric_definitions import as_json
from jobs.runtime.report.render import read_and_render, render, spent

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
        {
            "attempt": 0,
            "started": "2026-11-20T21:45:00Z",
            "processes": 2,
            "outcome": "preempted",
            "wall_s": 48.0,
        },
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


class Tags(HTMLParser):
    """The tags and attributes of a page that a browser would act on."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend(attrs)


def content(page: str) -> Any:
    """What the scripts of a page draw."""
    found = re.search(r'<script type="application/json" id="content">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def text_of(value: Any) -> str:
    """The texts of a value in their order, as a reader sees them: without keys, kinds and styles."""
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list):
        is_styled = len(value) == 2 and value[1] in ("mark", "strong", "good", "bad", "plain")
        return text_of(value[0]) if is_styled else " ".join(map(text_of, value))
    if isinstance(value, dict):
        return " ".join(
            text_of(item) for key, item in value.items() if key not in ("kind", "curves", "hosts")
        )
    return ""


def section(page: str, title: str) -> Any:
    """A section of a page; None where there is none of this title."""
    parts = content(page)
    found = [
        part for name in ("before", "samples", "after") for part in parts[name] if part["title"] == title
    ]
    return found[0] if found else None


EVALUATIONS = [{"step": step, "eval_loss": loss} for step, loss in ((10, 5.0), (20, 4.5), (30, 4.93))]
WARNED = {"warnings": ["step 97: <leapt>"]}


def words(lines: Sequence[Any] = (), run: Any = None, beats: Sequence[Any] = (), **result: Any) -> str:
    """What a reader sees of RUN and RESULT with some fields changed."""
    log_tail = ["line <one>", "line two"]
    page = render({**RUN, **(run or {})}, lines, {**RESULT, **result}, beats, log_tail)
    return " ".join(text_of(content(page)).split())


def test_the_page_says_what_was_measured_and_what_ran() -> None:
    page = words(training(100), steps=80)
    for part in (
        "Eval loss 4.930 nats, 1.420 below the unigram baseline of 6.350",
        "Accuracy 23.1% of the masked tokens",
        "Speed 12,346 tokens/s",
        "Wall time 5 min",  # of both attempts
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
        {"png": "aGVsbG8=", "truth": "cat", "prediction": "dog"},
    ],
}


def sampled(**changed: Any) -> str:
    return render(RUN, [], RESULT, [], samples_file=json.dumps({**SAMPLES, **changed}))


def test_what_the_model_says_of_held_out_rows_is_shown() -> None:
    page = sampled()
    matrix = section(page, "Confusion matrix")
    assert matrix["note"].startswith("3 of 4 held-out rows are right (75.0%)")
    assert (matrix["labels"], matrix["counts"]) == (["cat", "<form>"], [[3, 1], [0, 0]])
    assert section(page, "Held-out texts")["rows"] == [
        ["one <b>\ntwo", "cat", [["<form>", "bad"], " 93\u00a0%"]]
    ]
    wrong, right = section(page, "Answered questions")["rows"]
    assert wrong[1] == [["<u>me", "plain"], " 50\u00a0%", " (true: you)"] and wrong[2][1] == ["<u>me", "mark"]
    assert right[1][0] == ["no answer", "good"]
    assert [item["png"] for item in section(page, "Held-out pictures")["items"]] == [
        SAMPLES["pictures"][0]["png"]
    ]
    many = [f"class {n}" for n in range(40)]
    counts = [
        [int(truth == said) * 9 + int(said == truth + 1) * truth for said in range(40)] for truth in range(40)
    ]
    mistakes = section(sampled(confusion={"labels": many, "counts": counts}), "Confusion")["rows"]
    assert mistakes[:2] == [["class 38", "class 39", "38"], ["class 37", "class 38", "37"]]


def test_markup_in_any_field_is_shown_and_not_obeyed_and_the_page_loads_nothing_and_forbids_loading() -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>\"' onload='x"
    run = json.loads(
        json.dumps(RUN).replace('"flax_mlm', json.dumps(evil)[:-1]).replace("pod", "<b onclick=x>")
    )
    run |= {"config": {evil: evil}, "versions": {evil: evil}, "name": evil, "attempts": [{"attempt": evil}]}
    result = {**RESULT, "outcome": evil, "error": evil, "failed_host": 1}
    beats = [{"rank": 0, "state": evil, "message": evil, "step": evil}]
    page = render(run, training(20), result, beats, [evil])
    assert evil in text_of(content(page)) and "<b onclick" not in page and page.count("<title>") == 1
    tags = Tags(page)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form", "b"} & set(tags.tags)
    assert {name for name, _ in tags.attributes} == {
        "lang",
        "charset",
        "http-equiv",
        "content",
        "name",
        "type",
        "id",
    }
    (policy,) = [value or "" for _, value in tags.attributes if "default-src" in (value or "")]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert all(f"'sha256-{each}'" in policy for each in hashes) and "unsafe" not in policy
    assert "Copyright (c)" in page
    render({**RUN, "name": "half \ud800 pair"}, [], None, []).encode("utf-8")


def test_a_run_directory_is_read_with_a_torn_last_line_and_the_failed_hosts_log(tmp_path: Path) -> None:
    result = {**RESULT, "outcome": "failed", "failed_host": 1, "error": None, "eval_loss": None}
    files = {
        "run.json": json.dumps(RUN),
        "metrics.jsonl": '{"step": 1, "loss": 7.5}\n{"step": 2, "loss": 7.25}\n{"step": 3, "lo',
        "result.json": json.dumps(result),
        "heartbeats/host-1.json": json.dumps(
            {"rank": 1, "state": "failed", "message": "told by host 1", "time": 1.8e9}
        ),
        "logs/1/host-1.log": "\n".join(f"line {i}" for i in range(100)),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(FileNotFoundError, match=r"run\.json: there is no such file"):
        read_and_render(str(tmp_path / "logs"))
    text = text_of(content(read_and_render(str(tmp_path))))
    assert "Loss 7.250 nats at step 2" in text
    assert "told by host 1" in text and "line 99" in text and "line 59 " not in text


@pytest.mark.parametrize(
    ("price", "said"),
    [
        ({"usd_per_hour": 4.0, "billed_usd_per_hour": 4.0}, ("2.00 USD", "at list prices")),
        (
            {"usd_per_hour": 4.0, "billed_usd_per_hour": 0.0},
            ("free by the grant", "2.00 USD at list prices"),
        ),
        (
            {"usd_per_hour": 4.0, "billed_usd_per_hour": None},
            ("2.00 USD", "at list prices, less what a grant covers"),
        ),
        (None, None),
    ],
)
def test_the_cost_is_told_where_it_is_known(price: object, said: tuple[str, str] | None) -> None:
    assert spent({"attempts": [{"attempt": 0, "price": price}]}, 1800.0) == said
