"""Our dynamic providers as Pulumi sees them: state, inputs, the process they run in, and who a stack is."""

import base64
import concurrent.futures
import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import threading
import types
from typing import Any

import dill  # type: ignore[import-untyped]
import pulumi
import pytest
from pulumi.dynamic import Config, ConfigureRequest
from pulumi.dynamic.dynamic import serialize_provider

from infra import naming
from infra.bucket_and_images import StackObjectsProvider
from infra.documents import ABSENT, Documents
from infra.node_workers import NodeWorkersProvider
from infra.queued_resource import QueuedResourceProvider
from infra.slice_apis import plugin
from infra.slice_apis.lifecycle import Lifecycle
from infra.slice_apis.retry import AbandonedError, CloudTpuError, Refusal
from infra.stack_identity import StackIdentityProvider
from rehearsal.simulated_cloud import Clock, SimulatedCloud
from tests.infra.bucket import served
from tests.infra.cloud_tpu.lab import OWNER, PARENT, Cloud, wanted_props

PROPS: dict[str, Any] = wanted_props(node_count=None, wait_s=60.0)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (QueuedResourceProvider, b"infra.queued_resource"),
        (NodeWorkersProvider, b"infra.node_workers"),
        (StackIdentityProvider, b"infra.stack_identity"),
        (StackObjectsProvider, b"infra.bucket_and_images"),
    ],
)
def test_the_state_holds_a_providers_name_which_stays_as_it_is_and_not_its_code(
    kind: type[pulumi.dynamic.ResourceProvider], path: bytes
) -> None:
    """Stacks that have been made hold these names: a provider that moves can no longer be found by them."""
    held = base64.b64decode(serialize_provider(kind()))
    assert len(held) < 80
    assert path in held and kind.__name__.encode() in held
    assert type(dill.loads(held)) is kind  # noqa: S301
    assert not kind.serialize_as_secret_always


def configured(config: dict[str, Any]) -> QueuedResourceProvider:
    provider = QueuedResourceProvider()
    provider.configure(ConfigureRequest(Config(config, "tpu-stack")))
    return provider


def test_a_preview_needs_no_credentials_and_no_google() -> None:
    provider = configured({})
    assert provider.check({}, dict(PROPS)).failures == []
    assert provider.diff("id", {**PROPS, "state": "ACTIVE"}, dict(PROPS)).changes is False
    program = "import sys, infra.queued_resource; print([m for m in sys.modules if m.startswith('googleapiclient')])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"[]\n"


def test_the_whole_life_of_one_with_no_secret_in_what_pulumi_keeps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with SimulatedCloud(clock=Clock(frozen_at=1_800_000_000.0)) as api:
        provider = configured({"gcp:tpuV2CustomEndpoint": f"{api.url}/v2/", "gcp:accessToken": "a-secret"})
        session = provider.require_session()
        now, sleep = lambda: api.control.alive()["moment"], api.control.advance
        session.backoff = dataclasses.replace(session.backoff, now=now, sleep=sleep)
        try:
            made = provider.create(dict(PROPS))
            assert made.id == f"{PARENT}/queuedResources/main"
            assert made.outs is not None and {**made.outs, **PROPS} == made.outs
            read = provider.read(made.id, dict(made.outs))
            assert (read.id, read.outs) == (made.id, made.outs)
            provider.delete(made.id, dict(made.outs))
            assert provider.read(made.id, dict(made.outs)).id == ""
        finally:
            session.client().close()
    captured = capsys.readouterr()
    assert "a-secret" not in json.dumps(made.outs) + captured.err + captured.out
    assert "main: asked for v5litepod-16 (spot) in us-central1-a" in captured.err


# --- who a stack is ---------------------------------------------------------------------------------------------


@pytest.fixture
def identity(cloud: Cloud) -> StackIdentityProvider:
    made = StackIdentityProvider()
    made._session = cloud.session
    return made


def test_each_stack_is_another_and_its_id_fits_a_label_and_is_kept(identity: StackIdentityProvider) -> None:
    owners = {StackIdentityProvider().create({"project": "p"}).id for _ in range(50)}
    assert len(owners) == 50
    assert all(naming.LABEL_VALUE.fullmatch(owner) for owner in owners)
    props = {"project": "p", "zones": ["a", "b"]}
    made = identity.create(props)
    assert made.outs == {**props, "owner": made.id}
    for zones, changes in (([], False), (["b"], False), (["b", "c"], True)):
        assert identity.diff(made.id, made.outs, {"project": "p", "zones": zones}).changes is changes
    moved = identity.update(made.id, made.outs, {"project": "p", "zones": ["c"], "apis": ["compute"]}).outs
    grown = {"zones": ["a", "b", "c"], "apis": ["cloud-tpu", "compute"]}
    assert moved == {"project": "p", **grown, "owner": made.id}
    assert identity.diff(made.id, moved, props).changes is False  # what an older program asks for


def test_what_interrupted_ups_have_left_goes_with_the_stack_and_without_an_answer_the_id_is_kept(
    cloud: Cloud, identity: StackIdentityProvider
) -> None:
    props = {"project": "grant", "owner": OWNER}
    cloud.put("left", owner=OWNER)
    cloud.put_node(OWNER, "direct")
    cloud.put("others", owner="someone-else")
    cloud.put("nobodys")
    cloud.control.advance(60)
    cloud.control.cut_off("europe-west4-b")
    with pytest.raises(CloudTpuError, match="could not say what it holds in europe-west4-b\nThe stack keeps"):
        identity.delete(OWNER, props | {"zones": ["europe-west4-b"]})
    kinds = ("nodes", "queuedResources")
    assert cloud.alive() == sorted(
        f"{PARENT}/{kind}/{name}" for kind in kinds for name in ("others", "nobodys")
    )
    with pytest.raises(CloudTpuError, match="europe-west4-b"):
        identity.delete(OWNER, props)  # of a state that says nothing of zones
    identity.delete(OWNER, props | {"zones": ["us-central1-a"]})
    cloud.control.inject("unavailable", times=1000)
    with pytest.raises(CloudTpuError, match="queued-resources list --zone=- --project=grant"):
        identity.delete(OWNER, props)


@pytest.mark.parametrize(
    ("code", "message", "is_kept"),
    [
        (403, "Cloud TPU API has not been used in project 1 before or it is disabled.", False),
        (403, "Project #123 has been deleted.", False),
        (404, "Project 'grant' not found or deleted.", False),
        (403, "Permission 'tpu.queuedResources.list' denied on 'projects/grant'.", True),
        (401, "Request had invalid authentication credentials.", True),
    ],
)
def test_only_a_project_without_the_service_is_known_to_hold_nothing(
    cloud: Cloud, identity: StackIdentityProvider, monkeypatch: pytest.MonkeyPatch, code: int, message: str,
    is_kept: bool,
) -> None:  # fmt: skip
    body = json.dumps({"error": {"code": code, "message": message}}).encode()
    refusal = Refusal.parse(code, body).explained("listing", "grant")

    def refuse(*_: object) -> None:
        raise refusal

    monkeypatch.setattr(Lifecycle, "remove_all", refuse)
    with pytest.raises(CloudTpuError, match="`pulumi state delete`") if is_kept else contextlib.nullcontext():
        identity.delete(OWNER, {"project": "grant", "owner": OWNER})
    assert is_kept or "nothing of the stack is looked for" in cloud.said


def test_what_the_stack_keeps_in_its_bucket_goes_before_the_bucket_and_what_others_put_there_stays(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = StackObjectsProvider()
    mine._session = cloud.session
    with served() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        documents = Documents("gs://runs/control")
        documents.write("capacity.json", {}, version=ABSENT)
        documents.write("leases/main.json", {}, version=ABSENT)
        mine.delete("runs", {"bucket": "runs", "protect": True})
        data = Documents("gs://runs/runs")
        data.write("a.json", {}, version=ABSENT)
        with pytest.raises(
            CloudTpuError, match="gs://runs holds runs/, and a bucket with data is not deleted"
        ):
            mine.delete("runs", {"bucket": "runs", "protect": False})
        assert documents.names() == ["capacity.json", "leases/main.json"]
        data.clear()
        mine.delete("runs", {"bucket": "runs", "protect": False})
        assert Documents("gs://runs").names() == []


# --- the process in which Pulumi runs them ----------------------------------------------------------------------


@pytest.fixture
def plugin_process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process looks like the plugin's."""
    main = types.ModuleType("__main__")
    main.__spec__ = types.SimpleNamespace(name=plugin.MODULE)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "__main__", main)
    return monkeypatch


def test_the_pool_of_four_threads_lets_more_than_four_wait_at_once() -> None:
    together = threading.Barrier(7)

    def wait() -> bool:
        grown = plugin.allow_threads(10)
        together.wait(timeout=20)
        return grown

    with concurrent.futures.ThreadPoolExecutor(max_workers=4) as pool:
        first = pool.submit(plugin.allow_threads, 10)
        assert first.result()
        assert [each.result() for each in [pool.submit(wait) for _ in range(7)]] == [True] * 7


def test_an_engine_that_listens_is_there_one_that_has_ended_is_not_and_where_we_cannot_know_it_is(
    plugin_process: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        plugin_process.setattr(sys, "argv", ["pulumi", address])
        assert plugin.engine_is_there()
    assert not plugin.engine_is_there()
    for arguments in ([], ["pulumi"], ["pulumi", "nonsense"], ["pulumi", "127.0.0.1:http"]):
        plugin_process.setattr(sys, "argv", arguments)
        assert plugin.engine_is_there()
    plugin_process.undo()  # outside of the plugin's process
    plugin_process.setattr(sys, "argv", ["pytest", address])
    assert plugin.engine_is_there()


def test_a_line_that_nobody_can_read_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(AbandonedError):
        plugin.say("hello")


def test_errors_for_the_user_have_no_traceback_and_bugs_have_one(plugin_process: pytest.MonkeyPatch) -> None:
    plugin_process.setattr(sys, "tracebacklimit", 1000, raising=False)
    with pytest.raises(CloudTpuError), plugin.plain_errors():
        raise CloudTpuError("no")
    assert sys.tracebacklimit == 0
    with pytest.raises(KeyError), plugin.plain_errors():
        raise KeyError("a bug")
    assert sys.tracebacklimit == 1000
