"""Finds the Pulumi command line, or builds it once from its Go modules (tools/pulumi/go.mod).

    python -m tools.pulumi_cli        prints its path

Taken in this order: `pulumi` on PATH if it is new enough and complete; the one built before; one built now. The built
one lies in the user's cache, in a folder named by version and recipe, and appears there only when it is whole."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import filelock

from contracts.aliases import Say
from tools import go

RECIPE = Path(__file__).resolve().parent / "pulumi"
MODULE = "github.com/pulumi/pulumi"
# Scripts that come with Pulumi, and where they lie in its module sdk/v3: one for dynamic providers, and the one that
# runs a Python program, which is the language host's.
DYNAMIC = "pulumi-resource-pulumi-python"
PROGRAM = "pulumi-language-python-exec"
SCRIPTS = {DYNAMIC: Path("python/dist"), PROGRAM: Path("python/cmd")}
LANGUAGE_HOST = "pulumi-language-python"

BUILD_LIMIT_S = 3600
TELL_EVERY_S = 15


class PulumiCliError(Exception):
    """There is no Pulumi command line to be had; the message says what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PulumiCli:
    """folder: holds `pulumi`; dynamic_folder: holds the script for dynamic providers. Both belong on PATH.

    language_host: runs a program for `pulumi up` typed in a shell; the built one has none, only that host's script."""

    folder: Path
    dynamic_folder: Path
    version: str
    language_host: Path | None = None

    @property
    def command(self) -> Path:
        return self.folder / "pulumi"

    @property
    def program_script(self) -> Path:
        """What a language host hands to Python; it is there where `pulumi` was built."""
        return self.folder / PROGRAM


def find_or_build(environ: Mapping[str, str], say: Say) -> PulumiCli:
    """The command line of this machine; it takes some minutes when it has to be built. Raises PulumiCliError."""
    return find(environ, say) or build(environ, say)


def find(environ: Mapping[str, str], say: Say) -> PulumiCli | None:
    """The command line of this machine; None where it has to be built."""
    return on_path(environ, say) or built(environ)


def build(environ: Mapping[str, str], say: Say) -> PulumiCli:
    """Build it, once by whichever process is first. Raises PulumiCliError."""
    home = cache_home(environ)
    home.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(f"{home}.lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        say(f"another process is building Pulumi's command line ({home}); waiting for it …")
        try:
            lock.acquire(timeout=BUILD_LIMIT_S)
        except filelock.Timeout:
            raise PulumiCliError(f"it is not done after {BUILD_LIMIT_S // 60} minutes; end it") from None
    with lock:
        lock.release()  # `with` holds it once more
        return built(environ) or _build(environ, say)


def wanted_version() -> str:
    """Of the recipe, and the oldest that will do on PATH."""
    match = re.search(rf"^\s*{MODULE}/pkg/v3 v(\S+)", (RECIPE / "go.mod").read_text(), flags=re.MULTILINE)
    if match is None:
        raise PulumiCliError(f"{RECIPE / 'go.mod'} does not name {MODULE}/pkg/v3")
    return match[1]


def cache_home(environ: Mapping[str, str]) -> Path:
    """Where what this recipe builds belongs: ~/.cache/tpu-stack/pulumi/VERSION-HASH."""
    cache_folder = environ.get("XDG_CACHE_HOME", "")
    cache = (
        Path(cache_folder)
        if os.path.isabs(cache_folder)
        else Path(environ.get("HOME") or Path.home()) / ".cache"
    )
    recipe = hashlib.sha256(b"".join((RECIPE / name).read_bytes() for name in ("go.mod", "go.sum")))
    recipe.update(" ".join([*_build_command("go", ""), *SCRIPTS]).encode())
    return cache / "tpu-stack" / "pulumi" / f"{wanted_version()}-{recipe.hexdigest()[:10]}"


def on_path(environ: Mapping[str, str], say: Say) -> PulumiCli | None:
    """`pulumi` from PATH; None where there is none, or where it is too old or not whole, which is said."""
    path = environ.get("PATH", os.defpath)
    command = shutil.which("pulumi", path=path)
    if command is None:
        return None
    version = _version(command, environ)
    if version is None or _numbers(version) < _numbers(wanted_version()):
        text = f"pulumi {version}" if version else "no pulumi that answers"
        say(f"{command} is {text}, and {wanted_version()} or newer is needed: leaving it aside")
        return None
    folder = Path(command).resolve().parent
    dynamic = folder / DYNAMIC if (folder / DYNAMIC).is_file() else shutil.which(DYNAMIC, path=path)
    if dynamic is None:
        say(f"{command} has no {DYNAMIC} beside it or on PATH: leaving it aside")
        return None
    language_host = folder / LANGUAGE_HOST
    host = language_host if language_host.is_file() else shutil.which(LANGUAGE_HOST, path=path)
    return PulumiCli(
        folder=Path(command).parent,
        dynamic_folder=Path(dynamic).parent,
        version=version,
        language_host=None if host is None else Path(host),
    )


def built(environ: Mapping[str, str]) -> PulumiCli | None:
    """The one that was built before from this very recipe."""
    home = cache_home(environ)
    if not (home / "pulumi").is_file():
        return None
    return PulumiCli(folder=home, dynamic_folder=home, version=wanted_version())


def find_go(environ: Mapping[str, str]) -> str:
    """A Go that can build it. Raises PulumiCliError, which says how to get one, or Pulumi itself."""
    try:
        return go.find(environ)
    except go.GoError as error:
        raise PulumiCliError(
            f"this needs the Pulumi command line {wanted_version()} or newer, or {go.REQUIREMENT} to build it; {error}."
            " Install that, or Pulumi (https://www.pulumi.com/docs/install), and try again"
        ) from None


def _build(environ: Mapping[str, str], say: Say) -> PulumiCli:
    compiler = find_go(environ)
    home = cache_home(environ)
    new = home.with_name(f"{home.name}.new")
    shutil.rmtree(new, ignore_errors=True)  # left by a build that was ended
    new.mkdir()
    say(
        f"building Pulumi's command line {wanted_version()} with {compiler}; this is done once and takes"
        " three to six minutes on two cores …"
    )
    start = time.monotonic()
    settings = {"GOFLAGS": "-mod=readonly", "GOWORK": "off", "CGO_ENABLED": "0"}
    go_environ = {**environ, **settings}
    try:
        _carry_out(_build_command(compiler, str(new / "pulumi")), go_environ, say)
        sdk = go.answer([compiler, "list", "-m", "-f", "{{.Dir}}", f"{MODULE}/sdk/v3"], go_environ, RECIPE)
        if sdk is None:
            raise PulumiCliError(f"`go list -m {MODULE}/sdk/v3` fails in {RECIPE}")
        for script, folder in SCRIPTS.items():
            shutil.copyfile(Path(sdk) / folder / script, new / script)
            (new / script).chmod(0o755)
        version = _version(str(new / "pulumi"), environ)
        if version != wanted_version():
            raise PulumiCliError(f"what was built answers {version!r} and not {wanted_version()!r}")
        shutil.rmtree(home, ignore_errors=True)
        os.replace(new, home)
    except OSError as error:
        raise PulumiCliError(f"{error}; mend that and try again (it wants 4 GB of free disk)") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    say(f"built in {time.monotonic() - start:.0f} s: {home / 'pulumi'}")
    return PulumiCli(folder=home, dynamic_folder=home, version=wanted_version())


def _build_command(compiler: str, target: str) -> list[str]:
    flags = f"-s -w -X {MODULE}/sdk/v3/go/common/version.Version=v{wanted_version()}"
    options = ["-v", "-trimpath", "-ldflags", flags, "-o", target]
    return [compiler, "build", *options, f"{MODULE}/pkg/v3/cmd/pulumi"]


def _carry_out(argv: list[str], environ: Mapping[str, str], say: Say) -> None:
    """Runs the build and says now and then how far it is. Raises PulumiCliError with its last lines."""
    lines: list[str] = []
    start = announced_s = time.monotonic()
    process = subprocess.Popen(
        argv, cwd=RECIPE, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    reader = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
    try:
        reader.start()
        while process.poll() is None:
            now = time.monotonic()
            if now - start > BUILD_LIMIT_S:
                raise PulumiCliError(f"the build is not done after {BUILD_LIMIT_S // 60} minutes")
            if now - announced_s > TELL_EVERY_S:
                announced_s = now
                fetched = sum(line.startswith("go: downloading") for line in lines)
                say(
                    f"… {fetched} modules fetched, {len(lines) - fetched} packages compiled, {now - start:.0f} s"
                )
            time.sleep(0.2)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join()
        process.stderr.close()
    if process.returncode != 0:
        output = "".join(lines[-20:]).strip() or f"(nothing; exit code {process.returncode})"
        raise PulumiCliError(
            f"building Pulumi's command line failed; the last lines of {argv[0]} build:\n\n{output}\n\n"
            "It needs the Go module proxy that `go env GOPROXY` names, and 4 GB of disk; mend that and try again, or"
            " install Pulumi (https://www.pulumi.com/docs/install)"
        )


def _version(command: str, environ: Mapping[str, str]) -> str | None:
    """3.250.0; None where it gives no version."""
    output = go.answer([command, "version"], {**environ, "PULUMI_SKIP_UPDATE_CHECK": "true"})
    return output.removeprefix("v") if output is not None and _numbers(output) else None


def _numbers(version: str) -> tuple[int, ...]:
    """(3, 250, 0) of v3.250.0-alpha.1 or go1.26.8; empty where there are none."""
    match = re.match(r"(?:v|go)?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, match[1].split("."))) if match else ()


def main() -> int:
    try:
        command = find_or_build(os.environ, lambda line: print(line, file=sys.stderr, flush=True))
    except PulumiCliError as problem:
        print(f"pulumi_cli: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\npulumi_cli: interrupted; what was compiled is kept", file=sys.stderr)
        return 130
    print(command.command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
