"""Servers of the rehearsal that are built from their Go modules, once, and kept (rehearsal/images/<name>)."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import filelock

from rehearsal.machines.errors import MachinesError
from rehearsal.machines.host_image import ROOT, cache_folder
from tools import go

# No C library: it has to run in whatever the hosts' base image is.
SETTINGS = {"GOFLAGS": "-mod=readonly", "GOWORK": "off", "CGO_ENABLED": "0", "GOOS": "linux"}
FLAGS = ("-trimpath", "-ldflags=-s -w")
BUILD_LIMIT_S = 1800

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoProgram:
    """what: as people call it. folder: of its go.mod and go.sum, in rehearsal/images. package: of its main function."""

    what: str
    folder: str
    package: str

    @property
    def module(self) -> Path:
        return ROOT / "rehearsal" / "images" / self.folder

    @property
    def recipe(self) -> str:
        """Changes when the program would."""
        parts = [(self.module / name).read_bytes() for name in ("go.mod", "go.sum")]
        return hashlib.sha256(b"".join([*parts, repr((SETTINGS, FLAGS)).encode()])).hexdigest()[:16]


BUCKET_SERVER = GoProgram(
    what="the bucket server", folder="bucket", package="github.com/fsouza/fake-gcs-server"
)
REGISTRY = GoProgram(
    what="the image registry",
    folder="registry",
    package="github.com/distribution/distribution/v3/cmd/registry",
)


def find_or_build(program: GoProgram, environ: Mapping[str, str], say: Say) -> Path:
    """Where it is; a minute or two the first time. Raises MachinesError."""
    target = cache_folder(environ) / f"{program.folder}-server-{program.recipe}"
    if target.is_file():
        return target
    try:
        with filelock.FileLock(f"{target}.lock", timeout=BUILD_LIMIT_S):
            if not target.is_file():
                _build(program, target, environ, say)
    except filelock.Timeout:
        raise MachinesError(
            f"another process holds {target}.lock for {BUILD_LIMIT_S // 60} minutes; end it"
        ) from None
    return target


def _build(program: GoProgram, target: Path, environ: Mapping[str, str], say: Say) -> None:
    try:
        compiler = go.find(environ)
    except go.GoError as error:
        raise MachinesError(
            f"the rehearsal builds {program.what} with Go, and {error}; install it and try again"
        ) from None
    say(f"building {program.what} with {compiler}; once, a minute or two on two cores …")
    new = target.with_name(f"{target.name}.new")
    try:
        done = subprocess.run(
            [compiler, "build", *FLAGS, "-o", str(new), program.package], cwd=program.module,
            env={**environ, **SETTINGS}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace", timeout=BUILD_LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise MachinesError(
                f"building {program.what} failed:\n{done.stderr.strip()[-2000:]}\n"
                "It needs the Go module proxy that `go env GOPROXY` names, and 1 GB of disk; mend that and try again"
            )
        os.replace(new, target)
    except subprocess.TimeoutExpired:
        raise MachinesError(f"{program.what} is not built after {BUILD_LIMIT_S // 60} minutes") from None
    finally:
        new.unlink(missing_ok=True)
