"""An exported model is RoBERTa's own, and a published one is gone on with as it is or refused with the reason."""

import dataclasses
import json
import runpy
import shutil
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from contracts.errors import RequestError
from contracts.run_directory import RunDirectory
from jobs.flax_mlm import sharding
from jobs.flax_mlm import step as steps
from jobs.flax_mlm.config import Config, dimensions
from jobs.flax_mlm.data import problems
from jobs.flax_mlm.hugging_face import Pretrained, adopt, export, open_pretrained
from jobs.flax_mlm.model import Mlm
from jobs.flax_mlm.tokenizer import load_tokenizer, open_tokenizer, train_tokenizer

pytestmark = pytest.mark.usefixtures("two_devices")

TOKENS_BS = np.array([[0, 5, 9, 282, 2, 1], [0, 282, 7, 7, 100, 2]])


def quiet(_text: str) -> None: ...


def written(run_dir: Path, config: Config, tokenizer: Path, params: Any) -> Path:
    export(RunDirectory(str(run_dir)), config, params, load_tokenizer(tokenizer))
    return run_dir / "export"


@pytest.fixture(scope="module")
def exported(two_devices: None, tmp_path_factory: pytest.TempPathFactory, config: Config) -> Path:
    """A folder with a model none of whose parameters is 0 or 1."""
    tmp_path = tmp_path_factory.mktemp("exported")
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["the cat sat on the mat and the dog ate the hat"] * 20, 300, path)
    model = Mlm(dimensions(config, load_tokenizer(path)), jnp.dtype("float32"), nnx.Rngs(0))
    random = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: random.normal(0.3, 0.4, leaf.shape).astype(np.float32),
        nnx.to_pure_dict(nnx.state(model, nnx.Param)),
    )
    return written(tmp_path / "run", config, path, params)


@pytest.fixture
def published(exported: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(exported, tmp_path / "run" / "export")


def opened(folder: Path) -> Pretrained:
    return open_pretrained(str(folder), folder.parent / "cache", quiet)


def logits(found: Pretrained, tokens_BS: Any = TOKENS_BS) -> np.ndarray:
    dims = dimensions(found.adopted_by(Config()), found.tokenizer)
    model = Mlm(dims, jnp.dtype("float32"), nnx.Rngs(0))
    nnx.update(model, found.params())
    return np.asarray(model.logits(model.encode(jnp.asarray(tokens_BS))))


def told(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def retensored(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_what_is_loaded_and_exported_again_is_the_same_to_the_last_bit_and_replaces_what_was_there(
    published: Path,
) -> None:
    found, before = opened(published), load_file(published / "model.safetensors")
    tokenizer = {
        name: (published / name).read_bytes() for name in ("tokenizer.json", "vocab.json", "merges.txt")
    }
    names = {path.name for path in published.iterdir()}
    (published / "left-over").write_text("of the export before")
    again = written(published.parent, found.adopted_by(Config()), found.tokenizer.path, found.params())
    after = load_file(again / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert {name: (again / name).read_bytes() for name in tokenizer} == tokenizer
    assert {path.name for path in again.iterdir()} == names


def test_room_for_more_tokens_than_the_tokenizer_has_is_kept_and_a_token_type_added_to_every_position(
    published: Path, tmp_path: Path
) -> None:
    types, known = np.arange(16, dtype=np.float32)[None], opened(published).tokenizer.vocab_size
    before = opened(published).params()["embeddings"]["positions"]["embedding"]

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["roberta.embeddings.token_type_embeddings.weight"] = types
        for name in ("roberta.embeddings.word_embeddings.weight", "lm_head.bias"):
            tensors[name] = np.concatenate([tensors[name], tensors[name][:4]])

    retensored(published, change)
    told(published, vocab_size=known + 4)
    found = opened(published)
    again = written(tmp_path / "again", found.adopted_by(Config()), found.tokenizer.path, found.params())
    assert load_file(again / "model.safetensors")["lm_head.bias"].shape == (known + 4,)
    np.testing.assert_array_equal(found.params()["embeddings"]["positions"]["embedding"], before + types)


def test_training_begins_with_its_parameters_on_every_device_and_an_optimizer_that_knows_nothing(
    published: Path,
) -> None:
    config, found = adopt(Config(init_from=str(published)), published.parent / "cache", quiet)
    assert found is not None
    assert (config.layers, config.width, config.heads, config.positions) == (2, 16, 4, 16)
    optimizer = steps.make_optimizer(config)
    mesh = sharding.make_mesh(1)
    _, fresh = steps.create(config, found.tokenizer, optimizer, mesh)
    state = steps.with_params(fresh, found.params())
    assert str(jax.tree.structure(state)) == str(jax.tree.structure(fresh))
    for leaf, given in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(found.params()), strict=True):
        assert [shard.data.shape for shard in leaf.addressable_shards] == [given.shape] * 2
        np.testing.assert_array_equal(leaf, given)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(state["opt_state"]))


def test_tensors_that_others_write_twice_for_other_tasks_or_in_half_precision_do_no_harm(
    published: Path,
) -> None:
    expected = logits(opened(published))

    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.decoder.weight"] = tensors["roberta.embeddings.word_embeddings.weight"].copy()
        tensors["lm_head.decoder.bias"] = tensors["lm_head.bias"].copy()
        tensors["roberta.embeddings.position_ids"] = np.arange(18)[None]
        tensors["roberta.pooler.dense.weight"] = np.ones((16, 16), np.float32)

    retensored(published, add)
    np.testing.assert_array_equal(logits(opened(published)), expected)
    retensored(
        published, lambda tensors: tensors.update({k: v.astype(np.float16) for k, v in tensors.items()})
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(opened(published).params())} == {np.dtype("float32")}


def test_vocab_and_merges_are_as_good_as_a_tokenizer_json(published: Path) -> None:
    text = "the cat ate <mask> hat, naïvely"
    expected = open_tokenizer(published / "tokenizer.json").encode(text).ids
    whole = opened(published).tokenizer
    (published / "tokenizer.json").unlink()
    joined = opened(published).tokenizer
    assert open_tokenizer(joined.path).encode(text).ids == expected
    assert dataclasses.replace(joined, path=whole.path, sha256="") == dataclasses.replace(whole, sha256="")


def test_a_folder_in_a_bucket_is_copied_once_and_again_when_it_has_changed(
    published: Path, tmp_path: Path
) -> None:
    url = f"memory://{uuid.uuid4().hex}/export"
    files = fsspec.filesystem("memory")
    said: list[str] = []

    def put() -> None:
        for path in published.iterdir():
            files.pipe_file(f"{url}/{path.name}", path.read_bytes())

    put()
    first = open_pretrained(url, tmp_path / "cache", said.append)
    assert open_pretrained(url, tmp_path / "cache", said.append) == first
    assert len(said) == 1 and said[0].startswith(f"copying {url}")
    assert first.fingerprint == opened(published).fingerprint
    retensored(published, lambda tensors: tensors.update({"lm_head.bias": tensors["lm_head.bias"] + 1}))
    put()
    assert open_pretrained(url, tmp_path / "cache", said.append).fingerprint != first.fingerprint


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["BertForMaskedLM"]}, "names BertForMaskedLM; only RobertaForMaskedLM"),
    ({"architectures": None}, "names roberta; only RobertaForMaskedLM"),
    ({"hidden_act": "relu"}, "hidden_act is 'relu' and must be 'gelu'"),
    ({"layer_norm_eps": 1e-12}, "layer_norm_eps is 1e-12 and must be 1e-05"),
    ({"hidden_size": "16"}, "has hidden_size '16', which is no size"),
    ({"num_hidden_layers": 3}, "model.safetensors lacks roberta.encoder.layer.2.attention"),
    ({"num_hidden_layers": 1}, "has what RobertaForMaskedLM has not: roberta.encoder.layer.1"),
    ({"intermediate_size": 25}, "is [24] and config.json's sizes make it [25]"),
    ({"pad_token_id": 3}, "pad_token_id is 3 and the tokenizer's is 1"),
    ({"config.json": b"[]"}, "its config.json is no JSON object"),
    ({"model.safetensors": None}, "has no model.safetensors; name a folder that has them"),
    ({"model.safetensors": None, "x.bin": b""}, "has no model.safetensors; load it in transformers and save"),
    ({"model.safetensors": slice(-9)}, "is no whole safetensors file ("),
    ({"model.safetensors": b"PK"}, "is no whole safetensors file ("),
    ({"tokenizer.json": None, "merges.txt": None}, "has no tokenizer.json (or vocab.json and merges.txt)"),
    ({"tokenizer.json": b"{}"}, "not a tokenizer.json as Hugging Face's"),
]
"""Values of config.json, or files: their new content, the part of it that is left, or None where they are removed."""


def refused(folder: Path) -> str:
    with pytest.raises(RequestError) as error:
        opened(folder).params()
    assert str(error.value).startswith("--init-from")
    return str(error.value)


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_a_model_of_another_kind_and_missing_or_torn_files_are_refused_with_the_reason(
    published: Path, changes: dict[str, Any], said: str
) -> None:
    for name, content in changes.items():
        path = published / name
        if "." not in name:
            told(published, **{name: content})
        elif content is None:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[content] if isinstance(content, slice) else content)
    assert said in refused(published)


def test_a_model_whose_output_is_not_tied_to_its_embeddings_is_refused(published: Path) -> None:
    words = load_file(published / "model.safetensors")["roberta.embeddings.word_embeddings.weight"]
    retensored(published, lambda tensors: tensors.update({"lm_head.decoder.weight": words + 1}))
    assert "a model whose output is not tied to its embeddings cannot be" in refused(published)


@pytest.mark.parametrize(
    ("heads", "asked", "said"),
    [
        (3, {"sequence_length": 8}, ["--heads 3: does not divide --width 16"]),
        (
            4,
            {"width": 32, "layers": 2, "max_positions": 99},
            ["--width 32: the model in", "--max-positions 99: the model in"],
        ),
    ],
)
def test_options_that_contradict_the_model_are_all_named_with_the_data(
    published: Path, heads: int, asked: dict[str, Any], said: list[str]
) -> None:
    told(published, num_attention_heads=heads)
    (found,) = problems(Config(init_from=str(published), **asked), published.parent / "cache")
    assert all(part in found for part in said) and "--layers" not in found


def test_a_run_that_goes_on_refuses_another_model_than_it_began_with(published: Path, tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    opened(published).check_began(directory, step=0, writes=True)
    opened(published).check_began(directory, step=5, writes=False)
    retensored(published, lambda tensors: tensors.update({"lm_head.bias": tensors["lm_head.bias"] + 1}))
    with pytest.raises(RequestError, match="holds another model or tokenizer than when the run began"):
        opened(published).check_began(directory, step=5, writes=False)
    opened(published).check_began(directory, step=0, writes=True)  # nothing was learned yet: it begins anew
    opened(published).check_began(directory, step=5, writes=False)


def test_the_readmes_jax_block_runs_as_it_stands_and_gives_the_models_logits(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = (published / "README.md").read_text().split("JAX, in a checkout of tpu-stack:")[1]
    (published.parent / "block.py").write_text(textwrap.dedent(block))
    monkeypatch.chdir(published.parent)
    names = runpy.run_path("block.py")
    np.testing.assert_allclose(names["logits"], logits(opened(published), [[0, 100, 200, 2]]), atol=1e-5)
