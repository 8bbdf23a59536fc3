"""What runs and slices cost: known where every part is, absent where one is not, and never counted twice or as zero."""

import dataclasses
import functools
from typing import Any

import pytest

from backends.local.local_backend import on_this_machine
from console.summary import summary
from contracts.errors import RequestError
from contracts.inventory import NodePool
from infra.documents.deleted_slices import DeletedSlice
from launch import pricing
from tests.launch.slices import WriteRun, make_slice

MAIN = make_slice(
    on_this_machine(hosts="4", platform="cpu").hosts,
    name="main",
    zone="us-central1-a",
    created="2026-11-20T10:00:00.25Z",
)
HOUR = 16 * 0.24493
ZONE, FREE = "us-central1-a", "free by the grant ({} at list prices)"
NOON_S = 1795176000.0
"""2026-11-20T12:00:00Z."""


def attempt(number: int, usd: float | None, billed: float | None, **more: Any) -> dict[str, Any]:
    price = None if usd is None else {"usd_per_hour": usd, "billed_usd_per_hour": billed}
    started = {"attempt": number, "started": "2020-11-20T21:45:00Z", "processes": 2}
    return {**started, "price": price, **more}


@pytest.mark.parametrize(
    ("changed", "usd", "billed"),
    [
        ({}, HOUR, None),
        ({"granted_chips": 0}, HOUR, HOUR),
        ({"granted_chips": 16}, HOUR, 0.0),
        ({"granted_chips": 4, "count": 2}, 2 * HOUR, 2 * HOUR * 28 / 32),
        ({"granted_chips": 0, "capacity": "on-demand"}, 19.2, 19.2),
        ({"capacity": "reserved"}, None, None),
        ({"zone": "mars-north1-a"}, None, None),
        ({"zone": "local", "accelerator_type": "cpu"}, None, None),
    ],
)
def test_an_hour_of_a_slice_has_its_list_price_or_none(
    changed: dict[str, Any], usd: float | None, billed: float | None
) -> None:
    price = pricing.list_price(dataclasses.replace(MAIN, **changed))
    assert (price is None) == (usd is None)
    if price is not None:
        assert price["usd_per_hour"] == pytest.approx(usd)
        assert price["billed_usd_per_hour"] == (None if billed is None else pytest.approx(billed))


@pytest.mark.parametrize(
    ("attempts", "said"),
    [
        ([attempt(0, 4.0, 4.0)], "2.00 USD at list prices"),
        ([attempt(0, 4.0, 0.0)], "free by the grant (2.00 USD at list prices)"),
        ([attempt(0, 4.0, 1.0)], "0.50 USD at list prices, 1.50 more by the grant"),
        ([attempt(0, 4.0, None)], "2.00 USD at list prices, less what a grant covers"),
        # At the price of each, as of another zone, and with the hours of each.
        ([attempt(0, 10.0, 10.0, wall_s=720.0), attempt(1, 4.0, 4.0)], "4.00 USD at list prices"),
        ([attempt(0, None, None, wall_s=720.0), attempt(1, 4.0, 4.0)], None),
        ([attempt(0, 4.0, 4.0, wall_s=None), attempt(1, 4.0, 4.0)], None),
        ([attempt(0, None, None)], None),
    ],
)
def test_a_run_costs_what_its_attempts_cost_or_nothing_is_said(
    write_run: WriteRun, attempts: list[dict[str, Any]], said: str | None
) -> None:
    run = write_run(attempts=attempts, result={"attempt": len(attempts) - 1, "wall_s": 1800.0})
    cost = pricing.run_cost(run)
    assert (cost and cost.text()) == said


def test_an_attempt_that_ended_before_its_first_heartbeat_took_until_its_result(write_run: WriteRun) -> None:
    run = write_run(attempts=[attempt(0, 4.0, 4.0)], result={"outcome": "failed", "time": 1605908700 + 360.0})
    assert run.wall_s == 360.0
    assert write_run(attempts=[attempt(0, 4.0, 4.0)]).wall_s == 360.0  # its result is still there
    run.directory.remove("result.json")
    fresh = write_run(attempts=[attempt(0, 4.0, 4.0)])
    assert (fresh.wall_s, pricing.run_cost(fresh)) == (None, None)


def test_an_attempt_that_no_pod_has_begun_cost_nothing(write_run: WriteRun) -> None:
    ended = {"outcome": "stopped", "time": 1605908700 + 360.0}
    waited = write_run(attempts=[attempt(0, 4.0, 4.0)], result=ended)
    waited.described["pods"] = {"restarts": 10, "queue": None}
    assert (cost := pricing.run_cost(waited)) is not None and cost.usd == 0
    waited.described["attempts"][0]["pod"] = "r-0-abcde"
    assert (cost := pricing.run_cost(waited)) is not None and cost.usd == 0.4


def test_a_budget_is_of_all_attempts_and_counts_a_grants_hours(write_run: WriteRun) -> None:
    free = dataclasses.replace(MAIN, granted_chips=16)
    new = pricing.budget(2 * HOUR, free, None)
    assert new is not None and new.left_s == 7200
    unseen = attempt(1, HOUR, 0.0, wall_s=None)
    attempts = [attempt(0, HOUR, 0.0, wall_s=3600.0), unseen, attempt(2, HOUR, 0.0)]
    ended = {"attempt": 2, "outcome": "stopped", "wall_s": 1800.0}
    run = write_run(attempts=attempts, result=ended, max_usd=2 * HOUR)
    kept = pricing.budget(None, free, run)
    assert kept is not None and kept.left_s == pytest.approx(1800, abs=1)
    assert pricing.budget(4 * HOUR, free, run) == dataclasses.replace(kept, max_usd=4 * HOUR)
    spent = write_run(attempts=attempts, result={**ended, "wall_s": 3600.0}, max_usd=2 * HOUR)
    with pytest.raises(
        RequestError, match=r"has spent 7.84 of its 7.84 USD; allow it more, as in: .*-usd 15\.68"
    ):
        pricing.budget(None, free, spent)
    # What the hosts have counted to its end is spent, though the record ends a moment before.
    short = write_run(
        attempts=attempts, result={**ended, "wall_s": 3599.0, "out_of_budget": True}, max_usd=2 * HOUR
    )
    with pytest.raises(RequestError, match=r"has spent 7.84 of its 7.84 USD"):
        pricing.budget(None, free, short)
    assert pricing.budget(None, MAIN, write_run(result=ended)) is None
    with pytest.raises(
        RequestError, match=r"--max-usd 5: no list price is known for v5litepod-16 \(reserved\)"
    ):
        pricing.budget(5, dataclasses.replace(MAIN, capacity="reserved"), None)


def test_a_run_that_has_spent_its_budget_says_so_and_how_it_goes_on(write_run: WriteRun) -> None:
    run = write_run(
        result={"outcome": "stopped", "out_of_budget": True, "reason": "all is spent"}, max_usd=2.5
    )
    assert summary(run, "stopped") == [
        f"{run.run_id} was stopped: out of budget",
        "  all is spent",
        f"  resume with `fab train --resume {run.run_id} --max-usd 5` (no checkpoint yet: from the start)",
    ]


def test_a_stack_costs_what_its_slices_cost_since_they_are_there() -> None:
    dear = dataclasses.replace(MAIN, name="dear", capacity="on-demand", granted_chips=0)
    free = dataclasses.replace(MAIN, name="free", granted_chips=16)
    queued = dataclasses.replace(MAIN, name="queued", hosts=())
    unknown = dataclasses.replace(MAIN, name="unknown", zone="mars-north1-a")
    old = dataclasses.replace(MAIN, name="old", created="")
    there, dollars = "in the 2 h that it is there", "USD at list prices"
    covered = FREE.format("3.92 USD an hour")
    assert list(pricing.stack_costs([dear, free, queued, unknown, old], NOON_S)) == [
        f"slice dear (v5litepod-16): 19.20 USD an hour at list prices (on-demand, {ZONE}); 38.40 {dollars} {there}",
        f"slice free (v5litepod-16): {covered} (spot, {ZONE}); {FREE.format('7.84 USD')} {there}",
        f"slice old (v5litepod-16): 3.92 USD an hour at list prices, less what a grant covers (spot, {ZONE})",
        f"together 38.40 {dollars}, 7.84 more by the grant so far",
    ]
    pool = NodePool(machine_type="ct5lp-hightpu-4t", accelerator="tpu-v5-lite-podslice", nodes=4)
    stays = dataclasses.replace(dear, name="stays", hosts=(), created="", pool=pool)
    goes = dataclasses.replace(stays, name="goes", pool=dataclasses.replace(pool, scales_to_zero=True))
    hourly = f"(v5litepod-16): 19.20 USD an hour at list prices (on-demand, {ZONE})"
    assert list(pricing.stack_costs([stays, goes], NOON_S)) == [
        f"slice stays {hourly}, with a run or without",
        f"slice goes {hourly} while a run has its nodes",
    ]


def test_a_run_on_node_pools_costs_what_their_slice_does(write_run: WriteRun) -> None:
    pool = NodePool(machine_type="ct5lp-hightpu-4t", accelerator="tpu-v5-lite-podslice", nodes=4)
    one = dataclasses.replace(MAIN, capacity="on-demand", hosts=(), pool=pool)
    ended = {"outcome": "done", "wall_s": 1800.0, "attempt": 0}
    run = write_run(result=ended, slice=dataclasses.asdict(one), pods={"restarts": 10, "queue": None})
    assert pricing.run_cost(run) is not None, "no pod has begun it"
    assert pricing.run_cost(run).usd == 0.0  # type: ignore[union-attr]
    run.described["attempts"][-1]["pod"] = "r-0"
    assert pricing.run_cost(run).usd == pytest.approx(9.60)  # type: ignore[union-attr]


def measured(started: str, outcome: str, wall_s: float, made: str, parts: dict[str, float]) -> dict[str, Any]:
    """An attempt on a slice that was made at `made`, as run.json has it after its end."""
    timing = {"timing": {"parts": parts, "from_step": 0, "step": 9}}
    ended = {"started": started, "wall_s": wall_s, "outcome": outcome, "slice_created": made}
    return attempt(0, 4.0, 4.0, **ended, **timing)


def test_the_time_of_slices_is_divided_by_month_with_what_no_run_held(write_run: WriteRun) -> None:
    gone, there = "2026-10-31T20:00:00Z", "2026-11-20T10:00:00.25Z"
    first = measured("2026-10-31T22:00:00Z", "failed", 1800.0, gone, {"start": 600.0, "compute": 1200.0})
    again = measured("2026-10-31T22:40:00Z", "done", 1200.0, gone, {"compute": 1200.0})
    old = write_run(
        attempts=[first, {**again, "attempt": 1}], result={"attempt": 1, "outcome": "done", **again}
    )
    # At midnight the slice stood idle, until a run of another day.
    late = measured("2026-11-01T01:00:00Z", "done", 3600.0, gone, {"compute": 3600.0})
    late_run = dataclasses.replace(old, described={**old.described, "run_id": "b", "attempts": [late]})
    new = measured("2026-11-20T11:00:00Z", "failed", 1800.0, there, {"compute": 1800.0})
    unpriced = {**new, "price": None, "started": "2026-11-20T11:30:00Z"}
    new_run = dataclasses.replace(
        old, described={**old.described, "run_id": "c", "attempts": [new, unpriced]}
    )
    runs = [
        dataclasses.replace(run, result={**run.described["attempts"][-1], "attempt": number, "time_s": parts})
        for run, number, parts in ((old, 1, {"compute": 1200.0}), (late_run, 0, {"compute": 3600.0}),
                                   (new_run, 0, {"compute": 1800.0}))
    ]  # fmt: skip
    slices = [
        dataclasses.replace(MAIN, created=there, granted_chips=0),
        dataclasses.replace(MAIN, name="requested", created="", hosts=()),
    ]
    november, october = pricing.by_month(runs, slices, (), NOON_S + 3600.0)
    assert october.goodput.seconds == {
        "productive": 2400.0,
        "starting": 600.0,
        "waiting": 600.0,
        "idle": 10800.0,
    }
    # 20:00 to 22:00, and 23:00 to midnight; its attempts' price is the only one that is known of it.
    assert (october.month, {*october.runs}, october.is_cost_complete) == ("2026-10", {old.run_id}, True)
    assert october.cost is not None and october.cost.usd == pytest.approx(4.0 * 4)
    assert november.goodput.seconds == {"productive": 3600.0 + 2 * 1800.0, "idle": 3600.0 + 2 * 3600.0 - 0.25}
    assert (november.month, {*november.runs}, november.is_cost_complete) == ("2026-11", {"b", "c"}, False)
    assert november.cost is not None
    idle_usd = 4.0 + HOUR * (2 * 3600.0 - 0.25) / 3600
    assert november.cost.usd == pytest.approx(4.0 + 2.0 + idle_usd, abs=0.001)
    assert pricing.by_month([], [dataclasses.replace(MAIN, created="")], (), NOON_S) == []

    # Slices that were deleted stood idle until then: one that runs held, one that none did, one that an old inventory
    # still has; the price of a topology is not known.
    held = DeletedSlice(
        created=gone,
        deleted="2026-11-01T03:00:00Z",
        accelerator_type=MAIN.accelerator_type,
        count=1,
        zone=ZONE,
        capacity="spot",
    )
    change = functools.partial(dataclasses.replace, held)
    deleted = [
        held,
        change(created=there, deleted="2026-11-20T13:00:00.25+00:00"),
        change(created="2026-09-30T23:00:00Z", deleted="2026-10-01T01:00:00Z"),
        change(created="2026-09-01T00:00:00Z", deleted="2026-09-01T01:00:00Z", accelerator_type=""),
    ]
    november, october, september = pricing.by_month(runs, slices, deleted, NOON_S + 30 * 86400.0)
    assert november.goodput.seconds == {"productive": 3600.0 + 2 * 1800.0, "idle": 2 * 3600.0 + 2 * 3600.0}
    assert october.goodput.seconds["idle"] == 10800.0 + 3600.0
    assert september.goodput.seconds == {"idle": 2 * 3600.0} and not september.is_cost_complete
    assert september.cost is not None and september.cost.usd == pytest.approx(HOUR)

    # A wait for capacity costs nothing: of a slice that is there, that is gone, and whose last attempt alone tells it.
    later = dataclasses.replace(slices[0], active_at="2026-11-20T10:30:00.25Z")
    (november, *_) = pricing.by_month(runs, [later], (), NOON_S + 3600.0)
    assert november.goodput.seconds["idle"] == 3600.0 + 2 * 3600.0 - 0.25 - 1800.0
    (september,) = pricing.by_month([], [], [change(created="2026-09-01T00:00:00Z", deleted="2026-09-03T00:00:00Z",
                                                    active_at="2026-09-02T00:00:00Z")], NOON_S)  # fmt: skip
    assert september.goodput.seconds == {"idle": 86400.0}
    told = {**late, "slice_active_at": "2026-11-01T00:30:00Z"}
    told_run = dataclasses.replace(late_run, described={**late_run.described, "attempts": [told]})
    (november,) = pricing.by_month([told_run], [], (), NOON_S)
    assert november.goodput.seconds["idle"] == 1800.0
