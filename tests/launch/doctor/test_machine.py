"""This machine, as `fab doctor` sees it."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.doctor import workstation
from launch.doctor.check import ok
from launch.doctor.workstation import Answer, Machine
from launch.jobs import CHECKOUT

MakeMachine = Callable[..., Machine]


def test_an_old_python_is_a_failure_with_the_way_to_another() -> None:
    assert workstation.python((3, 12, 0)).state == "ok"
    old = workstation.python((3, 11, 9))
    assert old.state == "fail" and "3.11.9" in old.message and "make install" in old.remedy


def test_an_environment_that_is_not_in_step_with_its_lock_names_what_is_not(tmp_path: Path) -> None:
    lock = tmp_path / "run.txt"
    lock.write_text(
        "# made\njax==0.12.0 \\\n    --hash=sha256:00\nonly-on-windows==1 ; sys_platform == 'win32' \\\n"
        "    --hash=sha256:01\nfsspec==2 \\\n    --hash=sha256:02\nuvloop[x]==3\n"
    )
    have = {"jax": "0.12.0", "fsspec": "1"}

    def installed(name: str) -> str:
        if name not in have:
            raise importlib.metadata.PackageNotFoundError(name)
        return have[name]

    said = workstation.packages(lock, installed)
    assert said.state == "fail" and said.remedy == "`make install`"
    assert said.message == "not as in requirements/run.txt: fsspec is 1, not 2, uvloop 3 is missing"
    have.update(fsspec="2", uvloop="3")
    assert workstation.packages(lock, installed).message == "all 3 as in requirements/run.txt"


def test_every_pin_of_the_real_lock_is_read() -> None:
    lines = (CHECKOUT / "requirements" / "run.txt").read_text().splitlines()
    pins = [line for line in lines if line and line[0] not in "# "]
    assert len(workstation.PIN.findall("\n".join(lines))) == len(pins) > 50


def test_a_full_disk_fails_and_a_small_one_is_worth_a_word(tmp_path: Path) -> None:
    states = [workstation.disk(tmp_path / "not" / "made", free).state for free in (2**40, 2**30, 2**20)]
    assert states == ["ok", "warn", "fail"]


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("v3.251.0", "ok"),
        ("v3.250.0\n", "ok"),
        ("v3.249.1", "warn"),
        ("v4.0.0", "ok"),
        ("hello", "warn"),
        ("v2.99.0", "warn"),
    ],
)
def test_pulumis_command_line_must_not_be_older_than_its_package(
    make_machine: MakeMachine, said: str, state: str
) -> None:
    assert workstation.pulumi(make_machine({"pulumi version": said}).ask, "3.250.4").state == state


def test_tools_that_are_not_installed_are_told_with_where_to_get_them(make_machine: MakeMachine) -> None:
    bare = make_machine()
    assert "pulumi.com" in workstation.pulumi(bare.ask, "3.250.0").remedy
    assert "cloud.google.com/sdk" in workstation.gcloud(bare.ask)[0].remedy


@pytest.mark.parametrize(
    ("version", "state"),
    [("477.0.1", "fail"), ("478.0.0", "ok"), ("550.0.0", "ok"), ("99.0.0", "fail"), (None, "warn")],
)
def test_gcloud_has_to_be_one_whose_tunnels_reach_tpu_hosts(
    make_machine: MakeMachine, version: str | None, state: str
) -> None:
    said = json.dumps({"Google Cloud SDK": version, "core": "2026.01.01"}) if version else "hello"
    answers = {"gcloud version": said, "gcloud auth list": "a@example.org\n"}
    found = workstation.gcloud(make_machine(answers).ask)
    assert [each.state for each in found] == [state, "ok"]
    assert found[1].message == "as a@example.org"


def test_gcloud_without_an_account_is_a_failure_and_its_two_logins_are_told_apart(
    make_machine: MakeMachine,
) -> None:
    for answer in ("", Answer(exit_code=1, stderr="ERROR: broken")):
        said = workstation.gcloud_account(make_machine({"gcloud auth list": answer}).ask)
        assert said.state == "fail" and said.remedy.startswith(
            "`gcloud auth login`; `gcloud auth application-default"
        )


def test_a_pulumi_that_is_not_logged_in_is_worth_a_word_and_its_user_is_not_told(
    make_machine: MakeMachine,
) -> None:
    command = "pulumi whoami"
    assert workstation.pulumi_login(make_machine({command: "ada@example.org\n"}).ask) == ok("there is one")
    refused = Answer(exit_code=255, stderr="error: PULUMI_ACCESS_TOKEN must be set for login")
    said = workstation.pulumi_login(make_machine({command: refused}).ask)
    assert said.state == "warn" and said.remedy.startswith("`pulumi login`")


def test_a_command_is_given_nothing_to_read_and_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workstation.ask([sys.executable, "-c", "input()"]).exit_code == 1
    assert workstation.ask(["/no/such/command"]).exit_code is None
    monkeypatch.setattr(workstation, "COMMAND_LIMIT_S", 0.2)
    slow = workstation.ask([sys.executable, "-c", "import time; time.sleep(60)"])
    assert slow.exit_code == -1 and "no answer" in slow.last_line
