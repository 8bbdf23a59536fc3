"""Who a stack is, and what goes with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra import naming
from infra.stack_identity import StackIdentityProvider
from rehearsal.tpu_api import Clock, TpuApi
from tests.infra.cloud_tpu.lab import OWNER, PARENT, Cloud


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    clock = Clock(frozen_at=1_800_000_000.0)
    with TpuApi(clock=clock) as api:
        cloud = Cloud(api, clock)
        yield cloud
        cloud.client.close()


@pytest.fixture
def provider(cloud: Cloud) -> StackIdentityProvider:
    made = StackIdentityProvider()
    made._session = cloud.session
    return made


def test_each_stack_is_another_and_its_id_fits_a_label() -> None:
    owners = {StackIdentityProvider().create({"project": "p"}).id for _ in range(50)}
    assert len(owners) == 50
    assert all(naming.LABEL_VALUE.fullmatch(owner) for owner in owners)


def test_an_id_is_kept_whatever_changes(provider: StackIdentityProvider) -> None:
    made = provider.create({"project": "p"})
    assert made.outs == {"project": "p", "owner": made.id}
    assert provider.diff(made.id, made.outs, {"project": "p"}).changes is False
    assert provider.update(made.id, made.outs, {"project": "q"}).outs == {"project": "q", "owner": made.id}


def test_what_interrupted_ups_have_left_goes_with_the_stack_and_nothing_else_does(
    cloud: Cloud, provider: StackIdentityProvider
) -> None:
    cloud.put("left", owner=OWNER)
    cloud.put("others", owner="someone-else")
    cloud.put("nobodys")
    cloud.control.advance(60)
    provider.delete(OWNER, {"project": "grant", "owner": OWNER})
    assert cloud.alive() == sorted(
        f"{PARENT}/{kind}/{name}" for kind in ("nodes", "queuedResources") for name in ("others", "nobodys")
    )


def test_a_project_that_does_not_answer_does_not_keep_a_stack_from_being_destroyed(
    cloud: Cloud, provider: StackIdentityProvider
) -> None:
    cloud.control.inject("unavailable", times=1000)
    provider.delete(OWNER, {"project": "grant", "owner": OWNER})
    assert "could not be looked for" in cloud.said
    assert "gcloud compute tpus queued-resources list --zone=- --project=grant" in cloud.said
