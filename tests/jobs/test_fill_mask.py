"""Masks in a text are filled by an exported model, from its files alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from contracts.errors import RequestError
from contracts.run_directory import RunDirectory
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.export import export
from jobs.flax_mlm.fill_mask import encode, fill
from jobs.flax_mlm.model import Mlm
from jobs.flax_mlm.pretrained import Pretrained, open_pretrained
from jobs.flax_mlm.step import dimensions
from jobs.flax_mlm.tokenizer import load_tokenizer, train_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path: Path, config: Config) -> Pretrained:
    """A model that knows one thing: whatever is hidden is " cat"."""
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["the cat sat on the mat and the cat ate the hat"] * 20, 300, path)
    facts = load_tokenizer(path)
    params = nnx.to_pure_dict(
        nnx.state(Mlm(dimensions(config, facts), jnp.dtype("float32"), nnx.Rngs(0)), nnx.Param)
    )
    (cat,) = encode(" cat", facts)[1:-1]
    params["head_bias"] = params["head_bias"].at[cat].set(9.0)
    tokens: Any = SimpleNamespace(tokenizer=facts)
    export(RunDirectory(str(tmp_path / "run")), config, params, tokens)
    return open_pretrained(str(tmp_path / "run" / "export"), tmp_path / "cache", lambda _: None)


pytestmark = pytest.mark.usefixtures("two_devices")


def test_each_mask_has_its_five_best_tokens_with_their_probabilities(model: Pretrained) -> None:
    first, second = fill(model, "the <mask> sat on the <mask>")
    for best in (first, second):
        assert len(best) == 5
        assert best[0]["token"] == "cat"
        assert best[0]["probability"] > 0.9
        assert sum(guess["probability"] for guess in best) <= 1.0001


def test_a_mask_takes_the_blank_before_it_along_and_other_special_words_are_mere_text(
    model: Pretrained,
) -> None:
    facts = model.tokenizer
    assert encode("the <mask> sat", facts) == encode("the<mask> sat", facts)
    ids = encode("<s> <mask>", facts)
    assert (ids.count(facts.bos_id), ids[-2:]) == (1, [facts.mask_id, facts.eos_id])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("the cat", "the text has no <mask>"),
        ("<mask>" * 20, "22 tokens, and the model takes at most 16; shorten it"),
    ],
)
def test_a_text_that_cannot_be_filled_is_refused_with_the_reason(
    model: Pretrained, text: str, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        fill(model, text)


def test_as_a_program_it_reads_the_text_and_answers_in_json(model: Pretrained, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jobs.flax_mlm.fill_mask", str(model.folder), str(tmp_path / "cache")]
    done = subprocess.run(
        command, input="a <mask>", capture_output=True, text=True, cwd=ROOT, timeout=110, check=True
    )
    assert json.loads(done.stdout)["masks"][0][0]["token"] == "cat"
    command[3] = str(tmp_path / "nowhere")
    done = subprocess.run(
        command, input="a <mask>", capture_output=True, text=True, cwd=ROOT, timeout=110, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'nowhere'}: No such file or directory")


def test_what_it_answers_is_what_the_models_own_softmax_says(model: Pretrained) -> None:
    dims = dimensions(model.adopted_by(Config()), model.tokenizer)
    whole = Mlm(dims, jnp.dtype("float32"), nnx.Rngs(0))
    nnx.update(whole, model.params())
    ids = encode("the <mask> sat", model.tokenizer)
    logits_V = np.asarray(whole.logits(whole.encode(jnp.array([ids]))))[0, ids.index(model.tokenizer.mask_id)]
    shares = np.exp(logits_V) / np.exp(logits_V).sum()
    ((best, *_),) = fill(model, "the <mask> sat")
    assert best["probability"] == pytest.approx(shares.max(), rel=1e-4)
