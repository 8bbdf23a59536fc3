"""When something is installed, when nothing is, and what a person reads of it."""

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import install
from tools.install import Checkout, InstallError, bring_up_to_date

STAMP = {"root": "/checkout", "python": "/usr/bin/python3.12", "version": "3.12", "uv": "abc"}
WANTED = {"root": "/checkout", "python": "", "uv": "abc"}


class Steps:
    """Stands in for the tools that install: notes each step, leaves what they would, fails when told to."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failing: str | None = None

    def __call__(self, argv: Sequence[str], purpose: str, environ: Mapping[str, str]) -> None:
        self.done.append(purpose)
        if purpose == self.failing:
            raise InstallError(f"{purpose} failed; it said: no space left on device")
        if purpose == "making .venv":
            binaries = Path(argv[-1]) / "bin"
            binaries.mkdir(parents=True)
            (binaries / "python").symlink_to(argv[0])


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    recorded = Steps()
    monkeypatch.setattr(install, "carry_out", recorded)
    return recorded


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "checkout")


def make_checkout(root: Path) -> Path:
    (root / "requirements").mkdir(parents=True)
    for lock in ("uv", "dev", "gpu"):
        (root / "requirements" / f"{lock}.txt").write_text(f"{lock}-tool==1.0 \\\n    --hash=sha256:00\n")
    (root / "pyproject.toml").write_text("[project]\n")
    return root


def make(root: Path, lock: str | None = None, *, only_uv: bool = False) -> None:
    bring_up_to_date(Checkout(root, lock=lock, python="", environ=os.environ), only_uv=only_uv)


BASE = ["making .venv", "installing uv"]
DEV = ["installing requirements/dev.txt", "putting this checkout on .venv's path"]


def test_a_second_make_does_nothing_and_says_nothing(
    root: Path, steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    make(root)
    assert steps.done == BASE + DEV
    assert "installing 1 locked packages" in capsys.readouterr().out
    make(root)
    assert steps.done == BASE + DEV
    assert capsys.readouterr().out == ""


def test_touching_a_lock_installs_nothing(root: Path, steps: Steps) -> None:
    make(root)
    os.utime(root / "requirements" / "dev.txt", (2e9, 2e9))
    os.utime(root / "pyproject.toml", (2e9, 2e9))
    make(root)
    assert steps.done == BASE + DEV


@pytest.mark.parametrize("changed", ["requirements/dev.txt", "pyproject.toml"])
def test_a_changed_lock_or_project_is_installed_into_the_same_environment(
    root: Path, steps: Steps, changed: str
) -> None:
    make(root)
    (root / changed).write_text("other==2.0\n")
    make(root)
    assert steps.done == BASE + DEV + DEV


@pytest.mark.parametrize("failing", BASE + DEV)
def test_after_a_failed_step_the_next_make_goes_on(root: Path, steps: Steps, failing: str) -> None:
    steps.failing = failing
    with pytest.raises(InstallError, match="no space left"):
        make(root)
    steps.failing = None
    steps.done.clear()
    make(root)
    # What was finished is not done again: the environment itself, once uv is in it.
    assert steps.done == (BASE + DEV if failing in BASE else DEV)
    steps.done.clear()
    make(root)
    assert steps.done == []


def test_an_environment_whose_new_packages_failed_does_not_pass_for_whole(root: Path, steps: Steps) -> None:
    make(root)
    before = (root / "pyproject.toml").read_text()
    (root / "pyproject.toml").write_text("[project] # new\n")
    steps.failing = DEV[0]
    with pytest.raises(InstallError):
        make(root)
    # Back to the old lock: its packages may be half replaced, so the old stamp must not vouch for them.
    (root / "pyproject.toml").write_text(before)
    steps.failing = None
    steps.done.clear()
    make(root)
    assert steps.done == DEV


def test_a_moved_checkout_gets_a_new_environment_and_says_why(
    root: Path, steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    make(root)
    moved = root.rename(root.with_name("moved"))
    make(moved)
    assert steps.done == (BASE + DEV) * 2
    assert f"making .venv again: it was made for another folder, {root}" in capsys.readouterr().out


def test_an_environment_whose_interpreter_is_gone_is_made_again(
    root: Path, steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    make(root)
    python = root / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3.12")
    make(root)
    assert steps.done == (BASE + DEV) * 2
    assert "is gone" in capsys.readouterr().out


def test_a_linked_environment_is_not_removed(root: Path, steps: Steps, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (root / ".venv").symlink_to(elsewhere)
    with pytest.raises(InstallError, match="is a link"):
        make(root)
    assert (elsewhere / "kept").exists()
    assert steps.done == []


def test_an_environment_stays_on_its_lock_until_another_is_asked_for(root: Path, steps: Steps) -> None:
    make(root, lock="gpu")
    make(root)
    assert [step for step in steps.done if "requirements/" in step] == ["installing requirements/gpu.txt"]
    make(root, lock="dev")
    assert steps.done[-2] == "installing requirements/dev.txt"


def test_renewing_the_locks_needs_uv_and_no_packages(root: Path, steps: Steps) -> None:
    make(root, only_uv=True)
    assert steps.done == BASE
    make(root)
    assert steps.done == BASE + DEV


@pytest.mark.parametrize("text", ["", "{", "[]", '{"lock": "dev"}', "\x00"])
def test_a_torn_stamp_means_install_again_and_is_no_crash(root: Path, steps: Steps, text: str) -> None:
    make(root)
    (root / ".venv" / ".installed").write_text(text)
    make(root)
    assert steps.done == BASE + DEV + DEV


def test_a_missing_lock_is_named_with_the_command_that_restores_it(root: Path) -> None:
    (root / "requirements" / "dev.txt").unlink()
    with pytest.raises(InstallError, match="`git checkout -- requirements/dev.txt`"):
        make(root)


def test_of_two_makes_at_once_one_installs_and_the_other_waits(
    root: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    installing, waiting = threading.Event(), threading.Event()

    def slow_step(argv: Sequence[str], purpose: str, environ: Mapping[str, str]) -> None:
        installing.set()
        waiting.wait(5)
        steps(argv, purpose, environ)

    def heard(line: str, **_: object) -> None:
        if line.startswith("another make is installing"):
            waiting.set()

    monkeypatch.setattr(install, "carry_out", slow_step)
    monkeypatch.setattr(install, "print", heard, raising=False)
    # Locks of two open files exclude each other whether or not the files are one process's.
    makes = [threading.Thread(target=make, args=(root,)) for _ in range(2)]
    makes[0].start()
    assert installing.wait(30)
    makes[1].start()
    for thread in makes:
        thread.join(60)
    assert waiting.is_set()
    assert steps.done == BASE + DEV


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_different_files_never_have_the_same_fingerprint(one: list[bytes], other: list[bytes]) -> None:
    assert (install.fingerprint(*one) == install.fingerprint(*other)) == (one == other)


def test_a_lock_is_counted_by_its_pins() -> None:
    lock = "# jax==9\njax==0.12.0 \\\n    --hash=sha256:aa\netils[epath]==1 ; sys_platform == 'linux'\n"
    assert install.count_packages(lock) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"root": "/old"}, "another folder, /old"),
        ({"version": "3.13"}, "was Python 3.13 and is now 3.12"),
        ({"uv": "old"}, "another uv"),
    ],
)
def test_the_reason_to_make_an_environment_again_is_said(change: dict[str, str], words: str | None) -> None:
    reason = install.reason_to_rebuild({**STAMP, **change}, WANTED, "3.12")
    assert reason == words if words is None else words in (reason or "")


def test_another_python_is_taken_only_when_asked_for() -> None:
    asked = {**WANTED, "python": "/opt/python3.13"}
    reason = install.reason_to_rebuild(STAMP, asked, "3.12")
    assert reason == "it has /usr/bin/python3.12, and PYTHON asks for /opt/python3.13"
    assert install.reason_to_rebuild(STAMP, {**asked, "python": STAMP["python"]}, "3.12") is None


def test_a_setting_that_leads_installs_elsewhere_is_dropped_and_a_mirror_is_kept() -> None:
    kept = install.calm({"PYTHONPATH": "/x", "PIP_TARGET": "/z", "UV_DEFAULT_INDEX": "mirror"})
    assert kept == {"UV_DEFAULT_INDEX": "mirror", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def test_a_failed_step_shows_what_the_tool_said() -> None:
    failing = [sys.executable, "-c", "import sys; print('on stdout'); sys.exit('No space left on device')"]
    with pytest.raises(InstallError, match=r"(?s)making x failed.*on stdout.*No space left.*make again"):
        install.carry_out(failing, "making x", os.environ)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.1, "1 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (75, "1 min 15 s")]
)
def test_a_duration_reads_as_a_person_would_say_it(seconds: float, words: str) -> None:
    assert install.duration(seconds) == words
