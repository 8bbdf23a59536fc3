"""The table of what a grant covers."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.errors import RequestError
from infra.config import GrantLine
from launch.commands.accelerators import covered, list_granted, read_file

ROOT = Path(__file__).resolve().parents[2]
LINE = GrantLine(generation="v5e", zone="us-central1-a", chips=48, capacity="spot", until=None)


def written(folder: Path, text: str) -> Path:
    path = folder / "Pulumi.dev.yaml"
    path.write_text(text)
    return path


def test_a_line_covers_the_types_of_its_generation_that_fit() -> None:
    assert [each.type_name for each in covered(LINE)] == [f"v5litepod-{chips}" for chips in (1, 4, 8, 16, 32)]


def test_the_grant_of_the_example_is_listed_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_granted(ROOT / "Pulumi.example.yaml", zone=None, generation=None) == 0
    said = capsys.readouterr().out
    assert "v5e in us-central1-a: 64 spot chips, until 2026-12-31" in said
    assert "v5e in europe-west4-b: 64 spot chips" in said
    (row,) = {tuple(line.split()) for line in said.splitlines() if line.strip().startswith("v5litepod-16 ")}
    assert row[-1] == "4"


def test_zone_and_generation_choose_among_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    list_granted(ROOT / "Pulumi.example.yaml", zone="europe-west4-b", generation="v5e")
    assert "us-central1-a" not in capsys.readouterr().out
    with pytest.raises(RequestError, match="no line of tpu-stack:grant is for v4"):
        list_granted(ROOT / "Pulumi.example.yaml", zone=None, generation="v4")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("config: {}", "has no tpu-stack:grant"),
        ("[]", "has no tpu-stack:grant"),
        ("config: [", "cannot be read"),
        (
            "config:\n  tpu-stack:grant:\n    - {type: v9, zone: us-central1-a, chips: 0, capacity: spot}",
            "tpu-stack:grant[0].type",
        ),
    ],
)
def test_a_file_without_a_right_grant_is_answered_with_what_is_wrong(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(RequestError, match=said.replace("[", r"\[")):
        read_file(written(tmp_path, text))
    with pytest.raises(RequestError, match="cannot be read"):
        read_file(tmp_path / "missing.yaml")
