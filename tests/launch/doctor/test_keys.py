"""Keys: real ones of ssh-keygen's kind, with and without a passphrase, with and without an agent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import asyncssh
import pytest

from launch.doctor import workstation
from launch.doctor.check import Check, Said, carry_out
from launch.doctor.workstation import Answer, Machine

MakeMachine = Callable[..., Machine]


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
