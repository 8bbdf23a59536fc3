"""Measures the dashboard in a real browser, over runs of many points each, made for it in a temporary folder.

The runs' metrics are one file under many names (hard links), which the server reads as if it were many.

python -m bench.dashboard [--runs 200] [--points 100000]"""

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from contracts import run_directory
from jobs.flax_mlm import METRICS
from jobs.runtime.metric_definitions import as_json

ROOT = Path(__file__).resolve().parent.parent
MOMENT = "%Y-%m-%dT%H:%M:%SZ"
REPEATS = 5
UPDATED = """async lines => {
  const grid = document.querySelector(".charts"), begun = performance.now();
  document.dispatchEvent(new Event("visibilitychange"));
  while (Number(grid.dataset.lines) < lines) await new Promise(requestAnimationFrame);
  return performance.now() - begun;
}"""
"""Seconds from the request for what is new until it is drawn: a page that becomes visible asks at once."""


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


def timed(page: Page, url: str, drawn: str) -> float:
    """Seconds from the request for a page until something is there."""
    begun = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.wait_for_selector(drawn)
    return time.perf_counter() - begun


def measure(base: str, folder: Path, runs: int, points: int) -> dict[str, list[float]]:
    """Milliseconds of each thing, several times."""
    found: dict[str, list[float]] = {}
    chance = random.Random(1)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page()

        def note(what: str, seconds: float) -> None:
            found.setdefault(what, []).append(1000 * seconds)

        note("all runs, the first look", timed(page, base, "table.runs tbody tr"))
        for _ in range(REPEATS):
            time.sleep(2)  # what was read is old by then, and is read again
            note("all runs, page", timed(page, base, "table.runs tbody tr"))
            time.sleep(2)
            took_ms = page.evaluate(
                "async () => { const t = performance.now(); await (await fetch('/api/runs')).json(); "
                "return performance.now() - t; }"
            )
            note("all runs, what is new", took_ms / 1000)
        full = f".charts[data-lines='{points}'] .u-legend"
        for number in range(REPEATS):
            url = f"{base}run/local/{run_id(number)}"
            note("one run, the first look at its points", timed(page, url, full))
            note("one run, page", timed(page, url, full))
        live = folder / run_id(runs)
        make_run(folder, live.name, points=points, state="stepping")
        page.goto(f"{base}run/local/{live.name}", wait_until="commit")
        page.wait_for_selector(full)
        for number in range(1, REPEATS + 1):
            with open(live / run_directory.METRICS, "a") as file:
                file.write(json.dumps(line(10 * (points + number), 10 * points, chance)) + "\n")
            note("one run, an update drawn", page.evaluate(UPDATED, points + number) / 1000)
        several = "&".join(f"run=local/{run_id(number)}" for number in range(REPEATS))
        full = f".charts[data-lines='{REPEATS * points}'] .u-legend"
        for _ in range(3):
            note(f"{REPEATS} runs compared, page", timed(page, f"{base}compare?{several}", full))
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--points", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-dashboard-") as temporary:
        folder = Path(temporary) / "runs"
        first = make_run(folder, run_id(0), points=given.points)
        for number in range(1, given.runs):
            run = make_run(folder, run_id(number), seed=number, points=1)
            (run / run_directory.METRICS).unlink()
            os.link(first / run_directory.METRICS, run / run_directory.METRICS)
        size = (first / run_directory.METRICS).stat().st_size
        print(
            f"{given.runs} runs, {given.points:,} lines of 6 metrics ({size / 1e6:.0f} MB) each", flush=True
        )
        fab = Path(sys.executable).with_name("fab")
        command = [str(fab), "dashboard", "--port", "0", "--runs", str(folder)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            base = server.stdout.readline().split()[-1]
            try:
                found = measure(base, folder, given.runs, given.points)
            finally:
                server.terminate()
    print(f"\n{'ms':40}{'median':>9}{'most':>9}")
    for what, each in found.items():
        print(f"{what:40}{statistics.median(each):9.0f}{max(each):9.0f}")


if __name__ == "__main__":
    main()
