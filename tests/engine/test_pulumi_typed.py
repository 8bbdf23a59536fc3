"""`pulumi` as a user types it in the project's root: Pulumi.yaml as it is, `main: infra/`, the plugins as processes.

The other tests here hand the program to the engine themselves, and would not see it when the language host, or the
plugin of dynamic providers, starts in another folder or with another Python than they do. Where Pulumi is installed its
own host runs the program, and where it was built tests/engine/language_stand_in.py."""

import dataclasses
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts import inventory
from rehearsal.engine import ACCESS_TOKEN, MARK, NOWHERE, end_marked
from rehearsal.gcp_stand_in.provider import WORLD_VARIABLE
from rehearsal.gcp_stand_in.stand_in_world import World
from rehearsal.simulated_cloud import SimulatedCloud
from tools.pulumi_cli import PulumiCli

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 90
# One line of the list of resources: what is done, type, name, and how it went.
LINE = re.compile(r"^ *(?:[-+~]+ +)?([\w-]+(?::[\w/]+)+) +(\S+)(?: +(\w.*))?$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command printed, both streams together, and its exit code."""

    code: int
    text: str

    def resources(self, status: str) -> set[tuple[str, str]]:
        """Type and name of those that the engine lists so."""
        found = LINE.findall(self.text)
        return {(short(kind), name) for kind, name, said in found if said.split()[:1] == [status]}

    @property
    def summary(self) -> list[str]:
        """What stands below "Resources:", of the preview and of the operation."""
        parts = re.findall(r"^Resources:\n((?: {4}.*\n)+)", self.text, re.MULTILINE)
        return [" ".join(part.split()) for part in parts]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shell:
    """A user's shell in a checkout of their own. environ: all that it has; nothing of the tests' own environment."""

    root: Path
    environ: dict[str, str]
    world: World

    def type(self, line: str, *, below: str = "") -> Answer:
        done = subprocess.run(
            shlex.split(line), cwd=self.root / below, env=self.environ, timeout=LIMIT_S, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return Answer(code=done.returncode, text=done.stdout)

    def state(self) -> list[dict[str, Any]]:
        """What Pulumi knows to be there, its own providers left out."""
        deployment = json.loads(self.type("pulumi stack export").text)["deployment"]
        resources = deployment.get("resources") or []
        return [each for each in resources if not each["type"].startswith("pulumi:providers:")]


def short(type_token: str) -> str:
    """gcp:compute:Network of gcp:compute/network:Network, as the engine shows most types."""
    return re.sub(r"/[^:]*:", ":", type_token)


def copy_checkout(target: Path) -> None:
    """What git has or would take, links as links; no .venv, which may be a link that git would take, too."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if name != ".venv" and os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def make_environment(root: Path) -> None:
    """As `make install` would, with the packages of this Python, and with that checkout on its path."""
    venv.EnvBuilder(symlinks=True).create(root / ".venv")
    (packages,) = (root / ".venv").glob("lib/python*/site-packages")
    (packages / "checkout.pth").write_text(f"{root}\n{sysconfig.get_path('purelib')}\n")


def launcher(path: Path, module: str, *arguments: Path) -> None:
    """An executable that runs a module of this checkout with this Python, and leaves no trace in its environment."""
    words = shlex.join([sys.executable, "-m", module, *map(str, arguments)])
    path.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {words} "$@"\n')
    path.chmod(0o755)


# Made by dynamic providers.
IDENTITY = ("pulumi-python:dynamic:StackIdentity", "owner")
REMAINS = ("pulumi-python:dynamic:SliceRemains", "main")
QUEUED = ("pulumi-python:dynamic:QueuedResource", "main")
OBJECTS = ("pulumi-python:dynamic:StackObjects", "objects")
SPECIFICATION = ("gcp:storage:BucketObject", "specification")


@pytest.fixture
def shell(cli: PulumiCli, api: SimulatedCloud, buckets: str, tmp_path: Path) -> Iterator[Shell]:
    """A checkout with a new environment .venv, a stack `dev` of Pulumi.example.yaml, and simulated clouds."""
    root, bin_folder = tmp_path / "checkout", tmp_path / "bin"
    home, backend = tmp_path / "home", tmp_path / "backend"
    copy_checkout(root)
    make_environment(root)
    for folder in (bin_folder, home, backend):
        folder.mkdir()
    launcher(bin_folder / "pulumi-resource-gcp", "rehearsal.gcp_stand_in")
    if cli.language_host is None:
        launcher(bin_folder / "pulumi-language-python", "tests.engine.language_stand_in", cli.program_script)
    path = [
        cli.folder,
        bin_folder,
        cli.dynamic_folder,
        Path("/usr/local/bin"),
        Path("/usr/bin"),
        Path("/bin"),
    ]
    environ = {
        **dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY"), NOWHERE),
        "NO_PROXY": "127.0.0.1,localhost",
        "HOME": str(home),
        "PATH": os.pathsep.join(map(str, path)),
        "PULUMI_BACKEND_URL": backend.as_uri(),
        "PULUMI_CONFIG_PASSPHRASE": "rehearsal",
        "PULUMI_SKIP_UPDATE_CHECK": "true",
        "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
        "STORAGE_EMULATOR_HOST": buckets,
        MARK: str(tmp_path),
        WORLD_VARIABLE: str(tmp_path / "world.json"),
    }
    made = Shell(root=root, environ=environ, world=World(path=tmp_path / "world.json"))
    shutil.copy(root / "Pulumi.example.yaml", root / "Pulumi.dev.yaml")
    for line in (
        "pulumi stack init dev",
        f"pulumi config set gcp:tpuV2CustomEndpoint {api.url}/v2/",
        f"pulumi config set --secret gcp:accessToken {ACCESS_TOKEN}",
    ):
        answer = made.type(line)
        assert answer.code == 0, answer.text
    try:
        yield made
    finally:
        end_marked(MARK, str(tmp_path))


def names(api: SimulatedCloud) -> list[str]:
    """Of the queued resources and nodes that are there, each once."""
    there = api.control.alive()
    return sorted(
        {each["name"].rpartition("/")[2] for kind in ("queuedResources", "nodes") for each in there[kind]}
    )


def files(root: Path) -> set[str]:
    """What git would see in a checkout."""
    skipped = {".venv", "__pycache__"}
    found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return {str(path) for path in found if skipped.isdisjoint(path.parts)}


@pytest.mark.timeout(400)  # nine commands, each with a limit of its own
def test_a_stack_is_previewed_made_kept_changed_and_destroyed(shell: Shell, api: SimulatedCloud) -> None:
    # Neither an activated environment nor a Python on PATH that knows Pulumi is needed: the fixture gives none.
    folders = shell.environ["PATH"].split(os.pathsep)
    assert not any(Path(folder).is_relative_to(shell.root / ".venv") for folder in folders)
    assert {"VIRTUAL_ENV", "PYTHONPATH", "PULUMI_PYTHON_CMD"}.isdisjoint(shell.environ)
    (packages,) = (shell.root / ".venv").glob("lib/python*/site-packages")
    trace = shell.root.parent / "trace"
    (packages / "trace_of_start.pth").write_text(
        f"import sys; open({str(trace)!r}, 'a').write(' '.join(sys.orig_argv) + '\\n')\n"
    )
    before = files(shell.root)
    preview = shell.type("pulumi preview")
    assert preview.code == 0, preview.text
    assert "slice main: v5litepod-16" in preview.text  # the table of costs
    previewed = preview.resources("create")
    assert {IDENTITY, QUEUED, ("gcp:storage:Bucket", "bucket")} <= previewed
    assert shell.world.things() == {} and shell.state() == []
    # The program and the dynamic providers run with the Python of the checkout, which only this environment holds.
    lines = trace.read_text().splitlines()
    for module in ("pulumi-language-python-exec", "-m pulumi.dynamic"):
        assert any(module in line and line.startswith(str(shell.root)) for line in lines), lines
    below = shell.type("pulumi preview", below="infra")
    assert below.code == 0 and IDENTITY in below.resources("create"), below.text
    assert files(shell.root) == before  # as git has it

    up = shell.type("pulumi up --yes")
    assert up.code == 0, up.text
    made = {(short(each["type"]), each["urn"].rpartition("::")[2]) for each in shell.state()}
    assert made == previewed
    assert names(api) == ["tpu-stack-dev-main"]

    again = shell.type("pulumi up --yes")
    assert again.code == 0 and again.summary == [f"{len(made)} unchanged"] * 2, again.text

    output = shell.type("pulumi stack output inventory")
    (one,) = inventory.from_json(output.text).slices
    assert [host.index for host in one.hosts] == [0, 1, 2, 3]

    for line in ("--path 'tpu-stack:slices[0].labels.team' nlp", "tpu-stack:protect false"):
        assert shell.type(f"pulumi config set {line}").code == 0
    changed = shell.type("pulumi up --yes")
    assert changed.code == 0, changed.text
    assert changed.resources("updated") == {QUEUED, REMAINS, OBJECTS, SPECIFICATION}
    assert api.control.alive()["nodes"][0]["labels"]["team"] == "nlp"

    destroy = shell.type("pulumi destroy --yes")
    assert destroy.code == 0, destroy.text
    assert shell.state() == [] and shell.world.things() == {} and names(api) == []


def test_no_module_of_infra_is_called_like_one_that_anything_imports() -> None:
    """The program and the plugin have infra/ first on their path."""
    ours = {path.stem for path in (ROOT / "infra").iterdir() if path.name[0] not in "._"}
    assert {"pulumi_program", "config"} <= ours
    assert ours.isdisjoint(sys.stdlib_module_names)
    assert ours.isdisjoint(importlib.metadata.packages_distributions())


MISTAKES = (
    (
        "--path 'tpu-stack:slices[0].accelerator' v6e-12",
        'slices[0].accelerator: "v6e-12" is not a v6e size',
    ),
    ("tpu-stack:protetc false", "tpu-stack:protetc"),
)


def test_a_mistake_is_told_without_a_traceback_and_nothing_is_made(shell: Shell, api: SimulatedCloud) -> None:
    settings = shell.root / "Pulumi.dev.yaml"
    right = settings.read_text()
    for line, said in MISTAKES:
        assert shell.type(f"pulumi config set {line}").code == 0
        answer = shell.type("pulumi up --yes")
        assert answer.code != 0 and "Traceback" not in answer.text, answer.text
        assert answer.text.count(said) == 1 and "unhandled error" not in answer.text, answer.text
        settings.write_text(right)
    # What the engine itself leaves unread: the program is told of it by nobody.
    settings.write_text(right + "confg: {}\n---\nconfig: {}\n")
    answer = shell.type("pulumi preview")
    assert answer.code != 0 and "confg: nothing reads it; did you mean config:?" in answer.text, answer.text
    assert "Pulumi.dev.yaml: line" in answer.text and "is in another document of the file" in answer.text
    settings.write_text(right)
    # Dynamic providers find their Python through this link.
    (shell.root / "infra" / ".venv").unlink()
    answer = shell.type("pulumi up --yes")
    assert answer.code != 0
    assert "infra/.venv" in answer.text and "doesn't exist" in answer.text, answer.text
    assert "could not read plugin" in answer.text and "pulumi-resource-pulumi-python" in answer.text
    assert names(api) == []
