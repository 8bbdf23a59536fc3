"""The inventory of a Pulumi stack, and every way in which there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.errors import RequestError
from contracts.inventory import to_json
from launch import inventories, targets

Program = Callable[[str, str], Path]


def refused() -> str:
    with pytest.raises(RequestError) as error:
        inventories.read("dev")
    return str(error.value)


def test_a_stacks_output_is_its_inventory(tmp_path: Path, program: Program) -> None:
    inventory = targets.local(2, "cpu", [0, 1]).inventory
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
