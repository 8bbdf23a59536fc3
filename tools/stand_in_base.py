"""Makes a stand-in for the base image of the rehearsal's hosts, where no image registry can be reached.

    python -m tools.stand_in_base        prints its name, for TPU_STACK_BASE_IMAGE

It is no official image and says so in its label: Debian bookworm by mmdebstrap, the Python 3.12 that this program runs
on, and this machine's certificate authorities, so that what the build of the host image fetches is trusted as here.
Needs root (for mmdebstrap), Docker and a Debian mirror; takes half a minute, then nothing until it is removed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from contracts.aliases import Say

VARIABLE = "TPU_STACK_BASE_IMAGE"
REPOSITORY = "tpu-stack-stand-in-base"
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
# What a Python that was built on Debian is linked with, and its certificates' place.
PACKAGES = (
    "ca-certificates", "libbz2-1.0", "libexpat1", "libffi8", "libgdbm6", "liblzma5", "libncursesw6", "libreadline8",
    "libsqlite3-0", "libssl3", "libuuid1", "zlib1g",
)  # fmt: skip
# pip and uv read these; the file is the one that is copied in.
CHANGES = (
    "ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin",
    f"ENV PIP_CERT={AUTHORITIES} SSL_CERT_FILE={AUTHORITIES}",
    'LABEL org.opencontainers.image.description="a stand-in for python:3.12-slim-bookworm, made on this machine"',
    'CMD ["python3"]',
)
TRY = "import bz2, ctypes, lzma, sqlite3, ssl, venv, zlib; ssl.create_default_context()"
LIMIT_S = 600


class StandInBaseError(Exception):
    """It cannot be made here; the message says what is missing."""


def find_or_make(say: Say) -> str:
    """The image's name with its tag. Raises StandInBaseError."""
    name = f"{REPOSITORY}:{recipe()}"
    if _run(["docker", "image", "inspect", name], check=False) == 0:
        return name
    for needed in ("docker", "mmdebstrap"):
        if shutil.which(needed) is None:
            raise StandInBaseError(
                f"{needed} is not on PATH: apt-get install {'docker.io' if needed == 'docker' else needed}"
            )
    if os.geteuid() != 0:
        raise StandInBaseError(
            "only root can make a root file system with mmdebstrap: run this as root, or use the official base image"
            " (leave TPU_STACK_BASE_IMAGE unset), or name another that has Python 3.12"
        )
    say(f"making {name}, a stand-in for the official base image; about half a minute …")
    with tempfile.TemporaryDirectory(prefix="stand-in-base-") as scratch:
        archive = Path(scratch) / "root.tar"
        python = Path(scratch) / "python.tar"
        _run(pack_python(python))
        _run(bootstrap(archive, python))
        changes = [word for change in CHANGES for word in ("--change", change)]
        _run(["docker", "import", *changes, str(archive), name])
    _run(["docker", "run", "--rm", "--network", "none", name, "python3", "-c", TRY])
    return name


def chosen(environ: Mapping[str, str], say: Say) -> str | None:
    """What tests put into TPU_STACK_BASE_IMAGE: what is there already, or a stand-in where one can be made.

    None: neither, and the official image is needed. Raises StandInBaseError."""
    if given_image := environ.get(VARIABLE):
        return given_image
    able = os.geteuid() == 0 and shutil.which("mmdebstrap") and shutil.which("docker")
    return find_or_make(say) if able else None


def recipe() -> str:
    """Changes when the image would: packages, settings, this Python, the certificate authorities."""
    recipe = repr((PACKAGES, CHANGES, sys.version, sys.base_prefix)).encode()
    return hashlib.sha256(recipe + AUTHORITIES.read_bytes()).hexdigest()[:12]


def pack_python(archive: Path) -> list[str]:
    """This interpreter's own folder as it belongs in /usr/local: with pip, without what else was installed into it."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shared = [f"lib/{name}" for name in (sysconfig.get_config_var("INSTSONAME"),) if name and ".so" in name]
    return [
        "tar", "--create", f"--file={archive}", f"--directory={sys.base_prefix}", "--owner=0", "--group=0",
        "--exclude=__pycache__", "--exclude=*.a", f"--exclude=lib/python{version}/site-packages/*",
        f"--exclude=lib/python{version}/test", f"--exclude=lib/python{version}/config-*",
        f"bin/python{version}", f"lib/python{version}", *shared,
    ]  # fmt: skip


def bootstrap(archive: Path, python: Path) -> list[str]:
    """Debian's smallest system with that Python in /usr/local."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    hooks = [
        f"tar-in {python} /usr/local",
        f"upload {AUTHORITIES} {AUTHORITIES}",
        'chroot "$1" ldconfig',
        f'ln -sf python{version} "$1/usr/local/bin/python3"; ln -sf python{version} "$1/usr/local/bin/python"',
        'chroot "$1" /usr/local/bin/python3 -m ensurepip >/dev/null',
    ]
    return [
        "mmdebstrap", "--quiet", "--variant=apt", f"--include={','.join(PACKAGES)}",
        '--aptopt=APT::Install-Recommends "false"', *(f"--customize-hook={hook}" for hook in hooks),
        "bookworm", str(archive),
    ]  # fmt: skip


def _run(command: list[str], *, check: bool = True) -> int:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except FileNotFoundError:
        raise StandInBaseError(f"{command[0]} is not on PATH; install it") from None
    except subprocess.TimeoutExpired:
        raise StandInBaseError(f"{command[0]} is not done after {LIMIT_S} s") from None
    if check and done.returncode != 0:
        raise StandInBaseError(f"{command[0]} ended with {done.returncode}:\n{done.stderr.strip()[-2000:]}")
    return done.returncode


def main() -> int:
    try:
        print(find_or_make(lambda line: print(line, file=sys.stderr, flush=True)))
    except StandInBaseError as problem:
        print(f"stand_in_base: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
