"""A suggestion fits what was typed, or there is none."""

import pytest

from contracts.suggestions import copied_character, suggestion
from fabfile.commands import COMMANDS as ALL
from infra.catalogue.zones import REGIONS, ZONES
from launch import jobs

COMMANDS = [*ALL]
TRAIN = [option for option in ALL["train"].parser_context.flags if option.startswith("--")]
FLAX_MLM = jobs.find("flax_mlm").options()
TF_IMAGES = jobs.find("tf_images").options()


@pytest.mark.parametrize(
    ("typed", "known", "suggested"),
    [
        # Case, spaces, hyphens and underscores.
        ("--dry_run", TRAIN, "--dry-run"),
        ("--Job", TRAIN, "--job"),
        ("—job", TRAIN, "--job"),
        ("STATUS", COMMANDS, "status"),
        ("flax-mlm", jobs.names(), "flax_mlm"),
        ("US_Central1-A", ZONES, "us-central1-a"),
        # The beginning of one name.
        ("--learning", FLAX_MLM, "--learning-rate"),
        ("job", COMMANDS, "jobs"),
        ("--max", TRAIN, None),
        ("us-central1-ai1", ZONES, "us-central1-ai1a"),
        # A letter too many, too few, swapped, or another one.
        ("trian", COMMANDS, "train"),
        ("--detatch", TRAIN, "--detach"),
        ("--stepz", FLAX_MLM, "--steps"),
        ("pytroch", ["jax", "pytorch", "pytorch_xla"], "pytorch"),
        ("eurpoe-west4", REGIONS, "europe-west4"),
        ("--sequnce-lenght", FLAX_MLM, "--sequence-length"),
        # What only shares letters with a name is another word.
        ("--pip", [*TRAIN, *TF_IMAGES], None),
        ("--lr", [*TRAIN, *FLAX_MLM], None),
        ("--image", [*TRAIN, *FLAX_MLM], None),
        ("nothing", COMMANDS, None),
        ("ls", COMMANDS, None),
        ("cp", ["cpu", "gpu", "tpu"], None),
        ("gpu", ["cpu", "tpu"], None),
        # Another number is another thing, and of several that are as near none is suggested.
        ("us-east9", REGIONS, None),
        ("us-central1-z", ZONES, None),
        ("v6e-12", ["v6e-1", "v6e-16"], None),
        ("", COMMANDS, None),
    ],
)  # fmt: skip
def test_a_suggestion_fits_what_was_typed_or_there_is_none(
    typed: str, known: list[str], suggested: str | None
) -> None:
    assert suggestion(typed, known) == suggested


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("—job", "—job: begins with — (em dash), as copied from a page; type two hyphens: --job"),
        ("–-job=x", "–-job=x: begins with – (en dash), as copied from a page; type two hyphens: --job=x"),
        ("−5", "−5: begins with − (minus sign), as copied from a page; type two hyphens: --5"),
        ("—", "—: begins with — (em dash), as copied from a page; type two hyphens: --"),
        ("“my", "“my: begins with “ (left double quotation mark), which a shell does not read as a quote; type \""),
        ("--job", None), ("a–b", None), ("", None), ("it’s", None),
    ],
)  # fmt: skip
def test_a_dash_or_a_quote_of_a_page_is_named(word: str, message: str | None) -> None:
    assert copied_character(word) == message
