"""Compiled programs, kept on this host's disk: what a run has compiled a later run loads instead of compiling it.

A pod's disk is lost with it, so what pods have compiled is also kept in the cache that they share, in a bucket.

A program may have been compiled before there was a host, by a process that had only a description of the TPU slice
(jobs/runtime/jax/aot.py). Then a note of it comes with the code: its facts, where it is, and the digest of its bytes.
The key is made of the facts, and hosts compute theirs. It assumes of a real slice that its devices have the numbers and
places of the description, and that its runtime says the version of the libtpu that compiled. If one of them differs, or
the runtime refuses the program, the log says so and it is compiled here.

JAX's own compilation cache does not do here: it is written by process 0 only, so that every other host would compile
each time, and on CPU its key differs from process to process and says neither what instructions nor how many processors
a program was compiled for.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

import jax
from filelock import FileLock
from jax.experimental import serialize_executable

from contracts.errors import first_line
from contracts.files import DiskFiles
from contracts.process_environment import ProcessEnvironment
from jobs.runtime import processor
from jobs.runtime.jax import hlo
from jobs.runtime.storage.bucket_files import files_of
from jobs.runtime.storage.cache import remove_unused

FOLDER = "executables"
UNUSED_DAYS = 30
"""What no run has loaded for so long is removed; of a small model it is some megabytes an entry."""
NOTES_FOLDER = Path(__file__).resolve().parents[3] / FOLDER
"""Beside the code: notes of programs that were compiled beforehand."""
CLIENT_PREFIX = "PJRT C API\n"
"""A client with devices puts this before its version, one that only compiles does not."""
_DIGEST_BYTES = hashlib.sha256().digest_size
_PICKLE_BEGINS = b"\x80"
"""A program that does not begin so is compressed."""
_SHOWN = 120
"""Characters of a fact in the log."""

COMPILER_OPTIONS = {
    "TPU v5 lite": {"xla_jf_convolution_performance_target": "0.98"},
}
"""What a compiler is asked for, by kind of device. A tile of a product becomes one piece of straight code, so the
largest tiles take most of the time of compiling: the compiler may choose a smaller one that has 98 % of the best one's
rate by its own estimate (docs/benchmarks.md)."""

type Facts = dict[str, Any]


class Note(TypedDict):
    """Of a program that was compiled beforehand. sha256: of the bytes that are kept. Who sends it adds `url`, where
    they are."""

    facts: Facts
    key: str
    sha256: str


class Executables:
    """The programs of one process for these devices, in the order of its mesh. shared: the URL of a cache that other
    hosts read and write too. A program that is loaded from there is code: who may write it decides what is computed.
    notes: a folder with notes of programs that were compiled beforehand, each a JSON object."""

    def __init__(
        self,
        cache_dir: str,
        devices: Iterable[jax.Device],
        shared: str | None = None,
        notes: Path = NOTES_FOLDER,
    ) -> None:
        self._folder, self._devices = Path(cache_dir) / FOLDER, list(devices)
        self._shared = None if shared is None else f"{shared}/{FOLDER}"
        self._notes = notes

    def cached(self, function: Any) -> Callable[..., Any]:
        """`function`, as jax.jit returned it, compiled or loaded at its first call; all calls take the same shapes."""
        programs: list[Callable[..., Any]] = []

        def call(*arguments: Any) -> Any:
            if programs:
                return programs[0](*arguments)
            programs.append(self.compiled(function, *arguments))
            results = jax.block_until_ready(programs[0](*arguments))
            _return_free_memory()
            return results

        return call

    def compiled(self, function: Any, *arguments: Any) -> Callable[..., Any]:
        """`function`, as jax.jit returned it, compiled or loaded for arguments like these, which are not used up."""
        lowered = function.lower(*arguments)
        facts = program_facts(lowered, self._devices)
        path = self._path(facts)
        with _one_compiles(path, self._devices[0].platform):
            if not path.exists():
                self._copy_here(path, facts)
            compiled = self._load(path, lowered)
            if compiled is None:
                compiled = compile_for(self._devices, lowered)
                self._keep(facts, compiled)
        _return_free_memory()
        return compiled

    def precompile(
        self, lowered: jax.stages.Lowered, compile: Callable[[], jax.stages.Compiled]
    ) -> Note | None:
        """Compile a program unless it is kept already, keep it, and return the note of it; None: it cannot be kept, for
        the reason in the log."""
        facts = program_facts(lowered, self._devices)
        path = self._path(facts)
        if not path.exists():
            self._keep(facts, compile(), zlib.compress)
        if not path.exists():
            return None
        return Note(facts=facts, key=path.name, sha256=hashlib.sha256(path.read_bytes()).hexdigest())

    def _path(self, facts: Facts) -> Path:
        return self._folder / hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _copy_here(self, path: Path, facts: Facts) -> None:
        """Put a program into this host's cache that was compiled beforehand, or that another host has shared."""
        for note in _read_notes(self._notes):
            if note["facts"] == facts:
                print(f"{facts['name']} was compiled beforehand: it is loaded from {note['url']}", flush=True)
                self._fetch(path, note["url"], note["sha256"])
            elif note["facts"]["name"] == facts["name"]:
                differences = "; ".join(_differences(note["facts"], facts))
                print(f"{facts['name']} was compiled beforehand for another {differences}", flush=True)
        if self._shared is not None and not path.exists():
            self._fetch(path, f"{self._shared}/{path.name}")

    def _load(self, path: Path, lowered: jax.stages.Lowered) -> jax.stages.Compiled | None:
        """The program that was kept, unless there is none that can be used."""
        try:
            content = path.read_bytes()
            digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if hashlib.sha256(body).digest() != digest:
                raise ValueError("it is torn")
            program = body[body.index(b"\n") + 1 :]
            if not program.startswith(_PICKLE_BEGINS):
                program = zlib.decompress(program)
            structure = jax.tree.structure(lowered.args_info)
            loaded: jax.stages.Compiled = serialize_executable.deserialize_and_load(
                program, structure, lowered.out_tree, execution_devices=self._devices
            )
            os.utime(path)
        except FileNotFoundError:
            return None
        except Exception as error:  # of many kinds; whatever it is, compiling anew is the remedy
            print(f"{path} cannot be loaded and is compiled anew: {first_line(error)}", flush=True)
            return None
        return loaded

    def _fetch(self, path: Path, url: str, sha256: str | None = None) -> None:
        """Copy a program; sha256: of the bytes that it has to have."""
        try:
            (content,) = files_of(url).read([url])
            if content is None and sha256 is not None:
                print(f"{url} is not there yet", flush=True)
            elif content is not None and sha256 not in (None, hashlib.sha256(content).hexdigest()):
                print(f"{url} is not what was compiled beforehand, and is not loaded", flush=True)
            elif content is not None:
                DiskFiles().write(str(path), content)
        except Exception as error:  # each driver has exceptions of its own; compiling is the remedy here too
            print(f"{url} cannot be read: {first_line(error)}", flush=True)

    def _share(self, name: str, content: bytes, shared: str) -> None:
        try:
            files_of(shared).write(f"{shared}/{name}", content)
        except Exception as error:
            print(f"a compiled program is not kept for other pods: {first_line(error)}", flush=True)

    def _keep(
        self, facts: Facts, compiled: jax.stages.Compiled, pack: Callable[[bytes], bytes] = bytes
    ) -> None:
        """pack: what a TPU has of a large model, hundreds of megabytes, becomes a quarter, in time that hosts do not
        have."""
        path = self._path(facts)
        try:
            program = pack(serialize_executable.serialize(compiled)[0])
            body = json.dumps(facts).encode() + b"\n" + program
            content = hashlib.sha256(body).digest() + body
            is_same_for_all = facts["host"] is None  # then one process shares it for all
            if self._shared is not None and not (is_same_for_all and jax.process_index()):
                # Beside the first steps, which do not wait for it.
                arguments = (path.name, content, self._shared)
                threading.Thread(target=self._share, args=arguments, name="share", daemon=True).start()
            DiskFiles().write(str(path), content)
            remove_unused(self._folder, UNUSED_DAYS)
        except Exception as error:  # a full disk, or a program that cannot be kept; the run goes on
            print(f"a compiled program is not kept for later runs: {first_line(error)}", flush=True)


@contextlib.contextmanager
def _one_compiles(path: Path, platform: str) -> Iterator[None]:
    """Hold the lock under which one process of this host compiles a program and the others then load it. Not on GPUs:
    there the processes of a group choose kernels together while they compile."""
    lock = FileLock(f"{path}.lock")
    if platform != "gpu" and not path.exists():
        with contextlib.suppress(OSError):  # where nothing can be kept, each process compiles
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _return_free_memory() -> None:
    """Return to the system what was freed and glibc keeps: after a large model's step was compiled, some 0.4 GiB, and
    after its first call, for what the drawing of its state took, 0.3. Other C libraries have no malloc_trim."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def open_executables(environment: ProcessEnvironment) -> Executables:
    """The programs of a run for all its devices, in JAX's own order."""
    return Executables(environment.cache_dir, jax.devices(), environment.shared_cache)


def compile_for(devices: Sequence[jax.Device], lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile a program with the options for these devices; without them where the compiler refuses one, or fails with
    them for any other reason than the devices' memory."""
    options = compiler_options(devices)
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if not options or hlo.out_of_memory(str(error)) is not None:
            raise
        print(f"compiled again without the options {options}: {first_line(error)}", flush=True)
        return lowered.compile()


def compiler_options(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Return COMPILER_OPTIONS for these devices, but for those that LIBTPU_INIT_ARGS sets."""
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    options = COMPILER_OPTIONS.get(devices[0].device_kind, {})
    return {name: value for name, value in options.items() if f"--{name}=" not in flags}


def program_facts(lowered: jax.stages.Lowered, devices: Sequence[jax.Device]) -> Facts:
    """All that the compiler's result depends on, and the arguments' structure: those that are unused are no part of
    the text.

    A TPU's program is the same on every host of its slice, a CPU's on every host with as many such processors. A GPU's
    is its process's own.
    """
    client = devices[0].client
    text = lowered.as_text()
    process = None if client.platform == "cpu" else jax.process_index()
    return {
        "name": text.partition("@")[2].partition(" ")[0],
        "program": hashlib.sha256(f"{lowered.in_tree}\n{text}".encode()).hexdigest(),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "platform": client.platform,
        "runtime": client.platform_version.removeprefix(CLIENT_PREFIX),
        "device_kind": devices[0].device_kind,
        "devices": [device_position(device) for device in devices],
        "flags": [os.environ.get(name) or None for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        "options": compiler_options(devices),
        "host": None
        if client.platform == "tpu"
        else [processor.kind(), len(os.sched_getaffinity(0)), process],
    }


def device_position(device: Any) -> list[Any]:
    """A device's number, and of a TPU where it is: slice, coordinates of the chip, core."""
    coordinates = getattr(device, "coords", None)
    return [
        device.id,
        getattr(device, "slice_index", None) or 0,
        None if coordinates is None else [*coordinates],
        getattr(device, "core_on_chip", None),
    ]


def _read_notes(folder: Path) -> Iterator[Any]:
    for path in sorted(folder.glob("*.json")):
        try:
            yield json.loads(path.read_text())
        except (OSError, ValueError) as error:
            print(f"{path} cannot be read: {first_line(error)}", flush=True)


def _differences(expected: Facts, actual: Facts) -> Iterator[str]:
    """Each fact in which two programs differ; of devices the first that does."""
    for name, value in actual.items():
        before = expected.get(name)
        if before == value:
            continue
        if name == "devices" and isinstance(before, list) and len(before) == len(value):
            before, value = next((a, b) for a, b in zip(before, value, strict=True) if a != b)
        yield f"{name}: {str(before)[:_SHOWN]} there, {str(value)[:_SHOWN]} here"
