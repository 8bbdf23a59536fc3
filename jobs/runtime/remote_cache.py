"""Folders that one host has made and others fetch: in a bucket, or on a disk that hosts share.

A folder is named by what it was made from, so whoever puts it, and however often, puts the same. Its MANIFEST is
written last and says what each file has to be: a folder without one is not there, and a file that differs is torn.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contracts.errors import RequestError, Unreachable
from contracts.files import is_url
from jobs.runtime.patience import patiently

MANIFEST = "manifest.json"


class RemoteCache:
    """The folders under `url`: whatever fsspec knows, a path too."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def fetch(self, name: str, into: Path, *, say: Callable[[str], None]) -> bool:
        """Make `into` the same as folder `name`; False where that is not there.

        A torn one is not there either: its manifest is removed, so that the next `put` mends it.

        Raises:
            Unreachable: it does not answer, or refuses.
        """
        files, root = self._open()
        manifest = self._manifest(files, root, name)
        if manifest is None:
            return False
        size = sum(known["size_bytes"] for known in manifest.values())
        say(f"copying {self._url}/{name} ({size / 1e6:,.0f} MB)")
        for file, known in manifest.items():
            place = f"{root}/{name}/{file}"
            try:
                self._carry_out(functools.partial(files.get_file, place, str(into / file)), say)
                torn = _known(into / file) != known
            except FileNotFoundError:
                torn = True
            if torn:
                say(f"{self._url}/{name}/{file} is not what was put there: made again")
                with contextlib.suppress(FileNotFoundError):  # another host has found it torn as well
                    self._carry_out(lambda: files.rm_file(f"{root}/{name}/{MANIFEST}"), say)
                for each in manifest:
                    (into / each).unlink(missing_ok=True)
                return False
        for path in into.iterdir():
            if path.name not in manifest:
                path.unlink()
        return True

    def put(self, folder: Path, name: str, *, say: Callable[[str], None]) -> None:
        """Copy the files of `folder` to `name`, unless they are there.

        Raises:
            Unreachable: it does not answer, or refuses.
        """
        files, root = self._open()
        if self._manifest(files, root, name) is not None:
            return
        manifest = {path.name: _known(path) for path in sorted(folder.iterdir())}
        size = sum(known["size_bytes"] for known in manifest.values())
        say(f"copying {size / 1e6:,.0f} MB to {self._url}/{name}")
        place = f"{root}/{name}"
        content = json.dumps(manifest, indent=2).encode()
        try:
            for file in manifest:
                self._carry_out(functools.partial(files.put_file, str(folder / file), f"{place}/{file}"), say)
            self._carry_out(lambda: files.pipe_file(f"{place}/{MANIFEST}", content), say)
        except FileNotFoundError as error:
            raise Unreachable(
                f"--remote-cache {self._url}: cannot be written ({error}); make the bucket or folder first"
            ) from None

    def _open(self) -> tuple[Any, str]:
        import fsspec

        try:
            if not is_url(self._url) or self._url.startswith("file://"):
                files, root = fsspec.core.url_to_fs(os.path.expanduser(self._url), auto_mkdir=True)
            else:  # other hosts write here too: a listing that is kept is a listing that is wrong
                files, root = fsspec.core.url_to_fs(self._url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise RequestError(
                f"--remote-cache {self._url}: no driver for this kind of URL: {error}"
            ) from None
        return files, str(root)

    def _manifest(self, files: Any, root: str, name: str) -> dict[str, Any] | None:
        try:
            content = self._carry_out(lambda: files.cat_file(f"{root}/{name}/{MANIFEST}"), lambda _: None)
        except FileNotFoundError:
            return None
        try:
            found: Any = json.loads(content)
        except ValueError:
            return None  # on a shared disk it may be half-written; whoever puts it again finishes it
        return found if _is_manifest(found) else None

    def _carry_out[Result](self, action: Callable[[], Result], say: Callable[[str], None]) -> Result:
        def attempt() -> Result | FileNotFoundError:
            try:
                return action()
            except FileNotFoundError as error:
                return error  # an answer, and nothing to try again

        try:
            result = patiently(attempt, what=self._url, say=say)
        except Exception as error:  # each driver has exceptions of its own
            raise Unreachable(
                f"--remote-cache {self._url}: {type(error).__name__}: {error}; check the address, the network and "
                "your permission to read and write there"
            ) from error
        if isinstance(result, FileNotFoundError):
            raise result
        return result


def _is_manifest(found: Any) -> bool:
    """Whether it names plain files with what they have to be: a bucket may be written by others."""
    return isinstance(found, dict) and all(
        Path(name).name == name and isinstance(known, dict) and isinstance(known.get("size_bytes"), int)
        for name, known in found.items()
    )


def _known(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {
            "size_bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }
