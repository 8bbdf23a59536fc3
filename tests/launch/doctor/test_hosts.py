"""The hosts, as `fab doctor` tells of them: a host at work is not ill, a silent one hides no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from launch.doctor import slice_hosts
from launch.doctor.check import Said
from launch.hosts import Agent
from tests.launch.slices import IMAGES, make_target

MakeAgent = Callable[..., Agent]
HELD = {"name": "device", "ok": False, "message": "/dev/accel0 is held by pid 7", "remedy": "end it"}
FINE = {"name": "python", "ok": True, "message": "Python 3.12", "remedy": None}


def agent_with(
    make_agent: MakeAgent,
    host: str,
    *,
    running: str | None = None,
    kernel: str = "6.1",
    checks: Any = (FINE,),
) -> Agent:
    def answer(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        if verb == "status":
            return {"processes": [{"state": "running", "run_id": running}] if running else []}
        if verb == "preflight":
            return {"checks": list(checks), "facts": {"kernel": kernel, "docker": False}}
        return {"names": []}

    return make_agent(answer, host=host)


def silent(make_agent: MakeAgent, host: str) -> Agent:
    return make_agent(
        lambda verb, request: {"ok": False, "error": {"message": "timed out", "remedy": "look"}}, host=host
    )


def of(said: list[Said], name: str) -> list[tuple[str | None, str, str]]:
    return [(each.host, each.state, each.message) for each in said if each.name == name]


def test_every_host_is_asked_and_a_silent_one_hides_no_other(make_agent: MakeAgent) -> None:
    target = make_target(
        [agent_with(make_agent, "w-0"), silent(make_agent, "w-1"), agent_with(make_agent, "w-2")]
    )
    said = slice_hosts.reached(target, [0, 1, 2])
    assert [(each.host, each.state) for each in said] == [("w-0", "ok"), ("w-1", "fail"), ("w-2", "ok")]
    assert said[1].message == "timed out (through IAP)" and said[1].remedy == "look"
    found = slice_hosts.preflight(target, "jax")
    assert of(found, "preflight") == [("w-1", "fail", "timed out")]
    assert [host for host, _, _ in of(found, "python")] == ["w-0", "w-2"]


def test_a_device_that_a_strange_process_holds_is_a_failure_and_one_of_a_run_of_ours_is_not(
    make_agent: MakeAgent,
) -> None:
    run = "flax_mlm-20261120-214500-abcd"
    target = make_target(
        [
            agent_with(make_agent, "w-0", checks=(HELD,)),
            agent_with(make_agent, "w-1", checks=(HELD,), running=run),
        ]
    )
    strange, ours = [each for each in slice_hosts.preflight(target, "jax") if each.name == "device"]
    assert (strange.state, strange.remedy) == ("fail", "end it")
    assert (ours.state, ours.remedy) == ("warn", f"`fab stop --run {run}`")


def test_hosts_of_one_slice_that_are_not_alike_are_named(make_agent: MakeAgent) -> None:
    target = make_target([agent_with(make_agent, "w-0"), agent_with(make_agent, "w-1", kernel="5.15")])
    ((_, state, message),) = of(slice_hosts.preflight(target, "jax"), "kernel")
    assert state == "warn" and message == "not the same on all hosts: 6.1 on w-0; 5.15 on w-1"


def test_a_stack_with_images_of_other_frameworks_wants_docker_on_its_hosts_too(make_agent: MakeAgent) -> None:
    target = make_target([agent_with(make_agent, "w-0")])
    inventory = dataclasses.replace(target.inventory, images={"pytorch": IMAGES["jax"]})
    other = dataclasses.replace(target, inventory=inventory)
    assert [state for _, state, _ in of(slice_hosts.preflight(other, "jax"), "docker")] == ["warn"]


def test_the_hosts_of_a_stack_with_an_image_are_asked_for_it(make_agent: MakeAgent) -> None:
    plan = slice_hosts.asked(make_target([agent_with(make_agent, "w-0")]), "jax")
    assert plan.container is not None
    assert plan.container.image == IMAGES["jax"]


def test_a_slice_of_tpus_has_the_peak_that_the_catalogue_gives_it(make_agent: MakeAgent) -> None:
    agents = [agent_with(make_agent, f"w-{index}") for index in range(4)]
    assert slice_hosts.asked(make_target(agents), "jax").peak_flops_per_s == 16 * 197_000_000_000_000
    assert slice_hosts.asked(make_target(agents, platform="cpu"), "jax").peak_flops_per_s is None
