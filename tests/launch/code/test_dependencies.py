"""What a user's own project needs: read from its files, resolved by a real uv against an index of the test's own."""

import io
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from contracts.errors import RequestError, Unreachable
from jobs.runtime.ranks import command_environment
from launch.code import dependencies
from launch.code.dependencies import Framework, Interpreter
from launch.code.requirement_files import find, imported_framework, required_framework
from tests.launch.code.package_index import add_wheel, list_files

HERE = dependencies.interpreter_on(is_here=True, in_container=False)
HOSTS = dependencies.interpreter_on(is_here=False, in_container=True)
BLOCK = '# /// script\n# requires-python = ">=3.11"\n# dependencies = [\n#   "{}",\n# ]\n# ///\n'
PROJECT = '[project]\nname = "mine"\nversion = "1"\ndependencies = ["greet", "numpy"]\n'


@pytest.fixture
def index(tmp_path: Path) -> Path:
    place = tmp_path / "index"
    add_wheel(place, "greet", "1.0", program="greet-all")
    add_wheel(place, "greet", "2.0", requires="numpy<2")
    add_wheel(place, "numpy", "2.5.5")
    add_wheel(place, "numpy", "1.26.0")
    add_wheel(place, "elsewhere", "1.0", tag="cp312-cp312-win_amd64")
    sources = place / "sourced"
    sources.mkdir()
    setup = b"from setuptools import setup\nsetup(name='sourced', version='1.0', py_modules=[])\n"
    with tarfile.open(sources / "sourced-1.0.tar.gz", "w:gz") as packed:
        for name, content in (
            ("PKG-INFO", b"Metadata-Version: 2.2\nName: sourced\nVersion: 1.0\n"),
            ("setup.py", setup),
        ):
            member = tarfile.TarInfo(f"sourced-1.0/{name}")
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    list_files(sources)
    return place


@pytest.fixture
def environ(tmp_path: Path, index: Path) -> dict[str, str]:
    """Variables of a machine whose only index is the test's, by pip's variable."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME")}
    places = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "UV_CACHE_DIR": str(tmp_path / "uv")}
    return {**kept, **places, "PIP_INDEX_URL": index.as_uri(), "UV_HTTP_RETRIES": "0"}


@pytest.fixture
def framework(tmp_path: Path) -> Framework:
    lock = tmp_path / "jax.txt"
    lines = ["jax==0.12.0.1", "numpy==2.5.5 ; python_version > '3'", "greet-all==1 ; sys_platform == 'win32'"]
    lock.write_text("".join(f"{line} \\\n    --hash=sha256:0\n" for line in lines))
    return Framework(name="jax", lock=lock)


def project(tmp_path: Path, files: Mapping[str, str]) -> Path:
    folder = tmp_path / "project"
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


SCRIPT = {"train.py": BLOCK.format("torch>=2")}
REQUIREMENTS = {
    "requirements.txt": "# ours\n-r more.txt\nGreet_All[x]>=1 # yes\n",
    "more.txt": "flax\n-c all.txt\n",
    "all.txt": "torch==2\n",
}


@pytest.mark.parametrize(
    ("files", "name", "names", "framework"),
    [
        ({**SCRIPT, **REQUIREMENTS}, "train.py", {"torch"}, "pytorch"),
        ({"train.py": "", **REQUIREMENTS, "pyproject.toml": PROJECT}, "requirements.txt", {"greet-all", "flax"}, "jax"),
        ({"pyproject.toml": PROJECT, "uv.lock": "", **REQUIREMENTS}, "uv.lock", {"greet", "numpy"}, None),
        ({"pyproject.toml": PROJECT}, "pyproject.toml", {"greet", "numpy"}, None),
        ({"requirements.txt": "torch\ntorch_xla\n"}, "requirements.txt", {"torch", "torch-xla"}, "pytorch_xla"),
    ],
)  # fmt: skip
def test_the_nearest_file_says_what_a_project_needs_and_of_which_framework(
    tmp_path: Path, files: dict[str, str], name: str, names: set[str], framework: str | None
) -> None:
    source = find(project(tmp_path, files), "train.py")
    assert source is not None
    assert (source.name, {*source.names}, required_framework(source)) == (name, names, framework)


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ("import numpy, torch.nn as nn", "pytorch"),
        ("def load():\n    from torch.utils import data", "pytorch"),
        ("import torch\nimport torch_xla.core.xla_model as xm", "pytorch_xla"),
        ("import tensorflow as tf", "tensorflow"),
        ("import flax\nfrom jax import numpy", "jax"),
        ("import torch\nimport jax", None),
        ("from .torch import model", None),
        ("import numpy", None),
        ("import torch\nprint 'of Python 2'", None),
        ("", None),
    ],
)
def test_a_script_that_says_nothing_else_is_of_the_framework_that_it_imports(
    tmp_path: Path, text: str, framework: str | None
) -> None:
    folder = project(tmp_path, {"train.py": text})
    assert imported_framework(folder / "train.py") == framework
    assert imported_framework(folder / "other.py") is None


def test_a_folder_that_needs_nothing_has_no_source(tmp_path: Path) -> None:
    folder = project(tmp_path, {"pyproject.toml": "[tool.ruff]\n"})
    (folder / "train.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
    assert find(folder, "train.py") is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"requirements.txt": "jax\ntensorflow\n"}, "jax (jax) and tensorflow (tensorflow); say which"),
        (
            {"requirements.txt": "\n--index-url https://me:hunter22@host/simple\n"},
            "requirements.txt, line 2: a URL",
        ),
        ({"requirements.txt": "x @ git+https://hunter22@host/x"}, "line 1: a URL with a user or password"),
        ({"requirements.txt": "-r more.txt"}, "more.txt: cannot be read: No such file"),
        ({"pyproject.toml": "[project"}, "pyproject.toml: is no TOML"),
        ({"train.py": BLOCK.format("a") + "import a\n" + BLOCK.format("b")}, "has 2 blocks"),
    ],
)
def test_what_is_refused_of_such_a_file_is_named_without_a_secret(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    with pytest.raises(RequestError) as refused:
        required_framework(find(project(tmp_path, files), "train.py"))  # type: ignore[arg-type]
    assert message in str(refused.value)
    assert "hunter22" not in str(refused.value)


def test_a_url_may_name_a_variable_or_a_user_of_ssh(tmp_path: Path) -> None:
    text = "a @ https://me:${TOKEN}@host/a.whl\nb @ git+ssh://git@host/b\nc @ git+https://host/c@v1\n"
    assert find(project(tmp_path, {"requirements.txt": text})) is not None


def test_what_a_framework_lacks_is_packed_once_and_runs_over_it(
    tmp_path: Path, environ: dict[str, str], framework: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project(tmp_path, {"requirements.txt": "greet<2\nnumpy\n"})
    said: list[str] = []

    def ensure() -> dependencies.Packages:
        source = find(folder)
        assert source is not None
        return dependencies.ensure(source, framework, HERE, (), environ, said.append)

    packages = ensure()
    assert packages.line == "requirements.txt: 1 package besides the framework's: greet==1.0"
    assert packages.bundle is not None
    assert packages.record["sha256"] == packages.bundle.sha256

    monkeypatch.setattr(dependencies, "uv", lambda: "/nonexistent/uv")
    began_s = time.monotonic()
    assert ensure() == packages
    assert time.monotonic() - began_s < 0.3
    assert len(said) == 2
    monkeypatch.undo()
    (folder / "requirements.txt").write_text("numpy\n")
    assert ensure().line == "requirements.txt: the framework has all of it"

    installed, layer = tmp_path / "installed", tmp_path / "layer"
    with tarfile.open(fileobj=io.BytesIO(packages.bundle.archive)) as packed:
        packed.extractall(installed, filter="data")
    command_environment.ensure(str(layer), sys.executable, str(installed))
    for words in (["python", "-c", "import greet, pytest; greet.main()"], ["greet-all"]):
        done = subprocess.run(
            [layer / "bin" / words[0], *words[1:]], capture_output=True, text=True, check=True
        )
        assert done.stdout == f"hello from {installed}/greet.py\n"


def test_an_index_that_a_requirements_file_names_is_where_its_packages_come_from(
    tmp_path: Path, environ: dict[str, str], framework: Framework
) -> None:
    add_wheel(tmp_path / "project" / "wheels", "own", "1.0")
    away = {**environ, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    text = "--no-index\n--find-links ./wheels/own\nown\n"
    source = find(project(tmp_path, {"requirements.txt": text}))
    assert source is not None
    packages = dependencies.ensure(source, framework, HERE, (), away, lambda _: None)
    assert packages.record["requirements"] == ["own==1.0"]


def test_a_lock_holds_where_the_framework_has_nothing_else(
    tmp_path: Path, environ: dict[str, str], framework: Framework
) -> None:
    folder = project(tmp_path, {"pyproject.toml": f"{PROJECT}requires-python = '>=3.12'\n"})
    locked = subprocess.run(
        [dependencies.uv(), "lock", "--quiet", "--python", sys.executable, "--upgrade-package", "greet==2.0"],
        cwd=folder, env=dependencies.with_pip_variables(environ), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert locked.returncode == 0, locked.stderr
    source = find(folder)
    assert source is not None
    packages = dependencies.ensure(source, framework, HOSTS, (), environ, lambda _: None)
    assert packages.record["requirements"] == ["greet==1.0"]
    assert packages.line.endswith(
        "; not as in uv.lock, beside the framework: greet 1.0 for 2.0, numpy 2.5.5 for 1.26.0"
    )


@pytest.mark.parametrize(
    ("files", "is_met"),
    [
        ({"requirements.txt": "numpy>=2 # yes\nJAX==0.12.*\n"}, True),
        ({"requirements.txt": ""}, True),
        ({"train.py": BLOCK.format("jax>=0.4")}, True),
        ({"requirements.txt": "greet"}, False),
        ({"requirements.txt": "greet-all"}, False),  # only a Windows machine's lock has it
        ({"requirements.txt": "jax[tpu]"}, False),
        ({"requirements.txt": "-e .\nnumpy"}, False),
        ({"requirements.txt": "-c c.txt\nnumpy", "c.txt": "numpy<2"}, False),
        ({"train.py": BLOCK.format("jax>=0.4").replace("3.11", "3.99")}, False),
        ({"pyproject.toml": PROJECT.replace('"greet", ', ""), "uv.lock": ""}, False),
    ],
)
def test_where_a_framework_has_all_of_it_no_index_is_asked(
    tmp_path: Path, framework: Framework, files: dict[str, str], is_met: bool
) -> None:
    source = find(project(tmp_path, files), "train.py")
    assert source is not None
    assert dependencies.is_met(source, framework, HOSTS) == is_met
    if is_met:
        packages = dependencies.ensure(source, framework, HOSTS, (), {}, pytest.fail)
        assert (packages.bundle, packages.record["sha256"]) == (None, None)


AWAY = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple"}


@pytest.mark.parametrize(
    ("needed", "on", "more", "messages"),
    [
        ("numpy==1.26.0", HERE, {}, ("asks for numpy==1.26.0; jax has numpy 2.5.5, whose versions stay; change",)),
        ("greet==2.0", HERE, {}, ("whose versions stay (numpy 2.5.5)", "numpy<2")),
        ("unheard-of", HERE, {}, ("no index has a package unheard-of; correct its name",)),
        ("elsewhere", HOSTS, {}, ("win_amd64", "has a wheel for x86_64-manylinux_2_28 with Python 3.12")),
        ("sourced", HERE, {}, ("--from-source sourced builds it on this machine",)),
        ("??bad", HERE, {}, ("requirements.txt:1:1",)),
        ("./lib", HERE, {}, ("./lib is a folder", "--env PYTHONPATH=FOLDER")),
        ("greet", HERE, AWAY, ("no package index can be reached", "127.0.0.1:9", "--no-install")),
        ("greet", HERE, {"UV_OFFLINE": "1", **AWAY}, ("no package index can be reached", "UV_OFFLINE")),
        ("greet", HERE, {"PIP_INDEX_URL": "http://me:hunter22@127.0.0.1:9/s"}, ("no package index can be",)),
    ],
)  # fmt: skip
def test_what_cannot_be_installed_is_one_message(
    tmp_path: Path,
    environ: dict[str, str],
    framework: Framework,
    needed: str,
    on: Interpreter,
    more: dict[str, str],
    messages: tuple[str, ...],
) -> None:
    folder = project(tmp_path, {"requirements.txt": f"{needed}\n"})
    (folder / "lib").mkdir()
    (folder / "lib" / "pyproject.toml").write_text('[project]\nname = "lib"\nversion = "1"\n')
    source = find(folder)
    assert source is not None
    with pytest.raises(RequestError) as refused:
        dependencies.ensure(source, framework, on, (), {**environ, **more}, lambda _: None)
    text = str(refused.value)
    assert text.startswith("requirements.txt: ")
    assert all(message in text for message in messages), text
    assert "hunter22" not in text
    assert isinstance(refused.value, Unreachable) == bool(more)
    left = (tmp_path / "cache" / "tpu-stack" / "packages").glob("*")
    assert [path.name for path in left if path.suffix != ".lock"] == []
