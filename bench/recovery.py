"""Measures how long a kept run stands still after its slice is preempted, in a rehearsal that has capacity at once.

A timer starts the keeper's passes, one a minute, as on a gateway. Each preemption comes at a random moment between two
looks, at least a minute after the last recovery. A phase ends when the keeper has noted that it asks for the slice,
when the simulated API shows the new request as ACTIVE, when the keeper has noted that it resumes the run and that all
processes have joined, and at the first line of metrics, which has the compilation in it. Google's part is what the
simulated API takes to delete and to serve. `load` is that of the minute before the run has joined.

python -m bench.recovery [--preemptions 5] [--period 60] [--hosts 1] [--seed 0]"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from infra.documents import Documents
from launch.reconcile import LOOK_EVERY_S
from launch.store import Store
from rehearsal import state
from rehearsal.daemon import cli
from rehearsal.daemon.daemon import DELAY_FACTOR
from rehearsal.daemon.gateway import Gateway
from rehearsal.daemon.rehearsal_stack import BUCKET, PROJECT
from rehearsal.rehearse import RUNS, Story, environment, run_id_in
from rehearsal.tpu_api import Delays

STEPS = 10_000_000  # never done
ARGUMENTS = (
    f"--steps {STEPS} --checkpoint-every 1000 --log-every 10 --eval-every {STEPS} --batch-size 12 --layers 1"
    " --width 32 --heads 2 --ff-width 64 --vocab-size 300 --max-positions 32 --sequence-length 16"
    f" --remote-cache gs://{BUCKET}/tokens"  # each new host would tokenise anew
)
KEPT = "kept"
AFTER_S = 60.0
"""Between a recovery and the next preemption, at least: the keeper's pause between two tries."""
SETTLED_S = 15.0
"""For the first steps after a recovery to be in the metrics."""
_DELAYS = Delays().scaled(DELAY_FACTOR)
GOOGLE_S = _DELAYS.delete_s + _DELAYS.accept_s + _DELAYS.create_s
"""Of the simulated API, to delete what is left of a slice and to serve a new request."""
LIMIT_S = 600.0
LOOK_S = 0.2
ACTS = {"asks": "asked for", "resumes": "resumed", "runs": "joined"}
PHASES = ("asked for", "ACTIVE", "resumed", "joined", "first step")

type Moments = dict[str, float]
"""What has come to be: Unix seconds."""


class Watcher:
    """Looks at a rehearsal's API and at what its keeper has noted."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._url = state.require(Path(environ[state.FOLDER_VARIABLE])).tpu_url
        os.environ.update(environ)  # Documents finds the server of the bucket there
        self._store = Store(Documents(f"gs://{BUCKET}/control"))

    def state(self) -> str:
        """The state of the only queued resource; "" where there is none."""
        url = f"{self._url}/v2/projects/{PROJECT}/locations/-/queuedResources"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
            found = json.loads(answer.read()).get("queuedResources", [])
        return str(found[0]["state"]["state"]) if found else ""

    def acts(self) -> list[str]:
        """What the keeper has done about the only run that it keeps."""
        (run,) = self._store.read().runs.values()
        return [ACTS.get(str(line["act"]), str(line["act"])) for line in run.history]

    def recovery(self, known: int) -> Moments:
        """Wait until the run has joined again. known: how many acts there were before the preemption."""
        moments: Moments = {}
        until_s = time.monotonic() + LIMIT_S
        while "joined" not in moments:
            if time.monotonic() > until_s:
                raise SystemExit(f"the run has not joined after {LIMIT_S:.0f} s: {self.acts()[known:]}")
            moments = dict.fromkeys([self.state() or "gone", *self.acts()[known:]], time.time()) | moments
            time.sleep(LOOK_S)
        return moments


def row(began_s: float, moments: Moments, load: float) -> list[float]:
    """Seconds of each phase, of all, and of what was not Google's; and the load."""
    ends = [began_s, *(moments[phase] for phase in PHASES)]
    phases = [end - start for start, end in itertools.pairwise(ends)]
    all_s = ends[-1] - began_s
    return [*phases, all_s, all_s - GOOGLE_S, load]


def measure(story: Story, scratch: Path, options: argparse.Namespace) -> Iterator[list[float]]:
    """Preempt so many times; a row for each."""
    story.type(f"fab rehearsal up --hosts {options.hosts} --keeper")
    story.type("fab rehearsal gateway-off")
    story.type("fab deploy --stack rehearsal")
    story.type(
        f"fab train --stack rehearsal --job flax_mlm --name {KEPT} --keep --detach --args '{ARGUMENTS}'"
    )
    run = run_id_in(story.answer("fab runs --stack rehearsal --all"), KEPT)
    folder = Path(story.environ[state.FOLDER_VARIABLE])
    opened = state.open_rehearsal(story.environ).environment
    watcher = Watcher({**story.environ, **opened})
    keeper = {**story.environ, **opened, "TPU_STACK_KEEPER": f"gs://{BUCKET}/control"}
    gateway = Gateway(environ=lambda: keeper, log=folder / "keeper.log", period_s=options.period)
    rng = random.Random(options.seed)
    gateway.power_on()
    try:
        for number in range(options.preemptions):
            time.sleep((AFTER_S if number else 0.0) + rng.uniform(0.0, LOOK_EVERY_S))
            known, began_s = len(watcher.acts()), time.time()
            preempted = cli.Typed(action="preempt")
            cli.carry_out(preempted, story.environ, story.say)  # a command takes seconds to start
            moments, load = watcher.recovery(known), os.getloadavg()[0]
            time.sleep(SETTLED_S)
            metrics = scratch / f"{number}.jsonl"
            story.type(f"fab get --stack rehearsal --hosts 0 {RUNS}/{run}/metrics.jsonl {metrics}")
            stepped = (json.loads(line)["time"] for line in metrics.read_text().splitlines())
            moments["first step"] = min(moment for moment in stepped if moment > moments["resumed"])
            yield row(began_s, moments, load)
    finally:
        gateway.power_off()


def main(arguments: Sequence[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=__doc__)
    parser.add_argument("--preemptions", type=int, default=5)
    parser.add_argument("--period", type=float, default=60.0, help="of the keeper's timer, in seconds")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tpu-stack-bench-") as scratch:
        environ = environment(os.environ, Path(scratch) / "rehearsal")
        story = Story(environ=environ, say=lambda line: print(line, file=sys.stderr, flush=True))
        heads = ["preemption", *PHASES, "all", "all but Google", "load"]
        rows: list[list[float]] = []
        try:
            for each in measure(story, Path(scratch), options):
                rows.append(each)
                story.say(
                    ", ".join(f"{head} {value:.1f}" for head, value in zip(heads[1:], each, strict=True))
                )
        finally:
            story.type("fab rehearsal down")
    print(f"| {' | '.join(heads)} |\n|{'---:|' * len(heads)}")
    for number, each in enumerate(rows, 1):
        print(f"| {number} | {' | '.join(f'{value:.1f}' for value in each)} |")
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    print(f"| median | {' | '.join(f'{value:.1f}' for value in medians)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
