"""The rehearsal's engine is the real one, is alone, and can be broken off: the tests beside this one build on it."""

import os
import sys
from pathlib import Path
from typing import Any

import pulumi
import pytest
from pulumi import dynamic
from pulumi_gcp import compute, pubsub, tpu

from rehearsal.engine import ACCESS_TOKEN, MARK, Engine, marked
from rehearsal.engine_report import EngineTimeoutError
from rehearsal.tpu_api import TpuApi
from tests.engine.conftest import EngineFactory
from tests.rehearsal.waiting import until

NETWORK_ID = "projects/my-project/global/networks/net"


def one_network() -> None:
    compute.Network("net", name="net", auto_create_subnetworks=False)


def network_and_tpu() -> None:
    network = compute.Network("net", name="net", auto_create_subnetworks=False)
    vm = tpu.V2Vm(
        "vm",
        name="vm",
        accelerator_type="v5litepod-16",
        runtime_version="v2-alpha-tpuv5-lite",
        network_config=tpu.V2VmNetworkConfigArgs(network=network.id, queue_count=1),
    )
    pulumi.export("endpoints", vm.network_endpoints)


def names(engine: Engine) -> list[str]:
    """Of all that there is at the stand-in's Google."""
    return sorted(thing.id.rpartition("/")[2] for thing in engine.world.things().values())


def test_what_is_declared_is_previewed_made_once_refreshed_and_gone_after_destroy(
    new_engine: EngineFactory, api: TpuApi, tmp_path: Path
) -> None:
    engine = new_engine(network_and_tpu)
    operation = engine.begin("preview")
    preview = operation.report()
    assert preview.ok and preview.changes == {"create": 3}, preview.text
    assert [said for said in preview.messages("info") if "stand-in: nothing is made at Google" in said]
    assert (names(engine), api.control.alive()["nodes"], engine.resources()) == ([], [], [])
    with pytest.raises(ProcessLookupError):
        operation.kill()  # nothing runs any more
    first = engine.up()
    assert first.ok and ACCESS_TOKEN not in first.text, first.text
    assert first.of("create") == ["default_10_2_0", "net", "tpu-stack-dev", "vm"]
    assert len(first.outputs["endpoints"]) == 4
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if ACCESS_TOKEN.encode() in path.read_bytes()] == []
    second = engine.up()
    assert second.ok and second.changes == {"same": 3}, second.text
    assert engine.refresh().changes == {"same": 3}
    assert engine.destroy().ok
    assert (names(engine), api.control.alive()["nodes"], engine.resources()) == ([], [], [])


def test_what_the_real_provider_would_not_know_and_what_the_program_refuses_fails_the_preview(
    new_engine: EngineFactory,
) -> None:
    def unknown_property() -> None:
        allows: Any = [{"protocol": "tcp", "portz": ["22"]}]
        compute.Firewall("ssh", network="n", allows=allows)

    def refusing() -> None:
        raise pulumi.RunError("the first thing\nthe second thing")

    engine = new_engine(unknown_property)
    report = engine.preview()
    assert not report.ok and "allows[0].portz" in report.text
    engine.program = lambda: pulumi.export("id", pubsub.Topic("t").id)
    report = engine.preview()
    assert not report.ok and "gcp:pubsub/topic:Topic: the stand-in cannot make this type" in report.text
    engine.program = refusing
    report = engine.preview()
    assert not report.ok and "the second thing" in report.text and "Traceback" not in report.text


def test_a_killed_up_leaves_a_lock_and_a_pending_creation_and_no_process(new_engine: EngineFactory) -> None:
    engine = new_engine(one_network)
    engine.world.inject({"compute:Network": "hang-after"})
    operation = engine.begin("up")
    until(lambda: bool(engine.world.things()), limit_s=30)
    operation.kill()
    assert not operation.report().ok
    engine.world.inject({})
    until(lambda: not marked(MARK, str(engine.folder)))
    assert names(engine) == ["net"] and engine.resources() == []
    assert [each["type"] for each in engine.state()["pending_operations"]] == ["creating"]
    locked = engine.up()
    assert not locked.ok and "the stack is currently locked" in locked.text and "pulumi cancel" in locked.text
    engine.cancel()
    again = engine.up()
    assert not again.ok and "already exists" in again.text and "with 1 pending operations" in again.text


def test_after_one_interrupt_what_was_begun_is_finished_and_known_and_nothing_else_begun(
    new_engine: EngineFactory,
) -> None:
    engine = new_engine(network_and_tpu)
    engine.world.inject({"compute:Network": "hang-after"})
    operation = engine.begin("up")
    until(lambda: bool(engine.world.things()), limit_s=30)
    operation.interrupt()
    operation.wait_for("^C received; cancelling")
    with pytest.raises(EngineTimeoutError, match="not done after"):
        operation.report(limit_s=0.5)
    engine.world.inject({})
    assert not operation.report().ok
    assert [each["id"] for each in engine.resources()] == [NETWORK_ID]
    again = engine.up()
    assert again.ok and again.of("create") == ["vm"], again.text


class Witness(dynamic.ResourceProvider):
    """Tells what a dynamic provider finds around it."""

    def create(self, props: Any) -> dynamic.CreateResult:
        import contracts.inventory

        found = {
            "python": sys.executable,
            "variables": sorted(os.environ),
            "infra": contracts.inventory.__file__,
        }
        return dynamic.CreateResult(id_="witness", outs=found)


class FoundAround(dynamic.Resource):
    python: pulumi.Output[str]
    variables: pulumi.Output[list[str]]
    infra: pulumi.Output[str]

    def __init__(self, name: str) -> None:
        super().__init__(Witness(), name, {"python": None, "variables": None, "infra": None})


def test_a_dynamic_provider_runs_in_this_environment_and_sees_nothing_of_the_users_accounts(
    new_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "PULUMI_ACCESS_TOKEN",
        "CLOUDSDK_CORE_PROJECT",
        "PYTHONSTARTUP",
    ):
        monkeypatch.setenv(name, "the-users")

    def program() -> None:
        found = FoundAround("found")
        for name in ("python", "variables", "infra"):
            pulumi.export(name, getattr(found, name))

    report = new_engine(program).up()
    assert report.ok, report.text
    assert report.outputs["python"] == sys.executable
    assert Path(report.outputs["infra"]).is_file()
    theirs = {
        "GOOGLE_APPLICATION_CREDENTIALS",
        "PULUMI_ACCESS_TOKEN",
        "CLOUDSDK_CORE_PROJECT",
        "PYTHONSTARTUP",
    }
    assert theirs & set(report.outputs["variables"]) == set()
