"""The folder of --init-from, and what can be said of it without a framework, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from contracts.errors import RequestError
from jobs.runtime.model_folder import BYTE_LEVEL, CONFIG, WORDPIECES, open_folder

KINDS = ("roberta", "bert")


class Limited(Protocol):
    """Options that say how long a row may be."""

    @property
    def max_length(self) -> int: ...


def open_pretrained(options: Limited, source: str, cache_dir: Path, say: Callable[[str], None]) -> Path:
    """The folder of a model that this job can go on with.

    Raises:
        RequestError: there is no such folder, it lacks a file, its model is of another kind, or has too few positions.
    """
    folder = open_folder(source, cache_dir, say, (*BYTE_LEVEL, (WORDPIECES,)))
    try:
        told = json.loads((folder / CONFIG).read_bytes())
        kind = told.get("model_type")
    except (ValueError, AttributeError) as error:
        raise RequestError(f"--init-from {source}: its {CONFIG} is no JSON object ({error})") from None
    if kind not in KINDS:
        named = ", ".join(map(str, told.get("architectures") or [])) or "nothing"
        raise RequestError(
            f"--init-from {source}: {CONFIG} names {named}, of the type {kind}; choose a model of the type "
            f"{' or '.join(KINDS)}"
        )
    longest = positions(told)
    if options.max_length > longest:
        raise RequestError(
            f"--max-length {options.max_length}: the model has {longest} positions; choose at most {longest}"
        )
    return folder


def positions(told: dict[str, Any]) -> int:
    """The longest sequence that a configuration allows: RoBERTa counts from the padding token's id + 1 on."""
    offset = int(told.get("pad_token_id", 1)) + 1 if told["model_type"] == "roberta" else 0
    return int(told.get("max_position_embeddings", 512)) - offset
