"""torch_glue in torch: a resumed run goes on with the losses of one that was never stopped, two processes compute what
one does, and what it leaves behind loads elsewhere."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from contracts.errors import RequestError
from jobs.glue.data import read
from jobs.glue.pretrained import prepare
from jobs.glue.training import pack
from jobs.runtime.prediction import answer
from jobs.runtime.process import Run
from jobs.torch_glue.attention import backward, forward, make_plan
from jobs.torch_glue.config import Config
from jobs.torch_glue.encoder import Encoder, Noise, draw
from jobs.torch_glue.model import build
from jobs.torch_glue.predict import load
from jobs.torch_glue.train import train
from tests.jobs.glue_folder import EXACT, FIRST_STEPS, write_folder, write_rows
from tests.jobs.glue_folder import STEPS as FEW_STEPS
from tests.jobs.resumed import go_back, lines_of

pytestmark = pytest.mark.usefixtures("group")
MakeRun = Callable[..., Run]
STEPS = 40


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture
def config(rows: Path) -> Config:
    return Config(
        data=str(rows),
        steps=STEPS,
        batch_size=8,
        max_length=32,
        learning_rate=2e-3,
        log_every=1,
        eval_every=7,
        checkpoint_every=1,
        keep_checkpoints=STEPS,
        dropout=0.1,
        dtype="float32",
        best=True,
    )


def test_a_run_goes_on_exactly_from_any_step(make_run: MakeRun, config: Config, tmp_path: Path) -> None:
    complete = make_run("whole")
    final = train(complete, config)
    assert final["accuracy"] > 0.7  # it learns
    undisturbed = lines_of(complete)
    for step in (
        7,
        20,
        35,
        STEPS - 1,
    ):  # before its evaluation, between two, after its evaluation, at the end
        run = make_run(f"from-{step}")
        go_back(complete, run, step, is_evaluated=step == 35)
        again = train(run, config)
        assert lines_of(run) == undisturbed, f"resumed after step {step}"
        for name in ("eval_score", "eval_loss", "best_step", "exported_step"):
            assert again[name] == final[name]
        shutil.rmtree(run.directory.url)


@pytest.mark.parametrize("kind", FIRST_STEPS)
@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_packed_rows_have_the_logits_and_gradients_that_transformers_gives_each_alone(
    rows: Path, tmp_path: Path, kind: str, device: str
) -> None:
    from transformers import AutoTokenizer

    config = Config(
        data=str(rows),
        init_from=str(write_folder(tmp_path / kind, kind, rows)),
        batch_size=8,
        max_length=32,
        **EXACT,
    )
    dataset = read(config)
    beginning = prepare(config, dataset, tmp_path, print)
    packing = pack(config, dataset, beginning, shares=1, device=device)
    transformers_tokenizer = AutoTokenizer.from_pretrained(beginning.tokenizer)
    separate, packed = build(beginning, 0), Encoder(build(beginning, 0))
    batch = packing.step(1)
    assert len(batch.blocks) > 1 and (batch.mask_GT == 0).any()
    arguments = packed.arguments(batch, torch.from_numpy)
    if device != "cpu":
        del arguments["plans"]
    logits_BC = packed(arguments, batch.blocks, None)
    texts = [dataset.train.texts_a[row] for row in batch.rows_GN[0]]
    encoded = [
        transformers_tokenizer(text, return_tensors="pt", truncation=True, max_length=32) for text in texts
    ]
    expected_BC = torch.cat([separate(**value).logits for value in encoded])
    torch.testing.assert_close(logits_BC, expected_BC, atol=1e-5, rtol=1e-5)
    for logits in (logits_BC, expected_BC):
        (logits.square().sum(1) * torch.arange(8)).sum().backward()
    for (name, actual), expected in zip(packed.model.named_parameters(), separate.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(actual.grad, expected.grad, atol=1e-4, rtol=1e-4, msg=name)
    packed.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(packed(arguments, batch.blocks, None), logits_BC, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_noise_drops_as_many_as_torch_does_and_compiled_code_the_very_same(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    numbers_N, x = draw(400_001), torch.ones(1000, 400, dtype=dtype)
    dropped = Noise(numbers_N).drop(x, 0.1, training=True)
    assert (dropped == 0).float().mean() == pytest.approx(0.1, abs=0.003)
    assert dropped.unique().tolist() == functional.dropout(x, 0.1).unique().tolist()
    compiled = torch.compile(lambda x: Noise(numbers_N).drop(x, 0.1, training=True), backend="aot_eager")
    assert torch.equal(compiled(x), dropped)
    noise = Noise(numbers_N)
    first, second = (noise.drop(torch.ones(200_000), 0.5, training=True) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("is_last", [False, True])
def test_attention_by_hand_has_the_outputs_and_gradients_of_torch_for_each_row(is_last: bool) -> None:
    heads, width, blocks = (
        2,
        8,
        ((2, 3), (1, 7), (1, 9), (2, 10), (3, 11), (1, 15), (1, 16), (1, 17), (2, 21)),
    )
    lengths = [length for rows, length in blocks for _ in range(rows)]
    plan = make_plan(blocks, heads, is_last=is_last)
    assert len(plan.sizes) < 3 * len(blocks) and (len(plan.indices[-1]) > 0) != is_last
    torch.manual_seed(0)
    qkv_THK = torch.randn(sum(lengths), 3 * heads, width, dtype=torch.float64, requires_grad=True)
    unseen_T = torch.where(torch.rand(sum(lengths)) < 0.3, -torch.inf, 0.0)
    unseen_T[np.cumsum([0, *lengths[:-1]])] = 0.0
    unseen_P = functional.pad(unseen_T, (0, 1), value=-torch.inf)[plan.keys]
    kept_P = (torch.rand(len(unseen_P)) < 0.8).double() / 0.8
    begins = np.cumsum([0, *lengths])[:-1]
    source_XK = qkv_THK.view(-1, width)
    if is_last:
        queries = qkv_THK[begins, :heads].reshape(-1, width)
        source_XK = torch.cat([queries, qkv_THK[:, heads:].reshape(-1, width)])
    outputs_XK, laid_out_LK, shares_P = forward(
        source_XK.detach(), unseen_P, kept_P, plan.indices, plan.sizes
    )
    shapes = zip(plan.sizes[::3], plan.sizes[1::3], plan.sizes[2::3], strict=True)
    pairs = [shape for count, *shape in shapes for _ in range(count // heads)]
    expected = []
    for row, remaining in enumerate(kept_P.split([heads * asking * keys for asking, keys in pairs])):
        tokens = slice(begins[row], begins[row] + lengths[row])
        q_HSK, k_HSK, v_HSK = qkv_THK[tokens].transpose(0, 1).chunk(3)
        q_HMK = q_HSK[:, :1] if is_last else q_HSK
        shares_HMS = torch.softmax(q_HMK @ k_HSK.mT / width**0.5 + unseen_T[tokens], -1)
        kept_HMS = remaining.view(heads, *pairs[row])[:, : q_HMK.shape[1], : lengths[row]]
        expected.append(((shares_HMS * kept_HMS) @ v_HSK).transpose(0, 1).reshape(-1, width))
    torch.testing.assert_close(outputs_XK, torch.cat(expected))
    weights_XK = torch.randn_like(outputs_XK)
    d_source_XK = backward(weights_XK, laid_out_LK, shares_P, kept_P, plan.indices, plan.sizes)
    (actual,) = torch.autograd.grad(source_XK, qkv_THK, d_source_XK)
    torch.testing.assert_close(actual, torch.autograd.grad(torch.cat(expected), qkv_THK, weights_XK)[0])


@pytest.mark.parametrize("kind", FIRST_STEPS)
def test_the_first_steps_have_the_losses_and_gradients_of_keras_glue(
    make_run: MakeRun, rows: Path, tmp_path: Path, kind: str
) -> None:
    run, folder = make_run(), write_folder(tmp_path / kind, kind, rows)
    train(run, Config(data=str(rows), init_from=str(folder), **FEW_STEPS, **EXACT))
    actual = [(line["loss"], line["grad_norm"]) for line in run.directory.read_metrics() if "loss" in line]
    np.testing.assert_allclose(actual, FIRST_STEPS[kind], atol=1e-5)


def test_an_export_says_in_transformers_and_in_predict_what_the_run_has_predicted(
    make_run: MakeRun, config: Config
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = make_run()
    train(run, dataclasses.replace(config, steps=20))
    folder = run.directory.path("export")
    loaded, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForSequenceClassification, AutoTokenizer)
    )
    assert loaded.config.id2label == {0: "bad", 1: "good"}
    lines = [json.loads(line) for line in (run.directory.read_text("predictions.jsonl") or "").splitlines()]
    for line in lines[:5]:
        with torch.no_grad():
            logits = loaded.eval()(**tokenizer(*line["texts"], return_tensors="pt")).logits[0]
        assert loaded.config.id2label[int(logits.argmax())] == line["prediction"]
        np.testing.assert_allclose(
            torch.softmax(logits, 0).numpy(), list(line["probabilities"].values()), atol=1e-5
        )
    texts = [line["texts"][0] for line in lines]
    predictor = load(Path(folder), Path())
    for line, actual in zip(lines, answer(predictor, texts), strict=True):
        assert {guess.text: guess.probability for guess in actual.best} == pytest.approx(
            line["probabilities"], abs=1e-5
        )
    with pytest.raises(RequestError, match="single texts takes no second text"):
        answer(predictor, ["a"], "b")


ONE_STEP = """
import dataclasses, json, os, sys
from pathlib import Path
import torch
from contracts import process_environment as contract
from contracts.run_directory import RunDirectory
from jobs.runtime.monitoring.heartbeat import Heartbeat
from jobs.runtime.process import Run
from jobs.runtime.torch import distributed
from jobs.torch_glue.config import Config
from jobs.glue.pretrained import prepare
from jobs.glue.data import read
from jobs.torch_glue.train import Task
environment = contract.read(os.environ)
distributed.start(environment)
config = Config(**json.loads(sys.argv[1]))
directory = RunDirectory(environment.run_dir)
run = Run(environment=environment, directory=directory, heartbeat=Heartbeat(directory, environment))
dataset = read(config)
beginning = prepare(config, dataset, Path(directory.path("cache")), print)
task = Task(run, config, dataset, beginning)
batch = task.batches.step(1).share(distributed.rank(), distributed.size())
loss = task.loss(batch)
loss.backward()
mean = float(distributed.exchange_on_host(loss.detach()).mean())
whole = lambda grad: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
gradients = {name: whole(each.grad).tolist() for name, each in task.model.named_parameters()}
if environment.is_first:
    with open(sys.argv[2], "w") as file:
        json.dump([mean, gradients], file)
distributed.leave()
os._exit(0)  # as a job ends: torch's own threads may abort the interpreter's exit
"""


def test_two_processes_compute_the_loss_and_gradients_of_one(
    config: Config, tmp_path: Path, variables: Callable[..., list[dict[str, str]]]
) -> None:
    actual = []
    for size, fsdp in ((1, False), (2, False), (2, True)):
        value = dataclasses.replace(config, dropout=0.0, fsdp=fsdp)
        environments = variables(tmp_path / f"{size}-{fsdp}", size)
        answer = tmp_path / f"{size}-{fsdp}.json"
        command = [sys.executable, "-c", ONE_STEP, json.dumps(dataclasses.asdict(value)), str(answer)]
        processes = [subprocess.Popen(command, env=environment) for environment in environments]
        assert [process.wait(120) for process in processes] == [0] * size
        actual.append(json.loads(answer.read_text()))
    (single, gradients), *pairs_of_processes = actual
    for two, shared in pairs_of_processes:
        assert two == pytest.approx(single, abs=1e-5)
        assert gradients.keys() == shared.keys()
        for name, gradient in gradients.items():
            np.testing.assert_allclose(shared[name], gradient, atol=1e-5, err_msg=name)
