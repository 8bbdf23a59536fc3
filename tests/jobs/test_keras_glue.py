"""keras_glue: the steps that torch_glue takes, exact resume, and an export that loads in Keras."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from contracts.errors import RequestError
from jobs.keras_glue.config import Config, problems
from jobs.keras_glue.data import problems as data_problems
from jobs.runtime.prediction import answer
from jobs.runtime.process import Run
from tests.jobs.glue_folder import EXACT, FIRST_STEPS, STEPS, write_folder, write_rows
from tests.jobs.groups import environment_of, run_in
from tests.jobs.resumed import go_back, lines_of

os.environ["KERAS_BACKEND"] = "jax"
MakeRun = Callable[..., Run]


@pytest.fixture(scope="module")
def models(two_devices: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows, and a model of each kind."""
    folder = tmp_path_factory.mktemp("glue")
    rows = write_rows(folder / "rows.jsonl")
    for kind in FIRST_STEPS:
        write_folder(folder / kind, kind, rows)
    return folder


@pytest.fixture
def make_run(models: Path, tmp_path: Path) -> MakeRun:
    def make(name: str = "run") -> Run:
        (tmp_path / name).mkdir(exist_ok=True)
        return run_in(environment_of("keras_glue", "jax", tmp_path / name, cache_dir=str(models / "cache")))

    return make


def trained(run: Run, config: Config) -> Any:
    from jobs.keras_glue.train import train

    return train(run, config)


def make_config(models: Path, kind: str = "roberta", **options: Any) -> Config:
    return Config(
        data=str(models / "rows.jsonl"), init_from=str(models / kind), **{**STEPS, **EXACT, **options}
    )


@pytest.mark.parametrize("kind", FIRST_STEPS)
def test_the_first_steps_have_the_losses_and_gradients_of_torch_glue(
    models: Path, make_run: MakeRun, kind: str
) -> None:
    run = make_run()
    trained(run, make_config(models, kind))
    actual = [(line["loss"], line["grad_norm"]) for line in run.directory.read_metrics() if "loss" in line]
    np.testing.assert_allclose(actual[0], FIRST_STEPS[kind][0], atol=1e-5)
    # Where a gradient is 0 but for rounding, as that of the keys' biases, AdamW makes a whole step of the rounding.
    np.testing.assert_allclose(actual, FIRST_STEPS[kind], rtol=2e-3)
    folders = (models / kind, Path(run.directory.path("export")))
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert {(name, value.shape) for name, value in before.items()} == {
        (name, value.shape) for name, value in after.items()
    }


def test_a_run_goes_on_exactly_from_any_step(models: Path, make_run: MakeRun) -> None:
    often: dict[str, Any] = {"eval_every": 4, "checkpoint_every": 1, "keep_checkpoints": 20, "best": True}
    config = make_config(models, steps=10, dropout=0.1, learning_rate=5e-3, **often)
    complete = make_run("whole")
    final = trained(complete, config)
    undisturbed = lines_of(complete)
    for step in (4, 8):  # before its evaluation, and after it
        run = make_run(f"from-{step}")
        go_back(complete, run, step, is_evaluated=step == 8)
        again = trained(run, config)
        assert lines_of(run) == undisturbed, f"resumed after step {step}"
        for name in ("eval_score", "eval_loss", "best_step", "exported_step"):
            assert again[name] == final[name]


def test_without_a_better_score_training_ends_early_and_the_best_model_is_exported(
    models: Path, make_run: MakeRun
) -> None:
    config = make_config(models, steps=9, eval_every=2, checkpoint_every=3, patience=2, best=True)
    config = dataclasses.replace(config, learning_rate=1e-9)  # nothing changes, so the first is the best
    run = make_run()
    final = trained(run, config)
    assert [line["step"] for line in lines_of(run) if "eval_score" in line] == [2, 4, 6]
    assert (final["steps"], final["best_step"], final["exported_step"]) == (6, 2, 2)
    assert sorted(run.directory.checkpoint_steps()) == [2, 4, 6]
    settings = run.directory.read_json("settings.json") or {}
    assert (settings["batch_size"], settings["patience"], settings["steps"]) == (8, 2, 9)
    again = trained(run, config)
    assert {name: again[name] for name in final if name != "rows_per_s"} == {
        name: final[name] for name in final if name != "rows_per_s"
    }


def test_an_export_says_in_keras_and_in_predict_what_the_run_has_predicted(
    models: Path, make_run: MakeRun
) -> None:
    import keras

    from jobs.keras_glue.predict import load

    run = make_run()
    trained(run, make_config(models, steps_per_execution=2, eval_every=2, checkpoint_every=2, log_every=2))
    export = Path(run.directory.path("export"))
    lines = [json.loads(line) for line in (run.directory.read_text("predictions.jsonl") or "").splitlines()]
    answers = answer(load(export, export), [line["texts"][0] for line in lines])
    for line, message in zip(lines, answers, strict=True):
        assert message.best[0].text == line["prediction"]
        actual = {guess.text: guess.probability for guess in message.best}
        assert actual == pytest.approx(line["probabilities"], abs=1e-5)
    loaded = keras.saving.load_model(export / "model.keras")
    from jobs.glue.tokenizer import open_tokenizer

    ids = np.array([open_tokenizer(export).encode(lines[0]["texts"][0]).ids], np.int32)
    logits = np.asarray(loaded({"ids": ids, "mask": np.ones_like(ids)}, training=False), np.float64)[0]
    shares = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(shares, list(lines[0]["probabilities"].values()), atol=1e-5)


def test_what_cannot_run_is_refused_with_what_to_do(models: Path, make_run: MakeRun, tmp_path: Path) -> None:
    actual = problems(Config(batch_size=7, steps_per_execution=0), devices=2)
    assert [value.partition(":")[0] for value in actual] == ["--batch-size 7", "--steps-per-execution 0"]
    assert problems(Config(steps_per_execution=3), devices=2) == [
        "--log-every 20: must be a multiple of --steps-per-execution 3; choose 21",
        "--checkpoint-every 200: must be a multiple of --steps-per-execution 3; choose 201",
    ]
    config, folder = make_config(models), tmp_path / "other"
    shutil.copytree(models / "roberta", folder)
    source = dataclasses.replace(config, init_from=str(folder))
    settings_before = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings_before, "hidden_act": "gelu_new"}))
    assert data_problems(source, tmp_path) == [
        f"--init-from {folder}: hidden_act is 'gelu_new'; choose a model with gelu, relu, silu, swish"
    ]
    wrongs = {
        "vocab_size": (20, "tokenizer has .* tokens and its model 20"),
        "intermediate_size": (
            64,
            r"intermediate.dense.weight is \[48, 32\] and config.json makes it \[64, 32\]",
        ),
        "num_hidden_layers": (3, "lacks roberta.encoder.layer.2.attention.self.query.weight"),
    }
    for name, (value, message) in wrongs.items():
        (folder / "config.json").write_text(json.dumps({**settings_before, name: value}))
        with pytest.raises(RequestError, match=message):
            trained(make_run(name), source)


@pytest.mark.parametrize("kind", FIRST_STEPS)
def test_the_fast_layers_compute_what_those_of_keras_do_and_drop_as_many(models: Path, kind: str) -> None:
    import keras

    from jobs.glue.pretrained import read_settings
    from jobs.keras_glue import model

    settings = {**read_settings(models / kind), "id2label": {"0": "a", "1": "b"}}
    ids = np.array([[3, 4, 5, 6], [7, 8, settings["pad_token_id"], settings["pad_token_id"]]], np.int32)
    inputs = {"ids": ids, "mask": (ids != settings["pad_token_id"]).astype(np.int32), "types": 0 * ids}
    inputs = {name: inputs[name] for name in model.input_names(settings)}
    plain, fast = model.build(settings), model.build(settings, keras.Model, ((1, 3), (1, 4)))
    for target, source in zip(fast.trainable_variables, plain.trainable_variables, strict=True):
        target.assign(source)
    packed = {"places": [0, 1, 2, 0, 1, 2, 3]} | {
        name: [*values[1, :3], *values[0]] for name, values in inputs.items()
    }
    logits_GNC = fast({name: np.array([values], np.int32) for name, values in packed.items()})
    np.testing.assert_allclose(logits_GNC[0], plain(inputs)[::-1], atol=1e-5)
    dropout, inputs_of_ones = model.FastDropout(0.1), np.ones((1000, 400), np.float32)
    dropped = [np.asarray(dropout(inputs_of_ones, training=True)) for _ in range(2)]
    assert [(value == 0).mean() for value in dropped] == pytest.approx([0.1, 0.1], abs=0.003)
    assert ((dropped[0] == 0) & (dropped[1] == 0)).mean() == pytest.approx(0.01, abs=0.001)
    np.testing.assert_allclose(dropped[0].max(), 1 / 0.9, rtol=1e-6)
