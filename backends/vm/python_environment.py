"""The interpreter that jobs run with: looked at wherever it is, and made from a lock where it is ours to make. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.vm.steps import APT_IS_FREE, Step, at_home
from contracts.errors import RequestError
from launch.code.dependencies import LOCK_OF_PLATFORM
from launch.code.dependencies import PYTHON as VERSION
from launch.hosts import Agent, HostError, ask_all
from launch.targets import PYTHON as DEPLOYED_PYTHON
from launch.targets import Target

OURS = DEPLOYED_PYTHON.removesuffix("/bin/python")
"""The environment that deployment makes; an interpreter anywhere else is somebody else's and only looked at."""
LIMIT_S = 1800.0
INSTALLER_LOCK = "uv"
STAMP = "tpu-stack-lock"

PROBE = """
import importlib.util, sys
def lacks(name):
    try:
        return importlib.util.find_spec(name) is None
    except ImportError:
        return True
missing = [name for name in sys.argv[1:] if lacks(name)]
version = ".".join(map(str, sys.version_info[:3]))
if sys.version_info < (3, 12):
    sys.exit(print("it is Python " + version + "; jobs need 3.12 or later") or 1)
if missing:
    sys.exit(print("Python " + version + " lacks " + ", ".join(missing)) or 1)
print("Python " + version + " with all modules")
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lock:
    """Requirements with hashes, uv's own among them. name: of the platform's.

    files: name → text; sha256: of them all; folder: where they lie on a host.
    """

    name: str
    files: Mapping[str, str]
    sha256: str
    folder: str


def existing_python(python: str, modules: Sequence[str], remedy: str) -> Step:
    """Return the step that looks at an interpreter which is not ours, and changes nothing."""
    return Step(name="python", check=_probe(python, modules), remedy=remedy)


def managed_environment(modules: Sequence[str], lock: Lock, environment: str = OURS) -> Step:
    """An environment of our own: made beside and renamed, by uv, with every file checked against its hash."""
    python, folder, name = f"{environment}/bin/python", at_home(lock.folder), shlex.quote(f"{lock.name}.txt")
    check = f"""{_probe(python, modules)}
[ "$(cat {at_home(f"{environment}/{STAMP}")} 2>/dev/null)" = {lock.sha256} ] ||
  {{ echo "$said, but made from another lock than this checkout's"; exit 1; }}
"""
    change = f"""{APT_IS_FREE}
set -e
environment={at_home(environment)} locks={folder}
base=${{environment%/*}} new=$environment.new.$$
for program in /proc/[0-9]*; do
  line=$(tr '\\0' ' ' 2>/dev/null <"$program/cmdline" || true)
  case $line in
    "$environment/bin/"*) echo "pid ${{program#/proc/}} is using $environment: $(printf %.80s "$line")"; exit 1 ;;
  esac
done
mkdir -p "$base"
trap 'rm -rf "$new" "$base/uv.new.$$"' EXIT
if ! "$base/uv/bin/uv" --version >/dev/null 2>&1; then
  "$PYTHON" -m pip --version >/dev/null 2>&1 || apt_install python3-pip
  say "installing uv"
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-input --require-hashes --no-deps \\
    --target "$base/uv.new.$$" -r "$locks/{INSTALLER_LOCK}.txt"
  rm -rf "$base/uv"
  mv "$base/uv.new.$$" "$base/uv"
fi
uv=$base/uv/bin/uv
say "making $environment from {lock.name}.txt"
"$uv" venv --quiet --relocatable --python {VERSION} "$new"
"$uv" pip install --quiet --python "$new/bin/python" --require-hashes -r "$locks/"{name}
echo {lock.sha256} >"$new/{STAMP}"
rm -rf "$environment"
mv "$new" "$environment"
"""
    return Step(
        name="python",
        check=check,
        change=change,
        limit_s=LIMIT_S,
        needs=("certificates", "folders"),
        remedy=(
            "a run that is using it: `fab stop` first; no network: the host has to reach a package index and, where it "
            f"has no Python {VERSION} of its own, the place that uv fetches one from (Cloud NAT)"
        ),
    )


def _probe(python: str, modules: Sequence[str]) -> str:
    word = at_home(python) if python.startswith(("~/", "/")) else shlex.quote(python)
    return f"""
command -v {word} >/dev/null 2>&1 || {{ echo "there is no "{shlex.quote(python)}; exit 1; }}
said=$({word} -c {shlex.quote(PROBE)} {shlex.join(modules)} 2>&1) || {{ printf '%s\\n' "$said" | tail -n 1; exit 1; }}
echo "$said"
"""


def needed(target: Target, checkout: Path) -> Lock | None:
    """Return the lock that the target's interpreter is made from; None where it is not ours to make.

    Raises:
        RequestError: the checkout has no lock for the platform.
    """
    if target.python != DEPLOYED_PYTHON:
        return None
    return read_lock(LOCK_OF_PLATFORM[target.platform], checkout, target.agent_root)


def read_lock(name: str, checkout: Path, agent_root: str) -> Lock:
    """Return a lock of the checkout. agent_root: of the hosts that it is for. Raises as `needed`."""
    files = {}
    for part in (name, INSTALLER_LOCK):
        path = checkout / "requirements" / f"{part}.txt"
        try:
            files[f"{part}.txt"] = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise RequestError(
                f"requirements/{part}.txt is not there, and what hosts need is installed from it; "
                "`make lock` makes it"
            ) from None
    sha256 = hashlib.sha256("\0".join(files[key] for key in sorted(files)).encode()).hexdigest()
    return Lock(name=name, files=files, sha256=sha256, folder=f"{agent_root}/locks/{sha256}")


def install(
    agents: Sequence[Agent], lock: Lock | None, errors: Sequence[HostError | None]
) -> list[HostError | None]:
    """Put on each host that has no error what is not there yet: the agent, which any question brings along, and the
    lock. The errors after that.
    """
    results = list(errors)

    def ask(indexes: Sequence[int], verb: str, request: dict[str, str]) -> dict[int, dict[str, Any]]:
        answers = ask_all([agents[index] for index in indexes], verb, [request] * len(indexes))
        by_index = dict(zip(indexes, answers, strict=True))
        for index, answer in by_index.items():
            results[index] = answer if isinstance(answer, HostError) else None
        return {index: answer for index, answer in by_index.items() if not isinstance(answer, HostError)}

    folder = lock.folder if lock else "~"
    listings = ask([index for index, error in enumerate(errors) if error is None], "list", {"path": folder})
    for name, text in (lock.files if lock else {}).items():
        lacking = [
            index
            for index, answer in listings.items()
            if name not in answer["names"] and results[index] is None
        ]
        ask(lacking, "write", {"path": f"{folder}/{name}", "text": text})
    return results
