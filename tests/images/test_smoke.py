"""The smoke test itself, on a framework that is plain Python: only what is broken in an image fails, and is named."""

import ast
import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from images.smoke import checks, lock, program
from launch import jobs

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "images"
SMOKE = IMAGES / "smoke"
FRAMEWORKS = sorted(file.parent.name for file in IMAGES.glob("*/requirements.in"))
FRAMEWORK = """
import json, os, signal, sys, time
from pathlib import Path

NAME = "plain"
MODULES = ("json", "sqlite3")
ENVIRONMENT = {"cpu": {"FOUND": "cpu"}, "tpu": {}}
CHECKS = {"own": lambda: "held"}

def devices():
    return os.environ.get("FOUND", "cpu"), "1 × plain"

def start():
    return {"weight": 1.0, "speed": 0.5}

def step(state, number):
    loss = state["weight"] ** 2
    return {**state, "weight": state["weight"] * state["speed"], "speed": state["speed"] * 0.9}, loss

def save(state, folder):
    (Path(folder) / "state.json").write_text(json.dumps(state))

def load(folder):
    return json.loads((Path(folder) / "state.json").read_text())

def listen():
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    def asked(number):
        time.sleep(0.01)
        return bool(told)
    return asked
"""


class Image:
    """What an image holds: the folder beside the lock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(SMOKE, root / "smoke", ignore=shutil.ignore_patterns("__pycache__"))
        pins = "".join(
            f"{name}=={version} \\\n    --hash=sha256:00\n" for name, version in lock.installed().items()
        )
        (root / "requirements.txt").write_text("# by make lock\n" + pins)
        (root / "smoke" / "framework.py").write_text(FRAMEWORK)

    def add(self, code: str) -> None:
        """What comes later in a module replaces what was before."""
        with (self.root / "smoke" / "framework.py").open("a") as file:
            file.write(textwrap.dedent(code))

    def everything(self, platform: str = "cpu") -> tuple[int, list[str], dict[str, object]]:
        """Exit code, lines, and the object in the last one."""
        done = subprocess.run(
            [sys.executable, str(self.root / "smoke"), "--platform", platform],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.stderr == ""
        *lines, last = done.stdout.splitlines()
        return done.returncode, lines, json.loads(last)

    def one(self, check: str, platform: str = "cpu") -> program.Verdict:
        """That check in a process of its own, as the whole runs it."""
        code = (
            "import json; from smoke import framework, program;"
            f"print(json.dumps(program.run_apart(framework, {check!r}, {platform!r})))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.root, capture_output=True, text=True, timeout=100, check=True,
        )  # fmt: skip
        return program.Verdict(*json.loads(done.stdout))


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


def test_a_sound_image_holds_every_check_but_the_one_that_only_a_container_can(image: Image) -> None:
    code, lines, result = image.everything()
    assert [line for line in lines if not line.startswith("ok ")] == [
        line for line in lines if " entry point " in line
    ]
    assert [name for name in checks.SHARED if not any(f" {name} " in line for line in lines)] == []
    # Nor is a signal sent to process 1 outside one.
    assert "run the image with its own entry point" in lines[0]
    assert any(" own " in line and line.endswith("held") for line in lines)
    assert (code, result["ok"], result["framework"], result["platform"]) == (1, False, "plain", "cpu")
    assert result["versions"] == dict(sorted(lock.installed().items()))


def test_without_the_platform_that_is_asked_for_nothing_is_tried_on_another(image: Image) -> None:
    assert "--platform is tpu, but plain computes on cpu (1 × plain)" in image.one("device", "tpu").finding
    code, lines, result = image.everything("tpu")
    assert (code, result["ok"]) == (1, False)
    _, hardware, skipped = lines
    assert "no file like /dev/accel* or /dev/vfio/[0-9]*" in hardware
    assert skipped.startswith("skip lock, imports, device, train,")
    image.add("""
        def devices():
            return "gpu", "1 × plain"
    """)
    _, lines, _ = image.everything("cpu")
    assert lines[-1].startswith("skip train, checkpoint, signals, own: ")


@pytest.mark.parametrize(
    ("code", "check", "said"),
    [
        (
            'MODULES = ("json", "no_such_package")',
            "imports",
            r"`import no_such_package` raised ModuleNotFoundError.*images/plain/requirements\.in",
        ),
        (
            'MODULES = ("json", "aborts")',
            "imports",
            r"SIGABRT ended the interpreter.*Aborted.*import aborts[^\n]*\n[^\n]*bad library[^\n]*$",
        ),
        (
            "listen = lambda: lambda number: False",
            "signals",
            "exited with -15; it has to save and exit with 75",
        ),
        ("step = lambda state, number: (state, 1.0)", "train", "it has to fall and be finite"),
        ("step = lambda state, number: (state, float('nan'))", "train", "it has to fall and be finite"),
        (
            "saved = load\nload = lambda folder: {**saved(folder), 'speed': 0.5}",
            "checkpoint",
            "what is saved is not all that a step needs",
        ),
        (
            "def own():\n    import atexit\n    atexit.register(os.abort)\n    return 'held'\nCHECKS = {'own': own}",
            "own",
            "SIGABRT",
        ),
        (
            "def breaks():\n    raise LookupError('no such thing')\nCHECKS = {'own': breaks}",
            "own",
            "^exit code 1.*in breaks.*LookupError: no such thing",
        ),
    ],
)
def test_what_is_broken_fails_its_check_and_says_why(image: Image, code: str, check: str, said: str) -> None:
    image.add(code)
    (image.root / "aborts.py").write_text("import os, sys\nprint('bad library', flush=True)\nos.abort()\n")
    verdict = image.one(check)
    assert not verdict.ok
    assert re.search(said, verdict.finding, flags=re.DOTALL), verdict.finding


# --- what the frameworks' own files have, which are read and not run: what they are made for is not here ----------


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Top-level names of the modules that these statements import."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def defined(framework: str) -> dict[str, Any]:
    """Name → value at the top of a framework's file; None where it is not a literal."""
    found: dict[str, Any] = {}
    for node in ast.parse((IMAGES / framework / "smoke.py").read_text()).body:
        match node:
            case ast.FunctionDef(name=name):
                found[name] = None
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                try:
                    found[name] = ast.literal_eval(node.value)  # type: ignore[arg-type]
                except ValueError:
                    found[name] = None
    return found


RUNTIMES = {"jax": "jax", "pytorch": "torch", "pytorch_xla": "torch", "tensorflow": "tensorflow"}
OF_FRAMEWORK = {
    framework: (
        *(name for name in jobs.names() if framework in jobs.find(name).frameworks),
        *("glue", "serve", f"runtime/{RUNTIMES[framework]}"),
    )
    for framework in FRAMEWORKS
}
"""Folders of jobs/ that the framework's image runs, besides OF_ALL."""
OF_ALL = ("runtime", *(f"runtime/{folder}" for folder in ("monitoring", "ranks", "report", "storage")))
NOT_IN_IMAGES = {"jobs", "contracts", "pyarrow", "pynvml", "libtpu"}
ELSEWHERE = {"pytorch": {"torch_xla"}}


@pytest.mark.parametrize("framework", OF_FRAMEWORK)
def test_the_smoke_test_imports_every_library_that_a_job_or_its_runtime_imports(framework: str) -> None:
    folders = [*OF_FRAMEWORK[framework], *OF_ALL]
    # `tracers.py` has one for each framework, and imports that of its run.
    files = [
        path for folder in folders for path in ROOT.glob(f"jobs/{folder}/*.py") if path.name != "tracers.py"
    ]
    used = {name for file in files for name in imported(ast.walk(ast.parse(file.read_text())))}
    modules = (*defined(framework)["MODULES"], *checks.COMMON_MODULES)
    tried = {module.partition(".")[0] for module in modules}
    needed = used - sys.stdlib_module_names - NOT_IN_IMAGES - ELSEWHERE.get(framework, set())
    assert needed - tried == set()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_image_has_a_base_by_digest_is_not_of_root_and_gets_signals(framework: str) -> None:
    assert re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64}\n", (IMAGES / "base.txt").read_text())
    lines = (IMAGES / framework / "Dockerfile").read_text().splitlines()
    said = [line for line in lines if line.startswith(("ARG BASE_IMAGE", "USER", "ENTRYPOINT", "CMD"))]
    assert said == ["ARG BASE_IMAGE", "USER 10001:10001", 'ENTRYPOINT ["tini", "--", "python"]']
