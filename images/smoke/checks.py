"""The checks of every image, in order. Each function returns a short finding or raises CheckFailed."""

from __future__ import annotations

import glob
import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from . import lock, signals
from .contract import Case, CheckFailed, Platform, State

LOCK = Path(__file__).parent.parent / "requirements.txt"
STEPS = 8
RESUMED_STEPS = 3
"""A checkpoint is good when the steps after it have the losses that they have without it."""
SAME_LOSS = {"cpu": 1e-6, "tpu": 1e-3}
"""Relative. The same program twice on the same data; on a TPU another layout may round otherwise."""
DEVICE = "device"
DEVICE_NODES = ("/dev/accel*", "/dev/vfio/[0-9]*")


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
    """All of the framework's modules import, in one process as in a job."""
    for name in case.framework.MODULES:
        case.doing(f"import {name}")
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a package does when it is imported
            raise CheckFailed(
                f"`import {name}` raised {type(error).__name__}: {error}; it is missing in "
                f"images/{case.framework.NAME}/requirements.in, or its version there does not go with the others"
            ) from error
    return f"{len(case.framework.MODULES)} modules from {case.framework.MODULES[0]} to {case.framework.MODULES[-1]}"


def device(case: Case) -> str:
    """The framework computes on the platform that was asked for; it may not fall back to another."""
    platform, description = case.framework.devices()
    if platform != case.platform:
        raise CheckFailed(
            f"--platform is {case.platform}, but {case.framework.NAME} computes on {platform} ({description}):"
            f" {remedy(case.platform)}"
        )
    return description


def hardware() -> str:
    """This container has been handed a TPU. Asked first: frameworks wait minutes for a TPU that is not there."""
    nodes = sorted(node for pattern in DEVICE_NODES for node in glob.glob(pattern))
    if not nodes:
        raise CheckFailed(
            f"--platform is tpu, but this container has no file like {' or '.join(DEVICE_NODES)}; run it on a TPU host"
            " with the devices (--device /dev/vfio --ulimit memlock=-1 --network host), or ask for --platform cpu"
        )
    return ", ".join(nodes)


def remedy(platform: Platform) -> str:
    """Why a framework may compute elsewhere than it should, for a person who has this machine before them."""
    if platform == "cpu":
        return "it found a device that this image is not for; run the image of that platform"
    return (
        "the devices are there, so the framework and libtpu do not go together, the TPU VM's runtime version is for"
        " another generation, or another process holds the chips (`fuser -v /dev/vfio/* /dev/accel*` on the host)"
    )


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
    case.doing("save a checkpoint")
    case.framework.save(state, case.folder)
    _, straight = run(case, state, resumed_steps)
    case.doing("load the checkpoint")
    _, resumed = run(case, case.framework.load(case.folder), resumed_steps)
    allowed = SAME_LOSS[case.platform]
    if not all(
        math.isclose(loss, resumed_loss, rel_tol=allowed)
        for loss, resumed_loss in zip(straight, resumed, strict=True)
    ):
        raise CheckFailed(
            f"after the checkpoint the losses are {resumed}, without it {straight}: what is saved is not all that a"
            " step needs, or it is not read as it was written"
        )
    files = [path for path in case.folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return f"{len(files)} files, {size / 1024:.0f} KiB; the next {len(resumed_steps)} losses are the same"


def run(case: Case, state: State, numbers: range) -> tuple[State, list[float]]:
    """Run steps one after the other. Returns the state and the losses."""
    losses = []
    for number in numbers:
        case.doing(f"step {number}")
        state, loss = case.framework.step(state, number)
        losses.append(float(loss))
    return state, losses


SHARED: Mapping[str, Callable[[Case], str]] = {
    "lock": locked,
    "imports": imports,
    DEVICE: device,
    "train": train,
    "checkpoint": checkpoint,
    "signals": signals.saved_and_left,
}
