"""The Python environment of an own command: a layer over the framework's, into which `pip install` installs.

It is a virtual environment in which the framework's packages are importable, with programs of its own: `python`,
`pip`, and those of the framework's packages. What a command installs or removes changes the layer only. A run has one
on each host, beside the copy of its workdir; it stays from one attempt to the next.

As a program it is run by the interpreter that the layer is made for: `python -I command_environment.py LAYER`, with a
folder of packages that come before the framework's as another argument (`launch.code.dependencies`).
Standard library only.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv

LIMIT_S = 120.0
STAMP = "tpu-stack-layer.json"
"""`contracts.ranks.LAYER_STAMP`, which cannot be imported by the interpreter that runs this."""
UNCAUGHT_EXCEPTIONS = "tpu_stack_uncaught_exceptions"
"""The module of that file in a layer."""
PIP = """\
#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")/python" "$0" "$@"
' '''
import sys
from pip._internal.cli.main import main
sys.exit(main())
"""
"""By sh, as the kernel takes no blank in an interpreter's path, and no path longer than 255 bytes."""


def interpreter(layer: str) -> str:
    """Return the interpreter of a layer."""
    return os.path.join(layer, "bin", "python")


def ensure(layer: str, python: str, own_packages: str | None = None) -> None:
    """Make a layer over the environment of `python`, unless it is there.

    own_packages: a folder of packages, and of their programs in `bin`, that come before those of that environment.

    Raises:
        OSError: it cannot be made.
    """
    command = [python, "-I", os.path.abspath(__file__), layer, *([own_packages] if own_packages else [])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(0, f"the command's environment was not made within {LIMIT_S:g} s", layer) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OSError(0, f"the command's environment cannot be made by {python}: {last}", layer)
    print(done.stdout, end="", flush=True)


def variables(layer: str, python: str, path: str) -> dict[str, str]:
    """Return the variables by which programs find a layer over the environment of `python`. path: PATH as it was."""
    folders = [os.path.join(layer, "bin"), os.path.dirname(python), path]
    return {"PATH": os.pathsep.join(folders), "VIRTUAL_ENV": layer}


def make(layer: str, *dependencies: str) -> None:
    """Make a layer over this interpreter's environment, unless it is there. dependencies: folders, as of `ensure`."""
    places = [*sysconfig.get_paths().values(), *sys.path]
    packages = [
        place
        for place in dict.fromkeys(places)
        if os.path.basename(place) in ("site-packages", "dist-packages") and os.path.isdir(place)
    ]
    packages = [*dependencies, *packages]
    made_for = {"python": os.path.abspath(sys.executable), "version": sys.version, "packages": packages}
    try:
        with open(os.path.join(layer, STAMP), encoding="utf-8") as file:
            before = json.load(file)
    except (FileNotFoundError, ValueError):
        before = None
    if before == made_for:
        return
    if before is not None:
        print(
            f"tpu-stack: {layer} is made again, without what was installed in it: the interpreter is another one, or "
            "the packages are others"
        )
    shutil.rmtree(layer, ignore_errors=True)
    venv.EnvBuilder(symlinks=True).create(layer)
    scheme = "venv" if "venv" in sysconfig.get_scheme_names() else "posix_prefix"
    own_packages = sysconfig.get_path("purelib", scheme, {"base": layer, "platbase": layer})
    shutil.copy(
        os.path.join(os.path.dirname(os.path.abspath(__file__)), "uncaught_exceptions.py"),
        os.path.join(own_packages, f"{UNCAUGHT_EXCEPTIONS}.py"),
    )
    with open(os.path.join(own_packages, "framework.pth"), "w", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in [f"import {UNCAUGHT_EXCEPTIONS}", *_path_lines(packages)]))
    for place in dependencies:
        _copy_programs(os.path.join(place, "bin"), os.path.join(layer, "bin"))
    _make_programs(os.path.join(layer, "bin"))
    with open(os.path.join(layer, STAMP), "w", encoding="utf-8") as file:
        json.dump(made_for, file)


def _path_lines(packages: list[str]) -> list[str]:
    """Return the lines of a .pth file that make packages importable, with what their own .pth files name, and pip."""
    lines = [f"import site; site.addsitedir({place!r})" for place in packages]
    if importlib.util.find_spec("pip") is None and importlib.util.find_spec("ensurepip") is not None:
        import ensurepip

        # The wheel that Python brings along can be imported as it is.
        lines += glob.glob(os.path.join(os.path.dirname(ensurepip.__file__), "_bundled", "pip-*.whl"))
    return lines


def _copy_programs(folder: str, to: str) -> None:
    """Copy programs that are run by the interpreter beside them, and replace none."""
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if not os.path.lexists(os.path.join(to, name)):
            shutil.copy(os.path.join(folder, name), os.path.join(to, name))


def _make_programs(folder: str) -> None:
    """Make pip, and the programs of this interpreter's environment, if it is a virtual one, as the layer's."""
    python = os.path.join(folder, "python")
    for name in ("pip", "pip3", f"pip3.{sys.version_info[1]}"):
        _write_program(os.path.join(folder, name), PIP)
    theirs = os.path.dirname(os.path.abspath(sys.executable))
    for name in sorted(os.listdir(theirs)) if sys.prefix != sys.base_prefix else ():
        path, own = os.path.join(theirs, name), os.path.join(folder, name)
        if os.path.lexists(own) or not os.path.isfile(path) or not os.access(path, os.X_OK):
            continue
        with open(path, "rb") as file:
            is_script = file.read(2) == b"#!"
        if not is_script:
            os.symlink(path, own)
            continue
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read()
        # Started by the layer's interpreter, it sees what is installed there.
        _write_program(own, text.replace(f"{theirs}/python", python, 1))


def _write_program(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    os.chmod(path, 0o755)  # noqa: S103 - as installers make programs


if __name__ == "__main__":
    make(*map(os.path.abspath, sys.argv[1:]))
