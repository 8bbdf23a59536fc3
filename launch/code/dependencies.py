"""The packages that a user's own project needs besides the framework's: resolved by uv and packed here, once.

What is packed is unpacked beside the code on every host, and comes before the framework's packages on the path of the
command's layer. Hosts, images and pods need neither uv nor a package index, and no credential of one leaves this
machine. The framework's versions are constraints: a package that the framework has stays as it is.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from contracts.aliases import Say
from contracts.durations import spoken
from contracts.errors import RequestError, Unreachable
from jobs.runtime.storage.cache import remove_unused, user_cache_dir
from launch.code.bundles import Bundle
from launch.code.requirement_files import NAME, Source, masked, normal
from launch.jobs import CHECKOUT
from launch.output import counted, printable
from launch.programs import run_program

LARGEST_BYTES = 2**30
"""Of the files of all packages: they are sent to every host."""
LIMIT_S = 1800.0
UNUSED_DAYS = 30
FOLDER = "packages"
LOCK_OF_PLATFORM = {"cpu": "jobs", "gpu": "gpu", "tpu": "tpu"}
"""Of the environment that `fab deploy` makes: requirements/NAME.txt."""
PYTHON = "3.12"
"""On hosts and in images."""
OLDEST_LIBC = "manylinux_2_28"
"""What wheels for hosts and images may ask for: Ubuntu 20.04's glibc is 2.31, that of the images 2.36."""
PIP_VARIABLES = {
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_CERT": "SSL_CERT_FILE",
    "PIP_PROXY": "ALL_PROXY",
}
"""pip's variables about where packages come from → uv's."""
INDEX_VARIABLES = (
    *("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"),
    *("UV_TORCH_BACKEND", "UV_EXCLUDE_NEWER", "UV_PRERELEASE", "UV_RESOLUTION", "UV_INDEX_STRATEGY"),
)
"""Variables that uv's choice depends on."""

PIN = re.compile(r"(?m)^([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?==([^\s;\\]+)[ \t]*(?:;[ \t]*([^\\\n]*))?")
ELSEWHERE = re.compile(r"sys_platform == '(?!linux)|platform_system == '(?!Linux)")
"""A marker of packages that no Linux machine has."""
AWAY = re.compile(
    r"error sending request|Failed to fetch|client error|dns error|Could not resolve host|timed out"
    r"|network was disabled|Network connectivity is disabled|HTTP status server error",
    re.IGNORECASE,
)
REMEDIES = (
    (re.compile(r"Wheels are required for `([^`]+)`|[Bb]uilding source distributions is disabled"), "source"),
    (
        re.compile(r"no wheels with a matching|doesn't have a wheel|not supported wheel|is not compatible"),
        "wheel",
    ),
    (re.compile(r"(\S+) was not found in the package registry"), "unknown"),
)
CONFLICT_REMEDY = (
    "change the requirement, choose another --framework, or leave all of it out with --no-install"
)
SHEBANG = '#!/bin/sh\n\'\'\'exec\' "$(dirname -- "$(realpath -- "$0")")/python" "$0" "$@"\n\' \'\'\'\n'
"""Runs a program by the interpreter beside it, as a layer has it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interpreter:
    """What packages are for. version: of Python. platform: as uv names it; None: this machine."""

    version: str
    platform: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework as a host has it. lock: its packages with their versions. overrides: what they ask for in vain."""

    name: str
    lock: Path
    overrides: Path | None = None

    def pins(self) -> dict[str, str]:
        """Return the versions of its packages on Linux."""
        return {
            normal(name): version
            for name, version, marker in PIN.findall(self.lock.read_text(encoding="utf-8"))
            if not ELSEWHERE.search(marker)
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packages:
    """What was resolved. record: of run.json (source, python, requirements, lock_sha256, sha256 of the bundle). bundle:
    the packages; None: the framework has all that is needed. changed: what has another version than the lock says."""

    record: Mapping[str, Any]
    bundle: Bundle | None = None
    changed: str = ""

    @property
    def line(self) -> str:
        """What to say of them."""
        requirements = self.record["requirements"]
        shown = ", ".join(requirements[:12]) + (
            f" and {len(requirements) - 12} more" if requirements[12:] else ""
        )
        text = f"{counted(len(requirements), 'package')} besides the framework's: {shown}"
        return f"{self.record['source']}: {text if requirements else 'the framework has all of it'}{self.changed}"


# --- what hosts have ------------------------------------------------------------------------------------------------


def framework_on(name: str, device: str, *, in_container: bool) -> Framework:
    """Return a framework as hosts have it. device: their platform.

    Raises:
        RequestError: there is no lock of it.
    """
    image = CHECKOUT / "images" / name
    bare = CHECKOUT / "requirements" / f"{LOCK_OF_PLATFORM[device]}.txt"
    locks = [image / "requirements-cpu.txt", image / "requirements.txt"]
    if in_container and device != "cpu":
        locks = locks[1:]
    if not in_container and name == "jax":
        locks = [bare]
    lock = next((lock for lock in locks if lock.exists()), None)
    if lock is None:
        raise RequestError(f"--framework {name}: {image} has no lock; `make lock` makes it")
    overrides = image / "overrides.in"
    return Framework(name=name, lock=lock, overrides=overrides if overrides.exists() else None)


def interpreter_on(*, is_here: bool, in_container: bool) -> Interpreter:
    """Return what packages are for. is_here: the hosts are this machine."""
    if is_here and not in_container:
        return Interpreter(version=f"{sys.version_info[0]}.{sys.version_info[1]}", platform=None)
    machine = platform.machine() if is_here else "x86_64"
    return Interpreter(
        version=PYTHON, platform=f"{'aarch64' if machine == 'arm64' else machine}-{OLDEST_LIBC}"
    )


# --- resolved and packed ----------------------------------------------------------------------------------------------


def ensure(
    source: Source,
    framework: Framework,
    interpreter: Interpreter,
    from_source: Collection[str],
    environ: Mapping[str, str],
    say: Say,
) -> Packages:
    """Return a project's packages; they are resolved, fetched and packed where this machine does not have them.

    from_source: names of packages that may be built here. environ: this process's variables.

    Raises:
        RequestError: they cannot be installed together with the framework's, on that platform, or at all.
        Unreachable: no package index answers.
    """
    if is_met(source, framework, interpreter):
        return Packages(record=_record(source, interpreter))
    home = user_cache_dir(environ) / FOLDER
    home.mkdir(parents=True, exist_ok=True)
    place = home / f"{key(source, framework, interpreter, from_source, environ)}.json"
    if (packages := _earlier_packages(place)) is not None:
        return packages
    try:
        with FileLock(f"{place}.lock", timeout=LIMIT_S):
            if (packages := _earlier_packages(place)) is not None:
                return packages
            say(f"{source.name}: resolving what it needs besides the packages of {framework.name} …")
            began_s = time.monotonic()
            written = _resolved(source, framework, interpreter, from_source, environ, home)
            place.write_text(json.dumps(written))
            remove_unused(home, UNUSED_DAYS)
            say(f"{source.name}: resolved and packed in {spoken(time.monotonic() - began_s)}")
    except Timeout:
        raise RequestError(f"{place}: another process has been making it for {spoken(LIMIT_S)}") from None
    packages = _earlier_packages(place)
    assert packages is not None, "it has just been made"
    return packages


def is_met(source: Source, framework: Framework, interpreter: Interpreter) -> bool:
    """Whether it is plain, without an index, that a framework has all that a project asks for.

    Raises:
        RequestError: it is as plain that the framework has other versions.
    """
    from packaging.requirements import InvalidRequirement, Requirement  # most runs have no such project
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    pins, requested, has = framework.pins(), list[str](), list[str]()
    is_plain = not source.has_lock  # whose other versions are to be named
    for line in source.requirements:
        try:
            requirement = Requirement(re.sub(r"\s--hash\S+", "", line))
        except InvalidRequirement:  # an option; or a mistake, which uv explains
            is_plain = False
            continue
        version = pins.get(normal(requirement.name))
        if version is None or requirement.url or requirement.marker:
            is_plain = False
        elif not requirement.specifier.contains(version, prereleases=True):
            requested.append(f"{requirement.name}{requirement.specifier}")
            has.append(f"{requirement.name} {version}")
        is_plain = is_plain and not requirement.extras
    if requested:
        raise RequestError(
            f"{source.name}: asks for {', '.join(requested)}; {framework.name} has {', '.join(has)}, whose "
            f"versions stay; {CONFLICT_REMEDY}"
        )
    try:
        return is_plain and SpecifierSet(source.python).contains(interpreter.version)
    except InvalidSpecifier:
        return False


def _record(
    source: Source, interpreter: Interpreter, requirements: Sequence[str] = (), lock: str | None = None
) -> dict[str, Any]:
    return {
        "source": source.name,
        "python": interpreter.version,
        "requirements": [*requirements],
        "lock_sha256": None if lock is None else hashlib.sha256(lock.encode()).hexdigest(),
        "sha256": None,
    }


def key(
    source: Source,
    framework: Framework,
    interpreter: Interpreter,
    from_source: Collection[str],
    environ: Mapping[str, str],
) -> str:
    """Return the hash of all that a resolution depends on but the state of the index."""
    variables = with_pip_variables(environ)
    facts = [
        [source.name, *source.texts.values()],
        [path.read_text() for path in (framework.lock, framework.overrides) if path is not None],
        dataclasses.asdict(interpreter),
        sorted(from_source),
        [masked(variables.get(name, "")) for name in INDEX_VARIABLES],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def with_pip_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables in which uv finds what pip's say of where packages come from."""
    result = dict(environ)
    for pip, uv_name in PIP_VARIABLES.items():
        is_given = uv_name == "UV_DEFAULT_INDEX" and "UV_INDEX_URL" in environ
        if environ.get(pip) and not is_given:
            result.setdefault(uv_name, environ[pip])
    return result


def _earlier_packages(place: Path) -> Packages | None:
    """Return the packages of an earlier resolution; None where there is none, or its bundle is gone."""
    try:
        written = json.loads(place.read_text())
        sha256 = written["record"]["sha256"]
        bundle = None if sha256 is None else bundle_here(sha256, place.parent)
    except (OSError, ValueError, KeyError):
        return None
    if sha256 is not None and bundle is None:
        return None
    os.utime(place)
    return Packages(record=written["record"], bundle=bundle, changed=written["changed"])


def bundle_here(sha256: str, home: Path | None = None) -> Bundle | None:
    """Return packed packages by their hash; None where this machine does not have them."""
    path = (home or user_cache_dir(os.environ) / FOLDER) / f"{sha256}.tar.gz"
    try:
        archive = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    return Bundle(sha256=sha256, archive=archive)


def _resolved(
    source: Source,
    framework: Framework,
    interpreter: Interpreter,
    from_source: Collection[str],
    environ: Mapping[str, str],
    home: Path,
) -> dict[str, Any]:
    pins = framework.pins()
    variables = with_pip_variables(environ)
    interpreter_options = ["--python", sys.executable, "--python-version", interpreter.version]
    interpreter_options += ["--python-platform", interpreter.platform] if interpreter.platform else []
    # Not of the resolution: it would go back to versions of years ago that need nothing without a wheel.
    wheels = ["--only-binary", ":all:"]
    wheels += [word for name in sorted(from_source) for word in ("--no-binary", name)]
    with tempfile.TemporaryDirectory(dir=home, prefix=".making-") as temporary:
        folder, lock = Path(temporary), Path(temporary) / "lock.txt"
        constraints = folder / "framework.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        arguments = [
            "pip",
            "compile",
            str(source.path),
            "--constraints",
            str(constraints),
            *interpreter_options,
        ]
        arguments += ["--output-file", str(lock), "--generate-hashes", "--no-header", "--no-annotate"]
        arguments += ["--emit-index-url", "--emit-find-links"]
        arguments += ["--overrides", str(framework.overrides)] if framework.overrides else []
        locked = _exported(source, variables) if source.has_lock else ""
        lock.write_text(locked)  # which uv keeps to where it can
        done = _uv(arguments, source.path.parent, variables)
        if done.returncode:
            raise refusal(source, framework, interpreter, pins, done.stderr)
        written = lock.read_text().splitlines(keepends=True)
        indexes = "".join(line for line in written if line.startswith("--"))
        lines = "".join(line for line in written if not line.startswith("--"))
        if differing := _differing(locked, lines):
            differing = f"; not as in uv.lock, beside the framework: {differing}"
        needed = own_entries(lines, pins, source)
        requirements = [masked(entry.split(" \\")[0].split(" ;")[0].strip()) for entry in needed]
        record = _record(source, interpreter, requirements, lines)
        if needed:
            tree = folder / "tree"
            arguments = [
                "pip",
                "install",
                "--target",
                str(tree),
                "--no-deps",
                "--requirements",
                "-",
                *interpreter_options,
                *wheels,
            ]
            arguments += ["--no-index"] if "--no-index" in source.requirements else []
            done = _uv(arguments, source.path.parent, variables, indexes + "".join(needed))
            if done.returncode:
                raise refusal(source, framework, interpreter, pins, done.stderr)
            _check_size(source, tree)
            archive = folder / "packages.tar.gz"
            with archive.open("wb") as file:
                pack(tree, file)
            record["sha256"] = hashlib.sha256(archive.read_bytes()).hexdigest()
            archive.rename(home / f"{record['sha256']}.tar.gz")
    return {"record": record, "changed": differing}


def _exported(source: Source, variables: Mapping[str, str]) -> str:
    """Return the versions that a project's uv.lock has."""
    arguments = [
        "export",
        "--frozen",
        "--no-emit-project",
        "--no-dev",
        "--no-hashes",
        "--no-annotate",
        "--no-header",
    ]
    done = _uv([*arguments, "--python", sys.executable], source.path.parent, variables)
    if done.returncode:
        raise RequestError(f"uv.lock: cannot be read: {masked(done.stderr.strip())}; `uv lock` makes it anew")
    return done.stdout


def _differing(locked: str, lines: str) -> str:
    """Return the packages that have another version than a lock says, as text."""
    versions = {normal(name): version for name, version, _ in PIN.findall(lines)}
    before: dict[str, set[str]] = {}
    for name, version, _ in PIN.findall(locked):
        before.setdefault(normal(name), set()).add(version)
    pairs = [(name, now) for name, now in versions.items() if name in before and now not in before[name]]
    return ", ".join(f"{name} {now} for {' or '.join(sorted(before[name]))}" for name, now in pairs)


def own_entries(lines: str, pins: Mapping[str, str], source: Source) -> list[str]:
    """Return the entries of a lock that the framework does not have, without the project itself.

    Raises:
        RequestError: one is a folder, which is no package that could be sent.
    """
    entries = re.findall(r"^\S.*\n(?:[ \t].*\n)*", lines, re.MULTILINE)
    result = []
    for entry in entries:
        text = entry.split(" \\")[0].strip()
        place = re.sub(r"^(-e|--editable)\s+|^\S+ @ ", "", text).removeprefix("file://")
        is_folder = "://" not in place and (source.path.parent / place).is_dir()
        if is_folder and (source.path.parent / place).resolve() == source.path.parent.resolve():
            continue  # the folder that the command runs in
        if is_folder:
            raise RequestError(
                f"{source.name}: {text} is a folder, and packages are installed from wheels; leave it out and name its "
                "code by --env PYTHONPATH=FOLDER, or build its wheel and name that"
            )
        name = NAME.match(text)
        if name is None or normal(name[0]) not in pins:
            result.append(entry)
    return result


def _check_size(source: Source, tree: Path) -> None:
    sizes: dict[str, int] = {}
    for path in tree.rglob("*"):
        if path.is_file():
            top = path.relative_to(tree).parts[0]
            sizes[top] = sizes.get(top, 0) + path.stat().st_size
    if (total := sum(sizes.values())) > LARGEST_BYTES:
        largest = ", ".join(
            f"{name} ({sizes[name] / 2**20:,.0f} MiB)"
            for name in sorted(sizes, key=lambda name: -sizes[name])[:3]
        )
        raise RequestError(
            f"{source.name}: its packages have {total / 2**20:,.0f} MiB, and at most {LARGEST_BYTES / 2**20:,.0f} MiB "
            f"are sent to hosts; the largest are {largest}. Choose the --framework that has them, or let the "
            "command install them: --no-install -- sh -c 'pip install … && python …'"
        )


def pack(tree: Path, file: IO[bytes]) -> None:
    """Write a tar.gz of installed packages; the same files give the same bytes."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime = member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        return member

    for program in (tree / "bin").glob("*"):
        text = program.read_bytes()
        if text.startswith(b"#!") and b"python" in text.partition(b"\n")[0]:
            program.write_bytes(SHEBANG.encode() + text.partition(b"\n")[2])
    with (
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT, dereference=True) as archive,
    ):
        for path in sorted(tree.rglob("*")):
            if path.is_file() and path != tree / ".lock" and "__pycache__" not in path.parts:
                archive.add(path, str(path.relative_to(tree)), filter=plain)


def refusal(
    source: Source, framework: Framework, interpreter: Interpreter, pins: Mapping[str, str], text: str
) -> RequestError:
    """Return what is wrong with a project's packages, from what uv said."""
    text = printable_lines(masked(text))
    # An HTTP error is an answer, as to a wrong password.
    if AWAY.search(text) and "HTTP status client error" not in text:
        return Unreachable(
            f"{source.name}: no package index can be reached to install what it needs:\n{text}\n"
            "check the network, HTTPS_PROXY, UV_OFFLINE, and the index (UV_DEFAULT_INDEX), or add --no-install"
        )
    kind, match = next(
        ((kind, match) for pattern, kind in REMEDIES if (match := pattern.search(text))), ("", None)
    )
    interpreter_options = f"{interpreter.platform or sys.platform} with Python {interpreter.version}"
    if kind == "unknown" and match is not None:
        remedy = (
            f"no index has a package {match[1]}; correct its name, or name the index that has it (UV_INDEX)"
        )
    elif kind == "source":
        name = match[1] if match is not None and match[1] else "NAME"
        remedy = f"it is only there as source; --from-source {name} builds it on this machine"
    elif kind == "wheel":
        remedy = f"choose a version that has a wheel for {interpreter_options}"
    else:
        remedy = CONFLICT_REMEDY
    named = sorted(name for name in pins if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text))
    stays = f", whose versions stay ({', '.join(f'{name} {pins[name]}' for name in named)})" if named else ""
    return RequestError(
        f"{source.name}: what it needs cannot be installed over the packages of {framework.name}{stays}:\n"
        f"{text}\n{remedy}"
    )


def printable_lines(text: str) -> str:
    """Return what uv said, without what only a developer of uv needs."""
    lines = [re.sub(r"^(error|\s*cause): ", "  ", line.rstrip()) for line in text.strip().splitlines()]
    return "\n".join(printable(line) for line in lines if line and "No solution found" not in line)[-2000:]


def uv() -> str:
    """Return the path of uv, which is in this checkout's environment."""
    return str(Path(sys.executable).with_name("uv"))


def _uv(
    arguments: Sequence[str], cwd: Path, variables: Mapping[str, str], text: str = ""
) -> subprocess.CompletedProcess[str]:
    return run_program(
        [uv(), *arguments, "--quiet", "--color", "never", "--no-progress"],
        cwd=cwd,
        environ={**variables, "UV_PYTHON_DOWNLOADS": "never"},
        limit_s=LIMIT_S,
        missing=f"{uv()} is not there; `make install` installs it, or add --no-install",
        late=f"uv {arguments[0]}: took longer than {spoken(LIMIT_S)}; check the network",
        text=text,
    )
