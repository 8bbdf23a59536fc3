"""`make rehearse`: runs the whole path of a new user, with faults on the way, and removes everything at the end.

In the first act a person mends what was lost, in the second the keeper does, with nobody there. On a cluster there is
one act, in which Kubernetes does.

    python -m rehearsal.rehearse [--hosts N] [--kubernetes | --provisioning compute]

Every step is a command that can be typed; it is printed before it is run. Exit codes: 0 all of it came true; 1
something did not, which is named; 2 the rehearsal could not begin; 130 interrupted. It is taken down in every case.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from contracts.aliases import Say
from rehearsal import state
from rehearsal.daemon.cli import OWNER_VARIABLE, Provisioning
from rehearsal.local_servers import RefusalError, ask
from rehearsal.machines import docker_engine, guardian
from rehearsal.machines.docker_engine import MachinesError

RUNS = "/mnt/share/runs"
UNDISTURBED, DISTURBED, BY_KEEPER = "undisturbed", "disturbed", "kept"
STEPS = 700  # some 20 s of computing on 2 cores: an accident has to come in the midst of them
# After the first checkpoint or the second, and long before the end: on a busy computer two commands take a while.
FIRST_ACCIDENT, SECOND_ACCIDENT, THIRD_ACCIDENT = 60, 120, 60
# The tokens are on the share, so that a new slice does not prepare them again; pods have them from the bucket.
JOB = f"--steps {STEPS} --checkpoint-every 50 --log-every 10 --remote-cache /mnt/share/prepared"
# On pods `fab status` has a run's step from the bucket, later than from a host; the accidents must not come too late.
POD_STEPS = 1000
FIRST_OF_PODS, SECOND_OF_PODS = 100, 400
POD_JOB = f"--steps {POD_STEPS} --checkpoint-every 100 --log-every 10"
POLL_S = 1.0
END_POLL_S = 4.0  # each look takes a second of processor from the run, whose end nobody has to catch
PROGRESS_LIMIT_S = 300.0
RECOVERY_LIMIT_S = 600.0
COMMAND_LIMIT_S = 1800.0
FETCH_LIMIT_S = 30.0
# Of a loss, where it is not equal to the last digit: another order of sums on another number of hosts.
TOLERANCE = 1e-5
SHOWN = 8


class StoryError(Exception):
    """Something did not come true; the message says what."""


class NotBegunError(StoryError):
    """There is no rehearsal to tell the story in."""


class Story:
    """Prints and runs one step after the other. environ: of the commands."""

    def __init__(self, *, environ: Mapping[str, str], say: Say) -> None:
        self.environ = dict(environ)
        self.say = say
        self._began = time.monotonic()

    def tell(self, text: str) -> None:
        """Print why the next step comes."""
        self.say(f"\n# {text}")

    def type(self, line: str) -> None:
        """Runs a command line as it is shown. Raises StoryError if it fails."""
        self.say(f"$ {line}")
        began = time.monotonic()
        try:
            done = subprocess.run(
                shlex.split(line), env=self.environ, stdin=subprocess.DEVNULL, timeout=COMMAND_LIMIT_S, check=False
            )  # fmt: skip
        except FileNotFoundError:
            raise StoryError(f"`{line}`: there is no such command; `make install` makes it") from None
        except subprocess.TimeoutExpired:
            raise StoryError(f"`{line}` has not ended after {COMMAND_LIMIT_S / 60:.0f} min") from None
        self.say(f"  ({time.monotonic() - began:.1f} s)")
        if done.returncode != 0:
            raise StoryError(f"`{line}` ended with exit code {done.returncode}, expected 0")

    def answer(self, line: str) -> str:
        """The output of a command, whether it succeeds or not."""
        done = subprocess.run(
            shlex.split(line), env=self.environ, stdin=subprocess.DEVNULL, timeout=COMMAND_LIMIT_S, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        return done.stdout

    def until_done(self, run: str) -> None:
        """Wait until a run is done. Raises StoryError after RECOVERY_LIMIT_S."""
        self._until(run, is_done, "done", RECOVERY_LIMIT_S, END_POLL_S)
        self.say("  … the run is done")

    def until_step(self, run: str, step: int, *, attempt: int = 0) -> None:
        """Wait until a run has reached a step in that attempt or a later one. Raises StoryError after the limit."""

        def is_there(status: str) -> bool:
            if has_ended(status):
                raise StoryError(f"the run {run} has ended before step {step}; status:\n{status}")
            return (step_in(status) or 0) >= step and attempt_in(status) >= attempt

        status = self._until(run, is_there, f"at step {step}", PROGRESS_LIMIT_S, POLL_S)
        self.say(f"  … the run is at step {step_in(status)}")

    def _until(
        self, run: str, holds: Callable[[str], bool], where: str, limit_s: float, poll_s: float
    ) -> str:
        """The first status of a run that `holds` is true of. Raises StoryError after the limit."""
        deadline = time.monotonic() + limit_s
        while not holds(status := self.answer(f"fab status --stack rehearsal {run}")):
            if time.monotonic() > deadline:
                keeper = self.answer("fab keeper status --stack rehearsal")
                raise StoryError(
                    f"the run {run} is not {where} after {limit_s:.0f} s; status:\n{status}\n{keeper}"
                )
            time.sleep(poll_s)
        return status


def step_in(status: str) -> int | None:
    """The step in the output of `fab status`; None if it has none."""
    match = re.search(r"\bstep (\d+)/", status)
    return int(match[1]) if match else None


def attempt_in(status: str) -> int:
    """The attempt in the output of `fab status`, from 0."""
    match = re.search(r"\battempt (\d+)", status)
    return int(match[1]) if match else 0


def has_ended(status: str) -> bool:
    """Whether `fab status` tells of a run that is over."""
    return re.match(r"\S+ +(done|failed|stopped|lost|hung|preempted)\b", status) is not None


def is_done(status: str) -> bool:
    """Whether `fab status` tells of a run that has got to its end."""
    return re.match(r"\S+ +done\b", status) is not None


def tell(story: Story, hosts: int, scratch: Path, *, provisioning: Provisioning = "queued") -> None:
    """The story. Raises StoryError."""
    is_compute = provisioning == "compute"
    api = "Compute Engine" if is_compute else "Cloud TPU API"
    story.tell(
        f"A cloud on this machine: a simulated {api}, the real Pulumi engine with the program of infra/, and"
        f" {hosts} containers as hosts, each with its own address, SSH server and host key."
    )
    try:
        option = f" --provisioning {provisioning}" if is_compute else ""
        story.type(f"fab rehearsal up --hosts {hosts} --keeper{option}")
    except StoryError as problem:
        raise NotBegunError(f"{problem}; what is missing is said above") from None

    story.tell("Prepare the hosts: what is there already is left as it is.")
    story.type("fab deploy --stack rehearsal")

    story.tell("Train on all hosts, undisturbed. Its losses are what the next run will be held against.")
    story.type(f"fab train --stack rehearsal --job flax_mlm --name {UNDISTURBED} --args {shlex.quote(JOB)}")

    story.tell("The same again, detached: from now on it needs neither this terminal nor this computer.")
    story.type(
        f"fab train --stack rehearsal --job flax_mlm --name {DISTURBED} --args {shlex.quote(JOB)} --detach"
    )

    story.tell(
        "In the middle of it one host loses power. All processes of a run stop with the first one that is lost."
    )
    story.until_step(DISTURBED, FIRST_ACCIDENT)
    story.type(f"fab rehearsal kill --host {hosts - 1}")
    story.type(f"fab status --stack rehearsal {DISTURBED}")

    story.tell("Mend it: wait for the host (Google starts it again), and go on from the last checkpoint.")
    story.type(f"fab recover --stack rehearsal {DISTURBED} --detach")

    story.tell(
        "Now Google takes the whole spot slice back. `fab recover` asks for the same again and goes on there."
    )
    story.until_step(DISTURBED, SECOND_ACCIDENT)
    story.type("fab rehearsal preempt")
    story.type(f"fab recover --stack rehearsal {DISTURBED}")

    story.tell(
        "Every step computes only from (seed, step) and the parameters: two accidents must have changed nothing."
    )
    compare(story, DISTURBED, scratch)

    story.tell(
        "The second act, with nobody there: the run is handed to the keeper on the gateway, which looks every few"
        " seconds here and every minute at Google. Its spot slice is taken back too."
    )
    story.type(
        f"fab train --stack rehearsal --job flax_mlm --name {BY_KEEPER} --args {shlex.quote(JOB)} --keep --detach"
    )
    story.until_step(BY_KEEPER, THIRD_ACCIDENT)
    story.type("fab rehearsal preempt")
    story.until_done(BY_KEEPER)
    story.type("fab keeper status --stack rehearsal")
    compare(story, BY_KEEPER, scratch)


def tell_on_cluster(story: Story, hosts: int, scratch: Path) -> None:
    """The story of the same runs on pods. Raises StoryError."""
    story.tell(
        "A Kubernetes cluster on this machine: its own API server, controllers, scheduler and DNS, and"
        f" {hosts} nodes with a kubelet over containerd. The nodes run pods of the image of this checkout."
    )
    try:
        story.type("fab build --framework jax --platform cpu")
        story.type(f"fab rehearsal up --kubernetes --hosts {hosts}")
    except StoryError as problem:
        raise NotBegunError(f"{problem}; what is missing is said above") from None

    story.tell("Train on all nodes, undisturbed. Its losses are what the next run will be held against.")
    story.type(
        f"fab train --stack rehearsal --job flax_mlm --name {UNDISTURBED} --args {shlex.quote(POD_JOB)}"
    )

    story.tell("The same again, detached. In the middle of it one pod's first process is killed.")
    story.type(
        f"fab train --stack rehearsal --job flax_mlm --name {DISTURBED} --args {shlex.quote(POD_JOB)} --detach"
    )
    story.until_step(DISTURBED, FIRST_OF_PODS)
    story.type(f"fab rehearsal kill-pod --host {hosts - 1}")

    story.tell(
        "The Job makes the pod again, and the run goes on from its last checkpoint. Now a node is drained, as for an"
        " upgrade, and comes back: the pod on it writes a checkpoint before it leaves."
    )
    story.until_step(DISTURBED, SECOND_OF_PODS, attempt=1)
    story.type("fab rehearsal drain --host 0")
    story.type("fab rehearsal node-back --host 0")
    story.until_done(DISTURBED)
    line = f"fab status --stack rehearsal {DISTURBED}"
    status = story.answer(line)
    story.say(f"$ {line}\n{status.rstrip()}")
    if attempt_in(status) < 2:
        raise StoryError(f"the run was to be started again twice; status:\n{status}")

    story.tell(
        "Every step computes only from (seed, step) and the parameters: two accidents must have changed nothing."
    )
    compare(story, DISTURBED, scratch, fetch_from_bucket, steps=POD_STEPS)


def fetch_by_host(story: Story, run_id: str, target: Path) -> None:
    """The metrics of a run, from the share through a host. Raises StoryError."""
    story.type(f"fab get --stack rehearsal --hosts 0 {RUNS}/{run_id}/metrics.jsonl {target}")


def fetch_from_bucket(story: Story, run_id: str, target: Path) -> None:
    """Raises StoryError."""
    opened = state.open_rehearsal(story.environ)
    bucket = str(json.loads(opened.inventory_json)["storage"]["bucket_url"]).removeprefix("gs://")
    name = urllib.parse.quote(f"runs/{run_id}/metrics.jsonl", safe="")
    server = opened.environment["STORAGE_EMULATOR_HOST"]
    url = f"{server}/download/storage/v1/b/{bucket}/o/{name}?alt=media"
    story.say(f"$ curl --output {target} {shlex.quote(url)}")
    try:
        target.write_bytes(ask("GET", url, limit_s=FETCH_LIMIT_S))
    except (OSError, RefusalError) as error:
        raise StoryError(f"{url}: {error}") from None


def compare(
    story: Story,
    disturbed: str,
    scratch: Path,
    fetch: Callable[[Story, str, Path], None] = fetch_by_host,
    *,
    steps: int = STEPS,
) -> None:
    """Compares the losses of a run with the undisturbed one's. Raises StoryError where they differ."""
    losses, listing = {}, story.answer("fab runs --stack rehearsal --all")
    for name in (UNDISTURBED, disturbed):
        metrics = scratch / f"{name}.jsonl"
        if not metrics.exists():
            fetch(story, run_id_in(listing, name), metrics)
        losses[name] = read_losses(metrics)
    equal, lines = compare_losses(losses[UNDISTURBED], losses[disturbed], name=disturbed, steps=steps)
    for line in lines:
        story.say(f"  {line}")
    if not equal:
        raise StoryError(f"the losses of the {disturbed} run are not those of the undisturbed one")


def run_id_in(listing: str, name: str) -> str:
    """The id of the run of that name, from the output of `fab runs`. Raises StoryError."""
    for line in listing.splitlines():
        fields = line.split()
        if fields[1:2] == [name]:
            return fields[0]
    raise StoryError(f"`fab runs` lists no run called {name}:\n{listing}")


def read_losses(metrics: Path) -> dict[int, float]:
    """Step → loss. Of a step that was computed twice, before and after a fault, the last loss counts."""
    losses = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "loss" in entry:
            losses[int(entry["step"])] = float(entry["loss"])
    return losses


def compare_losses(
    reference: Mapping[int, float], losses: Mapping[int, float], *, name: str, steps: int
) -> tuple[bool, list[str]]:
    """Whether both are the same curve, all the way to the last step, and lines that say so, the last one in words.

    reference: of the undisturbed run. name: of the other one."""
    common = sorted(reference.keys() & losses.keys())
    differences = {
        step: abs(reference[step] - losses[step]) / max(abs(reference[step]), 1e-12) for step in common
    }
    is_complete = reference.keys() == losses.keys() and bool(common) and common[-1] == steps
    # max() would pass over what is no number.
    worst = (
        max(differences.values(), default=math.inf)
        if all(map(math.isfinite, differences.values()))
        else math.inf
    )
    shown = common[:: max(1, len(common) // SHOWN)]
    table = [f"   step {UNDISTURBED:>12} {name:>12}"]
    table += [f"{step:7d} {reference[step]:12.6f} {losses[step]:12.6f}" for step in shown]
    if not is_complete:
        unmatched = ", ".join(map(str, sorted(reference.keys() ^ losses.keys())[:SHOWN])) or "none"
        verdict = (
            f"not the same steps: {len(reference)} and {len(losses)} were logged, {steps} expected; only in one: "
            f"{unmatched}"
        )
    elif worst == 0:
        verdict = f"all {len(common)} losses are equal to the last digit"
    else:
        verdict = (
            f"{len(common)} losses, apart by at most {worst:.1e} of their value ({TOLERANCE:.0e} is allowed)"
        )
    return is_complete and worst <= TOLERANCE, [*table, verdict]


def take_down(story: Story, folder: Path, name: str) -> None:
    """Whatever has happened. Raises StoryError where something is left."""
    story.tell("Take everything down, and see that nothing is left.")
    story.type("fab rehearsal down")
    if left := what_is_left(name, folder):
        raise StoryError(f"something is left: {', '.join(left)}")
    story.say("  left: no container, no network, no volume, no file")


def what_is_left(name: str, folder: Path) -> list[str]:
    """What a rehearsal has left: containers, networks, volumes and its folder. Raises StoryError if Docker fails."""
    try:
        with contextlib.closing(docker_engine.connect()) as client:
            leftovers = [item_name for _, item_name in guardian.left(client, name)]
    except MachinesError as error:
        raise StoryError(f"what is left cannot be seen: {error}") from None
    return [*leftovers, *([str(folder)] if folder.exists() else [])]


def rehearse(
    hosts: int,
    environ: Mapping[str, str],
    say: Say,
    *,
    kubernetes: bool = False,
    provisioning: Provisioning = "queued",
) -> int:
    """Returns the exit code. kubernetes: whether the hosts are nodes of a cluster. provisioning: if they are not."""
    with tempfile.TemporaryDirectory(prefix="tpu-stack-rehearse-") as scratch:
        folder = Path(scratch) / "rehearsal"
        story = Story(environ=environment(environ, folder), say=say)
        say(f"To watch from another terminal: export {state.FOLDER_VARIABLE}={folder}")
        code, began = 1, time.monotonic()
        try:
            if kubernetes:
                tell_on_cluster(story, hosts, Path(scratch))
            else:
                tell(story, hosts, Path(scratch), provisioning=provisioning)
            code = 0
        except StoryError as problem:
            say(f"\nnot as it should be: {problem}")
            code = 2 if isinstance(problem, NotBegunError) else 1
        except KeyboardInterrupt:
            say("\ninterrupted")
            code = 130
        try:
            take_down(story, folder, state.rehearsal_name(folder))
        except StoryError as problem:
            say(f"\nnot as it should be: {problem}")
            code = code or 1
        if code == 0:
            say(f"\nAll of it came true, in {(time.monotonic() - began) / 60:.1f} min.")
        return code


def environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The commands' environment: a rehearsal of their own that ends with this process, and this checkout's `fab`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    return {
        **environ,
        state.FOLDER_VARIABLE: str(folder),
        OWNER_VARIABLE: str(os.getpid()),
        "PATH": path,
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "160",  # tables would shorten run ids to fit 80
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rehearsal.rehearse", description="The whole path, rehearsed."
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--kubernetes", action="store_true", help="on a cluster of real Kubernetes")
    parser.add_argument(
        "--provisioning", choices=get_args(Provisioning), default="queued", help="what makes the slice"
    )
    options = parser.parse_args(arguments)
    with contextlib.suppress(BrokenPipeError):
        return rehearse(
            options.hosts,
            os.environ,
            lambda line: print(line, flush=True),
            kubernetes=options.kubernetes,
            provisioning=options.provisioning,
        )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
