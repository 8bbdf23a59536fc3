"""This machine, as `fab doctor` sees it."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path

import asyncssh
import pytest

from launch.doctor import workstation
from launch.doctor.check import Check, Said, carry_out, ok
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


@pytest.fixture
def make_key(tmp_path: Path) -> Callable[..., str]:
    """Writes a key pair as ssh-keygen does; the public key, as "TYPE BASE64"."""

    def make(name: str = "id_ed25519", passphrase: str | None = None) -> str:
        folder = tmp_path / ".ssh"
        folder.mkdir(exist_ok=True)
        key = asyncssh.generate_private_key("ssh-ed25519", comment="somebody@somewhere")
        (folder / name).write_bytes(key.export_private_key(passphrase=passphrase))
        (folder / name).chmod(0o600)
        public = key.export_public_key().decode()
        (folder / f"{name}.pub").write_text(public)
        return " ".join(public.split()[:2])

    return make


def said(
    machine: Machine, look: Callable[[Machine], list[Said]] = workstation.usable
) -> list[tuple[str, str, str]]:
    return [
        (each.state, each.message, each.remedy)
        for each in carry_out([Check("this machine", "ssh keys", lambda: look(machine))])
    ]


def test_a_machine_without_any_key_is_told_how_to_make_one(make_machine: MakeMachine) -> None:
    ((state, _, remedy),) = said(make_machine())
    assert state == "fail" and "ssh-keygen" in remedy


def test_one_key_that_nobody_has_to_unlock_is_enough(
    make_machine: MakeMachine, make_key: Callable[..., str]
) -> None:
    make_key()
    assert [state for state, _, _ in said(make_machine())] == ["ok"]
    make_key("google_compute_engine", passphrase="secret")
    fine, locked = said(make_machine())
    assert fine[0] == "ok" and locked[0] == "warn" and "has a passphrase" in locked[1]


def test_a_key_with_a_passphrase_alone_is_a_failure(
    make_machine: MakeMachine, make_key: Callable[..., str]
) -> None:
    make_key(passphrase="secret")
    ((state, message, _),) = said(make_machine())
    assert state == "fail" and "ssh-add" in message


def test_a_key_that_others_may_read_is_worth_a_word(
    make_machine: MakeMachine, make_key: Callable[..., str], tmp_path: Path
) -> None:
    make_key()
    (tmp_path / ".ssh/id_ed25519").chmod(0o644)
    _, (state, _, remedy) = said(make_machine())
    assert state == "warn" and remedy.startswith("chmod 600")


def profile(*public: str) -> str:
    known = {str(number): {"key": f"{key} me@laptop"} for number, key in enumerate(public)}
    return json.dumps({"posixAccounts": [{"username": "me_example_org"}], "sshPublicKeys": known})


def test_os_login_has_to_know_one_of_this_machines_keys(
    make_machine: MakeMachine, make_key: Callable[..., str]
) -> None:
    other, public = make_key("id_rsa"), make_key()
    (Path(make_machine().home) / ".ssh/id_rsa").unlink()
    command = "gcloud compute os-login describe-profile"
    ((state, message, _),) = said(
        make_machine({command: profile(other, "no key", public)}), workstation.os_login
    )
    assert state == "ok" and "me_example_org" in message
    ((state, message, remedy),) = said(make_machine({command: profile(other)}), workstation.os_login)
    assert state == "fail" and "SHA256:" in message and "os-login ssh-keys add" in remedy


@pytest.mark.parametrize(
    "answer",
    [
        "[]",
        "not json",
        '{"posixAccounts": [{"username": "me"}], "sshPublicKeys": ["x"]}',
        Answer(exit_code=1, stderr="x"),
        Answer(exit_code=None),
    ],
)
def test_whatever_gcloud_answers_of_os_login_is_a_finding_with_a_remedy(
    make_machine: MakeMachine, make_key: Callable[..., str], answer: Answer | str
) -> None:
    make_key()
    ((state, _, remedy),) = said(make_machine({"gcloud compute": answer}), workstation.os_login)
    assert state == "fail" and remedy


@pytest.mark.parametrize(
    "answer", ["{}", '{"posixAccounts": [{}]}', '{"posixAccounts": [{"username": "me"}]}']
)
def test_an_account_without_any_key_is_told_that_the_first_connection_adds_one(
    make_machine: MakeMachine, make_key: Callable[..., str], answer: str
) -> None:
    make_key()
    ((state, message, remedy),) = said(make_machine({"gcloud compute": answer}), workstation.os_login)
    assert state == "warn" and "the first connection adds somebody@somewhere" in message
    assert "os-login ssh-keys add" in remedy
