"""Idle slices: when one was last used, and that commands name it without asking anybody as long as it is not idle."""

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from backends.local.local_backend import on_this_machine
from console import idle
from contracts.inventory import NodePool
from launch import runs
from launch.runs import Run
from launch.targets import Target
from tests.launch.slices import ssh_backend
from tests.launch.test_pricing import MAIN

HOUR_S = 3600.0
STARTED_S = runs.parse_time("2020-11-20T21:45:00Z")


@pytest.mark.parametrize(
    ("slice_name", "written", "last_s"),
    [
        ("main", {}, STARTED_S),
        ("main", {"result": {"outcome": "done", "time": STARTED_S + 60}}, STARTED_S + 60),
        ("main", {"beats": ["joined", None]}, STARTED_S + 30),
        ("other", {"result": {"outcome": "done", "time": STARTED_S + 60}}, STARTED_S - 10 * HOUR_S),
    ],
)
def test_a_slice_was_last_used_when_a_run_on_it_last_said_something(
    write_run: Callable[..., Run],
    beat: Callable[..., Any],
    slice_name: str,
    written: dict[str, Any],
    last_s: float,
) -> None:
    beats = [state and beat(state, time=STARTED_S + 30) for state in written.pop("beats", ())]
    run = write_run(slice={"name": slice_name}, beats=beats, **written)
    made = dataclasses.replace(MAIN, created="2020-11-20T11:45:00Z")
    assert idle.used_s(made, [run]) == last_s
    assert idle.used_s(dataclasses.replace(made, hosts=()), [run]) is None
    pool = NodePool(machine_type="ct5lp-hightpu-4t", accelerator="a", nodes=2)
    stays = dataclasses.replace(made, hosts=(), created="", pool=pool)
    assert idle.used_s(stays, [run]) == (last_s if slice_name == "main" else 0.0)
    assert idle.used_s(stays, []) == 0.0, "when it was made is not known"
    goes = dataclasses.replace(stays, pool=dataclasses.replace(pool, scales_to_zero=True))
    assert idle.used_s(goes, [run]) is None
    assert idle.used_s(dataclasses.replace(made, created=""), [run]) is None


def test_commands_name_an_idle_slice_and_ask_nobody_while_it_is_not(
    write_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[runs.RunsFolder] = []
    real = runs.list_runs

    def list_runs(folder: runs.RunsFolder) -> list[Run]:
        asked.append(folder)
        return real(folder)

    monkeypatch.setattr(runs, "list_runs", list_runs)

    def stack(hours_ago: float, **changed: Any) -> Target:
        here = on_this_machine(hosts="1", platform="cpu")
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - hours_ago * HOUR_S))
        inventory = dataclasses.replace(
            here.inventory, slices=(dataclasses.replace(MAIN, created=moment),), **changed
        )
        return dataclasses.replace(here, name="my/stack", backend=ssh_backend(), inventory=inventory)

    assert not [*idle.remarks(stack(3))] and not asked
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 2 * HOUR_S + 30))
    ending = stack(3)
    (main,) = ending.inventory.slices
    ends = dataclasses.replace(main, capacity="flex-start", ends_at=soon)
    ending = dataclasses.replace(ending, inventory=dataclasses.replace(ending.inventory, slices=(ends,)))
    (line,) = idle.remarks(ending)
    assert line.startswith("the slice main (flex-start) is taken back in 2 h")
    (line,) = idle.remarks(stack(5))
    assert line == (
        "the slice main has had no run for 5 h: 3.92 USD an hour at list prices, less what a grant covers "
        "(spot, us-central1-a); `tpu-stack:slices: []` and `pulumi up` give it back"
    )
    assert not [*idle.remarks(stack(5, idle_hours=6.0))]
    (line,) = idle.remarks(stack(5, idle_hours=0.5, has_keeper=True))
    assert line.endswith("; its keeper gives it back unless a program has a TPU open")
    assert len(asked) == 2

    # A run just now: it is looked for once, and then known for as long as the slice is not idle again.
    write_run(slice={"name": "main"}, result={"outcome": "done", "time": time.time() - HOUR_S})
    assert not [*idle.remarks(stack(5))] and len(asked) == 3
    assert not [*idle.remarks(stack(5))] and len(asked) == 3

    # Node pools that stay: idle from the first look on, or from the last run; none was made at a known time.
    pool = NodePool(machine_type="ct5lp-hightpu-4t", accelerator="a", nodes=2)
    pools = stack(5)
    slices = (dataclasses.replace(MAIN, name="pool", hosts=(), pool=pool),)
    pools = dataclasses.replace(pools, inventory=dataclasses.replace(pools.inventory, slices=slices))
    assert not [*idle.remarks(pools)]
    idle._memory(pools).write_text(json.dumps({"pool": time.time() - 6 * HOUR_S}))
    (line,) = idle.remarks(pools)
    assert line.startswith("the slice pool has had no run for 6 h")
    write_run(slice={"name": "pool"}, result={"outcome": "done", "time": time.time() - 5 * HOUR_S})
    (line,) = idle.remarks(pools)
    assert line.startswith("the slice pool has had no run for 5 h") and "`scale-to-zero: true`" in line

    # Runs that cannot be read are no reason to say anything.
    def fails(folder: runs.RunsFolder) -> list[Run]:
        raise OSError("no such disk")

    monkeypatch.setattr(runs, "list_runs", fails)
    assert not [*idle.remarks(stack(5, idle_hours=0.5))]
