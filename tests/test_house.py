"""Rules of the whole repository: what may be imported, where the documents lead, what the first commands say."""

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fabfile.command_line import options_after_dashes
from fabfile.commands import COMMANDS
from fabfile.slips import Line
from host.agent.stack_traces import RUNTIME_PROCESSES
from launch import jobs

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = (
    "contracts",
    "fabfile",
    "keeper",
    "console",
    "backends",
    "images",
    "launch",
    "infra",
    "host",
    "jobs",
    "rehearsal",
)


def imported(path: Path) -> set[str]:
    """The top-level names of everything that a file imports from outside its package, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module is not None
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


# --- imports ------------------------------------------------------------------------------------------------


def test_what_runs_on_a_bare_python_imports_only_the_standard_library_and_the_contracts() -> None:
    files = [ROOT / "tools" / "install.py", *ROOT.glob("host/**/*.py"), *ROOT.glob("contracts/*.py")]
    others = {str(path.relative_to(ROOT)): imported(path) - sys.stdlib_module_names for path in files}
    assert {path: found for path, found in others.items() if found - {"contracts", "host"}} == {}
    assert others["tools/install.py"] == set()
    # A tracker's interpreter runs this file alone.
    assert imported(ROOT / "console" / "tracker_client.py") - sys.stdlib_module_names <= {"mlflow", "wandb"}


@pytest.mark.parametrize("module", ["jobs.runtime.ranks.rank_supervisor", "jobs.runtime.monitoring.sampler"])
def test_stack_traces_leave_out_the_processes_of_the_runtime_that_compute_nothing(module: str) -> None:
    assert importlib.util.find_spec(module) and RUNTIME_PROCESSES.search(
        f"python\0-P\0-m\0{module}\0argument"
    )


JOBS = sorted(f"jobs/{path.parent.name}" for path in ROOT.glob("jobs/*/__init__.py"))


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "fabfile"])
def test_importing_a_package_loads_nothing(room: str) -> None:
    assert imported(ROOT / room / "__init__.py") == set()


@pytest.mark.parametrize("job", JOBS)
def test_a_jobs_package_imports_no_more_than_what_its_metrics_are_defined_with(job: str) -> None:
    lines = (ROOT / job / "__init__.py").read_text().splitlines()
    of_definitions = (
        "from jobs.runtime.monitoring.metric_definitions import ",
        "from jobs.glue import METRICS",
    )
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    assert [line for line in imports if not line.startswith(of_definitions)] == []


KIND_OF_BACKEND = re.compile(
    r"\.is_(local|by_cluster|pod|on_pods)\b|\btarget\.cluster\b|\bON_PODS\b"
    r"|isinstance\([^)]*Backend|\bbackend\.name\b|from backends\.\w+\.\w+_backend import|\btarget\.name [!=]="
    r"|\.alone\b|\balone=|\.find_agents\b"
)


def test_no_command_asks_which_backend_it_has() -> None:
    """What differs is behind a verb of `launch.targets.Backend`, or in its table of capabilities."""
    asking = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for room in ("fabfile", "console", "images", "launch", "keeper")
        for path in sorted((ROOT / room).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if KIND_OF_BACKEND.search(line)
    ]
    assert asking == []


# --- the documents ------------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """What GitHub calls a heading in an address."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_every_link_in_the_documents_leads_somewhere() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.splitlines() if name.endswith(".md")]
    anchors = {
        path: {anchor(line.lstrip("#")) for line in path.read_text().splitlines() if line.startswith("#")}
        for path in files
    }
    dead = []
    for path in files:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", path.read_text()):
            name, _, heading = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists() or (heading and heading not in anchors[target]):
                dead.append(f"{path.relative_to(ROOT)}: {link}")
    assert dead == []


def test_every_path_in_the_readmes_tables_exists() -> None:
    """The map of folders, "to change X, edit Y" and docs/architecture.md; a name in capitals is a blank."""
    pages = ("README.md", "CONTRIBUTING.md", "docs/architecture.md")
    words = "".join((ROOT / page).read_text() for page in pages)
    rooms = "|".join([*ROOMS, "bench", "docs", "requirements", "tests", "tools"])
    paths = set(re.findall(rf"`((?:{rooms})/[\w./-]*)`", words))
    assert len(paths) > 30
    assert (
        sorted(path for path in paths if not re.search("[A-Z]{4}", path) and not (ROOT / path).exists()) == []
    )


PAGES = [
    *(ROOT / page for page in ("README.md", "CONTRIBUTING.md", "rehearsal/README.md")),
    *(ROOT / "docs").glob("*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_fab_command_that_a_page_shows_is_one_that_fab_takes_with_its_jobs_options(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^    (fab [a-z].*)$", text, flags=re.MULTILINE)
    commands = [command for line in lines for command in line.partition("  #")[0].split(" && ")]
    for command in (each for each in commands if each.startswith("fab ") and not re.search(r"…|\$\(", each)):
        words = shlex.split(command)[1:]
        place = words.index("--") if "--" in words else len(words)
        line = Line(words[:place], words[place + 1 :], COMMANDS, options_after_dashes)
        line.check()
        for call in line.calls:
            options = COMMANDS[str(call.name)].read(call.as_kwargs, line.after)
            job = getattr(getattr(options, "run", options), "job", None)
            if job and line.after:
                jobs.find(job).parse(line.after)


# --- the first commands -------------------------------------------------------------------------------------


def run_make(*args: str) -> str:
    """What make says, as if a person typed it: these tests may themselves run under make."""
    return subprocess.run(
        ["make", *args], cwd=ROOT, env={"PATH": os.environ["PATH"]},
        capture_output=True, text=True, timeout=30, check=True,
    ).stdout  # fmt: skip


def test_make_alone_lists_every_command_in_one_line_each() -> None:
    said = run_make()
    listed = re.findall(r"^  make (\S+) +\S", said, flags=re.MULTILINE)
    commands = re.findall(r"^\.PHONY: (\S+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert listed == commands
    assert max(map(len, said.splitlines())) <= 100
    assert len(set(map(len, re.findall(r"^  make \S+ +", said, flags=re.MULTILINE)))) == 1


def test_arguments_of_a_training_run_reach_it_as_one_argument() -> None:
    said = run_make("--dry-run", "train", """ARGS=--steps 3 --data "a folder/it's.txt" """)
    # The shell reads the variable itself, so quotes inside need no care; without ARGS the option is absent.
    assert said.splitlines()[-1].endswith('fab train --job flax_mlm --args "$ARGS"')
    assert run_make("--dry-run", "train").splitlines()[-1].rstrip().endswith("--job flax_mlm")


def test_the_python_of_the_house_is_the_same_wherever_it_is_said() -> None:
    chosen = (ROOT / ".python-version").read_text().strip()
    assert PROJECT["project"]["requires-python"] == f">={chosen}"
    assert PROJECT["tool"]["mypy"]["python_version"] == chosen
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + chosen.replace(".", "")
    assert f'PREFERRED = "{chosen}"' in (ROOT / "tools" / "install.py").read_text()
