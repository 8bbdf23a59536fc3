"""The checks of every image, in order, and what a framework's own `smoke.py` holds for them.

A check prints its steps, returns a short finding, and raises where something is wrong. Each runs in a process of its
own, so nothing is kept from one to the next but what `save` wrote; and a TPU, which belongs to one process at a time,
is free again.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from . import lock

type Platform = Literal["cpu", "tpu"]

LOCK = Path(__file__).parent.parent / "requirements.txt"
COMMON_MODULES = (
    "numpy", "tokenizers", "msgpack", "fsspec", "gcsfs", "etils.epath", "filelock", "tyro",
    "tensorboard.summary.writer.event_file_writer", "psutil", "google_crc32c", "grpc",
    "google.protobuf.unknown_fields", "starlette", "uvicorn", "h11", "prometheus_client",
)  # fmt: skip
"""What jobs and their runtime import, whatever their framework."""
STEPS, RESUMED_STEPS = 8, 3
"""A checkpoint is good when the steps after it have the losses that they have without it."""
SAME_LOSS: Mapping[Platform, float] = {"cpu": 1e-6, "tpu": 1e-3}
"""Relative. The same program twice on the same data; on a TPU another layout may round otherwise."""
DEVICE_NODES = ("/dev/accel*", "/dev/vfio/[0-9]*")
TINI = "tini"
RESUME_ME = 75
"""The exit code of a job that has saved and wants to go on (EX_TEMPFAIL of sysexits.h)."""
PASSED_ON_LIMIT_S, STEPPING_LIMIT_S, SAVED_LIMIT_S, JOB_LIMIT_S = 10, 300, 120, 600
"""For SIGTERM to come from process 1; for the first step; for the checkpoint; for a job that nobody ends."""
STEPPING, SAVED = "stepping", "saved"


class CheckFailed(Exception):
    """The image does not do what it is for; the message names what was found, what has to be, and the remedy."""


class Framework(Protocol):
    """A framework's `smoke.py`: a small model of it, and what only this framework has to prove.

    The file imports nothing of its framework at its top, and nothing of this folder; its functions do.

    NAME: the folder's name. MODULES: what must import besides COMMON_MODULES, in the order in which a job imports it.
    ENVIRONMENT: variables of a process on each platform, as jobs.runtime sets them. CHECKS: what else has to work; each
    returns its finding, and raises where it does not.
    """

    NAME: str
    MODULES: tuple[str, ...]
    ENVIRONMENT: Mapping[Platform, Mapping[str, str]]
    CHECKS: Mapping[str, Callable[[], str]]

    def devices(self) -> tuple[str, str]:
        """The platform that the framework computes on when nothing is said (cpu, tpu), and its devices in words."""

    def start(self) -> Any:
        """A small model and its optimizer with parameters by a fixed seed, on the device: the state of a training."""

    def step(self, state: Any, number: int) -> tuple[Any, float]:
        """One training step on data that is a function of `number`; the new state and its loss."""

    def save(self, state: Any, folder: Path) -> None:
        """A checkpoint in the framework's own format, complete on return. `folder` is there and empty."""

    def load(self, folder: Path) -> Any:
        """What `save` wrote, in a process that has started nothing yet."""

    def listen(self) -> Callable[[int], bool]:
        """Answer SIGTERM as a job of this framework does: the function says after a step whether to save and leave."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What a check is given. folder: empty, writable, its own."""

    framework: Framework
    platform: Platform
    folder: Path


def entry_point() -> str:
    """Process 1 is tini and hands SIGTERM on to the Python that it started: that is what `docker stop` sends."""
    first = Path("/proc/1/comm").read_text(encoding="utf-8").strip()
    if first != TINI or os.getppid() != 1:
        raise CheckFailed(
            f"the container's process 1 is {first!r}; it has to be {TINI}, which hands signals on to this program and"
            " reaps: run the image with its own entry point, and without --pid and --init"
        )
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        os.kill(1, signal.SIGTERM)
        arrived = signal.sigtimedwait({signal.SIGTERM}, PASSED_ON_LIMIT_S)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if arrived is None:
        raise CheckFailed(
            f"SIGTERM to process 1 did not arrive in {PASSED_ON_LIMIT_S} s: `docker stop` would end in SIGKILL"
        )
    return f"{TINI} is process 1, and SIGTERM to it arrives here"


def hardware() -> str:
    """This container has been handed a TPU. Asked first: frameworks wait minutes for a TPU that is not there."""
    nodes = sorted(node for pattern in DEVICE_NODES for node in glob.glob(pattern))
    if not nodes:
        raise CheckFailed(
            f"--platform is tpu, but this container has no file like {' or '.join(DEVICE_NODES)}; run it on a TPU host"
            " with the devices (--device /dev/vfio --ulimit memlock=-1 --network host), or ask for --platform cpu"
        )
    return ", ".join(nodes)


def locked(_: Case) -> str:
    """Exactly the packages of the lock are installed, each in the lock's version."""
    lock_versions = lock.read(LOCK.read_text(encoding="utf-8"))
    wrong = lock.differences(lock_versions, lock.installed())
    if wrong:
        raise CheckFailed(
            f"{len(wrong)} packages are not as {LOCK.name} says: {'; '.join(wrong)}; build the image again, and install"
            " nothing into it but from the lock"
        )
    return f"{len(lock_versions)} packages, each in its version, no other"


def imports(case: Case) -> str:
    """All modules import, in one process as in a job."""
    names = (*case.framework.MODULES, *COMMON_MODULES)
    for name in names:
        print(f"import {name}", flush=True)
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a package does when it is imported
            raise CheckFailed(
                f"`import {name}` raised {type(error).__name__}: {error}; it is missing in "
                f"images/{case.framework.NAME}/requirements.in, or its version there does not go with the others"
            ) from error
    return f"{len(names)} modules from {names[0]} to {names[-1]}"


def device(case: Case) -> str:
    """The framework computes on the platform that was asked for; it may not fall back to another."""
    platform, description = case.framework.devices()
    if platform != case.platform:
        remedy = "it found a device that this image is not for; run the image of that platform"
        if case.platform == "tpu":
            remedy = (
                "the devices are there, so the framework and libtpu do not go together, the TPU VM's runtime version is"
                " for another generation, or another process holds the chips (`fuser -v /dev/vfio/* /dev/accel*` on the"
                " host)"
            )
        raise CheckFailed(
            f"--platform is {case.platform}, but {case.framework.NAME} computes on {platform} ({description}): {remedy}"
        )
    return description


def train(case: Case) -> str:
    """A few steps: every loss is a number and the last is below the first."""
    _, losses = run(case, case.framework.start(), range(STEPS))
    shown = [f"{loss:.4g}" for loss in losses]
    if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        raise CheckFailed(
            f"over {STEPS} steps the loss is {', '.join(shown)}; it has to fall and be finite: a version in the lock"
            " computes wrongly"
        )
    return f"{STEPS} steps, loss {shown[0]} → {shown[-1]}"


def checkpoint(case: Case) -> str:
    """After saving and loading, training continues with the same losses."""
    half = STEPS // 2
    resumed_steps = range(half, half + RESUMED_STEPS)
    state, _ = run(case, case.framework.start(), range(half))
    print("save a checkpoint", flush=True)
    case.framework.save(state, case.folder)
    _, straight = run(case, state, resumed_steps)
    print("load the checkpoint", flush=True)
    _, resumed = run(case, case.framework.load(case.folder), resumed_steps)
    allowed = SAME_LOSS[case.platform]
    if not all(math.isclose(*both, rel_tol=allowed) for both in zip(straight, resumed, strict=True)):
        raise CheckFailed(
            f"after the checkpoint the losses are {resumed}, without it {straight}: what is saved is not all that a"
            " step needs, or it is not read as it was written"
        )
    sizes = [path.stat().st_size for path in case.folder.rglob("*") if path.is_file()]
    return f"{len(sizes)} files, {sum(sizes) / 1024:.0f} KiB; the next {RESUMED_STEPS} losses are the same"


def run(case: Case, state: Any, numbers: range) -> tuple[Any, list[float]]:
    """Run steps one after the other. Returns the state and the losses."""
    losses = []
    for number in numbers:
        print(f"step {number}", flush=True)
        state, loss = case.framework.step(state, number)
        losses.append(float(loss))
    return state, losses


def saved_and_left(case: Case) -> str:
    """A process that trains like a job's gets SIGTERM, saves after its step and exits with 75."""
    print("start a process that trains until it is stopped", flush=True)
    command = [sys.executable, str(Path(__file__).parent), "--platform", case.platform]
    process = subprocess.Popen([*command, "--train-in", str(case.folder)], stdin=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + STEPPING_LIMIT_S
        while not (case.folder / STEPPING).exists():
            if process.poll() is not None:
                raise CheckFailed(
                    f"a process that trains ended with {process.returncode} before its first step"
                )
            if time.monotonic() > deadline_s:
                raise CheckFailed(
                    f"a process that trains is not at its first step after {STEPPING_LIMIT_S} s"
                )
            time.sleep(0.05)
        print("send it SIGTERM and wait until it has saved", flush=True)
        sent_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=SAVED_LIMIT_S)
        took_s = time.monotonic() - sent_s
    except subprocess.TimeoutExpired:
        raise CheckFailed(
            f"a process that trains does not leave within {SAVED_LIMIT_S} s of SIGTERM: the framework swallows the"
            " signal or cannot save"
        ) from None
    finally:
        process.kill()
        process.wait()
    if code != RESUME_ME:
        raise CheckFailed(
            f"a process that trains was sent SIGTERM and exited with {code}; it has to save and exit with {RESUME_ME}"
        )
    print("load what it saved", flush=True)
    case.framework.step(case.framework.load(case.folder / SAVED), 0)
    return f"saved and left with {RESUME_ME} in {took_s:.1f} s, and was loaded again"


def train_until_told(framework: Framework, folder: Path) -> int:
    """In the process of `saved_and_left`: train until SIGTERM. Returns the exit code."""
    is_stop_requested = framework.listen()
    state = framework.start()
    until_s, number = time.monotonic() + JOB_LIMIT_S, 0
    while time.monotonic() < until_s:
        state, _ = framework.step(state, number)
        (folder / STEPPING).touch()
        if is_stop_requested(number):
            (folder / SAVED).mkdir()
            framework.save(state, folder / SAVED)
            return RESUME_ME
        number += 1
    print(f"nobody sent SIGTERM in {JOB_LIMIT_S} s", file=sys.stderr, flush=True)
    return 1


SHARED: Mapping[str, Callable[[Case], str]] = {
    "lock": locked,
    "imports": imports,
    "device": device,
    "train": train,
    "checkpoint": checkpoint,
    "signals": saved_and_left,
}
