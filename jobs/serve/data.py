"""The export as a folder of this host."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path

from contracts.errors import RequestError
from contracts.files import is_url
from jobs.runtime.bucket_files import open_url, place_error
from jobs.runtime.cache import build_once
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
    wanted: tuple[str, ...] = getattr(importlib.import_module(f"jobs.{config.job}"), "PREDICTS_FROM", ())
    files, root = open_url(config.export, option="--export")
    try:
        names = [path[len(root.rstrip("/")) + 1 :] for path in files.find(root)]
        names = [name for name in names if not wanted or name.partition("/")[0] in wanted]
        known = sorted((name, str(files.ukey(f"{root.rstrip('/')}/{name}"))) for name in names)

        def fetch(folder: Path) -> None:
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                files.get_file(f"{root.rstrip('/')}/{name}", str(folder / name))

        copied = (
            cache_dir / "exports" / hashlib.sha256(repr((config.export, known)).encode()).hexdigest()[:32]
        )
        build_once(copied, fetch)
    except Exception as error:  # each driver has exceptions of its own
        remedy = "check the address, the network and your permission there"
        raise place_error(error, f"--export {config.export}", remedy) from error
    return copied
