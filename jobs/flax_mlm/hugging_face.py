"""Reads and writes RobertaForMaskedLM in Hugging Face's layout: the model of --init-from, and the export of a run.

Loading and exporting again changes no bit. Light: the launching side opens a folder to find mistakes before anything
starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from contracts.errors import RequestError
from contracts.run_directory import EXPORT, RunDirectory
from jobs.flax_mlm.config import SIZES, Config, Dimensions, Size, dimensions
from jobs.flax_mlm.tokenizer import TokenizerFacts, export_tokenizer, load_tokenizer, write_tokenizer
from jobs.runtime.storage.bucket_files import files_of
from jobs.runtime.storage.cache import build_once
from jobs.runtime.storage.model_folder import (
    CONFIG,
    PARTS,
    TOKENIZER,
    WEIGHTS,
    open_folder,
    read_config,
    require_unchanged,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

README = Path(__file__).with_name("export_readme.md")
"""Of an export: how to use it in PyTorch and in JAX."""
TOKEN_TABLE = "roberta.embeddings.word_embeddings.weight"
POSITIONS = "roberta.embeddings.position_embeddings.weight"
TYPES = "roberta.embeddings.token_type_embeddings.weight"
OUTPUT_BIAS = "lm_head.bias"
TIED = {"lm_head.decoder.weight": TOKEN_TABLE, "lm_head.decoder.bias": OUTPUT_BIAS}
"""What some files hold a second time."""
UNUSED = ("roberta.embeddings.position_ids", "roberta.pooler.")
"""A buffer of old versions, and a layer that predicting masked tokens does not use."""

RECORD = "init-from.json"
"""In the run directory: which folder the run began with, and what was in it."""
ARCHITECTURE = "RobertaForMaskedLM"
LAYER_NORM_EPSILON = 1e-5
FIXED: dict[str, tuple[Any, Any]] = {
    "hidden_act": ("gelu", "gelu"),
    "layer_norm_eps": (LAYER_NORM_EPSILON, 1e-12),
    "position_embedding_type": ("absolute", "absolute"),
    "tie_word_embeddings": (True, True),
    "type_vocab_size": (1, 2),
}
"""What the model here has built in, and what a config.json that does not name it means (RobertaConfig's defaults)."""
NAMES: dict[Size, str] = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ff_width": "intermediate_size",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A model on this host's disk. fingerprint: sha256 over configuration, tokenizer and weights."""

    source: str
    folder: Path
    tokenizer: TokenizerFacts
    dims: Dimensions

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.tokenizer.sha256.encode())
        for name in (CONFIG, WEIGHTS):
            with (self.folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def adopted_by(self, config: Config) -> Config:
        """`config` as if this model's sizes and tokenizer had been asked for; `model`, from which the learning rate
        comes, is the largest named one that is no wider.

        Raises:
            RequestError: options that contradict the folder, all of them.
        """
        sizes: dict[str, Any] = {name: getattr(self.dims, name) for name in (*NAMES, "max_positions")}
        against = [
            f"--{name.replace('_', '-')} {value}: the model in {self.source} has {size}"
            for name, size in sizes.items()
            if (value := getattr(config, name)) not in (None, size)
        ]
        if against:
            raise RequestError("; ".join(against) + "; sizes come from --init-from, leave them out")
        if self.dims.vocab_size == self.tokenizer.vocab_size:  # which may be fewer than can be asked for
            sizes["vocab_size"] = None
        narrower = [name for name, size_values in SIZES.items() if size_values["width"] <= self.dims.width]
        named: Any = narrower[-1] if narrower else "tiny"
        return dataclasses.replace(
            config, init_from=None, model=named, tokenizer=str(self.tokenizer.path), **sizes
        )

    def params(self) -> dict[str, Any]:
        """The parameters, as the pure dict that training uses; see `load_params`."""
        return load_params(self.folder / WEIGHTS, self.dims)

    def check_began(self, directory: RunDirectory, *, step: int, writes: bool) -> None:
        """Check that a run resumed after `step` began from this model; a new run notes it, if it `writes`.

        Raises:
            RequestError: the folder holds another model now.
        """
        noted = directory.read_json(RECORD) if step else None
        if noted is not None:
            require_unchanged(self.source, noted.get("fingerprint"), self.fingerprint)
        if noted is None and writes:
            directory.write_json(RECORD, {"source": self.source, "fingerprint": self.fingerprint})


def open_pretrained(source: str, cache_dir: Path, say: Callable[[str], None]) -> Pretrained:
    """The model in `source`, a folder of this host or a URL, whose files are then kept under `cache_dir`.

    Raises:
        RequestError: there is no such folder, a file is missing or torn, it is a model of another architecture, its
            tensors are not what its config.json says, or tokenizer and model do not fit together.
    """
    folder = open_folder(source, cache_dir, say)
    settings = _settings(source, folder)
    path = find_tokenizer(source, folder, cache_dir)
    try:
        tokenizer = load_tokenizer(path)
    except RequestError as error:
        raise RequestError(str(error).replace("--tokenizer", "--init-from", 1)) from None
    pad_id = settings.get("pad_token_id", 1)
    if pad_id != tokenizer.pad_id:
        raise RequestError(
            f"--init-from {source}: config.json's pad_token_id is {pad_id} and the tokenizer's is {tokenizer.pad_id}, "
            "so positions would be counted from another row; the two are not of one model"
        )
    dims = Dimensions(
        max_positions=_whole_number(source, settings, "max_position_embeddings") - pad_id - 1,
        position_offset=pad_id + 1,
        **{name: _whole_number(source, settings, theirs) for name, theirs in NAMES.items()},
    )
    wrong = tensor_problems(tensor_shapes(folder / WEIGHTS), dims)
    if wrong:
        raise RequestError(f"--init-from {source}: {WEIGHTS} {'; '.join(wrong)}; name a whole {ARCHITECTURE}")
    if tokenizer.vocab_size > dims.vocab_size:
        raise RequestError(
            f"--init-from {source}: its tokenizer has {tokenizer.vocab_size:,} tokens and its model "
            f"{dims.vocab_size:,}; the two are not of one model"
        )
    return Pretrained(source=source, folder=folder, tokenizer=tokenizer, dims=dims)


def adopt(config: Config, cache_dir: Path, say: Callable[[str], None]) -> tuple[Config, Pretrained | None]:
    """The options with everything that --init-from decides, and its model; without --init-from the options as they are.

    Raises:
        RequestError: as open_pretrained and Pretrained.adopted_by.
    """
    if config.init_from is None:
        return config, None
    pretrained = open_pretrained(config.init_from, cache_dir, say)
    return pretrained.adopted_by(config), pretrained


def _settings(source: str, folder: Path) -> dict[str, Any]:
    settings = read_config(source, folder)
    architectures = settings.get("architectures") or []
    if architectures != [ARCHITECTURE]:
        kinds = ", ".join(map(str, architectures)) or settings.get("model_type") or "nothing"
        raise RequestError(
            f"--init-from {source}: {CONFIG} names {kinds}; only {ARCHITECTURE} can be continued"
        )
    differences = [
        f"{name} is {settings.get(name, default)!r} and must be {required!r}"
        for name, (required, default) in FIXED.items()
        if settings.get(name, default) != required
    ]
    if differences:
        raise RequestError(
            f"--init-from {source}: in {CONFIG}, {'; '.join(differences)}: the model here computes nothing else"
        )
    return settings


def _whole_number(source: str, settings: dict[str, Any], name: str) -> int:
    value = settings.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(f"--init-from {source}: {CONFIG} has {name} {value!r}, which is no size; mend it")
    return value


def find_tokenizer(source: str, folder: Path, cache_dir: Path) -> Path:
    """The folder's tokenizer.json; where it has vocab.json and merges.txt only, one that is made from them.

    Raises:
        RequestError: the two are not a byte-level BPE.
    """
    if (folder / TOKENIZER).exists():
        return folder / TOKENIZER
    content = [(folder / name).read_bytes() for name in PARTS]
    key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in content)).hexdigest()[:32]
    joined = cache_dir / "flax_mlm" / "tokenizer" / f"joined-{key}"
    build_once(joined, lambda temporary: _join(source, folder, temporary / TOKENIZER), say=lambda _: None)
    return joined / TOKENIZER


def _join(source: str, folder: Path, path: Path) -> None:
    """Write the tokenizer.json that transformers' RobertaTokenizerFast makes of the two files."""
    from tokenizers import models

    try:
        model = models.BPE.from_file(*(str(folder / name) for name in PARTS))
    except Exception as error:  # the library raises nothing narrower
        raise RequestError(f"--init-from {source}: {' and '.join(PARTS)} are no BPE ({error})") from None
    write_tokenizer(model, path)


class Module(NamedTuple):
    """A linear map or, without inputs, a layer norm: its names in a file and its path in the parameters.

    Of several names each has an equal share of the outputs: they are one matrix here, side by side.
    """

    names: tuple[str, ...]
    path: tuple[str | int, ...]
    inputs: int | None
    outputs: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its tensors; PyTorch keeps a linear map as outputs x inputs."""
        outputs = self.outputs // len(self.names)
        weight = (outputs,) if self.inputs is None else (outputs, self.inputs)
        return {
            tensor: shape
            for name in self.names
            for tensor, shape in ((f"{name}.weight", weight), (f"{name}.bias", (outputs,)))
        }


def modules(dims: Dimensions) -> Iterator[Module]:
    """All that is not a table of embeddings, in RobertaForMaskedLM's names and in the parameters'."""
    d, f = dims.width, dims.ff_width
    yield Module(("roberta.embeddings.LayerNorm",), ("embeddings", "norm"), None, d)
    for index in range(dims.layers):
        name, path = f"roberta.encoder.layer.{index}", ("layers", index)
        qkv = tuple(f"{name}.attention.self.{part}" for part in ("query", "key", "value"))
        yield Module(qkv, (*path, "qkv"), d, 3 * d)
        yield Module((f"{name}.attention.output.dense",), (*path, "attention_out"), d, d)
        yield Module((f"{name}.attention.output.LayerNorm",), (*path, "attention_norm"), None, d)
        yield Module((f"{name}.intermediate.dense",), (*path, "ff_in"), d, f)
        yield Module((f"{name}.output.dense",), (*path, "ff_out"), f, d)
        yield Module((f"{name}.output.LayerNorm",), (*path, "ff_norm"), None, d)
    yield Module(("lm_head.dense",), ("head_dense",), d, d)
    yield Module(("lm_head.layer_norm",), ("head_norm",), None, d)


def expected_shapes(dims: Dimensions) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of these sizes, tied ones once."""
    shapes: dict[str, tuple[int, ...]] = {
        TOKEN_TABLE: (dims.vocab_size, dims.width),
        POSITIONS: (dims.max_positions + dims.position_offset, dims.width),
        TYPES: (1, dims.width),
        OUTPUT_BIAS: (dims.vocab_size,),
    }
    for module in modules(dims):
        shapes |= module.shapes()
    return shapes


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a safetensors file, without reading the tensors.

    Raises:
        RequestError: it is no such file, or not as long as its header says.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
    except (SafetensorError, OSError) as error:
        raise RequestError(
            f"--init-from: {path} is no whole safetensors file ({error}); copy it again"
        ) from None


def tensor_problems(actual: Mapping[str, tuple[int, ...]], dims: Dimensions) -> list[str]:
    """Why tensors of these shapes are not a model of these sizes; empty where they are."""
    expected = expected_shapes(dims)
    missing = [name for name in expected if name not in actual]
    extra = [
        name for name in actual if name not in expected and name not in TIED and not name.startswith(UNUSED)
    ]
    wrong = [
        f"{name} is {list(actual[name])} and config.json's sizes make it {list(shape)}"
        for name, shape in expected.items()
        if name in actual and actual[name] != shape
    ]
    return [
        *([f"lacks {_listed(missing)}"] if missing else []),
        *([f"has what RobertaForMaskedLM has not: {_listed(extra)}"] if extra else []),
        *([_listed(wrong)] if wrong else []),
    ]


def load_params(path: Path, dims: Dimensions) -> dict[str, Any]:
    """The parameters, float32, as the pure dict that training uses.

    The one token type is added to every position: the model here has no types, and computes the same without them.

    Raises:
        RequestError: an output matrix of its own, where the model here uses the word embeddings.
    """
    import numpy as np
    from safetensors import safe_open

    with safe_open(str(path), framework="numpy") as file:

        def read(name: str) -> Array:
            tensor: Array = file.get_tensor(name)
            return tensor.astype(np.float32)

        for name, twin in TIED.items():
            if name in file.keys() and not np.array_equal(read(name), read(twin)):  # noqa: SIM118 - it is no dict
                raise RequestError(
                    f"--init-from: in {path}, {name} is not {twin}: a model whose output is not tied to its "
                    "embeddings cannot be trained here; choose one with tie_word_embeddings"
                )
        return _params(read, dims)


def _params(read: Callable[[str], Array], dims: Dimensions) -> dict[str, Any]:
    import numpy as np

    def padded(name: str) -> Array:
        tensor = read(name)
        rows = dims.vocab_rows - dims.vocab_size
        return np.pad(tensor, [(0, rows), *[(0, 0)] * (tensor.ndim - 1)])

    positions, types = read(POSITIONS), read(TYPES)
    params: dict[Any, Any] = {
        "embeddings": {
            "tokens": {"embedding": padded(TOKEN_TABLE)},
            "positions": {"embedding": positions + types if types.any() else positions},
        },
        "head_bias": padded(OUTPUT_BIAS),
    }
    for module in modules(dims):
        weights = [read(f"{name}.weight").T for name in module.names]
        place = params
        for step in module.path:
            place = place.setdefault(step, {})
        place["scale" if module.inputs is None else "kernel"] = np.concatenate(weights, axis=-1)
        place["bias"] = np.concatenate([read(f"{name}.bias") for name in module.names])
    return params


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def export(directory: RunDirectory, config: Config, params: Any, tokenizer: TokenizerFacts) -> None:
    """Write export/ whole: config.json, model.safetensors, the tokenizer's files, params.msgpack, README.md.

    Args:
        params: the pure dict of float32 parameters that training uses.
    """
    import flax.serialization
    import jax
    import numpy as np
    from safetensors.numpy import save_file

    host_params = jax.tree.map(np.asarray, params)
    dims = dimensions(config, tokenizer)
    with tempfile.TemporaryDirectory(prefix="export-") as folder:
        out = Path(folder)
        (out / CONFIG).write_text(json.dumps(hugging_face_config(dims, tokenizer), indent=2) + "\n")
        save_file(hugging_face_tensors(host_params, dims), out / WEIGHTS, metadata={"format": "pt"})
        export_tokenizer(tokenizer.path, out, dims.max_positions)
        (out / "params.msgpack").write_bytes(flax.serialization.to_bytes(host_params))
        (out / "dimensions.json").write_text(json.dumps(vars(dims), indent=2) + "\n")
        shutil.copyfile(README, out / "README.md")
        files_of(directory.url).put_folder(folder, directory.path(EXPORT))


def hugging_face_config(dims: Dimensions, tokenizer: TokenizerFacts) -> dict[str, Any]:
    """config.json of a RobertaForMaskedLM with these sizes."""
    from jobs.flax_mlm.model import init_stddev

    return {
        "architectures": [ARCHITECTURE],
        "model_type": "roberta",
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.width,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "intermediate_size": dims.ff_width,
        "hidden_act": "gelu",
        "hidden_dropout_prob": dims.dropout,
        "attention_probs_dropout_prob": 0.0,
        # Hugging Face counts the rows of the position table, the unused ones included.
        "max_position_embeddings": dims.max_positions + dims.position_offset,
        "type_vocab_size": 1,
        "initializer_range": init_stddev(dims.width),
        "layer_norm_eps": LAYER_NORM_EPSILON,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_id,
        "pad_token_id": tokenizer.pad_id,
        "eos_token_id": tokenizer.eos_id,
        "torch_dtype": "float32",
    }


def hugging_face_tensors(params: Mapping[str, Any], dims: Dimensions) -> dict[str, Array]:
    """The parameters under RobertaForMaskedLM's names and in PyTorch's orientation (a Linear is out x in).

    The output matrix is not among them: it is the word embeddings (tie_word_embeddings).
    """
    import numpy as np

    embeddings = params["embeddings"]
    tensors: dict[str, Array] = {
        TOKEN_TABLE: embeddings["tokens"]["embedding"][: dims.vocab_size],
        POSITIONS: embeddings["positions"]["embedding"],
        # RoBERTa's single token type adds the same vector everywhere; it is part of the others here.
        TYPES: np.zeros((1, dims.width), np.float32),
        OUTPUT_BIAS: params["head_bias"][: dims.vocab_size],
    }
    for module in modules(dims):
        own: Any = params
        for step in module.path:
            own = own[step]
        weight = own["scale" if module.inputs is None else "kernel"]
        parts = len(module.names)
        for name, weights, bias in zip(
            module.names, np.split(weight, parts, axis=-1), np.split(own["bias"], parts), strict=True
        ):
            tensors |= {f"{name}.weight": weights.T, f"{name}.bias": bias}
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
