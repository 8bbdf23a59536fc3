"""The inventory of a Pulumi stack, and every way in which there is none."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from backends.local.local_backend import local
from contracts.errors import RequestError
from contracts.inventory import InventoryError, Slice, slices_to_json, to_json
from launch import inventories
from tests.launch.slices import Program, make_host, make_inventory, make_slice


def refused() -> str:
    with pytest.raises(RequestError) as error:
        inventories.read("dev")
    return str(error.value)


def test_a_stacks_output_is_its_inventory(tmp_path: Path, program: Program) -> None:
    inventory = local(2, "cpu", [0, 1]).inventory
    (tmp_path / "output").write_text(json.dumps({"image_repository": "x", "inventory": to_json(inventory)}))
    program("pulumi", f'[ "$*" = "stack output --json --stack dev" ] && cat {tmp_path}/output')
    assert inventories.read("dev") == inventory


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo '{}'", "--stack dev: it has no output `inventory` yet; `pulumi up --stack dev` makes it"),
        ("echo nonsense", "it has no output `inventory` yet"),
        ("echo '[]'", "it has no output `inventory` yet"),
        (
            "echo a; echo \"error: no stack named 'dev' found\" >&2; exit 255",
            "--stack dev: `pulumi stack output` failed: error: no stack named 'dev' found",
        ),
        ("exit 1", "--stack dev: `pulumi stack output` failed: it said nothing"),
        ('echo \'{"inventory": "{}"}\'', "the stack dev: inventory: version None cannot be read"),
    ],
)
def test_a_stack_without_an_inventory_says_what_to_do(program: Program, script: str, said: str) -> None:
    program("pulumi", script)
    assert said in refused()


def test_a_pulumi_that_does_not_answer_or_is_not_there_is_said_to_be_so(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventories, "LIMIT_S", 0.2)
    program("pulumi", "exec sleep 60")
    assert "`pulumi stack output` gave no answer within 0 s" in refused()
    monkeypatch.setenv("PATH", "/nowhere")
    assert "--stack dev: `pulumi` is not on PATH" in refused()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xba\x00", "is not UTF-8"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (None, "Is a directory"),
    ],
)
def test_a_file_that_is_no_inventory_is_refused_with_where_one_comes_from(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    path = tmp_path / "inventory.json"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(RequestError) as error:
        inventories.read(str(path))
    said = str(error.value)
    assert said.startswith(f"--stack {path}: ") and why in said and "`pulumi stack output inventory`" in said


def test_of_two_entries_of_a_slice_the_newer_counts_and_of_equally_old_ones_that_with_hosts() -> None:
    ours = make_slice([make_host(0)], created="2026-11-20T10:00:00.5Z")
    whole = make_inventory(ours)

    def kept(**changes: Any) -> Slice:
        text = slices_to_json([dataclasses.replace(ours, zone="kept", **changes)])
        return inventories.with_kept(whole, text.encode()).slices[0]

    changes: dict[str, Any] = {
        "created": "2026-11-20T10:00:01Z",
        "active_at": "2026-11-20T11:00:00Z",
        "ends_at": "2026-11-21T11:00:00Z",
    }
    assert kept(**changes) == dataclasses.replace(ours, zone="kept", **changes)
    assert kept(created="2026-11-20T10:00:00Z") == ours, "`pulumi up` has made it anew since"
    assert kept() == ours
    waiting = dataclasses.replace(ours, hosts=())
    inventory = make_inventory(waiting)
    assert inventories.with_kept(inventory, slices_to_json([ours]).encode()).slices == (ours,)
    assert inventories.with_kept(inventory, None) == inventory
    # What was recorded before the stack declared another zone does not undo that.
    zones = ("us-central1-a", "us-south1-a")
    declared = dataclasses.replace(ours, zones=zones, hosts=(), created="")
    stack = dataclasses.replace(inventory, slices=(declared,))
    (found,) = inventories.with_kept(stack, slices_to_json([ours]).encode()).slices
    assert (found.zones, found.hosts) == (zones, ours.hosts)
    with pytest.raises(InventoryError, match="no list of slices"):
        inventories.with_kept(inventory, b"[]")
