"""The rules over slices that are node pools: what no grant covers, what they cost, what is missing, what is opened."""

from typing import Any

import pytest

from infra import policy
from infra.config import Config, reader
from tests.infra.policy.stacks import TODAY

POOL: dict[str, Any] = {
    "name": "main",
    "accelerator": "v5litepod-16",
    "zone": "us-central1-a",
    "capacity": "spot",
    "provisioning": "node-pool",
}


def stack(*, pool: dict[str, Any] | None = None, **changes: Any) -> Config:
    values = {
        "slices": [POOL | (pool or {})],
        "storage": {"nfs": {"kind": "none"}},
        "access": {"members": ["user:ada@example.com"]},
        **{key.replace("_", "-"): value for key, value in changes.items()},
    }
    return reader.read(values, project="my-project", stack="dev")


def said(config: Config) -> list[tuple[str, str]]:
    """Severity, and path and message, of every finding; not that the DNS name answers everywhere, which is always."""
    found = [(each.severity, str(each)) for each in policy.review(config, today=TODAY).findings]
    return [each for each in found if "IAM turns away" not in each[1]]


def test_a_grant_covers_no_node_pool_whatever_it_lists_and_says_why() -> None:
    grant = [{"type": "v5e", "zone": "us-central1-a", "chips": 64, "capacity": "spot"}]
    ((severity, message),) = said(stack(grant=grant))
    assert severity == "error"
    assert message == (
        "tpu-stack:slices[0].provisioning: a grant is quota of the Cloud TPU API, and node pools use Compute Engine's "
        'quota, which it does not cover; all 16 chips of "main" are billed at list price, 3.92 USD an hour; if that is '
        "meant, set tpu-stack:allow-billable: true"
    )
    ((severity, _),) = said(stack(grant=grant, allow_billable=True))
    assert severity == "warning"
    assert policy.review(stack(grant=grant), today=TODAY).covered_chips == (0,)
    # Beside a slice of VMs, which the same line covers.
    vm = POOL | {"name": "vm", "provisioning": "queued"}
    both = stack(grant=grant, allow_billable=True, slices=[POOL, vm])
    assert policy.review(both, today=TODAY).covered_chips == (0, 16)


@pytest.mark.parametrize(
    ("changes", "severity", "message"),
    [
        ({"storage": {"bucket": False, "nfs": {"kind": "none"}}}, "error",
         "slices[0].provisioning: \"main\" is node pools"),
        ({"storage": {}}, "note", "storage.nfs: pods do not mount the share"),
        ({"pool": {"capacity": "flex-start"}}, "warning",
         "slices[0].capacity: Google does not list flex-start for v5e in us-central1-a; it lists us-west4-a"),
        ({"pool": {"count": 2}}, "note", "slices[0].count: 2 slices train together as a JobSet"),
        ({"cluster": {"authorized-networks": ["0.0.0.0/0"]}}, "warning",
         "cluster.authorized-networks[0]: \"0.0.0.0/0\" lets all of the internet"),
        ({"keeper": True, "storage": {}}, "warning", "keeper: the keeper is for TPU VMs, and all slices are node"),
    ],
)  # fmt: skip
def test_what_a_node_pool_needs_and_opens_is_said(
    changes: dict[str, Any], severity: str, message: str
) -> None:
    found = said(stack(**changes))
    assert (severity, True) in [(each[0], each[1].startswith(f"tpu-stack:{message}")) for each in found], (
        found
    )


def test_a_plain_one_is_found_no_fault_with_but_for_the_name_that_answers_everywhere() -> None:
    assert said(stack()) == []
    by_address = policy.review(stack(cluster={"authorized-networks": ["203.0.113.0/24"]}), today=TODAY)
    assert by_address.findings == ()


def lines(config: Config) -> dict[str, float | None]:
    return {each.item: each.usd_per_hour for each in policy.review(config, today=TODAY).cost.lines}


def test_a_cluster_costs_its_fee_a_machine_and_a_disk_a_node_and_one_that_exists_nothing() -> None:
    found = lines(stack())
    assert found == {
        "slice main: v5litepod-16, us-central1-a": pytest.approx(16 * 0.24493),
        "slice main: boot disks": pytest.approx(4 * 100 * 0.10 / 730),
        "cluster: GKE": 0.10,
        "cluster: VM": pytest.approx(4 * 0.03350571),
        "cluster: boot disk": pytest.approx(100 * 0.10 / 730),
        # Four nodes of the slice, and the one of GKE's own pods.
        "Cloud NAT, us-central1": pytest.approx(5 * 0.0014 + 0.005),
    }
    assert lines(stack(cluster={"context": "theirs"})) == {}
    v6e = lines(stack(pool={"accelerator": "v6e-16", "zone": "us-central1-b"}))
    assert v6e["slice main: boot disks"] is None  # a hyperdisk, which is billed by more than its size


@pytest.mark.parametrize(
    ("pool", "refused"),
    [
        (
            {"accelerator": "tpu7x-128", "zone": "us-central1-c", "capacity": "on-demand"},
            True,
        ),  # 64 chips, at v5p's
        ({"accelerator": "tpu7x-8", "zone": "us-central1-c", "capacity": "on-demand"}, False),
        (
            {"accelerator": "v6e-256", "zone": "asia-northeast1-b", "capacity": "flex-start"},
            True,
        ),  # 256 chips at 1.35, the least of flex-start
        (
            {"accelerator": "v5p-512", "zone": "us-east5-a", "capacity": "flex-start"},
            True,
        ),  # 256 chips at 0.8357
    ],
)
def test_what_has_no_price_asks_for_a_budget_all_the_same(pool: dict[str, Any], refused: bool) -> None:
    errors = [str(each) for each in policy.review(stack(pool=pool), today=TODAY).errors]
    assert [each.startswith("tpu-stack:budget-usd-per-hour: missing") for each in errors] == [True] * refused
