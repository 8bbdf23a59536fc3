"""The hosts, as `fab doctor` tells of them: a host at work is not ill, a silent one hides no other."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.files import DiskFiles
from launch.doctor import slice_hosts
from launch.doctor.check import Said
from launch.hosts import Agent, LocalTransport
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


@pytest.fixture
def target(make_agent: MakeAgent) -> Any:
    return make_target(
        [make_agent(lambda verb, request: {}, host="w-0")],
        [LocalTransport()],
        files=DiskFiles(),
        python=sys.executable,
    )


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    assert slice_hosts.from_here(DiskFiles(), str(tmp_path)).state == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_failure_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = slice_hosts.from_here(DiskFiles(), str(tmp_path / "file" / "runs"))
    assert said.state == "fail" and "Not a directory" in said.message and said.remedy


def test_a_host_tries_the_bucket_with_the_interpreter_of_its_jobs(target: Any, tmp_path: Path) -> None:
    said = slice_hosts.from_host(target, f"file://{tmp_path}")
    assert (said.state, said.host) == ("ok", "w-0")
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_that_a_host_may_not_write_is_a_failure_with_the_role(target: Any) -> None:
    said = slice_hosts.from_host(target, "file:///proc/nothing/here")
    assert said.state == "fail" and "roles/storage.objectUser" in said.remedy


def test_a_host_without_that_interpreter_is_sent_to_deploy(target: Any) -> None:
    said = slice_hosts.from_host(dataclasses.replace(target, python="~/none/python"), "file:///tmp")
    assert (said.state, said.remedy) == ("fail", "`fab deploy`")


def test_a_bucket_is_looked_at_once_where_the_runs_are_in_it(target: Any) -> None:
    def names(runs_url: str) -> list[str]:
        return [check.name for check in slice_hosts.checks(dataclasses.replace(target, runs_url=runs_url))]

    bucket = target.inventory.storage.bucket_url
    assert names(f"{bucket}/runs") == ["runs", "bucket from a host"]
    assert names("/share/runs") == ["runs", "bucket", "bucket from a host"]


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


def test_a_bucket_that_never_answers_is_a_failure_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    class Silent(DiskFiles):
        def write(self, path: str, data: bytes) -> None:
            answered.wait(60)

    monkeypatch.setattr(slice_hosts, "HERE_LIMIT_S", 0.05)
    said = slice_hosts.from_here(Silent(), "gs://b")
    answered.set()
    assert said.state == "fail" and said.message == "gs://b: no answer within 0 s"
