"""What is said of slices that Compute Engine makes: which API serves them and why, their quota, grant and costs."""

from typing import Any

import pytest

from infra import policy
from infra.config import Config, reader
from infra.policy import costs
from tests.infra.policy.stacks import TODAY

ZONE = "us-east5-a"
GRANT = [{"type": "v6e", "zone": ZONE, "chips": 64, "capacity": "spot"}]
FLEX = {"capacity": "flex-start", "max-run-duration": "2d"}


def stack(accelerator: str = "v6e-16", *, zone: str = ZONE, **keys: Any) -> Config:
    more = {name.replace("_", "-"): keys.pop(name) for name in ("grant", "allow_billable") if name in keys}
    values = {
        "zone": zone,
        "slices": [
            {"name": "main", "accelerator": accelerator, "zone": zone}
            | {key.replace("_", "-"): value for key, value in keys.items()}
        ],
        "storage": {"nfs": {"kind": "none"}},
        "access": {"members": ["user:ada@example.com"]},
        "budget-usd-per-hour": 1000,
        **more,
    }
    return reader.read(values, project="my-project", stack="dev")


def messages(config: Config, key: str) -> list[tuple[str, str]]:
    """Severity and message of each finding at a key of the slice."""
    path = f"tpu-stack:slices[0].{key}"
    return [
        (each.severity, each.message)
        for each in policy.review(config, today=TODAY).findings
        if each.path == path
    ]


@pytest.mark.parametrize(
    ("accelerator", "keys", "provisioning", "why"),
    [
        ("v6e-16", {}, "queued", "the Cloud TPU API serves \"main\", as it is the default for v6e"),
        ("v6e-16", {"capacity": "spot", "grant": GRANT}, "queued", "is quota of that API"),
        ("v6e-16", FLEX, "queued", "the Cloud TPU API serves"),
        ("v5p-8", FLEX, "compute", "the Cloud TPU API has flex-start for v5e, v6e only"),
        ("tpu7x-8", {"zone": "us-central1-c"}, "compute", "as the Cloud TPU API does not have tpu7x"),
        # Where there is no choice, nothing is said, nor where the choice is made.
        ("v5litepod-16", {"zone": "us-central1-a"}, "queued", None),
        ("v6e-16", {"provisioning": "queued"}, "queued", None),
        ("v6e-16", {"provisioning": "compute"}, "compute", None),
    ],
)  # fmt: skip
def test_where_the_choice_is_open_the_preview_says_which_api_serves_a_slice_and_why(
    accelerator: str, keys: dict[str, Any], provisioning: str, why: str | None
) -> None:
    config = stack(accelerator, **keys)
    assert config.slices[0].provisioning == provisioning
    choices = [each for each in messages(config, "provisioning") if each[1].startswith("not set: ")]
    assert len(choices) == (why is not None)
    assert all(severity == "note" and why is not None and why in said for severity, said in choices)
    is_choice = provisioning == "queued"  # the other API could not serve what Compute Engine takes by itself
    assert all(("takes the other API" in said) is is_choice for _, said in choices)


@pytest.mark.parametrize(
    ("accelerator", "keys", "quota"),
    [
        ("v6e-16", {"count": 2}, "needs 32 chips: TPUS-PER-TPU-FAMILY-per-project-region (tpu_family CT6E)"),
        ("v6e-1", {"capacity": "spot"}, "needs 1 chip: PREEMPTIBLE-TPU-V6E-per-project-region"),
        ("v6e-16", FLEX, "needs 16 chips: PREEMPTIBLE-TPU-V6E-per-project-region"),
        ("v5p-8", {"capacity": "spot"}, "PREEMPTIBLE-TPU-V5P-per-project-region"),
        ("tpu7x-8", {"zone": "us-central1-c", "capacity": "spot"}, "needs 4 chips"),
    ],
)  # fmt: skip
def test_the_quota_that_a_slice_needs_is_named(accelerator: str, keys: dict[str, Any], quota: str) -> None:
    ((severity, said),) = [
        each for each in messages(stack(accelerator, provisioning="compute", **keys), "provisioning")
        if "needs" in each[1]
    ]  # fmt: skip
    elsewhere = f" of a quota of Compute Engine in {'us-central1' if '7x' in accelerator else 'us-east5'}"
    shortened = said.replace(f"{elsewhere}, not of the Cloud TPU API's", "")
    assert severity == "note" and shortened.endswith(quota)


def test_a_grant_covers_nothing_that_compute_engine_makes_and_a_reservation_needs_no_quota() -> None:
    (refused, *_) = messages(stack(capacity="spot", provisioning="compute", grant=GRANT), "provisioning")[
        ::-1
    ]
    assert refused[0] == "error"
    assert refused[1].startswith(
        "a grant is quota of the Cloud TPU API, and Compute Engine has its own, which it does not cover; all 16 chips"
    )
    assert policy.review(stack(capacity="spot", grant=GRANT), today=TODAY).covered_chips == (16,)
    reserved = stack(provisioning="compute", capacity="reserved", reservation="spring")
    assert messages(reserved, "provisioning") == []


def test_a_zone_without_flex_start_is_warned_of() -> None:
    ((severity, said),) = messages(stack("tpu7x-8", zone="us-central1-c", capacity="spot"), "capacity")
    assert severity == "warning" and "spot tpu7x only to projects that have asked for it" in said
    ((severity, said),) = messages(stack(zone="us-central1-b", **FLEX), "capacity")
    assert severity == "warning" and "does not list flex-start for v6e in us-central1-b" in said


def test_boot_disks_are_billed_beside_the_chips_and_flex_start_has_a_price_of_its_own() -> None:
    def lines(config: Config) -> dict[str, float | None]:
        return {line.item: line.usd_per_hour for line in costs.stack_cost(config, [0]).lines}

    v5p = lines(stack("v5p-16", provisioning="compute", boot_disk={"size-gib": 200}))
    assert v5p["slice main: boot disks"] == pytest.approx(2 * 200 * 0.10 / 730)
    assert "slice main: boot disks" not in lines(stack("v5p-16"))
    assert lines(stack(**FLEX))["slice main: v6e-16, us-east5-a"] == pytest.approx(16 * 1.35)
    assert "while asked for" not in costs.table(costs.stack_cost(stack(**FLEX), [0]))
