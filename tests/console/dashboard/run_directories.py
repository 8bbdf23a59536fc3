"""Run directories that no job has made, for the dashboard's tests."""

import json
import math
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contracts import run_directory
from jobs.flax_mlm import METRICS
from jobs.runtime.monitoring.metric_definitions import as_json

MOMENT = "%Y-%m-%dT%H:%M:%SZ"


def run_id(number: int) -> str:
    """The id of one of a folder's runs."""
    letters = "".join(chr(ord("a") + number // 26**power % 26) for power in (3, 2, 1, 0))
    return f"flax_mlm-20261120-214500-{letters}"


def line(step: int, total: int, chance: random.Random) -> dict[str, float]:
    """A line of metrics.jsonl."""
    return {
        "step": step,
        "grad_norm": chance.uniform(0.4, 0.6),
        "learning_rate": 1e-3 * (1 - step / (total + 1)),
        "loss": 3 + 4 * math.exp(-8 * step / total) + chance.gauss(0, 0.1),
        "tokens_per_s": chance.uniform(9e3, 11e3),
        "step_s": chance.uniform(0.18, 0.22),
        "input_wait_s": 0.0,
        "time": 1.8e9 + 0.2 * step,
    }


def make_run(
    folder: Path,
    name: str,
    *,
    points: int = 40,
    state: str = "done",
    seed: int = 0,
    more: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run directory that no job has made. more: other fields of run.json. state: of its two heartbeats; one
    that has ended has a result."""
    run, chance, now_s = folder / name, random.Random(seed), time.time()
    started = time.strftime(MOMENT, time.gmtime(now_s - 600))
    hosts = [{"index": index, "name": f"host-{index}", "address": "127.0.0.1"} for index in range(2)]
    options = {"model": "tiny", "steps": 10 * points, "learning_rate": 1e-3, "seed": seed, **(settings or {})}
    record = {
        "version": run_directory.RUN_VERSION,
        "run_id": name,
        "name": None,
        "job": "flax_mlm",
        "stack": "jax",
        "target": "local",
        "platform": "cpu",
        "args": [],
        "config": options,
        "metric_definitions": as_json(METRICS),
        "code": {"git_commit": "0" * 40},
        "slice": {},
        "hosts": hosts,
        "created": started,
        "attempts": [{"attempt": 0, "started": started, "processes": 2}],
        **(more or {}),
    }
    (run / "heartbeats").mkdir(parents=True)
    (run / "logs" / "0").mkdir(parents=True)
    (run / run_directory.RUN).write_text(json.dumps(record))
    (run / run_directory.SETTINGS).write_text(json.dumps(options))
    lines = (json.dumps(line(10 * index, 10 * points, chance)) for index in range(1, points + 1))
    (run / run_directory.METRICS).write_text("".join(f"{each}\n" for each in lines))
    for host in range(2):
        beat = {
            "rank": host,
            "attempt": 0,
            "state": state,
            "step": 10 * points,
            "time": now_s,
            "message": None,
        }
        (run / run_directory.heartbeat(host)).write_text(json.dumps(beat))
        (run / run_directory.log(0, host)).write_text(f"a line of host {host}\n")
    if state in run_directory.STATES_ENDED:
        measured = {"eval_loss": 3.0 + chance.random(), "unigram_entropy": 6.1}
        result = run_directory.result(
            state, attempt=0, steps=10 * points, time=now_s - 300, wall_s=300.0, measured=measured
        )
        (run / run_directory.RESULT).write_text(json.dumps(result))
    return run
