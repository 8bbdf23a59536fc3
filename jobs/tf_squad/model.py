"""The model: a RoBERTa in layers of tf_keras with scores for the first and the last token of an answer; its weights
from and to Hugging Face's names, and its export.

Shapes: B windows, S tokens, N heads, H a head's width, D the model's width.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
import tf_keras
from safetensors import safe_open
from safetensors.numpy import save_file

from contracts.errors import RequestError
from contracts.run_directory import EXPORT, RunDirectory
from jobs.glue.pretrained import drawn_settings, open_pretrained
from jobs.glue.tokenizer import open_tokenizer, train_tokenizer
from jobs.runtime.storage.bucket_files import files_of
from jobs.runtime.storage.model_folder import CONFIG, TOKENIZER, WEIGHTS
from jobs.tf_squad.config import COMPUTES, Config
from jobs.tf_squad.data import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAVED_MODEL = "saved_model"
NOWHERE = -1e9
"""Added to the score of what is not to be looked at."""

type Weights = Mapping[str, np.ndarray[Any, Any]]
"""By the names that Hugging Face's RobertaForQuestionAnswering gives them, in PyTorch's layout."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beginning:
    """What training begins with. settings: config.json of a RobertaForQuestionAnswering. folder: of --init-from; None:
    the model is drawn. fingerprint: sha256 over all of it."""

    tokenizer: Tokenizer
    settings: Mapping[str, Any]
    folder: Path | None
    is_drawn: bool
    fingerprint: str


def prepare(
    config: Config, questions: tuple[Question, ...], cache_dir: Path, say: Callable[[str], None]
) -> Beginning:
    """Open the folder of --init-from, or train a tokenizer on the questions and their texts.

    Raises:
        RequestError: there is no such folder, or its model is another kind of model than this job trains.
    """
    folder, digest = None, hashlib.sha256()
    if config.init_from is None:
        with tempfile.TemporaryDirectory() as temporary:
            distinct_texts = {question.text: 0 for question in questions}
            train_tokenizer(
                (*(question.question for question in questions), *distinct_texts), Path(temporary)
            )
            tokenizer = open_tokenizer(Path(temporary))
        settings = drawn_settings(config.model, tokenizer.get_vocab_size(), config.max_length)
        settings["layer_norm_eps"] = DEFAULTS["layer_norm_eps"]
    else:
        folder = open_pretrained(config, config.init_from, cache_dir, say, COMPUTES)
        settings, tokenizer = json.loads((folder / CONFIG).read_bytes()), open_tokenizer(folder)
        if not config.scratch:
            with (folder / WEIGHTS).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    settings = {**DEFAULTS, **settings, "architectures": ["RobertaForQuestionAnswering"]}
    if config.dropout is not None:
        settings |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), config.dropout)
    digest.update(json.dumps(settings, sort_keys=True).encode() + tokenizer.to_str().encode())
    return Beginning(
        tokenizer=tokenizer,
        settings=settings,
        folder=folder,
        is_drawn=folder is None or config.scratch,
        fingerprint=digest.hexdigest(),
    )


DEFAULTS = {
    "model_type": "roberta",
    "type_vocab_size": 1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "layer_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
"""RoBERTa's, where a config.json leaves them out."""


class Dropout:
    """Zeroes of values a share that is drawn from a seed: the n-th dropout of a model has the n-th of its seeds.

    The share is one of 256ths, so that a byte says whether a value is kept: on a CPU, TensorFlow's own draws a float
    for each, and takes twice as long.
    """

    def __init__(self, seed: Any) -> None:
        self._seed, self._number = seed, 0

    def __call__(self, values: Any, share: float) -> Any:
        if self._seed is None or not share:
            return values
        self._number += 1
        seed = tf.random.experimental.stateless_fold_in(self._seed, self._number)
        count, dropped = tf.size(values), round(256 * share)
        integers = tf.random.stateless_uniform([-(-count // 4)], seed, None, None, tf.int32)
        bytes_ = tf.reshape(tf.reshape(tf.bitcast(integers, tf.uint8), [-1])[:count], tf.shape(values))
        # A product, because a choice between values of bfloat16 takes five times as long on a CPU.
        return values * (tf.cast(bytes_ >= dropped, values.dtype) * (256 / (256 - dropped)))


@tf.custom_gradient  # type: ignore[untyped-decorator]
def gelu(x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """x Φ(x), exact (Hendrycks & Gimpel 2016, arXiv:1606.08415), computed in float32.

    By erf: `tf.nn.gelu` takes erfc, which takes twice as long on a CPU, and in bfloat16 all of it takes three times as
    long.
    """
    wide = tf.cast(x, tf.float32)
    below = 0.5 + 0.5 * tf.math.erf(wide * math.sqrt(0.5))

    def backward(gradient: Any) -> Any:
        slope = below + wide * tf.exp(-0.5 * tf.square(wide)) * math.sqrt(0.5 / math.pi)
        return gradient * tf.cast(slope, x.dtype)

    return tf.cast(wide * below, x.dtype), backward


class Roberta(tf_keras.Model):  # type: ignore[misc]
    """Liu et al. 2019, with the head of Devlin et al. 2019, section 4.2."""

    def __init__(self, settings: Mapping[str, Any], dtype: str) -> None:
        super().__init__()
        self.settings = settings
        policy = tf_keras.mixed_precision.Policy("mixed_bfloat16" if dtype == "bfloat16" else "float32")
        width = settings["hidden_size"]

        def dense(units: int) -> Any:
            return tf_keras.layers.Dense(units, dtype=policy)

        def norm() -> Any:
            return tf_keras.layers.LayerNormalization(epsilon=settings["layer_norm_eps"], dtype=policy)

        def table(rows: int) -> Any:
            return tf_keras.layers.Embedding(rows, width, dtype=policy)

        prefix = "roberta.embeddings."
        self._named: dict[str, Any] = {
            f"{prefix}word_embeddings": table(settings["vocab_size"]),
            f"{prefix}position_embeddings": table(settings["max_position_embeddings"]),
            f"{prefix}token_type_embeddings": table(settings["type_vocab_size"]),
            f"{prefix}LayerNorm": norm(),
        }
        for layer in range(settings["num_hidden_layers"]):
            prefix = f"roberta.encoder.layer.{layer}."
            for name in ("query", "key", "value"):
                self._named[f"{prefix}attention.self.{name}"] = dense(width)
            self._named[f"{prefix}attention.output.dense"] = dense(width)
            self._named[f"{prefix}attention.output.LayerNorm"] = norm()
            self._named[f"{prefix}intermediate.dense"] = dense(settings["intermediate_size"])
            self._named[f"{prefix}output.dense"] = dense(width)
            self._named[f"{prefix}output.LayerNorm"] = norm()
        self._named["qa_outputs"] = dense(2)

    def call(self, ids_BS: Any, seed: Any = None) -> tuple[Any, Any]:
        """The scores of each token to be an answer's first, and its last: (B, S) each, float32.

        seed: (2,) of this step and these windows, for dropout; None: without.
        """
        named, settings, dropout = self._named, self.settings, Dropout(seed)
        pad = settings["pad_token_id"]
        mask_BS = ids_BS != pad
        # RoBERTa counts from the padding token's id + 1 on, and padding is at the end.
        positions_BS = tf.where(mask_BS, tf.range(tf.shape(ids_BS)[1])[None] + pad + 1, pad)
        values_BSD = (
            named["roberta.embeddings.word_embeddings"](ids_BS)
            + named["roberta.embeddings.position_embeddings"](positions_BS)
            + named["roberta.embeddings.token_type_embeddings"](tf.zeros_like(ids_BS))
        )
        values_BSD = named["roberta.embeddings.LayerNorm"](values_BSD)
        values_BSD = dropout(values_BSD, settings["hidden_dropout_prob"])
        bias_B11S = tf.where(mask_BS, 0.0, NOWHERE)[:, None, None, :]
        for layer in range(settings["num_hidden_layers"]):
            prefix = f"roberta.encoder.layer.{layer}."
            mixed_BSD = self._attention(f"{prefix}attention.", values_BSD, bias_B11S, dropout)
            values_BSD = named[f"{prefix}attention.output.LayerNorm"](values_BSD + mixed_BSD)
            inner_BSF = gelu(named[f"{prefix}intermediate.dense"](values_BSD))
            outer_BSD = dropout(named[f"{prefix}output.dense"](inner_BSF), settings["hidden_dropout_prob"])
            values_BSD = named[f"{prefix}output.LayerNorm"](values_BSD + outer_BSD)
        scores_BS2 = tf.cast(named["qa_outputs"](values_BSD), tf.float32)
        return scores_BS2[..., 0], scores_BS2[..., 1]

    def _attention(self, prefix: str, values_BSD: Any, bias_B11S: Any, dropout: Dropout) -> Any:
        settings, heads = self.settings, self.settings["num_attention_heads"]
        width = settings["hidden_size"] // heads

        def split(name: str) -> Any:
            found_BSD = self._named[f"{prefix}self.{name}"](values_BSD)
            shape = tf.concat([tf.shape(found_BSD)[:2], [heads, width]], 0)
            return tf.transpose(tf.reshape(found_BSD, shape), (0, 2, 1, 3))

        query_BNSH, key_BNSH, value_BNSH = split("query"), split("key"), split("value")
        scores_BNSS = tf.matmul(query_BNSH, key_BNSH, transpose_b=True)
        scores_BNSS = tf.cast(scores_BNSS, tf.float32) / math.sqrt(width) + bias_B11S
        shares_BNSS = tf.cast(tf.nn.softmax(scores_BNSS), value_BNSH.dtype)
        shares_BNSS = dropout(shares_BNSS, settings["attention_probs_dropout_prob"])
        mixed_BSNH = tf.transpose(tf.matmul(shares_BNSS, value_BNSH), (0, 2, 1, 3))
        mixed_BSD = self._named[f"{prefix}output.dense"](tf.reshape(mixed_BSNH, tf.shape(values_BSD)))
        return dropout(mixed_BSD, settings["hidden_dropout_prob"])

    def variables_by_name(self) -> dict[str, Any]:
        """Each variable by Hugging Face's name; matrices are transposed there."""
        variables = {}
        for name, layer in self._named.items():
            kinds = {"kernel": "weight", "embeddings": "weight", "gamma": "weight", "beta": "bias"}
            for variable in layer.trainable_variables:
                kind = variable.name.rpartition("/")[2].partition(":")[0]
                variables[f"{name}.{kinds.get(kind, kind)}"] = variable
        return variables

    def decayed(self) -> list[Any]:
        """Variables with weight decay: matrices and tables."""
        return [variable for variable in self.trainable_variables if variable.shape.rank > 1]

    def weights_by_name(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies on the host, in PyTorch's layout."""
        return {
            name: np.ascontiguousarray(_turned(name, variable.numpy()))
            for name, variable in self.variables_by_name().items()
        }

    def give(self, weights: Weights) -> None:
        for name, variable in self.variables_by_name().items():
            variable.assign(_turned(name, weights[name]))


def _turned(name: str, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A matrix in the other layout; tables are the same in both."""
    return value.T if value.ndim > 1 and "embeddings" not in name else value


def build(settings: Mapping[str, Any], dtype: str) -> Roberta:
    """The model with all its variables, whatever is in them."""
    model = Roberta(settings, dtype)
    model(tf.fill((1, 8), settings["bos_token_id"]))
    return model


def begin(model: Roberta, beginning: Beginning, seed: int) -> None:
    """Give the model the weights of a folder; what it does not have, the head mostly, is drawn from the seed.

    Raises:
        RequestError: the folder's weights are not those of the model that its config.json describes.
    """
    random = np.random.Generator(np.random.Philox(key=[seed, 0]))
    weights: dict[str, np.ndarray[Any, Any]] = {}
    for name, variable in model.variables_by_name().items():
        shape = tuple(reversed(variable.shape)) if "embeddings" not in name else tuple(variable.shape)
        drawn = random.normal(0.0, beginning.settings["initializer_range"], shape)
        if len(shape) == 1:
            drawn = np.full(shape, float("LayerNorm.weight" in name))
        weights[name] = drawn.astype(np.float32)
    if not beginning.is_drawn and beginning.folder is not None:
        read = read_weights(beginning.folder)
        wrong = [
            f"{name} {list(read[name].shape) if name in read else 'is missing'}, not {list(drawn.shape)}"
            for name, drawn in weights.items()
            if (name in read or "qa_outputs" not in name)
            and (name not in read or read[name].shape != drawn.shape)
        ]
        if wrong:
            raise RequestError(
                f"--init-from {beginning.folder}: {WEIGHTS} does not hold the model that {CONFIG} describes: "
                f"{', '.join(wrong[:3])}; save both again with transformers"
            )
        weights |= {name: read[name] for name in weights if name in read}
    model.give(weights)


def read_weights(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a folder in float32, by the names that they have in a model with a head."""
    try:
        with safe_open(folder / WEIGHTS, "tf") as file:
            names = list(file.keys())
            is_bare = not any(name.startswith("roberta.") for name in names)
            return {
                name if not is_bare or name.startswith("qa_outputs") else f"roberta.{name}": tf.cast(
                    file.get_tensor(name), tf.float32
                ).numpy()
                for name in names
                if is_bare or name.startswith(("roberta.", "qa_outputs"))
            }
    except Exception as error:  # safetensors raises many kinds for a torn file
        raise RequestError(
            f"--init-from {folder}: {WEIGHTS} cannot be read ({error}); save it again"
        ) from None


def export(directory: RunDirectory, beginning: Beginning, weights: Weights, notes: Mapping[str, Any]) -> None:
    """Write export/: what `AutoModelForQuestionAnswering.from_pretrained` loads, and a SavedModel for TensorFlow.

    notes: the settings with which `jobs.tf_squad.predict` answers.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        settings = {
            **beginning.settings,
            "torch_dtype": "float32",
            "task_specific_params": {"tf_squad": dict(notes)},
        }
        (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        save_file(dict(weights), folder / WEIGHTS, {"format": "pt"})
        beginning.tokenizer.save(str(folder / TOKENIZER))
        _describe_tokenizer(beginning, folder)
        model = build(beginning.settings, "float32")
        model.give(weights)

        @tf.function(input_signature=[tf.TensorSpec((None, None), tf.int32, "input_ids")])  # type: ignore[untyped-decorator]
        def serve(ids_BS: Any) -> dict[str, Any]:
            start_BS, end_BS = model(ids_BS)
            return {"start_logits": start_BS, "end_logits": end_BS}

        tf.saved_model.save(model, str(folder / SAVED_MODEL), serve)
        to = directory.path(EXPORT)
        files_of(to).put_folder(temporary, to)


def _describe_tokenizer(beginning: Beginning, folder: Path) -> None:
    """What `AutoTokenizer` reads besides tokenizer.json: as it was in the folder of --init-from, or made."""
    names = ("tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
    if beginning.folder is not None and (beginning.folder / names[0]).exists():
        for name in names:
            if (beginning.folder / name).exists():
                shutil.copyfile(beginning.folder / name, folder / name)
        return
    beginning.tokenizer.model.save(str(folder))
    special = {"bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>", "unk": "<unk>", "pad": "<pad>"}
    tokens = {f"{role}_token": name for role, name in {**special, "mask": "<mask>"}.items()}
    longest = beginning.settings["max_position_embeddings"] - beginning.settings["pad_token_id"] - 1
    described = {"tokenizer_class": "RobertaTokenizerFast", "model_max_length": longest, **tokens}
    (folder / names[0]).write_text(json.dumps(described, indent=2) + "\n")
    (folder / names[1]).write_text(json.dumps(tokens, indent=2) + "\n")
