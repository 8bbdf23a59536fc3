"""From the tensors of a RobertaForMaskedLM, under Hugging Face's names, to the parameters that training uses.

The way back is in `export`; there and back again changes no bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from contracts.errors import RequestError
from jobs.flax_mlm.sizes import vocabulary_rows

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

WEIGHTS = "model.safetensors"
WORDS = "roberta.embeddings.word_embeddings.weight"
TYPES = "roberta.embeddings.token_type_embeddings.weight"
TIED = {"lm_head.decoder.weight": WORDS, "lm_head.decoder.bias": "lm_head.bias"}
"""What some files hold a second time."""
UNUSED = ("roberta.embeddings.position_ids", "roberta.pooler.")
"""A buffer of old versions, and a layer that predicting masked tokens does not use."""

_LONGEST_HEADER_BYTES = 100 * 2**20  # the format's own limit


class Sizes(Protocol):
    """What the tensors' shapes follow from; `model.Dimensions` has them."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def position_offset(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def ff_width(self) -> int: ...


def shapes(dims: Sizes) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of these sizes, tied ones once."""
    d, f = dims.width, dims.ff_width

    def linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

    def norm(name: str) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (d,), f"{name}.bias": (d,)}

    found: dict[str, tuple[int, ...]] = {
        WORDS: (dims.vocab_size, d),
        "roberta.embeddings.position_embeddings.weight": (dims.max_positions + dims.position_offset, d),
        TYPES: (1, d),
        **norm("roberta.embeddings.LayerNorm"),
        "lm_head.bias": (dims.vocab_size,),
        **linear("lm_head.dense", d, d),
        **norm("lm_head.layer_norm"),
    }
    for index in range(dims.layers):
        layer = f"roberta.encoder.layer.{index}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            found |= linear(f"{layer}.attention.{part}", d, d)
        found |= norm(f"{layer}.attention.output.LayerNorm")
        found |= linear(f"{layer}.intermediate.dense", d, f)
        found |= linear(f"{layer}.output.dense", f, d)
        found |= norm(f"{layer}.output.LayerNorm")
    return found


def header(path: Path) -> dict[str, tuple[int, ...]]:
    """Of a safetensors file every tensor's shape, without reading the tensors.

    Raises:
        RequestError: it is no such file, or shorter than its header says.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _LONGEST_HEADER_BYTES:
                raise ValueError("its header has no length that can be")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if path.stat().st_size != end:
            raise ValueError(f"it has {path.stat().st_size} bytes and should have {end}")
        return {name: tuple(entry["shape"]) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise RequestError(
            f"--init-from: {path} is no whole safetensors file ({error}); copy it again"
        ) from None
    except OSError as error:
        raise RequestError(f"--init-from: {path}: {error.strerror}") from None


def problems(found: Mapping[str, tuple[int, ...]], dims: Sizes) -> list[str]:
    """What keeps tensors of these shapes from being a model of these sizes."""
    wanted = shapes(dims)
    missing = [name for name in wanted if name not in found]
    extra = [
        name for name in found if name not in wanted and name not in TIED and not name.startswith(UNUSED)
    ]
    wrong = [
        f"{name} is {list(found[name])} and config.json's sizes make it {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    return [
        *([f"lacks {_listed(missing)}"] if missing else []),
        *([f"has what RobertaForMaskedLM has not: {_listed(extra)}"] if extra else []),
        *([_listed(wrong)] if wrong else []),
    ]


def load(path: Path, dims: Sizes) -> dict[str, Any]:
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


def _params(read: Callable[[str], Array], dims: Sizes) -> dict[str, Any]:
    import numpy as np

    def linear(*names: str) -> dict[str, Array]:
        """One matrix product, or several of the same input side by side."""
        return {
            "kernel": np.concatenate([read(f"{name}.weight").T for name in names], axis=1),
            "bias": np.concatenate([read(f"{name}.bias") for name in names]),
        }

    def norm(name: str) -> dict[str, Array]:
        return {"scale": read(f"{name}.weight"), "bias": read(f"{name}.bias")}

    def layer(name: str) -> dict[str, Any]:
        return {
            "qkv": linear(*(f"{name}.attention.self.{part}" for part in ("query", "key", "value"))),
            "attention_out": linear(f"{name}.attention.output.dense"),
            "attention_norm": norm(f"{name}.attention.output.LayerNorm"),
            "ff_in": linear(f"{name}.intermediate.dense"),
            "ff_out": linear(f"{name}.output.dense"),
            "ff_norm": norm(f"{name}.output.LayerNorm"),
        }

    def padded(name: str) -> Array:
        tensor = read(name)
        return np.pad(
            tensor, [(0, vocabulary_rows(dims.vocab_size) - dims.vocab_size), *[(0, 0)] * (tensor.ndim - 1)]
        )

    positions = read("roberta.embeddings.position_embeddings.weight")
    types = read(TYPES)
    return {
        "embeddings": {
            "tokens": {"embedding": padded(WORDS)},
            "positions": {"embedding": positions + types if types.any() else positions},
            "norm": norm("roberta.embeddings.LayerNorm"),
        },
        "layers": {index: layer(f"roberta.encoder.layer.{index}") for index in range(dims.layers)},
        "head_dense": linear("lm_head.dense"),
        "head_norm": norm("lm_head.layer_norm"),
        "head_bias": padded("lm_head.bias"),
    }


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
