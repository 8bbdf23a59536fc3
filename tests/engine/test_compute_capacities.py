"""The life of slices that Compute Engine makes: the whole program, the real engine, the simulated Compute Engine."""

from pathlib import Path
from typing import Any

import pytest

from contracts import inventory
from infra.pulumi_program import declare
from rehearsal.engine import Engine, Report
from rehearsal.simulated_cloud import Control, SimulatedCloud
from tests.engine.conftest import EngineFactory

ROOT = Path(__file__).resolve().parents[2]
ZONE = "us-east5-a"
TEMPLATE = "gcp:compute/regionInstanceTemplate:RegionInstanceTemplate"


def a_slice(name: str, accelerator: str = "v6e-16", **changes: Any) -> dict[str, Any]:
    keys = {key.replace("_", "-"): value for key, value in changes.items()}
    return {"name": name, "accelerator": accelerator, "provisioning": "compute", "wait": "5m", **keys}


TWO_GROUPS = a_slice("two", capacity="spot", count=2)
ONE_HOST = a_slice("one", "v6e-8", capacity="flex-start", max_run_duration="2d")
SLICES = [
    TWO_GROUPS,
    ONE_HOST,
    a_slice("four"),
    a_slice("cal", capacity="reserved", reservation="calendar"),
    a_slice("long", "v6e-4", capacity="reserved", reservation="long", reservation_bound=False),
    # Nothing says so, and the Cloud TPU API does not have it.
    {"name": "iron", "accelerator": "tpu7x-16", "zone": "us-central1-c", "wait": "5m"},
]
ALL = {
    *("tpu-stack-dev-two-0", "tpu-stack-dev-two-1", "tpu-stack-dev-one", "tpu-stack-dev-four"),
    *("tpu-stack-dev-cal", "tpu-stack-dev-long", "tpu-stack-dev-iron"),
}

GONE = {"tpu-stack-dev-cal", "tpu-stack-dev-long", "tpu-stack-dev-iron"}
"""After the first change."""


def configuration(*slices: dict[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "zone": ZONE,
        "slices": list(slices),
        "network": {"existing": "default"},
        "storage": {"bucket": False, "nfs": {"kind": "none"}},
        "protect": False,
        "allow-cross-region": True,
        "budget-usd-per-hour": 1000,
    }
    return {"gcp:project": "my-project", **{f"tpu-stack:{key}": value for key, value in keys.items()}}


@pytest.fixture
def compute(api: SimulatedCloud) -> Control:
    return api.control


@pytest.fixture
def engine(new_engine: EngineFactory) -> Engine:
    return new_engine(declare, project_file=ROOT / "Pulumi.yaml")


def standing(compute: Control) -> set[str]:
    """The names of groups and of instances that are of none."""
    return {path.rpartition("/")[2] for path in compute.slices()}


def done(report: Report, op: str) -> list[str]:
    return sorted(each.name for each in report.steps if each.op == op and "providers:" not in each.type)


def slices(report: Report) -> dict[str, inventory.Slice]:
    return {entry.name: entry for entry in inventory.from_json(report.outputs["inventory"]).slices}


@pytest.mark.timeout(500)  # a dozen operations
def test_slices_of_every_capacity_are_previewed_made_kept_changed_lost_made_again_and_destroyed(
    engine: Engine, api: SimulatedCloud, compute: Control
) -> None:
    engine.configure(configuration(*SLICES))
    preview = engine.preview()
    assert preview.ok and "could not be asked" not in preview.text, preview.text
    assert 'Compute Engine serves "iron", as the Cloud TPU API does not have tpu7x' in preview.text
    assert standing(compute) == set() and engine.world.things() == {}

    first = engine.up()
    assert first.ok, first.text
    assert standing(compute) == ALL
    made = slices(first)
    numbers = {"two": 8, "one": 1, "four": 4, "cal": 4, "long": 1, "iron": 2}
    assert {name: len(entry.hosts) for name, entry in made.items()} == numbers
    assert made["iron"].devices_per_host == 8 and made["two"].origin == "group tpu-stack-dev-two"
    assert made["one"].ends_at and not made["four"].ends_at
    assert not api.control.alive()["queuedResources"] and not api.control.alive()["nodes"]

    assert engine.refresh().ok
    again = engine.up()
    assert again.ok and set(again.changes) == {"same"}, again.text

    # What a running slice can take changes in place, with a new template and no new machine.
    engine.configure(configuration(TWO_GROUPS, ONE_HOST, a_slice("four", labels={"team": "nlp"})))
    labelled = engine.up()
    assert labelled.ok and "four" in done(labelled, "update"), labelled.text
    assert slices(labelled)["four"].hosts == made["four"].hosts
    assert standing(compute) == ALL - GONE

    # Of each capacity one is lost: spot, flex-start at its end, and on-demand by one machine of four.
    compute.preempt("tpu-stack-dev-two-1")
    compute.vanish("tpu-stack-dev-four-w-002")
    api.control.advance(2 * 86400 + 60)
    assert standing(compute).isdisjoint({"tpu-stack-dev-one"})
    refreshed = engine.refresh()
    assert refreshed.ok, refreshed.text
    assert "tpu-stack-dev-four is lost: tpu-stack-dev-four has 3 of 4 machines; `pulumi up`" in refreshed.text
    assert "tpu-stack-dev-two is lost: tpu-stack-dev-two-1" in refreshed.text, refreshed.text
    known = {each["urn"].rpartition("::")[2] for each in engine.resources() if "ComputeSlice" in each["type"]}
    assert known == {"two", "four"}, "what ended by itself is not there any more"
    repaired = engine.up()
    assert repaired.ok, repaired.text
    assert standing(compute) == ALL - GONE
    fresh = slices(repaired)
    for name in ("one", "two", "four"):
        assert len(fresh[name].hosts) == numbers[name] and fresh[name].created > made[name].created
    assert fresh["one"].ends_at > made["one"].ends_at

    # Another size needs other templates and another placement, and the old ones go.
    engine.configure(configuration(a_slice("four", "v6e-32"), a_slice("one", "v6e-8", capacity="spot")))
    replaced = engine.up()
    assert replaced.ok and done(replaced, "delete-replaced").count("four") == 1, replaced.text
    assert standing(compute) == {"tpu-stack-dev-four", "tpu-stack-dev-one"}
    assert len(slices(replaced)["four"].hosts) == 8 and not slices(replaced)["one"].ends_at
    assert len([thing for thing in engine.world.things().values() if thing.type == TEMPLATE]) == 2

    # An interrupted `up` leaves a group that no state has. The next one without its slice deletes it, with the template
    # and the policy that it uses, and so does `destroy`.
    four, left = a_slice("four", "v6e-32"), a_slice("left", "v6e-16", wait="10m")
    api.control.set_capacity(f"{ZONE}:v6e:on-demand", 32)
    interrupt(engine, four, left)
    assert "tpu-stack-dev-left" in standing(compute)
    engine.configure(configuration(four))
    removed = engine.up()
    assert removed.ok and standing(compute) == {"tpu-stack-dev-four"}, removed.text
    assert len([thing for thing in engine.world.things().values() if thing.type == TEMPLATE]) == 1
    interrupt(engine, four, left)

    destroyed = engine.destroy()
    assert destroyed.ok, destroyed.text
    assert standing(compute) == set() and engine.resources() == [] and engine.world.things() == {}
    assert not api.control.alive()["groups"] and not api.control.alive()["instances"]


def interrupt(engine: Engine, *slices: dict[str, Any]) -> None:
    """Kill an `up` while the last of these slices waits for capacity."""
    engine.configure(configuration(*slices))
    killed = engine.begin("up")
    killed.wait_for(f"WAITING_FOR_RESOURCES for {slices[-1]['accelerator']}")
    killed.kill()
    assert not killed.report().ok
    engine.end_orphans()
    engine.cancel()
