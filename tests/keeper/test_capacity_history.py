"""What `fab capacity` shows of the hours in which requests were served or waited in vain."""

import dataclasses
import datetime
import json
from pathlib import Path

import pytest
from rich.console import Console

from contracts import inventory
from contracts.errors import RequestError
from infra.documents import Documents, stock_outs
from infra.documents.stock_outs import Hours, ZoneOffer
from keeper.capacity_history import capacity, capacity_table
from launch.targets import TargetRequest
from tests.launch.slices import NO_STORAGE, make_host, make_inventory, make_slice

NOW = datetime.datetime(2026, 11, 23, 14, 30, tzinfo=datetime.UTC)
A, B, C = (
    ZoneOffer(zone=zone, kind="v5litepod-16", capacity="spot") for zone in ("us-a1-a", "us-b1-b", "us-c1-c")
)


def printed(found: dict[ZoneOffer, Hours], days: int = 30) -> list[str]:
    console = Console(width=160)
    with console.capture() as shown:
        console.print(capacity_table(found, days=days, now=NOW))
    return shown.get().splitlines()


def test_zones_are_in_the_order_of_how_often_they_serve_and_old_hours_do_not_count() -> None:
    found = {
        A: Hours(out=("2026-11-22T03", "2026-11-23T14"), served=()),
        B: Hours(out=("2026-11-20T03", "2026-11-20T04"), served=("2026-11-20T04", "2026-11-21T23")),
        C: Hours(out=(), served=("2026-01-01T03",)),
    }
    _, first, second, third = printed(found)
    assert first.split() == [
        "us-b1-b", "v5litepod-16", "spot", "3", "33%", "3", "d", "ago", "1", "d", "ago", f"···●◐{'·' * 18}○",
    ]  # fmt: skip
    slots = f"···●{'·' * 10}●{'·' * 9}"
    assert second.split() == ["us-a1-a", "v5litepod-16", "spot", "2", "100%", "this", "hour", "–", slots]
    assert third.split() == ["us-c1-c", "v5litepod-16", "spot", "0", "–", "–", "·" * 24]


def test_what_requests_have_found_is_shown_of_a_stack_that_has_no_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_inventory(dataclasses.replace(make_slice((make_host(0),)), hosts=()), storage=NO_STORAGE)
    file = tmp_path / "stack.json"
    file.write_text(inventory.to_json(plain))
    with pytest.raises(RequestError, match="stock-outs, are noted in its bucket, and it has none"):
        capacity(Console(), TargetRequest(stack=str(file)), days=30, as_json=False)
    with pytest.raises(RequestError, match="this machine asks for no TPUs"):
        capacity(Console(), TargetRequest(), days=30, as_json=False)

    store = tmp_path / "control"
    storage = dataclasses.replace(NO_STORAGE, bucket_url=str(tmp_path))
    file.write_text(inventory.to_json(dataclasses.replace(plain, storage=storage)))
    wanted = TargetRequest(stack=str(file))
    assert capacity(Console(width=120), wanted, days=30, as_json=False) == 0
    assert "no request has been noted yet" in capsys.readouterr().out
    now = datetime.datetime.now(datetime.UTC)
    for seen in ("out", "served", "out"):
        stock_outs.remember(Documents(str(store)), A, seen, now)
    assert capacity(Console(width=120), wanted, days=30, as_json=True) == 0
    hour = [stock_outs.utc_hour(now)]
    assert json.loads(capsys.readouterr().out) == [
        {"zone": "us-a1-a", "kind": "v5litepod-16", "capacity": "spot", "out": hour, "served": hour}
    ]
