"""The model: RoBERTa's or BERT's encoder in Keras's own layers, with Hugging Face's head for the labels.

It is a functional model of layers and operations that Keras has, so that a `.keras` file of it needs no code of ours.
Its weights have Hugging Face's names and shapes in a file (`Part`), and are read and written by one table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import keras
import numpy as np
from keras import layers, ops

from contracts.errors import RequestError
from jobs.glue.batches import Blocks, Packed, row_lengths
from jobs.glue.classifier import Batch
from jobs.keras_glue.config import ACTIVATIONS
from jobs.runtime.jax.ops import attention, gelu, linear
from jobs.runtime.jax.ops import dropout as dropped
from jobs.runtime.storage.model_folder import WEIGHTS

type Array = np.ndarray[Any, Any]
type Settings = Mapping[str, Any]
"""Hugging Face's config.json, with id2label."""

FORMERLY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names in BERT's first files."""
MASKED = -1e9
"""Added to the score of a token that is padding."""


class FastDense(layers.Dense):  # type: ignore[misc]
    """A Dense layer whose products and GELU are flax_mlm's: on a CPU, Keras's own take five times as long in bfloat16.

    Its weights are Dense's; what is saved is built of Dense, which can be loaded without this class.
    """

    def call(self, inputs: Any) -> Any:
        outputs = linear(inputs, self.kernel.value, self.bias.value)
        if self.activation is keras.activations.gelu:
            return gelu(outputs)
        return outputs if self.activation is None else self.activation(outputs)


class FastDropout(layers.Dropout):  # type: ignore[misc]
    """A Dropout layer with flax_mlm's noise: Keras's own costs five times as much (`jobs.runtime.jax.ops.dropout`)."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training or self.rate == 0:
            return inputs
        return dropped(inputs[None], self.rate, self.seed_generator.next()[None])[0]


class PackedAttention(layers.Layer):  # type: ignore[misc]
    """Attention within packed rows, for all tokens or, in the last layer, for the rows' first ones."""

    def __init__(self, blocks: Blocks, heads: int, rate: float, *, is_last: bool) -> None:
        super().__init__()
        self.blocks, self.heads, self.rate, self.is_last = blocks, heads, rate, is_last
        self.seed_generator = keras.random.SeedGenerator()

    def call(self, qkv_GTD: Any, mask_GT: Any, training: bool = False) -> Any:
        """(shares, queries, width)."""
        shares, heads = qkv_GTD.shape[0], self.heads
        shapes = [(rows, heads, 1 if self.is_last else length, length) for rows, length in self.blocks]
        factors_by_block: list[Any] = [None] * len(shapes)
        if training and self.rate:
            pairs = [math.prod(shape) for shape in shapes]
            key = self.seed_generator.next()[None]
            factors_GP = dropped(jnp.ones((1, shares, sum(pairs)), qkv_GTD.dtype), self.rate, key)[0]
            factors_by_block = jnp.split(factors_GP, np.cumsum(pairs)[:-1], axis=1)
        ends = np.cumsum([rows * length for rows, length in self.blocks])[:-1]
        qkv_by_block, mask_by_block = (jnp.split(values, ends, axis=1) for values in (qkv_GTD, mask_GT))
        mixed = []
        for qkv_GSD, mask_GS, factors, (rows, _, asking, length) in zip(
            qkv_by_block, mask_by_block, factors_by_block, shapes, strict=True
        ):
            qkv_BSHK = qkv_GSD.reshape(shares * rows, length, 3 * heads, -1)
            q_BSHK, k_BSHK, v_BSHK = jnp.split(qkv_BSHK, 3, axis=2)
            seen_B11S = mask_GS.reshape(shares * rows, 1, 1, length) > 0
            factors_BHMS = None if factors is None else factors.reshape(shares * rows, heads, asking, length)
            mixed_BMHK = attention(q_BSHK[:, :asking], k_BSHK, v_BSHK, seen_B11S, factors_BHMS)
            mixed.append(mixed_BMHK.reshape(shares, rows * asking, -1))
        return jnp.concatenate(mixed, axis=1)


def build(
    settings: Settings,
    kind: type[keras.Model] = keras.Model,
    blocks: Blocks | None = None,
    shared: keras.Model | None = None,
) -> keras.Model:
    """The model, with weights drawn from Keras's random seed.

    Inputs: "ids" and "mask" (rows, positions), and "types" where the model has more than one type of token.
    Output: (rows, classes) or (rows, 1) in float32.
    blocks: of packed rows. Inputs are (shares, tokens) then, "places" among them, and the output (shares, rows, …).
    shared: a model whose layers, and so its weights, this one has too.
    """
    tokens = None if blocks is None else sum(row_lengths(blocks))
    names = input_names(settings, is_packed=blocks is not None)
    inputs = {name: keras.Input((tokens,), dtype="int32", name=name) for name in names}
    encoder = _Encoder(settings, blocks, shared)
    x_BSD = encoder.embed(inputs)
    for index in range(settings["num_hidden_layers"]):
        x_BSD = encoder.layer(x_BSD, inputs["mask"], index)
    return kind(inputs, encoder.classify(x_BSD), name=settings["model_type"])


class _Encoder:
    """The parts of the model, of layers that are made here or taken from `shared`."""

    def __init__(self, settings: Settings, blocks: Blocks | None, shared: keras.Model | None) -> None:
        self.settings, self.blocks, self.shared = settings, blocks, shared
        self.width, self.heads = settings["hidden_size"], settings["num_attention_heads"]
        self.is_roberta = settings["model_type"] == "roberta"
        self.dropout = settings.get("hidden_dropout_prob", 0.1)
        self.attention_dropout = settings.get("attention_probs_dropout_prob", 0.1)

    def embed(self, inputs: Mapping[str, Any]) -> Any:
        ids_BS, mask_BS, types = inputs["ids"], inputs["mask"], self.settings.get("type_vocab_size", 2)
        types_BS = inputs["types"] if types > 1 else ops.zeros_like(ids_BS)
        pad_id = self.settings.get("pad_token_id", 1)
        if self.blocks is not None:
            places_BS = inputs["places"]
            positions_BS = (places_BS + 1) * mask_BS + pad_id if self.is_roberta else places_BS
        elif (
            self.is_roberta
        ):  # it counts from the padding token's id + 1 on, and padding is all of one position
            real_BS = ops.cast(ops.not_equal(ids_BS, pad_id), "int32")
            positions_BS = ops.cumsum(real_BS, axis=1) * real_BS + pad_id
        else:
            positions_BS = ops.cumsum(ops.ones_like(ids_BS), axis=1) - 1
        x_BSD = self._embedding(ids_BS, self.settings["vocab_size"], "words")
        x_BSD = x_BSD + self._embedding(types_BS, types, "types_of_tokens")
        x_BSD = x_BSD + self._embedding(positions_BS, self.settings["max_position_embeddings"], "positions")
        return self._dropout(self.dropout)(self._norm(x_BSD, "embeddings_norm"))

    def layer(self, x_BSD: Any, mask_BS: Any, index: int) -> Any:
        """Of the last layer, which the head reads, the rows' first tokens only."""
        prefix = f"layer_{index}"
        qkv_BSD = self._dense(x_BSD, 3 * self.width, f"{prefix}_qkv")
        if self.blocks is None:
            seen_BSD, x_BSD = self._attend(qkv_BSD, mask_BS, x_BSD, index)
        else:
            seen_BSD, x_BSD = self._attend_packed(qkv_BSD, mask_BS, x_BSD, index)
        out_BSD = self._dense(seen_BSD, self.width, f"{prefix}_attention_out")
        x_BSD = self._norm(x_BSD + self._dropout(self.dropout)(out_BSD), f"{prefix}_attention_norm")
        activation = ACTIVATIONS[self.settings.get("hidden_act", "gelu")]
        inner_BSF = self._dense(
            x_BSD, self.settings["intermediate_size"], f"{prefix}_in", activation=activation
        )
        out_BSD = self._dense(inner_BSF, self.width, f"{prefix}_out")
        return self._norm(x_BSD + self._dropout(self.dropout)(out_BSD), f"{prefix}_norm")

    def classify(self, x_BSD: Any) -> Any:
        dropout = self.settings.get("classifier_dropout")
        dropout = self.dropout if dropout is None else dropout
        first_BD = x_BSD[:, 0] if self.blocks is None else x_BSD
        if self.is_roberta:
            first_BD = self._dropout(dropout)(first_BD)
        first_BD = self._dropout(dropout)(self._dense(first_BD, self.width, "head_dense", activation="tanh"))
        return self._dense(first_BD, len(self.settings["id2label"]), "head_out", dtype="float32")

    def _attend(self, qkv_BSD: Any, mask_BS: Any, x_BSD: Any, index: int) -> tuple[Any, Any]:
        """The result of attention, and x at the tokens that it is of."""
        by_head = (-1, self.heads, self.width // self.heads)
        q_BSHK, k_BTHK, v_BTHK = (layers.Reshape(by_head)(part) for part in ops.split(qkv_BSD, 3, axis=-1))
        if self._is_last(index):
            q_BSHK, x_BSD = q_BSHK[:, :1], x_BSD[:, :1]
        unseen_B11S = (1.0 - ops.cast(mask_BS, "float32")[:, None, None, :]) * MASKED
        scores_BHST = ops.einsum("bshk,bthk->bhst", q_BSHK, k_BTHK) * by_head[-1] ** -0.5
        shares_BHST = ops.softmax(ops.cast(scores_BHST, "float32") + unseen_B11S)
        shares_BHST = layers.Dropout(self.attention_dropout)(shares_BHST)
        shares_BHST = ops.cast(shares_BHST, keras.config.dtype_policy().compute_dtype)
        return layers.Reshape((-1, self.width))(ops.einsum("bhst,bthk->bshk", shares_BHST, v_BTHK)), x_BSD

    def _attend_packed(self, qkv_GTD: Any, mask_GT: Any, x_GTD: Any, index: int) -> tuple[Any, Any]:
        """As `_attend`, of packed rows."""
        assert self.blocks is not None
        is_last = self._is_last(index)
        attention_layer = PackedAttention(self.blocks, self.heads, self.attention_dropout, is_last=is_last)
        if is_last:
            x_GTD = ops.take(x_GTD, np.cumsum([0, *row_lengths(self.blocks)])[:-1], axis=1)
        return attention_layer(qkv_GTD, mask_GT), x_GTD

    def _is_last(self, index: int) -> bool:
        return bool(index == self.settings["num_hidden_layers"] - 1)

    def _dense(self, x: Any, units: int, name: str, **options: Any) -> Any:
        kind = layers.Dense if self.blocks is None else FastDense
        return self._get(kind, name, units, kernel_initializer=self._initializer(), **options)(x)

    def _embedding(self, x: Any, size: int, name: str) -> Any:
        return self._get(
            layers.Embedding, name, size, self.width, embeddings_initializer=self._initializer()
        )(x)

    def _norm(self, x: Any, name: str) -> Any:
        epsilon = self.settings.get("layer_norm_eps", 1e-12)
        return self._get(layers.LayerNormalization, name, epsilon=epsilon)(x)

    def _dropout(self, rate: float) -> layers.Layer:
        return (layers.Dropout if self.blocks is None else FastDropout)(rate)

    def _get(self, kind: type[layers.Layer], name: str, *arguments: Any, **options: Any) -> layers.Layer:
        return kind(*arguments, name=name, **options) if self.shared is None else self.shared.get_layer(name)

    def _initializer(self) -> keras.Initializer:
        return keras.initializers.RandomNormal(stddev=self.settings.get("initializer_range", 0.02))


def input_names(settings: Settings, *, is_packed: bool = False) -> tuple[str, ...]:
    names = ("ids", "mask", "types") if settings.get("type_vocab_size", 2) > 1 else ("ids", "mask")
    return (*names, "places") if is_packed else names


def model_inputs(batch: Batch, settings: Settings) -> dict[str, Array]:
    """The model's inputs for the rows of a batch."""
    inputs = {"ids": batch.ids_BS, "mask": batch.mask_BS, "types": batch.types_BS}
    return {name: inputs[name].astype(np.int32) for name in input_names(settings)}


def packed_inputs(batch: Packed, settings: Settings) -> dict[str, Array]:
    """As `model_inputs`, of packed rows."""
    names = input_names(settings, is_packed=True)
    return {name: getattr(batch, f"{name}_GT").astype(np.int32) for name in names}


class Part(NamedTuple):
    """A layer of the model, and the names that its weights have in a file; of several names each has an equal share
    of the outputs. is_new: a head, which a file need not have."""

    layer: str
    names: tuple[str, ...]
    is_new: bool = False


def parts(settings: Settings) -> Iterator[Part]:
    """Every layer that has weights."""
    kind = settings["model_type"]
    for layer, name in {"words": "word", "positions": "position", "types_of_tokens": "token_type"}.items():
        yield Part(layer, (f"{kind}.embeddings.{name}_embeddings",))
    yield Part("embeddings_norm", (f"{kind}.embeddings.LayerNorm",))
    for index in range(settings["num_hidden_layers"]):
        prefix, name = f"layer_{index}", f"{kind}.encoder.layer.{index}"
        yield Part(
            f"{prefix}_qkv",
            tuple(f"{name}.attention.self.{projection}" for projection in ("query", "key", "value")),
        )
        yield Part(f"{prefix}_attention_out", (f"{name}.attention.output.dense",))
        yield Part(f"{prefix}_attention_norm", (f"{name}.attention.output.LayerNorm",))
        yield Part(f"{prefix}_in", (f"{name}.intermediate.dense",))
        yield Part(f"{prefix}_out", (f"{name}.output.dense",))
        yield Part(f"{prefix}_norm", (f"{name}.output.LayerNorm",))
    is_roberta = kind == "roberta"
    yield Part("head_dense", ("classifier.dense" if is_roberta else "bert.pooler.dense",), is_new=True)
    yield Part("head_out", ("classifier.out_proj" if is_roberta else "classifier",), is_new=True)


def tensors(model: keras.Model, settings: Settings) -> dict[str, Array]:
    """The weights under Hugging Face's names and in PyTorch's orientation (a Linear is out x in)."""
    tensors_by_name = {}
    for layer, names, _ in parts(settings):
        kinds = ("weight", "bias")
        for kind, variable in zip(kinds, model.get_layer(layer).weights, strict=False):
            matrix = np.asarray(variable.value, np.float32)
            for name, share in zip(names, np.split(matrix, len(names), axis=-1), strict=True):
                tensors_by_name[f"{name}.{kind}"] = np.ascontiguousarray(_turned(layer, share))
    return tensors_by_name


def load(model: keras.Model, settings: Settings, source: str, folder: Path) -> None:
    """Give the model the weights of a folder; a head is left as it was drawn where the folder has none of its shape.

    Raises:
        RequestError: the file is torn, or it lacks weights of the encoder, or they have other shapes.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        read = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise RequestError(
            f"--init-from {source}: {WEIGHTS} is no whole safetensors file ({error}); copy it again"
        ) from None
    prefix = f"{settings['model_type']}."
    held: dict[str, Array] = {}
    for name, tensor in read.items():
        for old, now in FORMERLY.items():
            name = name.replace(old, now)
        is_bare = name.startswith(("embeddings.", "encoder.", "pooler."))  # saved without any head
        held[prefix + name if is_bare else name] = tensor
    expected = tensors(model, settings)
    new = {part.layer for part in parts(settings) if part.is_new}
    wrong = []
    for layer, names, _ in parts(settings):
        layer_names = [name for name in expected if name.rpartition(".")[0] in names]
        bad = [name for name in layer_names if name not in held or held[name].shape != expected[name].shape]
        if bad and layer not in new:
            wrong += [
                f"lacks {name}"
                if name not in held
                else f"{name} is {list(held[name].shape)} and config.json makes it {list(expected[name].shape)}"
                for name in bad
            ]
        if bad:
            continue
        for kind, variable in zip(("weight", "bias"), model.get_layer(layer).weights, strict=False):
            shares = [_turned(layer, held[f"{name}.{kind}"]) for name in names]
            variable.assign(np.concatenate(shares, axis=-1).astype(np.float32))
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise RequestError(
            f"--init-from {source}: {WEIGHTS} {'; '.join(wrong[:3])}{more}; name a folder with a whole model"
        )


def _turned(layer: str, weight: Array) -> Array:
    """A table of embeddings has one orientation; PyTorch keeps a linear map as outputs x inputs."""
    is_table = layer in ("words", "positions", "types_of_tokens")
    return weight if is_table or weight.ndim < 2 else weight.T
