"""A slice under its lease, and made again: by its specification against the simulator, or by Pulumi."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.resolve import inventory_target
from backends.vm import ensure
from contracts.errors import RequestError, Unreachable
from contracts.inventory import Slice, slices_from_json
from infra.documents import Documents
from infra.documents.lease import Lease
from launch import inventories
from launch.launching import StopAsked
from launch.targets import Sleep, Target, TargetRequest
from rehearsal.simulated_cloud import Clock, SimulatedCloud
from tests.infra.cloud_tpu.lab import PARENT, POOL, Cloud, wanted_props
from tests.launch.slices import NFS, Program, make_host, make_inventory, make_slice


def on_a_stack(bucket_url: str | None) -> Target:
    """A slice of a stack without a keeper, whose runs are on its share."""
    storage = dataclasses.replace(NFS, bucket_url=bucket_url)
    inventory = make_inventory(make_slice((make_host(0),)), storage=storage)
    return inventory_target(inventory, TargetRequest(stack="dev.json"))


def test_a_launch_holds_the_lease_of_its_slice_and_a_second_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RENEW_S", "LOOK_S"):  # by a second renewal it is known to be held
        monkeypatch.setattr(f"infra.documents.lease.{name}", 0.1)
    target = on_a_stack(str(tmp_path))
    lease = Documents(str(tmp_path / "control"))
    with target.backend.hold() as require:
        require()
        assert lease.read("leases/s.json").value["who"].startswith("`fab` on ")
        with pytest.raises(RequestError, match="is changing the slice s; try again once that is done"):
            target.backend.hold().__enter__()
    assert lease.read("leases/s.json").value["token"] == ""


def test_a_stack_without_a_bucket_has_no_place_for_a_lease() -> None:
    with on_a_stack(None).backend.hold() as require:
        require()


# --- by its specification -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Stack:
    """A stack with the slices a and b, as `pulumi up` has made them; of b a change waits for the next `pulumi up`."""

    cloud: Cloud
    control: Documents
    said: list[str] = dataclasses.field(default_factory=list)
    pulumi_stack: str | None = None

    def specify(self, **of_a: Any) -> None:
        slices = {
            "a": wanted_props(queued_resource_id="tpu-a", **of_a),
            "b": wanted_props(queued_resource_id="tpu-b", labels={"team": "new"}),
        }
        self.control.change("stack.json", lambda _: {"slices": slices})

    def up(self, **of_a: Any) -> None:
        self.specify(**of_a)
        self.cloud.create(queued_resource_id="tpu-a", **of_a)
        self.cloud.create(queued_resource_id="tpu-b", labels={"team": "old"})

    def restore(self, slice_name: str = "a", sleep: Sleep | None = None) -> None:
        known = make_slice(
            (), name=slice_name, zone="us-central1-a", origin=f"queued-resource tpu-{slice_name}"
        )
        sleep = sleep or self.cloud.session.backoff.sleep
        ensure.restore(self.control.url, self.pulumi_stack, known, self.said.append, sleep)

    def recorded(self) -> dict[str, Slice]:
        found = self.control.read("inventory.json").value
        return {} if found is None else {each.name: each for each in slices_from_json(json.dumps(found))}


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    clock = Clock(frozen_at=1_800_000_000.0)
    with SimulatedCloud(clock=clock) as api:
        cloud = Cloud(api, clock)
        monkeypatch.setenv("GOOGLE_TPU_V2_CUSTOM_ENDPOINT", f"{api.url}/v2/")
        backoff = cloud.session.backoff
        monkeypatch.setattr(ensure, "Backoff", lambda **how: dataclasses.replace(backoff, **how))
        yield Stack(cloud, Documents(str(tmp_path / "control")))
        cloud.client.close()


def test_only_the_lost_slice_is_made_again_and_every_command_knows_its_hosts(stack: Stack) -> None:
    stack.up()
    before = stack.cloud.history("tpu-b")
    stack.cloud.control.preempt(f"{PARENT}/queuedResources/tpu-a")
    stack.cloud.control.advance(60)
    stack.restore()
    assert (stack.cloud.state("tpu-a"), stack.cloud.history("tpu-b")) == ("ACTIVE", before)
    node = stack.cloud.node("tpu-b")
    assert node is not None and node["labels"]["team"] == "old", "somebody's change is not applied on the way"
    made = stack.recorded()["a"]
    assert len(made.hosts) == 4 and made.created
    inventory = make_inventory(make_slice((make_host(0),), name="a"), storage=NFS)
    (known,) = inventories.with_kept(
        inventory, json.dumps(stack.control.read("inventory.json").value).encode()
    ).slices
    assert known.hosts == made.hosts
    assert "the slice a is lost (it is SUSPENDED" in "\n".join(stack.said)
    assert stack.said[-1].startswith("the slice a is ACTIVE in us-central1-a")
    # It is whole now: nothing is asked for, and nothing deleted.
    history = stack.cloud.history("tpu-a")
    stack.restore()
    assert stack.cloud.history("tpu-a") == history


def test_a_slice_that_waits_for_capacity_or_was_removed_by_pulumi_is_told_so(stack: Stack) -> None:
    stack.up(wait_s=600)
    stack.cloud.control.preempt(f"{PARENT}/queuedResources/tpu-a")
    stack.cloud.control.set_capacity(POOL, 0)
    stack.cloud.control.advance(60)
    with pytest.raises(Unreachable, match="the slice a waits for capacity; its request stays in the queue"):
        stack.restore()
    assert stack.cloud.state("tpu-a") == "WAITING_FOR_RESOURCES"
    mark = Lease(stack.control, "b", "`pulumi`")
    mark.take()
    mark.mark(removed=True)
    mark.release()
    with pytest.raises(RequestError, match="the slice b was removed by Pulumi; `pulumi up` makes it again"):
        stack.restore("b")


def test_a_stop_while_a_slice_waits_for_capacity_leaves_its_request_in_the_queue(stack: Stack) -> None:
    stack.up(wait_s=600)
    stack.cloud.control.preempt(f"{PARENT}/queuedResources/tpu-a")
    stack.cloud.control.set_capacity(POOL, 0)
    stack.cloud.control.advance(60)
    asked: list[str | None] = []

    def sleep(seconds: float) -> None:
        if (state := stack.cloud.state("tpu-a")) == "WAITING_FOR_RESOURCES":
            asked.append(state)
            raise StopAsked
        stack.cloud.session.backoff.sleep(seconds)

    with pytest.raises(StopAsked):
        stack.restore(sleep=sleep)
    assert [*asked, stack.cloud.state("tpu-a")] == ["WAITING_FOR_RESOURCES"] * 2
    assert stack.said[-1] == "what was asked for a stays in the queue: `fab recover` goes on with it"
    assert stack.control.read("leases/a.json").value["token"] == ""


# --- by Pulumi ------------------------------------------------------------------------------------------------------

PREFIX = "urn:pulumi:dev::tpu-stack::tpu-stack:slices:TpuSlice"
STATE = {
    "deployment": {
        "resources": [
            {"urn": "urn:pulumi:dev::tpu-stack::pulumi:pulumi:Stack::tpu-stack-dev"},
            *({"urn": f"{PREFIX}::{name}"} for name in ("a", "b")),
            {"urn": f"{PREFIX}$gcp:compute/disk:Disk::a-data"},
            *({"urn": f"{PREFIX}$gcp:tpu/v2Vm:V2Vm::{name}"} for name in ("a", "b", "a-a")),
            {"urn": f"{PREFIX}$pulumi-python:tpu_stack:NodeWorkers::a"},
            {"urn": f"{PREFIX}$pulumi-python:tpu_stack:QueuedResource::q"},
        ]
    }
}


def test_a_slice_without_a_specification_is_made_again_by_pulumi_which_looks_at_no_other(
    tmp_path: Path, program: Program
) -> None:
    program(
        "pulumi",
        f"if [ \"$2\" = export ]; then echo '{json.dumps(STATE)}'; exit; fi\n"
        f'printf "%s\\n" "$*" >>"{tmp_path}/asked"\nexit $(cat "{tmp_path}/code")',
    )
    (tmp_path / "code").write_text("0")
    said: list[str] = []

    def restore(name: str, pulumi_stack: str | None = "dev", control_url: str | None = None) -> None:
        ensure.restore(control_url, pulumi_stack, make_slice((), name=name), said.append, time.sleep)

    restore("a")
    urns = f"--target {PREFIX}$gcp:tpu/v2Vm:V2Vm::a --target {PREFIX}$pulumi-python:tpu_stack:NodeWorkers::a"
    up = "up --refresh --yes --skip-preview --stack dev"
    assert (tmp_path / "asked").read_text() == f"{up} {urns}\n"
    assert said[0].startswith(f"the slice a is not whole: pulumi {up} --target")
    restore("q", control_url=str(tmp_path / "control"))
    assert (tmp_path / "asked").read_text().endswith("QueuedResource::q\n")
    with pytest.raises(
        RequestError, match="state of dev does not have it; `pulumi up --refresh --stack dev` makes"
    ):
        restore("gone")
    with pytest.raises(RequestError, match="the slice a has lost hosts, and Pulumi did not make it"):
        restore("a", None)
    (tmp_path / "code").write_text("3")
    with pytest.raises(RequestError, match=r"failed \(exit code 3\); its last lines say why"):
        restore("a")


@pytest.mark.parametrize("how", ["Ctrl-C", "fab stop"])
def test_an_interrupted_pulumi_is_waited_for_until_it_has_ended_what_it_has_begun(
    tmp_path: Path, how: str
) -> None:
    """A Pulumi that is killed forgets what it asked for just now."""
    pulumi = tmp_path / "pulumi"
    pulumi.write_text(
        "#!/bin/sh\ntrap 'sleep 1; echo written; exit 1' INT\necho begun\nwhile :; do sleep 0.1; done\n"
    )
    pulumi.chmod(0o755)
    watch = tmp_path / "stop"
    program = f"""if True:
        import os
        from backends.vm.ensure import _run_pulumi
        from launch.launching import StopAsked

        def sleep(_):
            if os.path.exists({str(watch)!r}):
                raise StopAsked

        _run_pulumi(["pulumi", "up"], lambda _: None, sleep)"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        if how == "fab stop":
            watch.touch()
        else:
            os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=20)[0] == "written\n"
    assert process.returncode != 0
