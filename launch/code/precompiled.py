"""A training step that was compiled before its slice existed: which run it belongs to, and how hosts get it.

`fab fit --keep` compiles it, and so does whatever waits for a slice (`console.compiler.compile_ahead`). It is kept in
the user's cache, as hosts keep theirs (jobs/runtime/jax/executables.py), and beside it a note of it, by the run's code,
options and slice. A launch adds the note to the code that hosts are sent, and puts the program into the stack's bucket:
that of a large model is tens of megabytes. Whatever goes wrong with it only costs the compiling.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.aliases import Say
from contracts.files import DiskFiles
from infra.documents import Documents, DocumentsError
from jobs.runtime.storage.bucket_files import files_of
from jobs.runtime.storage.cache import remove_unused, user_cache_dir
from launch.code.bundles import Bundle
from launch.output import printable
from launch.targets import Target, in_catalogue

FOLDER = "precompiled"
UNUSED_DAYS = 30
"""As of the programs."""
PROGRAMS = "executables"
"""Of a cache, the folder of programs; of the code on a host, that of their notes."""
DOCUMENTS = "executables/"
"""Of the control documents, those with notes."""
CHIP_CONFIGS = {"v4": "megacore"}
"""What libtpu calls a chip whose two cores JAX takes as one device, where that is not how it describes it itself."""

type Note = Mapping[str, Any]
"""facts, key and sha256 of a program, as jobs.runtime.jax.executables has them, and `url`, where it is."""


def topology(generation: str, sides: str, hosts: int, slices: int) -> dict[str, Any]:
    """Return how libtpu calls a slice, or several that train together. sides: its chips in each direction, as "4x4".

    hosts: of a slice; where it is one, it has all the chips.
    """
    along = [*(int(side) for side in sides.split("x")), 1]
    return {
        "topology": f"{generation}:{sides}",
        "slices": slices,
        "chips_per_host": along[:3] if hosts == 1 else [2, 2, 1],
        "chip_config": CHIP_CONFIGS.get(generation),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A training step that can be compiled beforehand: a job's, with the options that `words` make, by the code of that
    hash, for the slice that `topology` describes."""

    job: str
    words: tuple[str, ...]
    code: str
    topology: Mapping[str, Any]

    @classmethod
    def on(cls, target: Target, job: str, words: Sequence[str], code: Bundle) -> Step | None:
        """Return a job's step on a target; None where that is no TPU slice as libtpu knows it."""
        slice = target.slice
        entry = in_catalogue(slice.accelerator_type) if target.platform == "tpu" else None
        if entry is None or entry.topology != slice.topology:
            return None
        described = topology(entry.generation.name, entry.topology, entry.hosts, slice.count)
        return cls(job=job, words=tuple(words), code=code.sha256, topology=described)

    @property
    def name(self) -> str:
        facts = [self.job, self.words, self.code, dict(self.topology)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def record(step: Step, note: Note) -> None:
    """Keep the note of a program that was compiled for a step; those of programs that are gone are removed."""
    place = _note_path(step)
    DiskFiles().write(str(place), json.dumps(dict(note)).encode())
    remove_unused(place.parent, UNUSED_DAYS)


def find(step: Step) -> Note | None:
    """Return the note of a step's program; None where it was not compiled on this machine, or is gone."""
    try:
        note: Note = json.loads(_note_path(step).read_text())
    except (OSError, ValueError):
        return None
    return note if program_path(note).exists() else None


def program_path(note: Note) -> Path:
    """Return where this machine has a program."""
    return user_cache_dir(os.environ) / PROGRAMS / str(note["key"])


def _note_path(step: Step) -> Path:
    return user_cache_dir(os.environ) / FOLDER / f"{step.name}.json"


def with_url(note: Note, bucket_url: str) -> Note:
    """Return a note that says where hosts find the program: where pods look for what other pods have compiled."""
    return {**note, "url": f"{bucket_url}/cache/{PROGRAMS}/{note['key']}"}


def add_to_code(code: Bundle, note: Note) -> Bundle:
    """Return the code with the note beside it."""
    return code.with_file(f"{PROGRAMS}/{note['key']}.json", json.dumps(dict(note)).encode())


def upload(note: Note) -> None:
    """Put a program into its bucket, unless it is there."""
    content, files, url = program_path(note).read_bytes(), files_of(note["url"]), note["url"]
    stored = files.read_from(url, -1)
    if stored is None or stored[1] + len(stored[0]) != len(content):
        files.write(url, content)


def publish(note: Note, step: Step, control_url: str) -> None:
    """Put the note of a step's program among the control documents, for whoever starts a run that was submitted.

    Raises:
        DocumentsError: it cannot be written.
    """
    Documents(control_url).change(f"{DOCUMENTS}{step.name}.json", lambda _: dict(note))


def find_published(step: Step, documents: Documents) -> Note | None:
    """Return the note that another machine has published; None where none has, or it cannot be read."""
    with contextlib.suppress(DocumentsError):
        note: Note | None = documents.read(f"{DOCUMENTS}{step.name}.json").value
        return note
    return None


def begin_upload(note: Note, say: Say) -> None:
    """Put a program into its bucket beside what else is done; the end of this program waits for it."""
    if not program_path(note).exists():
        return  # another machine has compiled it, and has put it there

    def work() -> None:
        try:
            upload(note)
        except Exception as error:  # each driver has exceptions of its own
            say(printable(f"{note['url']} cannot be written, the step is compiled on the slice: {error}"))

    threading.Thread(target=work, name="upload").start()
