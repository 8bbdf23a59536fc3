"""The export as a folder of this host."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from pathlib import Path

from contracts.errors import RequestError
from contracts.files import is_url
from jobs.runtime.storage.cache import copy_once
from jobs.serve.config import Config


def problems(config: Config, _cache_dir: Path) -> list[str]:
    """What is wrong with the export, as far as it can be seen from here."""
    if not config.export or not config.job:
        return ["--export, --job: say what to serve; `fab serve RUN` does"]
    if not is_url(config.export) and not Path(config.export).is_dir():
        return [f"--export {config.export}: there is no such folder"]
    return []


def local_copy(config: Config, cache_dir: Path) -> Path:
    """Return the export's folder; one in a bucket is copied once.

    Raises:
        RequestError: it cannot be read.
    """
    if not is_url(config.export):
        if not Path(config.export).is_dir():
            raise RequestError(f"--export {config.export}: there is no such folder on this host")
        return Path(config.export)
    folders: tuple[str, ...] = getattr(importlib.import_module(f"jobs.{config.job}"), "PREDICTS_FROM", ())

    def needed(names: Collection[str]) -> list[str]:
        return [name for name in names if not folders or name.partition("/")[0] in folders]

    return copy_once(config.export, cache_dir / "exports", needed, option="--export", is_recursive=True)
