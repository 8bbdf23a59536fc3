"""What GKE says of node pools, in words for people, and what they can do."""

import json
import shlex
from importlib import resources
from typing import Any

import pytest

from infra.gke import node_pools
from infra.gke.node_pools import Observed, Pool
from tests.infra.conftest import Configure

FULL = "the zone 'us-central1-a' does not have enough resources"
CLUSTER = "projects/my-project/locations/us-central1-a/clusters/tpu-stack-dev"


@pytest.mark.parametrize(
    ("pool", "reason"),
    [
        ({}, ""),
        ({"conditions": [{"code": "GCE_STOCKOUT", "message": FULL}]}, f"GCE_STOCKOUT: {FULL}"),
        ({"conditions": [{"canonicalCode": "RESOURCE_EXHAUSTED", "message": FULL}], "statusMessage": "old"},
         f"RESOURCE_EXHAUSTED: {FULL}"),
        ({"conditions": [{"code": "GCE_QUOTA_EXCEEDED"}, {"message": FULL}]}, f"GCE_QUOTA_EXCEEDED; {FULL}"),
        ({"conditions": [{}], "statusMessage": FULL}, FULL),
    ],
)  # fmt: skip
def test_the_reason_of_a_pool_is_what_its_conditions_say_or_the_older_text(
    pool: dict[str, Any], reason: str
) -> None:
    assert node_pools.pool_error(pool) == reason
    schemas = google()["schemas"]
    assert pool.keys() <= schemas["NodePool"]["properties"].keys()
    for condition in pool.get("conditions", []):
        assert condition.keys() <= schemas["StatusCondition"]["properties"].keys()


def test_without_conditions_it_is_the_error_of_the_last_operation_on_the_pool() -> None:
    def operation(pool: str, at: str, message: str | None) -> dict[str, Any]:
        made = {
            "targetLink": f"https://container.googleapis.com/v1/{CLUSTER}/nodePools/{pool}",
            "startTime": at,
        }
        return made if message is None else made | {"error": {"code": 8, "message": message}}

    operations = [
        operation("main", "2026-11-02T00:00:00Z", FULL),
        operation("main", "2026-11-01T00:00:00Z", "earlier"),
        operation("main", "2026-11-03T00:00:00Z", None),
        operation("main-0", "2026-11-04T00:00:00Z", "of another pool"),
    ]
    assert node_pools.operation_error(operations, "main") == FULL
    assert node_pools.operation_error(operations, "other") == ""
    for each in operations:
        assert each.keys() <= google()["schemas"]["Operation"]["properties"].keys()


def google() -> Any:
    """Google's own description of its API."""
    folder = resources.files("googleapiclient.discovery_cache") / "documents"
    return json.loads((folder / "container.v1.json").read_text(encoding="utf-8"))


def test_only_a_pool_in_state_error_is_made_again_each_time_it_is_and_all_that_is_wrong_is_said() -> None:
    states = {"good": "RUNNING", "new": "PROVISIONING", "bad": "ERROR", "poor": "RUNNING_WITH_ERROR"}
    observed = Observed(pools={name: Pool(status=status, reason=FULL) for name, status in states.items()})
    assert [name for name in [*states, "none"] if observed.attempt(name) is not None] == ["bad"]
    assert observed.attempt("bad") != observed.attempt("bad")
    said = {each.message.split('"')[1]: each for each in node_pools.findings(observed)}
    assert set(said) == {"bad", "poor"} and all(FULL in each.message for each in said.values())
    assert "deletes it" in said["bad"].message and "left as they are" in said["poor"].message
    (unknown,) = node_pools.findings(Observed(not_asked="no answer within 8 s"))
    assert unknown.severity == "note" and "no answer within 8 s" in unknown.message


@pytest.mark.parametrize(
    ("types", "name", "own_id", "parent"),
    [
        ("tpu-stack:cluster:Pools$gcp:container/nodePool:NodePool", "main-1", f"{CLUSTER}/nodePools/main-1",
         "parent=urn:pulumi:dev::tpu-stack::tpu-stack:cluster:Pools::main"),
        ("tpu-stack:cluster:Gke$gcp:container/nodePool:NodePool", "system", f"{CLUSTER}/nodePools/system",
         "parent=urn:pulumi:dev::tpu-stack::tpu-stack:cluster:Gke::cluster"),
        ("tpu-stack:cluster:Gke$gcp:container/cluster:Cluster", "cluster", CLUSTER,
         "parent=urn:pulumi:dev::tpu-stack::tpu-stack:cluster:Gke::cluster"),
    ],
)  # fmt: skip
def test_what_an_interrupted_up_has_left_is_adopted_by_a_command_that_names_it_as_the_program_does(
    configure: Configure, types: str, name: str, own_id: str, parent: str
) -> None:
    asked = {"name": "main", "accelerator": "v5litepod-16", "provisioning": "node-pool", "count": 2}
    config = configure(slices=[asked])
    message = node_pools.adoption(config, f"urn:pulumi:dev::tpu-stack::{types}::{name}", own_id)
    command = shlex.split(message.split("`")[3])
    assert command[:5] == ["pulumi", "import", types.rpartition("$")[2], name, own_id]
    assert command[command.index("--parent") + 1] == parent and command[-2:] == ["--stack", "dev"]
