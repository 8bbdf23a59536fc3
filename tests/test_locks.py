"""Every lock, of the checkout's environments and of the images, against what asks for it."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from images.smoke import lock

ROOT = Path(__file__).resolve().parent.parent
INPUTS = sorted([*ROOT.glob("requirements/*.in"), *ROOT.glob("images/*/requirements*.in")])
LOCKS = [file.with_suffix(".txt") for file in INPUTS]
HERE = {
    "sys_platform": "linux",
    "platform_machine": "x86_64",
    "python_version": "3.12",
    "platform_system": "Linux",
}
PIN = re.compile(r"^(\S+?)(?:\[\S*\])?==(\S+) *(?:;.*)?\\$", re.MULTILINE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def pins(file: Path) -> dict[str, str]:
    return {canonicalize_name(each): version for each, version in PIN.findall(file.read_text())}


def asked(file: Path) -> Iterator[Requirement]:
    """What a .in asks for, with what it includes."""
    for raw in file.read_text().splitlines():
        line = re.sub(r"(^|\s)#.*", "", raw).strip()
        if line.startswith("-r "):
            yield from asked(file.parent / line[3:])
        elif line and not line.startswith("-"):
            yield Requirement(line)


@pytest.mark.parametrize("file", [*ROOT.glob("requirements/*"), *LOCKS], ids=name)
def test_no_requirements_file_names_an_index_and_every_pin_has_a_hash(file: Path) -> None:
    text = file.read_text()
    assert re.search(r"://|--(extra-)?index|--find-links|--trusted-host", text) is None
    if file.suffix == ".txt":
        blocks = [block for block in re.split(r"\n(?=\S)", text) if not block.startswith("#")]
        assert len(blocks) == len(pins(file)) > 0
        assert [block.splitlines()[0] for block in blocks if "--hash=sha256:" not in block] == []


@pytest.mark.parametrize("file", INPUTS, ids=name)
def test_a_lock_holds_what_is_asked_for_in_an_allowed_version(file: Path) -> None:
    found = pins(file.with_suffix(".txt"))
    overrides = file.parent / "overrides.in"
    replaced = {
        canonicalize_name(each.name): each for each in (asked(overrides) if overrides.exists() else ())
    }
    wanted = {canonicalize_name(each.name): each for each in asked(file)} | replaced
    here = {each: one for each, one in wanted.items() if one.marker is None or one.marker.evaluate(HERE)}
    # An override only replaces: it asks for nothing, and what it takes out is not there.
    missing = [each for each in here if each not in found and each not in replaced]
    wrong = [
        f"{each}=={found[each]}"
        for each, one in here.items()
        if each in found and not one.specifier.contains(found[each], prereleases=True)
    ]
    unwanted = [each for each in wanted if each not in here and each in found]
    assert (missing, wrong, unwanted) == ([], [], []), "run `make lock`"
    if file.parent.name != "requirements":
        assert lock.read(file.with_suffix(".txt").read_text()) == found, "the smoke test reads it otherwise"


def test_locks_of_the_same_environment_and_jax_in_a_container_and_without_have_the_same_versions() -> None:
    together = [sorted(ROOT.glob("requirements/*.txt"))]
    together += [sorted(folder.parent.glob("requirements*.txt")) for folder in ROOT.glob("images/*/smoke.py")]
    together += [[ROOT / "requirements/tpu.txt", ROOT / "images/jax/requirements.txt"]]
    for files in together:
        versions: dict[str, set[str]] = {}
        for file in files:
            for each, version in pins(file).items():
                versions.setdefault(each, set()).add(version)
        assert {each: found for each, found in versions.items() if len(found) > 1} == {}, files
    assert {"jax", "jaxlib", "libtpu", "flax"} <= pins(together[-1][0]).keys() & pins(together[-1][1]).keys()


def test_what_builds_this_package_is_in_the_lock_so_that_an_install_fetches_nothing_more() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (build,) = map(Requirement, project["build-system"]["requires"])
    assert build in list(asked(ROOT / "requirements/run.in"))
