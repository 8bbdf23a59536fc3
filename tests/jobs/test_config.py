"""What is wrong with a job's options is said before anything starts, all at once and with a remedy."""

import dataclasses
from typing import Any

import pytest

from jobs.flax_mlm import config as configs
from jobs.flax_mlm.config import Config, problems
from jobs.glue import options
from jobs.tf_images import config as tf_images
from jobs.tf_squad import config as tf_squad


@pytest.mark.parametrize("model", configs.SIZES)
def test_every_named_model_can_run_and_a_dimension_that_is_given_counts_instead_of_its_own(
    model: Any,
) -> None:
    assert problems(Config(model=model), devices=2) == problems(Config(model=model), devices=8) == []
    config = Config(model=model, layers=7)
    assert (config.size("layers"), config.size("width")) == (7, configs.SIZES[model]["width"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"steps": 0}, "--steps 0: must be at least 1"),
        ({"vocab_size": 299}, "--vocab-size 299: must be at least 300"),
        ({"seed": 2**63}, f"--seed {2**63}: must be between 0 and 4294967295"),
        ({"mask_share": 0.0}, "--mask-share 0.0: must be between 0.01 and 0.9"),
        ({"dropout": 1.0}, "--dropout 1.0: must be between 0.0 and 0.9"),
        ({"eval_fraction": float("nan")}, "--eval-fraction nan: must be between 0.001 and 0.5"),
        ({"learning_rate": float("nan")}, "--learning-rate nan: must be above 0"),
        ({"learning_rate": float("inf")}, "--learning-rate inf: must be above 0"),
        ({"clip_norm": 0.0}, "--clip-norm 0.0: must be above 0"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1: must not be negative"),
        ({"weight_decay": float("inf")}, "--weight-decay inf: must not be negative"),
        ({"profile": "10"}, "--profile 10: is not A:B"),
        ({"steps": 9, "profile": "9:10"}, "--profile 9:10: must be steps of this run"),
        (
            {"sequence_length": 513},
            "--sequence-length 513: the model takes at most --max-positions 512; shorten the one or raise the other",
        ),
        ({"heads": 3}, "--heads 3: does not divide --width 128; choose one of 1, 2, 4, 8"),
        (
            {"batch_size": 10},
            "--batch-size 10: is shared out over 4 devices, so it must be a multiple of 4; choose 8 or 12",
        ),
        (
            {"batch_size": 3},
            "--batch-size 3: is shared out over 4 devices, so it must be a multiple of 4; choose 4",
        ),
    ],
)
def test_each_mistake_is_named_with_its_value_and_its_rule(changed: dict[str, Any], said: str) -> None:
    (found,) = problems(dataclasses.replace(Config(), **changed), devices=4)
    assert found.startswith(said)


def test_all_mistakes_are_found_at_once() -> None:
    wrong = dataclasses.replace(Config(), steps=0, batch_size=0, dropout=-1.0, learning_rate=-1.0)
    assert [text.split(":")[0] for text in problems(wrong, devices=2)] == [
        "--dropout -1.0",
        "--batch-size 0",
        "--steps 0",
        "--learning-rate -1.0",
    ]
    wrong = dataclasses.replace(Config(), sequence_length=600, heads=5, batch_size=5)
    assert [text.split(" ")[0] for text in problems(wrong, devices=2)] == [
        "--sequence-length",
        "--heads",
        "--batch-size",
    ]


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (configs, Config),
        (options, options.Options),
        (tf_images, tf_images.Config),
        (tf_squad, tf_squad.Config),
    ],
    ids=["flax_mlm", "glue", "tf_images", "tf_squad"],
)
def test_every_number_among_the_options_has_a_rule_and_those_that_a_resumed_run_may_change_exist(
    module: Any, kind: Any
) -> None:
    """An option added without one would take 0, -1 or nan and fail on every host instead."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    numbers = {name for name, kind in kinds.items() if kind.split(" | ")[0] in ("int", "float")}
    assert numbers == module.RANGES.keys()
    assert kinds.keys() >= module.FREE_ON_RESUME


def test_what_is_said_of_an_option_of_another_job_has_that_options_own_value() -> None:
    wrong = tf_images.Config(shift=0.95, steps=0)
    assert sorted(tf_images.problems(wrong, devices=1)) == [
        "--shift 0.95: must be between 0.0 and 0.5",
        "--steps 0: must be at least 1",
    ]
