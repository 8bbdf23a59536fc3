"""A model to go on from: a Hugging Face folder of RobertaForMaskedLM, found, checked, and turned into options.

Light: the launching side opens it to find mistakes before anything starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contracts.errors import RequestError
from contracts.run_directory import RunDirectory
from jobs.flax_mlm import weights
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.pretrained_folder import CONFIG, open_folder, tokenizer_of
from jobs.flax_mlm.sizes import SIZES, Size
from jobs.flax_mlm.tokenizer import TokenizerFacts, load_tokenizer

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
    vocab_size: int
    layers: int
    width: int
    heads: int
    ff_width: int
    max_positions: int
    position_offset: int

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.tokenizer.sha256.encode())
        for name in (CONFIG, weights.WEIGHTS):
            with (self.folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def adopted_by(self, config: Config) -> Config:
        """`config` as if this model's sizes and tokenizer had been asked for; `model`, from which the learning rate
        comes, is the largest named one that is no wider.

        Raises:
            RequestError: options that contradict the folder, all of them.
        """
        sizes: dict[str, Any] = {name: getattr(self, name) for name in (*NAMES, "max_positions")}
        against = [
            f"--{name.replace('_', '-')} {given}: the model in {self.source} has {size}"
            for name, size in sizes.items()
            if (given := getattr(config, name)) not in (None, size)
        ]
        if against:
            raise RequestError("; ".join(against) + "; sizes come from --init-from, leave them out")
        if self.vocab_size == self.tokenizer.vocab_size:  # which may be fewer than can be asked for
            sizes["vocab_size"] = None
        narrower = [name for name, known in SIZES.items() if known["width"] <= self.width]
        named: Any = narrower[-1] if narrower else "tiny"
        return dataclasses.replace(
            config, init_from=None, model=named, tokenizer=str(self.tokenizer.path), **sizes
        )

    def params(self) -> dict[str, Any]:
        """The parameters, as the pure dict that training uses; see `weights.load`."""
        return weights.load(self.folder / weights.WEIGHTS, self)

    def check_began(self, directory: RunDirectory, *, step: int, writes: bool) -> None:
        """A run that goes on after `step` has begun from this very model; one that begins notes it, if it `writes`.

        Raises:
            RequestError: the folder holds another model now.
        """
        noted = directory.read_json(RECORD) if step else None
        if noted is not None and noted.get("fingerprint") != self.fingerprint:
            raise RequestError(
                f"--init-from {self.source}: holds another model or tokenizer than when the run began; bring the old "
                "one back there, or start a new run"
            )
        if noted is None and writes:
            directory.write_json(RECORD, {"source": self.source, "fingerprint": self.fingerprint})


def open_pretrained(source: str, cache_dir: Path, say: Callable[[str], None]) -> Pretrained:
    """The model in `source`, a folder of this host or a URL, whose files are then kept under `cache_dir`.

    Raises:
        RequestError: there is no such folder, a file is missing or torn, it is a model of another architecture, its
            tensors are not what its config.json says, or tokenizer and model do not fit together.
    """
    folder = open_folder(source, cache_dir, say)
    told = _told(source, folder)
    path = tokenizer_of(source, folder, cache_dir)
    try:
        tokenizer = load_tokenizer(path)
    except RequestError as error:
        raise RequestError(str(error).replace("--tokenizer", "--init-from", 1)) from None
    pad_id = told.get("pad_token_id", 1)
    if pad_id != tokenizer.pad_id:
        raise RequestError(
            f"--init-from {source}: config.json's pad_token_id is {pad_id} and the tokenizer's is {tokenizer.pad_id}, "
            "so positions would be counted from another row; the two are not of one model"
        )
    found = Pretrained(
        source=source,
        folder=folder,
        tokenizer=tokenizer,
        max_positions=_whole(source, told, "max_position_embeddings") - pad_id - 1,
        position_offset=pad_id + 1,
        **{name: _whole(source, told, theirs) for name, theirs in NAMES.items()},
    )
    wrong = weights.problems(weights.header(folder / weights.WEIGHTS), found)
    if wrong:
        raise RequestError(
            f"--init-from {source}: {weights.WEIGHTS} {'; '.join(wrong)}; name a whole {ARCHITECTURE}"
        )
    if tokenizer.vocab_size > found.vocab_size:
        raise RequestError(
            f"--init-from {source}: its tokenizer has {tokenizer.vocab_size:,} tokens and its model "
            f"{found.vocab_size:,}; the two are not of one model"
        )
    return found


def adopt(config: Config, cache_dir: Path, say: Callable[[str], None]) -> tuple[Config, Pretrained | None]:
    """The options with everything that --init-from decides, and the model; as they are where there is none.

    Raises:
        RequestError: as open_pretrained and Pretrained.adopted_by.
    """
    if config.init_from is None:
        return config, None
    found = open_pretrained(config.init_from, cache_dir, say)
    return found.adopted_by(config), found


def _told(source: str, folder: Path) -> dict[str, Any]:
    try:
        told = json.loads((folder / CONFIG).read_bytes())
        architectures = told.get("architectures") or []
    except (ValueError, AttributeError) as error:
        raise RequestError(f"--init-from {source}: its {CONFIG} is no JSON object ({error})") from None
    if architectures != [ARCHITECTURE]:
        kinds = ", ".join(map(str, architectures)) or told.get("model_type") or "nothing"
        raise RequestError(
            f"--init-from {source}: {CONFIG} names {kinds}; only {ARCHITECTURE} can be gone on with"
        )
    other = [
        f"{name} is {told.get(name, default)!r} and must be {wanted!r}"
        for name, (wanted, default) in FIXED.items()
        if told.get(name, default) != wanted
    ]
    if other:
        raise RequestError(
            f"--init-from {source}: in {CONFIG}, {'; '.join(other)}: the model here computes nothing else"
        )
    return dict(told)


def _whole(source: str, told: dict[str, Any], name: str) -> int:
    value = told.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(f"--init-from {source}: {CONFIG} has {name} {value!r}, which is no size; mend it")
    return value
