"""tf_squad in TensorFlow: a resumed run goes on with the losses of one that was never stopped, two processes compute
what one does, and what it leaves behind says what the run has said."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from contracts.errors import RequestError
from jobs.glue.tokenizer import open_tokenizer
from jobs.runtime.prediction import answer
from jobs.runtime.process import Run
from jobs.tf_squad import data, model, predict, windows
from jobs.tf_squad.config import Config
from jobs.tf_squad.train import train
from tests.jobs.groups import environment_of, free_address, run_in, variables_of
from tests.jobs.resumed import lines_of

pytestmark = pytest.mark.usefixtures("group")
MakeRun = Callable[..., Run]
STEPS = 24


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where somebody is, of 60 texts; for some the text does not say it."""
    drawn, paragraphs = random.Random(0), []
    people, places = ["Ada", "Bob", "Cleo", "Dan"], ["Rome", "Oslo", "Lima", "Kyiv", "Bern"]
    for number in range(60):
        who = drawn.sample(people, 3)
        text = " ".join(f"{each} is now in {drawn.choice(places)}." for each in who)
        asked = []
        for each in people:
            at = text.find(f"{each} is now in ") + len(f"{each} is now in ")
            answers = [{"text": text[at : text.index(".", at)], "answer_start": at}] if each in who else []
            asked.append(
                {"id": f"{number}{each}", "question": f"Where is {each}?", "answers": answers}
                | {"is_impossible": not answers}
            )
        paragraphs.append({"context": text, "qas": asked})
    path = tmp_path_factory.mktemp("squad") / "where.json"
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "where", "paragraphs": paragraphs}]}))
    return str(path)


def config_of(file: str) -> Config:
    return Config(
        data=file,
        steps=STEPS,
        batch_size=8,
        max_length=32,
        stride=8,
        dtype="float32",
        learning_rate=2e-3,
        steps_per_call=4,
        log_every=1,
        eval_every=12,
        checkpoint_every=6,
        keep_checkpoints=STEPS,
    )


@pytest.fixture
def config(file: str) -> Config:
    return config_of(file)


@pytest.fixture(scope="module")
def whole(group: None, file: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that was never stopped, with a line of metrics and so a call for each step."""
    place = tmp_path_factory.mktemp("whole")
    run = run_in(environment_of("tf_squad", "tensorflow", place))
    train(run, config_of(file))
    return run


def test_a_run_goes_on_exactly_and_however_many_steps_a_call_has(
    make_run: MakeRun, whole: Run, config: Config
) -> None:
    undisturbed = lines_of(whole)
    assert undisturbed[-2]["loss"] < 0.8 * undisturbed[0]["loss"]  # it learns
    run = make_run("again", job="tf_squad")
    shutil.copytree(whole.directory.path("checkpoints/6"), run.directory.path("checkpoints/6"))
    final = train(run, dataclasses.replace(config, steps_per_call=5, log_every=8, checkpoint_every=100))
    assert lines_of(run) == [
        line for line in undisturbed if (line["step"] > 6 and line["step"] % 8 == 0) or "f1" in line
    ]
    assert final["eval_loss"] == undisturbed[-1]["eval_loss"]


def test_an_export_answers_as_the_run_did_in_each_of_its_forms(
    make_run: MakeRun, whole: Run, config: Config
) -> None:
    export = Path(whole.directory.path("export"))
    said = json.loads(whole.directory.read_text("predictions.json") or "")
    odds = json.loads(whole.directory.read_text("null_odds.json") or "")
    held_out = data.read(config).eval
    assert list(said) == list(odds) == [each.id for each in held_out]
    assert all((odds[each.id] > 0) == (said[each.id] == "") for each in held_out)
    surest, *_, vaguest = sorted(held_out, key=lambda each: odds[each.id])
    predictor = predict.load(export, export)
    for each in (surest, vaguest):
        (found,) = answer(predictor, [each.question], each.text)
        assert found.best[0].text == (said[each.id] or predict.NO_ANSWER)
    assert predict.NO_ANSWER in [best.text for best in found.best]
    cut = windows.encode(held_out, open_tokenizer(export), config)
    ids_BS = tf.constant(cut.take(np.arange(4), windows.shared_length(cut)).ids_BS)
    settings = json.loads((export / "config.json").read_bytes())
    network = model.build(settings, "float32")
    network.give(model.read_weights(export))
    served = tf.saved_model.load(str(export / "saved_model")).signatures["serving_default"](input_ids=ids_BS)
    for found, name in zip(network(ids_BS), ("start_logits", "end_logits"), strict=True):
        np.testing.assert_allclose(served[name], found, atol=1e-5)
    with pytest.raises(RequestError, match="--second"):
        answer(predictor, ["Where?"])
    begun = make_run("begun", job="tf_squad")
    other = dataclasses.replace(config, init_from=str(export), steps=1, learning_rate=1e-9)
    assert train(begun, other)["eval_loss"] == pytest.approx(lines_of(whole)[-1]["eval_loss"], abs=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_gelu_by_hand_and_its_gradient_are_rounded_once(dtype: str, tolerance: float) -> None:
    """tolerance: of a value's size. In bfloat16, TensorFlow's own rounds each operation, and is not as near."""
    x = tf.cast(tf.linspace(-6.0, 6.0, 4001), dtype)
    exact_x = tf.cast(x, tf.float64)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, exact_x])
        found, exact = model.gelu(x), tf.nn.gelu(exact_x)
    for values, expected in ((found, exact), (tape.gradient(found, x), tape.gradient(exact, exact_x))):
        assert values.dtype == dtype
        np.testing.assert_allclose(tf.cast(values, tf.float64), expected, rtol=tolerance, atol=1e-6)


ONE_STEP = """
import json, os, sys
import numpy as np
from pathlib import Path
from contracts import process_environment as contract
from jobs.runtime.tensorflow import distributed
from jobs.tf_squad import data, model
from jobs.tf_squad.config import Config
from jobs.tf_squad.train import Training
from tests.jobs.groups import run_in
environment = contract.read(os.environ)
distributed.start(environment)
config = Config(**json.loads(sys.argv[1]))
dataset = data.read(config)
beginning = model.prepare(config, dataset.train, Path("/nowhere"), print)
training = Training(run_in(environment), config, dataset, beginning)
model.begin(training.model, beginning, config.seed)
results = training.take_steps(training.batches(range(1, 3)), 0, 2)
evaluated = training.score(2)
if environment.is_first:
    np.savez(sys.argv[2], **results, eval_loss=evaluated["eval_loss"], **training.model.weights_by_name())
distributed.leave()
os._exit(0)  # as a job ends: the framework's own threads may abort the interpreter's exit
"""


@pytest.mark.nightly
def test_two_processes_take_the_steps_of_one(config: Config, tmp_path: Path) -> None:
    config = dataclasses.replace(config, dropout=0.0, clip_norm=0.5)
    found = []
    for size in (1, 2):
        (tmp_path / str(size)).mkdir()
        addresses = [free_address() for _ in range(size)]
        environments = [
            environment_of(
                "tf_squad", "tensorflow", tmp_path / str(size), num_processes=size, process_id=rank
            )
            for rank in range(size)
        ]
        answer = tmp_path / f"{size}.npz"
        words = [sys.executable, "-P", "-c", ONE_STEP, json.dumps(dataclasses.asdict(config)), str(answer)]
        processes = [
            subprocess.Popen(
                words,
                env=told
                | {
                    "TF_CONFIG": json.dumps(
                        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
                    )
                },
            )
            for rank, told in enumerate(variables_of(environments))
        ]
        assert [process.wait(120) for process in processes] == [0] * size
        found.append(np.load(answer))
    one, two = found
    for name in one:
        np.testing.assert_allclose(two[name], one[name], atol=2e-4, err_msg=name)
    assert float(one["grad_norm"]) > 0.5  # so that clipping is by the norm of both
