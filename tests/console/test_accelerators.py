"""The table of accelerators: what is chosen, at which prices, and what is said of the rest."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from console.accelerators import WIDTH, choose, list_accelerators, list_granted, table
from contracts.errors import RequestError


def drawn(zone: str | None, generation: str | None) -> list[str]:
    """The whole table as text, in the narrowest terminal there is."""
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(table(choose(zone=zone, generation=generation), zone))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_price_is_the_lowest_of_the_zones_or_that_of_the_zone_asked_for() -> None:
    (anywhere,) = [line.split() for line in drawn(None, "v6e") if line.startswith("v6e-8 ")]
    (there,) = [line.split() for line in drawn("us-east5-a", "v6e") if line.startswith("v6e-8 ")]
    assert anywhere[-3:] == ["21.60", "2.90", "11"]
    assert there[-2:] == ["21.60", "9.72"]
    (unknown,) = [line for line in drawn("southamerica-west1-a", None) if line.startswith("v6e-1 ")]
    assert unknown.split()[-2:] == ["2.70", "–"]


@pytest.mark.parametrize(
    ("zone", "generation", "said"),
    [
        (None, "v9", '--generation: "v9" is not a TPU generation; choose one of v2, v3, v4, v5e, v5p, v6e'),
        ("mars-1-a", None, '--zone: no TPU is listed in "mars-1-a"; choose one of asia-east1-c, '),
        ("us-central2-b", "v5p", "--zone: no v5p is listed in us-central2-b; it is in us-central1-a, "),
    ],
)
def test_a_zone_or_generation_with_nothing_in_it_is_answered_with_those_there_are(
    zone: str | None, generation: str | None, said: str
) -> None:
    with pytest.raises(RequestError) as error:
        choose(zone=zone, generation=generation)
    assert str(error.value).startswith(said)


def test_what_is_left_out_is_counted_with_the_option_that_shows_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list_accelerators(zone=None, generation="v5p", max_chips=None) == 0
    assert "89 larger ones: --max-chips 6144" in capsys.readouterr().out
    assert list_accelerators(zone=None, generation="v5p", max_chips=6144) == 0
    said = capsys.readouterr().out
    assert "larger ones" not in said and "v5p-12288" in said
    assert list_accelerators(zone=None, generation="v3", max_chips=None) == 0
    told = "v3: one host us-central1-a, us-central1-b, europe-west4-a; more europe-west4-a"
    assert told in capsys.readouterr().out


ROOT = Path(__file__).resolve().parents[2]
GRANT = "config:\n  tpu-stack:grant:\n    - {{type: {}, chips: {}, capacity: spot}}"


def test_the_grant_of_the_example_is_listed_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_granted(ROOT / "Pulumi.example.yaml", zone=None, generation=None) == 0
    said = capsys.readouterr().out
    assert "v5e in us-central1-a: 64 spot chips, until 2026-12-31" in said
    assert "v5e in europe-west4-b: 64 spot chips" in said
    (row,) = {tuple(line.split()) for line in said.splitlines() if line.strip().startswith("v5litepod-16 ")}
    assert row[-1] == "4"
    covered = [f"v5litepod-{chips}" for chips in (1, 4, 8, 16, 32, 64)]
    assert [word for word in said.split() if word.startswith("v5litepod-")] == covered * 2
    list_granted(ROOT / "Pulumi.example.yaml", zone="europe-west4-b", generation="v5e")
    assert "us-central1-a" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("config: {}", "has no tpu-stack:grant"),
        ("[]", "has no tpu-stack:grant"),
        ("config: [", "cannot be read"),
        (None, "cannot be read"),
        (GRANT.format("v9, zone: us-central1-a", 0), "grant.0..type"),
        (GRANT.format("v4, zone: us-central2-b", 8), "no line of tpu-stack:grant is for v5e"),
    ],
)
def test_a_file_without_a_grant_to_list_is_answered_with_what_is_wrong(
    tmp_path: Path, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "Pulumi.dev.yaml").write_text(text)
    with pytest.raises(RequestError, match=said):
        list_granted(tmp_path / "Pulumi.dev.yaml", zone=None, generation="v5e")
