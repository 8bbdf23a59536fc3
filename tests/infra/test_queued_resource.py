"""The queued resource as Pulumi sees it: its state, its inputs, its mistakes, its provider."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from typing import Any

import dill  # type: ignore[import-untyped]
import pulumi
import pytest
from pulumi.dynamic import Config, ConfigureRequest
from pulumi.dynamic.dynamic import serialize_provider

from infra import queued_resource
from infra.node_workers import NodeWorkersProvider
from infra.queued_resource import DataDiskArgs, QueuedResourceArgs, QueuedResourceProvider
from infra.stack_identity import StackIdentityProvider
from rehearsal.tpu_api import Clock, TpuApi

PROPS: dict[str, Any] = {
    "project": "grant",
    "zone": "us-central1-a",
    "queued_resource_id": "main",
    "owner": "a1b2c3",
    "accelerator_type": "v5litepod-16",
    "runtime_version": "v2-alpha-tpuv5-lite",
    "capacity": "spot",
    "wait_s": 60.0,
}


@pytest.mark.parametrize("kind", [QueuedResourceProvider, NodeWorkersProvider, StackIdentityProvider])
def test_the_state_holds_a_providers_name_and_not_its_code(
    kind: type[pulumi.dynamic.ResourceProvider],
) -> None:
    text = serialize_provider(kind())
    assert len(base64.b64decode(text)) < 80
    assert type(dill.loads(base64.b64decode(text))) is kind  # noqa: S301
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
    with TpuApi(clock=Clock(frozen_at=1_800_000_000.0)) as api:
        provider = configured({"gcp:tpuV2CustomEndpoint": f"{api.url}/v2/", "gcp:accessToken": "a-secret"})
        session = provider.require_session()
        session.backoff = type(session.backoff)(
            now=lambda: api.control.alive()["moment"], sleep=api.control.advance, say=session.backoff.say
        )
        try:
            made = provider.create(dict(PROPS))
            assert made.id == "projects/grant/locations/us-central1-a/queuedResources/main"
            assert made.outs is not None and {**made.outs, **PROPS} == made.outs
            kept = json.dumps(made.outs)
            read = provider.read(made.id, dict(made.outs))
            assert (read.id, read.outs) == (made.id, made.outs)
            changed = provider.update(made.id, dict(made.outs), {**PROPS, "labels": {"a": "b"}})
            provider.delete(made.id, changed.outs or {})
            assert provider.read(made.id, dict(made.outs)).id == ""
            assert api.control.alive()["queuedResources"] == []
        finally:
            session.client().close()
    captured = capsys.readouterr()
    assert "a-secret" not in kept + captured.err + captured.out
    assert "main: asked for v5litepod-16 (spot) in us-central1-a" in captured.err


def test_a_provider_that_was_not_configured_says_so() -> None:
    with pytest.raises(RuntimeError, match="not configured"):
        QueuedResourceProvider().create(dict(PROPS))


def test_inputs_arrive_by_name_and_what_is_not_given_does_not() -> None:
    disk = DataDiskArgs(source_disk="projects/grant/zones/us-central1-a/disks/data", mode="read-only")
    given = queued_resource._props_of(QueuedResourceArgs(**PROPS, data_disks=[disk], tags=("t",)))
    outputs = {name: given.pop(name) for name in queued_resource.OUTPUTS}
    assert outputs == {"state": None, "nodes": None, "create_time": None}
    assert given == {
        **PROPS,
        "node_count": 1,
        "external_addresses": False,
        "metadata": {},
        "labels": {},
        "tags": ["t"],
        "data_disks": [{"source_disk": disk.source_disk, "mode": "read-only"}],
    }
