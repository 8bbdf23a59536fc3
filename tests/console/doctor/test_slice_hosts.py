"""The slice and its hosts, as `fab doctor` tells of them: a host at work is not ill, a silent one hides no other."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from backends.local.processes import LocalTransport
from console.doctor import slice_hosts
from console.doctor.check import Finding
from console.doctor.workstation import Answer
from contracts.files import DiskFiles
from contracts.inventory import Inventory, Slice
from launch.hosts import Agent
from tests.launch.slices import IMAGES, MakeAgent, make_target

HELD = {"name": "device", "ok": False, "message": "/dev/accel0 is held by pid 7", "remedy": "end it"}
FINE = {"name": "python", "ok": True, "message": "Python 3.12", "remedy": None}


# --- what is known before a host is asked -------------------------------------------------------------------------


@pytest.fixture
def stack(make_agent: MakeAgent) -> tuple[Inventory, Slice]:
    target = make_target([make_agent(lambda verb, request: {})] * 4)
    return target.inventory, dataclasses.replace(target.slice, zone="europe-west4-b")


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ("ACTIVE\n", "ok"),
        ("SUSPENDED\n", "fail"),
        ("FAILED", "fail"),
        ("WAITING_FOR_RESOURCES", "warn"),
        ("", "warn"),
        (Answer(exit_code=1, stderr="ERROR: NOT_FOUND: no such thing"), "fail"),
        (Answer(exit_code=1, stderr="ERROR: no credentials"), "warn"),
        (Answer(exit_code=None), "skip"),
    ],
)
def test_a_slice_that_is_gone_or_suspended_is_a_failure_and_one_that_waits_is_not(
    stack: tuple[Inventory, Slice], answer: Answer | str, state: str
) -> None:
    def ask(argv: object) -> Answer:
        assert isinstance(argv, list)
        assert argv[1:8] == [
            *("compute", "tpus", "queued-resources", "describe", "q"),
            *("--zone=europe-west4-b", "--project=p"),
        ]
        return Answer(exit_code=0, stdout=answer) if isinstance(answer, str) else answer

    said = slice_hosts.request_state(ask, "p", stack[1])
    assert said.state == state
    assert state != "fail" or "fab recover" in said.remedy


def test_a_stack_whose_parts_are_all_in_one_region_is_well(stack: tuple[Inventory, Slice]) -> None:
    said = [*slice_hosts.slice_in_use(*stack), *slice_hosts.regions(*stack)]
    assert {each.state for each in said} == {"ok"}
    assert any("USD an hour" in each.message for each in said)


@pytest.mark.parametrize(
    ("region", "image", "states", "words"),
    [
        ("US-CENTRAL1", IMAGES["jax"], ["warn", "ok"], "in us-central1, the TPUs"),
        ("EU", IMAGES["jax"], ["warn", "ok"], "in the multi-region eu"),
        ("europe-west4", "us-docker.pkg.dev/p/r/jax:latest", ["ok", "warn", "warn"], "is named by a tag"),
    ],
)
def test_a_bucket_or_an_image_elsewhere_is_told_of_with_what_it_costs(
    stack: tuple[Inventory, Slice], region: str, image: str, states: list[str], words: str
) -> None:
    inventory, one_slice = stack
    storage = dataclasses.replace(inventory.storage, bucket_region=region)
    found = slice_hosts.regions(
        dataclasses.replace(inventory, storage=storage, images={"jax": image}), one_slice
    )
    assert [each.state for each in found] == states
    assert any(words in each.message for each in found)
    assert any("billed" in each.remedy for each in found)


def test_hosts_that_are_missing_or_have_no_key_are_told_of(stack: tuple[Inventory, Slice]) -> None:
    inventory, one_slice = stack
    first, second, *_ = one_slice.hosts
    few = dataclasses.replace(one_slice, hosts=(dataclasses.replace(first, host_keys=()), second))
    messages = [each.message for each in slice_hosts.slice_in_use(inventory, few) if each.state == "warn"]
    assert messages[0] == "v5litepod-16 has 4 hosts, the inventory has 2"
    assert messages[1].startswith("no host key is known of host 0")


# --- what the hosts say -------------------------------------------------------------------------------------------


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


def of(said: list[Finding], name: str) -> list[tuple[str | None, str, str]]:
    return [(each.host, each.state, each.message) for each in said if each.name == name]


def test_every_host_is_asked_and_a_silent_one_hides_no_other(make_agent: MakeAgent) -> None:
    timed_out = {"ok": False, "error": {"message": "timed out", "remedy": "look"}}
    silent = make_agent(lambda verb, request: timed_out, host="w-1")
    target = make_target([agent_with(make_agent, "w-0"), silent, agent_with(make_agent, "w-2")])
    said = slice_hosts.reached(target, [0, 1, 2])
    assert [(each.host, each.state) for each in said] == [("w-0", "ok"), ("w-1", "fail"), ("w-2", "ok")]
    assert said[1].message == "timed out (through IAP)" and said[1].remedy == "look"
    found = slice_hosts.preflight(target)
    assert of(found, "preflight") == [("w-1", "fail", "timed out")]
    assert [host for host, _, _ in of(found, "python")] == ["w-0", "w-2"]


def test_a_device_that_a_strange_process_holds_is_a_failure_and_one_of_a_run_of_ours_is_not(
    make_agent: MakeAgent,
) -> None:
    run = "flax_mlm-20261120-214500-abcd"
    idle = agent_with(make_agent, "w-0", checks=(HELD,))
    at_work = agent_with(make_agent, "w-1", checks=(HELD,), running=run)
    found = slice_hosts.preflight(make_target([idle, at_work]))
    strange, ours = [each for each in found if each.name == "device"]
    assert (strange.state, strange.remedy) == ("fail", "end it")
    assert (ours.state, ours.remedy) == ("warn", f"`fab stop {run}`")


def test_hosts_of_one_slice_that_are_not_alike_are_named(make_agent: MakeAgent) -> None:
    target = make_target([agent_with(make_agent, "w-0"), agent_with(make_agent, "w-1", kernel="5.15")])
    ((_, state, message),) = of(slice_hosts.preflight(target), "kernel")
    assert state == "warn" and message == "not the same on all hosts: 6.1 on w-0; 5.15 on w-1"


def test_hosts_are_asked_for_the_image_or_told_that_docker_is_missing_for_another(
    make_agent: MakeAgent,
) -> None:
    target = make_target([agent_with(make_agent, "w-0")])
    container = slice_hosts.dry_plan(target).container
    assert container is not None and container.image == IMAGES["jax"]
    inventory = dataclasses.replace(target.inventory, images={"pytorch": IMAGES["jax"]})
    other = dataclasses.replace(target, inventory=inventory)
    assert [state for _, state, _ in of(slice_hosts.preflight(other), "docker")] == ["warn"]


# --- whether runs can be written ----------------------------------------------------------------------------------


@pytest.fixture
def target(make_agent: MakeAgent) -> Any:
    agent = make_agent(lambda verb, request: {}, host="w-0")
    return make_target([agent], [LocalTransport()], files=DiskFiles(), python=sys.executable)


def test_a_folder_is_tried_from_here_and_left_as_it_was(tmp_path: Path) -> None:
    assert slice_hosts.from_here(DiskFiles(), str(tmp_path)).state == "ok"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    said = slice_hosts.from_here(DiskFiles(), str(tmp_path / "file" / "runs"))
    assert said.state == "fail" and "Not a directory" in said.message and said.remedy


def test_a_host_tries_the_bucket_with_the_interpreter_of_its_jobs(target: Any, tmp_path: Path) -> None:
    said = slice_hosts.from_host(target, f"file://{tmp_path}")
    assert (said.state, said.host) == ("ok", "w-0")
    assert list(tmp_path.iterdir()) == []
    said = slice_hosts.from_host(target, "file:///proc/nothing/here")
    assert said.state == "fail" and "roles/storage.objectUser" in said.remedy
    said = slice_hosts.from_host(dataclasses.replace(target, python="~/none/python"), "file:///tmp")
    assert (said.state, said.remedy) == ("fail", "`fab deploy`")


def test_a_folder_that_only_looks_like_a_share_is_found_out(make_agent: MakeAgent) -> None:
    disks: list[dict[str, str]] = [{}, {}]

    def agent(host: str, disk: dict[str, str]) -> Agent:
        def answer(verb: str, request: dict[str, Any]) -> dict[str, Any]:
            if verb == "write":
                disk[request["path"]] = request["text"]
            elif verb == "remove":
                del disk[request["path"]]
            else:
                return {"files": [{"text": disk.get(request["paths"][0])}]}
            return {}

        return make_agent(answer, host=host)

    agents = [agent("w-0", disks[0]), agent("w-1", disks[0]), agent("w-2", disks[1])]
    target = make_target(agents, runs_url="/share/runs")
    assert [check.name for check in slice_hosts.checks(target)][:2] == ["runs", "share"]
    (said,) = slice_hosts.shared(target)
    assert (said.state, said.host) == ("fail", "w-2") and "--runs gs://" in said.remedy
    assert disks == [{}, {}]
    assert [each.state for each in slice_hosts.shared(make_target(agents[:2]))] == ["ok"]
