"""When something is installed, when nothing is, and with which Python."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tools import install
from tools.install import Checkout, InstallError, bring_up_to_date

ROOT = Path("/checkout")
STAMP = {"root": "/checkout", "python": "/usr/bin/python3.12", "version": "3.12.1"}
UV, VENV = "fetching uv", "making .venv"
DEV = ["installing requirements/dev.txt", "putting this checkout on .venv's path"]
ALL = [UV, VENV, *DEV]
PACKAGES = ("google", "protobuf-6.33.dist-info", "tqdm", "tqdm-4.70.dist-info")


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


class Steps:
    """Stands in for the tools that install: notes each step, leaves what they would, fails when told to."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.reinstalled = False
        self.failing: str | None = None

    def __call__(self, argv: Sequence[str], purpose: str, environ: Mapping[str, str]) -> None:
        if purpose == "making a place for pip":  # by the Python of these tests, which may have none
            return
        self.done.append(purpose)
        if purpose == UV:
            program(Path(argv[argv.index("--target") + 1]) / "bin" / "uv", f"echo {sys.executable}")
        elif purpose == VENV:
            (Path(argv[-1]) / "bin").mkdir(parents=True)
            (Path(argv[-1]) / "bin" / "python").symlink_to(argv[argv.index("--python") + 1])
        elif purpose == DEV[0]:
            self.reinstalled = "--reinstall" in argv
            # As uv, it looks at versions only.
            folder = Path(argv[argv.index("--python") + 1]).parents[1] / "lib/python3.12/site-packages"
            missing = PACKAGES if self.reinstalled or not folder.exists() else PACKAGES[1:]
            for name in missing:
                (folder / name).mkdir(parents=True, exist_ok=True)
            for name in {each.name for each in folder.iterdir()} - {*PACKAGES, "ipdb-1.0.dist-info"}:
                (folder / name).rmdir()
        if purpose == self.failing:
            raise InstallError(f"{purpose} failed; it said: no space left on device")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    recorded = Steps()
    monkeypatch.setattr(install, "carry_out", recorded)
    return recorded


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "requirements").mkdir(parents=True)
    for lock in ("uv", "dev", "gpu"):
        (root / "requirements" / f"{lock}.txt").write_text(f"{lock}-tool==1.0 \\\n    --hash=sha256:00\n")
    (root / "pyproject.toml").write_text("[project]\n")
    return root


def make(root: Path, lock: str | None = None, *, only_uv: bool = False, python: str = "") -> None:
    bring_up_to_date(Checkout(root, lock=lock, python=python, environ=os.environ), only_uv=only_uv)


def test_a_second_make_installs_only_what_changed_and_otherwise_does_and_says_nothing(
    root: Path, steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    make(root)
    assert steps.done == ALL
    assert "installing 1 locked packages" in capsys.readouterr().out
    for name in ("requirements/dev.txt", "pyproject.toml"):
        os.utime(root / name, (2e9, 2e9))
    make(root)
    assert steps.done == ALL
    assert capsys.readouterr().out == ""
    for changed, again in (
        ("requirements/dev.txt", DEV),
        ("pyproject.toml", DEV),
        (".venv/.installed", ALL[1:]),  # a torn stamp makes a new environment
        ("requirements/uv.txt", []),
    ):
        steps.done.clear()
        (root / changed).write_text("other==2.0\n")
        make(root)
        assert steps.done == again, changed


@pytest.mark.parametrize(
    ("removed", "added", "said", "syncs"),
    [
        (
            "protobuf-6.33.dist-info",
            "protobuf-4.25.dist-info",
            "protobuf-4.25.dist-info, protobuf-6.33.dist-info",
            1,
        ),
        ("google", None, "google", 2),
        (None, "ipdb-1.0.dist-info", None, 0),  # somebody's own
    ],
)
def test_packages_that_somebody_else_has_replaced_or_removed_are_installed_again(
    root: Path,
    steps: Steps,
    capsys: pytest.CaptureFixture[str],
    removed: str | None,
    added: str | None,
    said: str | None,
    syncs: int,
) -> None:
    make(root)
    packages = root / ".venv/lib/python3.12/site-packages"
    if removed:
        (packages / removed).rmdir()
    if added:
        (packages / added).mkdir()
    steps.done.clear()
    capsys.readouterr()
    make(root)
    assert steps.done == DEV * syncs
    assert steps.reinstalled == (syncs == 2)
    assert (f"has removed or replaced {said}\n" in capsys.readouterr().out) == bool(said)


@pytest.mark.parametrize("failing", ALL)
def test_after_a_failed_step_the_next_make_goes_on_from_there(root: Path, steps: Steps, failing: str) -> None:
    steps.failing = failing
    with pytest.raises(InstallError, match="no space left"):
        make(root)
    steps.failing = None
    steps.done.clear()
    make(root)
    expected = DEV if failing in DEV else ALL[ALL.index(failing) :]
    assert steps.done == expected
    make(root)
    assert steps.done == expected
    # Other packages failed, and it is back to the old lock: they may be half replaced.
    before = (root / "pyproject.toml").read_text()
    (root / "pyproject.toml").write_text("[project] # new\n")
    steps.failing = DEV[0]
    with pytest.raises(InstallError):
        make(root)
    (root / "pyproject.toml").write_text(before)
    steps.failing = None
    steps.done.clear()
    make(root)
    assert steps.done == DEV


def test_a_moved_checkout_a_lost_interpreter_and_a_linked_environment_are_told_and_only_the_last_is_left(
    root: Path, steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    make(root)
    moved = root.rename(root.with_name("moved"))
    make(moved)
    assert f"making .venv again: it was made for another folder, {root}" in capsys.readouterr().out
    (moved / ".venv" / "bin" / "python").unlink()
    make(moved)
    assert "is gone" in capsys.readouterr().out
    assert steps.done == ALL + ALL[1:] * 2
    elsewhere = (moved / ".venv").rename(root.with_name("elsewhere"))
    (elsewhere / ".installed").unlink()
    (moved / ".venv").symlink_to(elsewhere)
    with pytest.raises(InstallError, match="is a link"):  # which is not removed
        make(moved)
    assert (elsewhere / "bin").exists()


def test_an_environment_stays_on_its_lock_until_another_is_asked_for(root: Path, steps: Steps) -> None:
    make(root, only_uv=True)
    assert steps.done == [UV]
    make(root, lock="gpu")
    make(root)
    assert [step for step in steps.done if "requirements/" in step] == ["installing requirements/gpu.txt"]
    make(root, lock="dev")
    assert steps.done[-2] == "installing requirements/dev.txt"
    (root / "requirements" / "dev.txt").unlink()
    with pytest.raises(InstallError, match="`git checkout -- requirements/dev.txt`"):
        make(root)


@pytest.mark.parametrize(
    ("python", "asked", "reason"),
    [
        ("3.12.9", "", None),
        ("3.12.1", "/usr/bin/python3.12", None),
        ("3.13.0", "", "is now 3.13.0"),
        ("3.12.1", "/opt/python3.13", "PYTHON asks for /opt/python3.13"),
    ],
)
def test_an_environment_is_made_again_for_another_python(python: str, asked: str, reason: str | None) -> None:
    given = install.reason_to_rebuild(STAMP, ROOT, python, asked)
    assert given is None if reason is None else reason in (given or "")


def test_settings_that_mislead_are_dropped_and_a_failed_step_shows_what_was_said() -> None:
    kept = install.calm(
        {"PYTHONPATH": "/x", "PIP_TARGET": "/z", "PIP_USER": "1", "UV_DEFAULT_INDEX": "mirror"}
    )
    assert kept["UV_DEFAULT_INDEX"] == "mirror"
    assert {"PYTHONPATH", "PIP_TARGET"}.isdisjoint(kept)
    assert (kept["PIP_USER"], kept["PIP_REQUIRE_VIRTUALENV"]) == ("0", "0")
    failing = [sys.executable, "-c", "import sys; print('on stdout'); sys.exit('No space left on device')"]
    with pytest.raises(InstallError, match=r"(?s)making x failed.*on stdout.*No space left.*make again"):
        install.carry_out(failing, "making x", os.environ)


def test_a_python_that_will_not_do_is_an_error_that_says_the_ways_to_get_one_and_no_other_is_taken(
    root: Path, tmp_path: Path
) -> None:
    environ = {"PATH": "/nonexistent", "HOME": str(tmp_path), "UV_CACHE_DIR": str(tmp_path / "cache")}
    checkout = Checkout(root, lock=None, python="", environ=environ)
    checkout.uv = str(Path(sys.executable).with_name("uv"))
    with pytest.raises(InstallError, match=r"has: none; install one .*make PYTHON="):
        checkout.find_python()
    with pytest.raises(InstallError, match="PYTHON=/nowhere/python3.12: this does not run"):
        make(root, python="/nowhere/python3.12")
    old = program(tmp_path / "python3.11", "printf '/usr/bin/python3.11\\n3.11.2\\n'")
    with pytest.raises(InstallError, match="this is Python 3.11.2; name a Python 3.12 or newer"):
        make(root, python=str(old))
