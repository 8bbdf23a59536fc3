"""fake-gcs-server, which speaks the Cloud Storage API: built once from its Go module (rehearsal/images/bucket)."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import filelock

from rehearsal.machines.errors import MachinesError
from rehearsal.machines.host_image import ROOT, cache_folder

RECIPE = ROOT / "rehearsal" / "images" / "bucket"
MODULE = "github.com/fsouza/fake-gcs-server"
# No C library: it has to run in whatever the hosts' base image is.
SETTINGS = {"GOFLAGS": "-mod=readonly", "GOWORK": "off", "CGO_ENABLED": "0", "GOOS": "linux"}
FLAGS = ("-trimpath", "-ldflags=-s -w")
OLDEST_GO = (1, 21)  # from there on Go fetches the newer Go that a go.mod asks for
OTHER_GO_PLACES = ("/usr/local/go/bin/go", "/opt/homebrew/bin/go", "/snap/bin/go")
ANSWER_LIMIT_S = 60
BUILD_LIMIT_S = 1800

Say = Callable[[str], None]


def find_or_build(environ: Mapping[str, str], say: Say) -> Path:
    """The program; a minute or two the first time. Raises MachinesError."""
    target = cache_folder(environ) / f"bucket-server-{recipe()}"
    if target.is_file():
        return target
    try:
        with filelock.FileLock(f"{target}.lock", timeout=BUILD_LIMIT_S):
            if not target.is_file():
                _build(go_of(environ), target, environ, say)
    except filelock.Timeout:
        raise MachinesError(
            f"another process holds {target}.lock for {BUILD_LIMIT_S // 60} minutes; end it"
        ) from None
    return target


def recipe() -> str:
    """Changes when the program would."""
    parts = [(RECIPE / name).read_bytes() for name in ("go.mod", "go.sum")]
    return hashlib.sha256(b"".join([*parts, repr((SETTINGS, FLAGS)).encode()])).hexdigest()[:16]


def go_of(environ: Mapping[str, str]) -> str:
    """A Go that can build it. Raises MachinesError, which says how to get one."""
    seen = []
    for go in (shutil.which("go", path=environ.get("PATH", os.defpath)), *OTHER_GO_PLACES):
        if go is None or not os.access(go, os.X_OK):
            continue
        try:
            done = subprocess.run(
                [go, "env", "GOVERSION"], env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=ANSWER_LIMIT_S, check=True,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            seen.append(f"{go} does not run ({error})")
            continue
        version = tuple(int(part) for part in re.findall(r"\d+", done.stdout)[:2])
        if version >= OLDEST_GO:
            return go
        seen.append(f"{go} is {done.stdout.strip()}")
    has = f"; this machine has: {', '.join(seen)}" if seen else ""
    raise MachinesError(
        f"the rehearsal's bucket server is built with Go {'.'.join(map(str, OLDEST_GO))} or newer{has}; install Go"
        " (https://go.dev/doc/install; Debian 12's package golang is too old) and try again"
    )


def _build(go: str, target: Path, environ: Mapping[str, str], say: Say) -> None:
    say(f"building the bucket server with {go}; once, a minute or two on two cores …")
    new = target.with_name(f"{target.name}.new")
    try:
        done = subprocess.run(
            [go, "build", *FLAGS, "-o", str(new), MODULE], cwd=RECIPE, env={**environ, **SETTINGS},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
            timeout=BUILD_LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise MachinesError(
                f"building the bucket server failed:\n{done.stderr.strip()[-2000:]}\n"
                "It needs the Go module proxy that `go env GOPROXY` names, and 1 GB of disk; mend that and try again"
            )
        os.replace(new, target)
    except subprocess.TimeoutExpired:
        raise MachinesError(f"the bucket server is not built after {BUILD_LIMIT_S // 60} minutes") from None
    finally:
        new.unlink(missing_ok=True)
