"""What a model would write in place of a hidden token: by a program of its own, and at the end of a run."""

import functools
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from contracts.errors import RequestError
from contracts.run_directory import RunDirectory
from jobs.flax_mlm import sharding
from jobs.flax_mlm.config import Config, dimensions
from jobs.flax_mlm.hugging_face import Pretrained, export, open_pretrained
from jobs.flax_mlm.model import Mlm
from jobs.flax_mlm.predict import (
    BEST,
    MOST_ROWS,
    MaskFiller,
    final_eval,
    make_predict,
    make_sharded_predict,
    sample,
)
from jobs.flax_mlm.tokenizer import TokenizerFacts, load_tokenizer, open_tokenizer, train_tokenizer
from jobs.runtime.jax.distributed import Devices
from jobs.runtime.prediction import Answer, answer, main

pytestmark = pytest.mark.usefixtures("two_devices")

ROOT = Path(__file__).resolve().parents[2]


TEXT = "the cat sat on the mat and the dog ate the hat"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFacts:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer([TEXT] * 20, 300, path)
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def model(
    two_devices: None, tmp_path_factory: pytest.TempPathFactory, config: Config, trained: TokenizerFacts
) -> Pretrained:
    """A model that knows one thing: whatever is hidden is " cat"."""
    tmp_path, facts = tmp_path_factory.mktemp("model"), trained
    params = nnx.to_pure_dict(
        nnx.state(Mlm(dimensions(config, facts), jnp.dtype("float32"), nnx.Rngs(0)), nnx.Param)
    )
    (cat,) = open_tokenizer(facts.path).encode(" cat", add_special_tokens=False).ids
    params["head_bias"] = params["head_bias"].at[cat].set(9.0)
    export(RunDirectory(str(tmp_path / "run")), config, params, facts)
    return open_pretrained(str(tmp_path / "run" / "export"), tmp_path / "cache", lambda _: None)


@pytest.fixture(scope="module")
def filler(model: Pretrained, tmp_path_factory: pytest.TempPathFactory) -> MaskFiller:
    return MaskFiller(model, tmp_path_factory.mktemp("cache"))


def ask(filler: MaskFiller, *texts: str) -> list[Answer]:
    return answer(filler, texts)


def test_each_mask_has_its_five_best_tokens_with_the_probabilities_of_the_models_softmax(
    model: Pretrained, filler: MaskFiller
) -> None:
    text = "the <mask> sat on the <mask>"
    first, second = (each.best for each in ask(filler, text))
    for best in (first, second):
        assert len(best) == 5
        assert best[0].text == "cat"
        assert (best[0].probability or 0) > 0.9
        assert sum(guess.probability or 0 for guess in best) <= 1.0001
    whole = Mlm(dimensions(model.adopted_by(Config()), model.tokenizer), jnp.dtype("float32"), nnx.Rngs(0))
    nnx.update(whole, model.params())
    ids = filler.token_ids(text)
    logits_V = np.asarray(whole.logits(whole.encode(jnp.array([ids]))))[0, ids.index(model.tokenizer.mask_id)]
    shares = np.exp(logits_V) / np.exp(logits_V).sum()
    assert first[0].probability == pytest.approx(shares.max(), rel=1e-4)


def test_a_mask_takes_the_blank_before_it_along_and_other_special_words_are_mere_text(
    model: Pretrained, filler: MaskFiller
) -> None:
    facts = model.tokenizer
    assert filler.token_ids("the <mask> sat") == filler.token_ids("the<mask> sat")
    ids = filler.token_ids("<s> <mask>")
    assert (ids.count(facts.bos_id), ids[-2:]) == (1, [facts.mask_id, facts.eos_id])
    with pytest.raises(RequestError, match="22 tokens, and the model takes at most 16; shorten it"):
        ask(filler, "<mask>" * 20)


def test_an_answer_is_the_same_alone_unpadded_and_among_others_in_a_batch_of_any_shape(
    model: Pretrained, filler: MaskFiller
) -> None:
    texts = ["<mask>", "a <mask> cat", "the <mask> sat on the <mask>"]
    rows = [row for text in texts for row in filler.encode(text, None).rows]
    alone = [filler.compute([row], 1, row.length)[0] for row in rows]
    for size, length in ((4, 16), (8, 14)):
        for given, (tokens_G, shares_G) in zip(alone, filler.compute(rows, size, length), strict=True):
            np.testing.assert_allclose(shares_G, given[1], atol=1e-6)
            np.testing.assert_array_equal(tokens_G, given[0])


def test_as_a_program_it_reads_what_is_asked_and_has_an_answer_in_json_for_each_mask(
    model: Pretrained, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "jobs.runtime.prediction", "flax_mlm"]
    command += [str(model.folder), str(tmp_path / "cache")]
    asked = json.dumps({"inputs": ["a <mask>", "<mask> [1] <mask>"], "second": None})
    done = subprocess.run(
        command, input=asked, capture_output=True, text=True, cwd=ROOT, timeout=110, check=True
    )
    answers = json.loads(done.stdout)["answers"]
    assert [answer["best"][0]["text"] for answer in answers] == ["cat"] * 3
    assert [answer["heading"] for answer in answers] == ["a <mask>", "[1] [1] <mask>", "<mask> [1] [2]"]
    assert answers[1]["input"] == "<mask> [1] <mask>"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"inputs": ["<mask>", "the cat"]},
            '"the cat" has no <mask>; write <mask> where a word is to be guessed',
        ),
        (
            {"inputs": ["<mask>"], "second": "x"},
            "--second: a model that fills masks takes no second text; leave it out",
        ),
        ({"inputs": ["<mask>"]}, "nowhere: No such file or directory"),
    ],
)
def test_a_request_that_cannot_be_answered_ends_with_2_and_the_reason_in_the_last_line(
    asked: dict[str, object],
    said: str,
    model: Pretrained,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"second": None, **asked})))
    export = str(model.folder) if "nowhere" not in said else "nowhere"
    with pytest.raises(SystemExit) as end:
        main("flax_mlm", export, str(model.folder.parent / "cache"))
    assert end.value.code == 2
    told = capsys.readouterr()
    assert said in told.err.splitlines()[-1] and told.err.startswith("error: ") and not told.out


@pytest.fixture
def rows_NS(trained: TokenizerFacts) -> np.ndarray:
    ids = [trained.bos_id, *open_tokenizer(trained.path).encode(TEXT).ids, trained.eos_id] * 20
    return np.array(ids[: 3 * 12], np.int32).reshape(3, 12)


def test_pseudo_perplexity_is_exp_of_the_mean_surprise_at_each_token_hidden_alone(
    config: Config, trained: TokenizerFacts, rows_NS: np.ndarray
) -> None:
    model = Mlm(dimensions(config, trained), jnp.dtype("float32"), nnx.Rngs(3))
    nats = []
    for row_S in rows_NS:
        for position in range(len(row_S)):
            if row_S[position] not in trained.special_ids:
                hidden_1S = np.where(np.arange(12) == position, trained.mask_id, row_S)[None]
                logits_V = np.asarray(model.logits(model.encode(jnp.asarray(hidden_1S))))[0, position]
                nats.append(np.log(np.exp(logits_V).sum()) - logits_V[row_S[position]])
    assert len(nats) % 4  # the last batch has to be filled up

    devices, ticks = Devices(), []
    graph, params = nnx.split(model)
    seen = final_eval(
        devices.jit(make_predict(functools.partial(nnx.merge, graph))),
        nnx.to_pure_dict(params),
        rows_NS,
        trained,
        devices.rows,
        batch_size=4,
        tick=lambda: ticks.append(1),
    )
    assert seen["pseudo_perplexity"] == pytest.approx(math.exp(np.mean(nats)), rel=1e-5)
    assert len(ticks) == math.ceil(len(nats) / 4)
    assert all(len(each["guesses"]) == BEST for each in seen["fillings"])
    shares = [[share for _, share in each["guesses"]] for each in seen["fillings"]]
    assert all(best == sorted(best, reverse=True) and 0 < sum(best) <= 1 for best in shares)


def test_it_never_costs_more_rows_than_its_bounds_but_one_sequence_at_least() -> None:
    assert sample(sequences=1000, length=64, trained_rows=10**9).size * 64 <= MOST_ROWS
    assert sample(sequences=1000, length=64, trained_rows=20 * 64 * 3).tolist() == [0, 500, 999]
    assert sample(sequences=1000, length=512, trained_rows=10).tolist() == [0]
    assert sample(sequences=2, length=8, trained_rows=10**9).tolist() == [0, 1]


def test_devices_that_hold_parts_of_the_model_guess_what_one_with_all_of_it_does(
    config: Config, facts: TokenizerFacts
) -> None:
    graph, params = nnx.split(Mlm(dimensions(config, facts), jnp.dtype("float32"), nnx.Rngs(1)))
    whole, mesh = nnx.to_pure_dict(params), sharding.make_mesh(2)
    cut = jax.device_put(whole, sharding.shardings(whole, mesh))
    inputs_BS = np.random.default_rng(0).integers(4, 40, (4, 12)).astype(np.int32)
    positions_BM, truth_BM = np.array([[1], [5], [2], [6]]), np.array([[4], [5], [6], [7]])
    asked = (inputs_BS, positions_BM, truth_BM)
    on_one = make_predict(functools.partial(nnx.merge, graph))(whole, *map(jnp.asarray, asked))
    together = jax.jit(make_sharded_predict(graph, mesh, cut))(cut, *asked)
    np.testing.assert_allclose(on_one.nats_BM, together.nats_BM, atol=1e-5)
    np.testing.assert_array_equal(on_one.tokens_BMG, together.tokens_BMG)
