"""Every image's lock against what asks for it, and every framework's file against what the smoke test expects of it."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from images.smoke import lock

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "images"
FRAMEWORKS = sorted(file.parent.name for file in IMAGES.glob("*/requirements.in"))
IMAGE_INPUTS = sorted(IMAGES.glob("*/requirements*.in"))
LOCKS = [file.with_suffix(".txt") for file in IMAGE_INPUTS]
ON_A_HOST = {
    "sys_platform": "linux",
    "platform_machine": "x86_64",
    "python_version": "3.12",
    "platform_system": "Linux",
}
CONSTANTS = ("NAME", "MODULES", "ENVIRONMENT", "CHECKS")
FUNCTIONS = ("devices", "start", "step", "save", "load", "listen")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def asked(file: Path) -> Iterator[Requirement]:
    """What a .in asks for on a host, with what it includes."""
    for raw in file.read_text().splitlines():
        line = re.sub(r"(^|\s)#.*", "", raw).strip()
        if line.startswith("-r "):
            yield from asked(file.parent / line[3:])
        elif line and not line.startswith("-"):
            yield Requirement(line)


def overridden(folder: Path) -> dict[str, Requirement]:
    file = folder / "overrides.in"
    found = asked(file) if file.exists() else iter(())
    return {canonicalize_name(each.name): each for each in found}


def defined(framework: str) -> dict[str, ast.expr | None]:
    """Name → value at the top of a framework's file, which is read and not run: what it is made for is not here."""
    found: dict[str, ast.expr | None] = {}
    for node in ast.parse((IMAGES / framework / "smoke.py").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = None
        elif isinstance(node, ast.Assign):
            found |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node.value
    return found


def said(framework: str, constant: str) -> Any:
    value = defined(framework)[constant]
    assert value is not None
    return ast.literal_eval(value)


@pytest.mark.parametrize("file", LOCKS, ids=name)
def test_every_pin_has_a_hash_and_no_lock_names_an_index(file: Path) -> None:
    text = file.read_text()
    blocks = [block for block in re.split(r"\n(?=\S)", text) if not block.startswith("#")]
    assert blocks
    assert [block.splitlines()[0] for block in blocks if "--hash=sha256:" not in block] == []
    assert not re.search(r"://|--index|--find-links| @ ", text)


@pytest.mark.parametrize("file", IMAGE_INPUTS, ids=name)
def test_an_images_lock_holds_what_is_asked_for_in_an_allowed_version(file: Path) -> None:
    pins = lock.read(file.with_suffix(".txt").read_text())
    replaced = overridden(file.parent)
    wanted = {canonicalize_name(each.name): each for each in asked(file)} | replaced
    here = {each: one for each, one in wanted.items() if one.marker is None or one.marker.evaluate(ON_A_HOST)}
    # An override alone asks for nothing.
    missing = [each for each in here if each not in pins and each not in replaced]
    wrong = [
        f"{each}=={pins[each]}"
        for each, one in here.items()
        if each in pins and not one.specifier.contains(pins[each], prereleases=True)
    ]
    assert (missing, wrong) == ([], [])
    # What an override takes out is not there.
    assert [each for each in wanted if each not in here and each in pins] == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_frameworks_locks_have_one_version_of_what_both_hold(framework: str) -> None:
    found = [lock.read(file.read_text()) for file in sorted((IMAGES / framework).glob("requirements*.txt"))]
    for one, other in itertools.pairwise(found):
        assert {each for each in one.keys() & other.keys() if one[each] != other[each]} == set()


def test_a_jax_job_computes_with_the_same_versions_in_a_container_and_without() -> None:
    pin = re.compile(r"^(\S+?)(?:\[\S*\])?==(\S+) *(?:;.*)?\\$", re.MULTILINE)
    pins = pin.findall((ROOT / "requirements/tpu.txt").read_text())
    bare = {lock.normal(each): version for each, version in pins}
    image = lock.read((IMAGES / "jax/requirements.txt").read_text())
    assert {"jax", "jaxlib", "libtpu", "flax"} <= image.keys() & bare.keys()
    assert {each for each in image.keys() & bare.keys() if image[each] != bare[each]} == set()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_frameworks_file_has_what_the_smoke_test_asks_of_it(framework: str) -> None:
    assert [each for each in (*CONSTANTS, *FUNCTIONS) if each not in defined(framework)] == []
    assert said(framework, "NAME") == framework
    assert set(said(framework, "ENVIRONMENT")) == {"cpu", "tpu"}
    # Reading it loads no framework.
    tree = ast.parse((IMAGES / framework / "smoke.py").read_text())
    assert imported(tree.body) <= sys.stdlib_module_names


def test_the_smoke_test_of_jax_imports_every_library_that_a_job_or_its_runtime_imports() -> None:
    used: set[str] = set()
    for file in ROOT.glob("jobs/**/*.py"):
        used |= imported(ast.walk(ast.parse(file.read_text())))
    tried = {each.partition(".")[0] for each in said("jax", "MODULES")}
    assert used - sys.stdlib_module_names - {"jobs", "contracts"} - tried == set()


def imported(nodes: Iterator[ast.AST] | list[ast.stmt]) -> set[str]:
    """Top-level names of the modules that these statements import."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_image_has_a_base_by_digest_is_not_of_root_and_python_gets_the_containers_signals(
    framework: str,
) -> None:
    assert re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64}\n", (IMAGES / "base.txt").read_text())
    lines = (IMAGES / framework / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("ARG BASE_IMAGE")] == ["ARG BASE_IMAGE"]
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]
    assert [line for line in lines if line.startswith(("ENTRYPOINT", "CMD"))] == [
        'ENTRYPOINT ["tini", "--", "python"]'
    ]
