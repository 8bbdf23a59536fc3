"""Compiled programs, kept on this host's disk: what a run has compiled a later run loads instead of compiling it.

A pod's disk is lost with it, so what pods have compiled is also kept in the cache that they share, in a bucket.

JAX's own compilation cache does not do here: it is written by process 0 only, so that every other host would compile
each time, and on CPU its key differs from process to process and says neither what instructions nor how many processors
a program was compiled for.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from contracts.durations import DAY_S
from contracts.files import DiskFiles
from jobs.runtime import processor
from jobs.runtime.bucket_files import files_of

FOLDER = "executables"
UNUSED_DAYS = 30
"""What no run has loaded for so long is removed; of a small model it is some megabytes an entry."""
_DIGEST_BYTES = hashlib.sha256().digest_size


class Executables:
    """The programs of one process for these devices, in the order of its mesh. shared: the URL of a cache that other
    hosts read and write too. A program that is loaded from there is code: who may write it decides what is computed."""

    def __init__(self, cache_dir: str, devices: Iterable[jax.Device], shared: str | None = None) -> None:
        self._folder, self._devices = Path(cache_dir) / FOLDER, list(devices)
        self._shared = None if shared is None else f"{shared}/{FOLDER}"

    def of(self, function: Any) -> Callable[..., Any]:
        """`function`, as jax.jit returned it, compiled or loaded at its first call; all calls take the same shapes."""
        made: list[Callable[..., Any]] = []

        def call(*arguments: Any) -> Any:
            if not made:
                made.append(self.compiled(function, *arguments))
            return made[0](*arguments)

        return call

    def compiled(self, function: Any, *arguments: Any) -> Callable[..., Any]:
        """`function`, as jax.jit returned it, compiled or loaded for arguments like these, which are not used up."""
        lowered = function.lower(*arguments)
        path = self._folder / self._key(lowered)
        if self._shared is not None and not path.exists():
            self._fetch(path, self._shared)
        compiled = self._load(path, lowered)
        if compiled is None:
            compiled = lowered.compile()
            self._keep(path, compiled)
        return compiled

    def _key(self, lowered: jax.stages.Lowered) -> str:
        """All that the compiler's result depends on, and the arguments' structure: those that are unused are no part
        of the text."""
        client = self._devices[0].client
        facts = [
            *(jax.__version__, version("jaxlib"), client.platform, client.platform_version),
            *(self._devices[0].device_kind, [device.id for device in self._devices], jax.process_index()),
            *(os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")),
            *(processor.kind(), len(os.sched_getaffinity(0))),
        ]
        return hashlib.sha256(f"{facts}\n{lowered.in_tree}\n{lowered.as_text()}".encode()).hexdigest()

    def _load(self, path: Path, lowered: jax.stages.Lowered) -> jax.stages.Compiled | None:
        """The program that was kept, unless there is none that can be used."""
        try:
            content = path.read_bytes()
            digest, program = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if hashlib.sha256(program).digest() != digest:
                raise ValueError("it is torn")
            structure = jax.tree.structure(lowered.args_info)
            loaded: jax.stages.Compiled = serialize_executable.deserialize_and_load(
                program, structure, lowered.out_tree, execution_devices=self._devices
            )
            os.utime(path)
        except FileNotFoundError:
            return None
        except Exception as error:  # of many kinds; whatever it is, compiling anew is the remedy
            print(f"{path} cannot be loaded and is compiled anew: {_first_line(error)}", flush=True)
            return None
        return loaded

    def _fetch(self, path: Path, shared: str) -> None:
        try:
            (content,) = files_of(shared).read([f"{shared}/{path.name}"])
            if content is not None:
                DiskFiles().write(str(path), content)
        except Exception as error:  # each driver has exceptions of its own; compiling is the remedy here too
            print(f"{shared} cannot be read: {_first_line(error)}", flush=True)

    def _share(self, name: str, content: bytes, shared: str) -> None:
        try:
            files_of(shared).write(f"{shared}/{name}", content)
        except Exception as error:
            print(f"a compiled program is not kept for other pods: {_first_line(error)}", flush=True)

    def _keep(self, path: Path, compiled: jax.stages.Compiled) -> None:
        try:
            program = serialize_executable.serialize(compiled)[0]
            content = hashlib.sha256(program).digest() + program
            if self._shared is not None:  # beside the first steps, which do not wait for it
                given = (path.name, content, self._shared)
                threading.Thread(target=self._share, args=given, name="share", daemon=True).start()
            DiskFiles().write(str(path), content)
            self._remove_unused()
        except (
            Exception
        ) as error:  # a full disk, a kind of program that cannot be kept: the run goes on without
            print(f"a compiled program is not kept for later runs: {_first_line(error)}", flush=True)

    def _remove_unused(self) -> None:
        oldest = time.time() - UNUSED_DAYS * DAY_S
        for path in self._folder.iterdir():
            if path.stat().st_mtime < oldest:
                path.unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
