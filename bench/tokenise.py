"""Measures the time and memory that preparing a large corpus takes: made-up prose, a tokenizer trained on it, and all
of it tokenised by all cores of this process.

Memory: the most that all its processes together held at one moment, of their own (RssAnon: without what is mapped from
files and can be dropped), looked at five times a second; above --budget-mib the benchmark has failed, and no process
may allocate more than that (RLIMIT_DATA). Cores: processor time over wall time. --kill-at 0.8 kills everything when so
much is tokenised and starts again; the last line says whether the result is that of an undisturbed run.

python -m bench.tokenise --folder FOLDER [--gigabytes 0.2] [--vocab-size 50265] [--budget-mib 2048] [--kill-at SHARE]"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from contracts.atomic import atomic_path
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.corpus import docstrings
from jobs.flax_mlm.data import prepare_tokens
from jobs.runtime.text_files import stdlib_modules

ROOT = Path(__file__).resolve().parents[1]
LOOK_S = 0.2
PROGRESS = re.compile(r": ([\d,]+) million characters so far")
CPU, DONE = "cpu_s ", "done "
NEW_SHARE = 0.004
"""Of all words: 100 MB have about a hundred thousand new ones, as many as English web text of that size has."""
DOCUMENT_WORDS = (50, 800)
FILE_BYTES = 512 << 20
_SYLLABLES = [c + v + e for c in "bcdfghklmnprstvwz" for v in "aeiou" for e in ("", "n", "r", "s", "l")]


class Memory(threading.Thread):
    """Looks at a process and its children until it has ended."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self.peak_mib = pid, 0.0
        self.start()

    def run(self) -> None:
        while Path(f"/proc/{self._pid}/stat").exists():
            self.peak_mib = max(self.peak_mib, sum(map(_own_kib, [self._pid, *_children(self._pid)])) / 1024)
            time.sleep(LOOK_S)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def _own_kib(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) if found else 0
    return 0


def prose(seed: int = 0) -> Iterator[str]:
    """Made-up documents without end whose words go on getting new, as those of a real corpus do; of a seed the same.

    Sentences are the standard library's own words in another order; some words are made up, so that the number of
    different words grows with the text (Heaps' law) and the tokenizer's table with it.
    """
    random = Random(seed)
    known = " ".join(docstrings(str(path)) for path in sorted(stdlib_modules())).split()
    while True:
        length = random.randint(*DOCUMENT_WORDS)
        start = random.randrange(len(known) - length)
        words = known[start : start + length]
        # Runs of the original keep the usual neighbours; a shuffled half sees to it that no document occurs twice.
        half = words[length // 2 :]
        random.shuffle(half)
        words[length // 2 :] = half
        for _ in range(round(length * NEW_SHARE) + (random.random() < length * NEW_SHARE % 1)):
            words[random.randrange(length)] = "".join(random.choices(_SYLLABLES, k=random.randint(2, 5)))
        yield " ".join(words)


def write_prose(folder: Path, size_bytes: int) -> None:
    """.jsonl files of `size_bytes` together; those that are there already are taken as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, size_bytes, FILE_BYTES)):
        path = folder / f"prose-{number:04}-{min(FILE_BYTES, size_bytes - start)}.jsonl"
        if path.exists():
            continue
        written = 0
        with atomic_path(path) as beside, beside.open("w", encoding="utf-8") as file:
            for text in prose(seed=number):
                written += file.write(json.dumps({"text": text}) + "\n")
                if written >= min(FILE_BYTES, size_bytes - start):
                    break


def prepare(corpus: str, cache: str, vocab_size: int) -> None:
    """What the measured process does."""
    config = Config(data=corpus, vocab_size=vocab_size)
    prepared = prepare_tokens(config, Path(cache), say=lambda line: print(line, flush=True))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(f"{CPU}{sum(each.ru_utime + each.ru_stime for each in used)}")
    print(f"{DONE}{json.dumps([prepared.fingerprint, prepared.train.size + prepared.eval.size])}", flush=True)


def measure(
    corpus: Path, cache: Path, options: argparse.Namespace, kill_at_mb: float | None
) -> dict[str, Any]:
    """One process from its start to its end, or to its being killed."""
    budget = options.budget_mib << 20
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.tokenise", "--child", str(corpus), str(cache), str(options.vocab_size)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (budget, budget)),
    )
    memory, began, marks, found = (
        Memory(process.pid),
        time.monotonic(),
        list[float](),
        dict[str, Any](),
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{time.monotonic() - began:8.1f} s  {line}", end="", file=sys.stderr, flush=True)
        if line.startswith(("tokenising", "tokenised")):
            marks.append(time.monotonic())
        if line.startswith(CPU):
            found["cpu_s"] = float(line.removeprefix(CPU))
        if line.startswith(DONE):
            found["fingerprint"], found["tokens"] = json.loads(line.removeprefix(DONE))
        progress = PROGRESS.search(line)
        if kill_at_mb and progress and float(progress[1].replace(",", "")) >= kill_at_mb:
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    memory.join()
    if code != (-signal.SIGKILL if kill_at_mb else 0):
        raise SystemExit(f"ended with {code}")
    wall_s = time.monotonic() - began
    return {
        **found,
        "wall_s": wall_s,
        "before_s": marks[0] - began,
        "tokenising_s": marks[-1] - marks[0],
        "peak_mib": memory.peak_mib,
    }


def main(options: argparse.Namespace) -> None:
    size_bytes = round(options.gigabytes * 1e9)
    corpus, cache = options.folder / f"prose-{size_bytes}", options.folder / "cache"
    write_prose(corpus, size_bytes)
    size_mb = sum(path.stat().st_size for path in corpus.iterdir()) / 1e6
    shutil.rmtree(cache, ignore_errors=True)
    rows = []
    if options.kill_at:
        rows.append(("killed", measure(corpus, cache, options, options.kill_at * size_mb)))
    rows.append(("gone on with" if options.kill_at else "whole", measure(corpus, cache, options, None)))
    print("| what | MB | before tokenising s | tokenising s | MB/s | cores | peak MiB | million tokens |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, row in rows:
        cores = f"{row['cpu_s'] / row['wall_s']:.2f}" if "cpu_s" in row else ""
        done = f"{row['tokens'] / 1e6:,.1f}" if "tokens" in row else ""
        pace = "" if options.kill_at else f"{size_mb / row['tokenising_s']:.1f}"
        times = f"{row['before_s']:.1f} | {row['tokenising_s']:.1f} | {pace}"
        print(f"| {name} | {size_mb:,.0f} | {times} | {cores} | {row['peak_mib']:,.0f} | {done} |")
    if options.kill_at:
        undisturbed = measure(corpus, options.folder / "undisturbed", options, None)["fingerprint"]
        shutil.rmtree(options.folder / "undisturbed")
        print(f"the same as undisturbed: {undisturbed == rows[-1][1]['fingerprint']}")
    if max(row["peak_mib"] for _, row in rows) > options.budget_mib:
        raise SystemExit(f"more than --budget-mib {options.budget_mib}")


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.tokenise", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=0.2)
    parser.add_argument("--vocab-size", type=int, default=50265)
    parser.add_argument("--budget-mib", type=int, default=2048)
    parser.add_argument("--kill-at", type=float)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        prepare(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main(parsed(sys.argv[1:]))
