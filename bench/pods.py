"""Measures the time from `fab train` to the first step: on pods of a cluster, and on hosts that are containers.

Two rehearsals are up at once, one of nodes and one of hosts, and train in turns. Each round has a batch size of its
own, so that its first run finds no compiled program; `again` is the same command a second time. The end is when step 1
stands in the metrics. The losses of all runs of a round must be the same to the last digit. `load` is that of the
minute before.

python -m bench.pods [--rounds 3] [--hosts 2]"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rehearsal.daemon.rehearsal_stack import BUCKET
from rehearsal.rehearse import Story, environment, fetch_from_bucket, read_losses, run_id_in

STEPS = 20
FIRST_BATCH = 12
ARGUMENTS = (
    f"--steps {STEPS} --log-every 1 --eval-every {STEPS} --checkpoint-every {STEPS} --layers 1 --width 32 --heads 2"
    " --ff-width 64 --vocab-size 300 --max-positions 32 --sequence-length 16 --eval-fraction 0.01"
    f" --remote-cache gs://{BUCKET}/tokens"
)
PODS, CONTAINERS = "pods", "containers"
TIMES = ("first", "again")
Losses = Mapping[int, float]


@contextlib.contextmanager
def rehearsals(folder: Path, hosts: int) -> Iterator[dict[str, Story]]:
    """Both, until the end."""

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    stories = {
        way: Story(environ=environment(os.environ, folder / way), say=say) for way in (PODS, CONTAINERS)
    }
    try:
        stories[PODS].type("fab build --framework jax --platform cpu")
        stories[PODS].type(f"fab rehearsal up --kubernetes --hosts {hosts}")
        stories[CONTAINERS].type(f"fab rehearsal up --hosts {hosts}")
        stories[CONTAINERS].type("fab deploy --stack rehearsal")
        yield stories
    finally:
        with contextlib.ExitStack() as both:
            for story in stories.values():
                both.callback(story.type, "fab rehearsal down")


def first_step_s(story: Story, name: str, batch: int, scratch: Path) -> tuple[float, Losses]:
    """Seconds from the command to step 1, and the losses by step."""
    began = time.time()
    story.type(
        f"fab train --stack rehearsal --job flax_mlm --name {name} --runs gs://{BUCKET}/runs"
        f" --args '{ARGUMENTS} --batch-size {batch}'"
    )
    run = run_id_in(story.answer(f"fab runs --stack rehearsal --runs gs://{BUCKET}/runs --all"), name)
    metrics = scratch / f"{name}.jsonl"
    fetch_from_bucket(story, run, metrics)
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    (first,) = (line["time"] for line in lines if line.get("step") == 1)
    return first - began, read_losses(metrics)


def main(arguments: Sequence[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.pods", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=2)
    options = parser.parse_args(arguments)
    took: dict[tuple[str, str], list[float]] = {
        (way, when): [] for way in (PODS, CONTAINERS) for when in TIMES
    }
    loads = []
    with (
        tempfile.TemporaryDirectory(prefix="tpu-stack-bench-") as folder,
        rehearsals(Path(folder), options.hosts) as stories,
    ):
        # The round before the first one fills the caches of images and tokens.
        for number in range(options.rounds + 1):
            losses: list[Losses] = []
            for when in TIMES:
                for way, story in stories.items():
                    loads.append(os.getloadavg()[0])
                    name = f"{way}-{number}-{when}"
                    seconds, found = first_step_s(story, name, FIRST_BATCH + 2 * number, Path(folder))
                    losses.append(found)
                    story.say(f"{name}: {seconds:.1f} s to the first step")
                    if number:
                        took[way, when].append(seconds)
            if any(each != losses[0] for each in losses):
                raise SystemExit(f"the losses of round {number} are not the same: {losses}")
    print(f"| where | {' | '.join(f'{when}, median (all)' for when in TIMES)} |\n|---|---:|---:|")
    for way in (PODS, CONTAINERS):
        cells = (
            f"{statistics.median(took[way, when]):.1f} s ({', '.join(f'{s:.1f}' for s in took[way, when])})"
            for when in TIMES
        )
        print(f"| {way} | {' | '.join(cells)} |")
    print(
        f"load: {min(loads):.1f} to {max(loads):.1f}; the losses of each round are the same to the last digit"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
