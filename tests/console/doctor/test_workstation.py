"""This machine and its accounts, as `fab doctor` sees them: every answer is a finding, none a hang or a token."""

import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import asyncssh
import google.auth.exceptions
import pytest

from console.doctor import workstation
from console.doctor.check import Check, Finding, carry_out
from console.doctor.workstation import Answer, Machine
from launch.jobs import CHECKOUT


def machine(answers: Mapping[str, Answer | str] | None = None, home: Path = Path("/nowhere")) -> Machine:
    """answers: the beginning of a command → what it answers; any other is not installed."""

    def ask(argv: Sequence[str]) -> Answer:
        command = " ".join(argv)
        for beginning, answer in (answers or {}).items():
            if command.startswith(beginning):
                return Answer(exit_code=0, stdout=answer) if isinstance(answer, str) else answer
        return Answer(exit_code=None)

    return Machine(environ={}, home=home, checkout=home, cache_dir=home, ask=ask)


def test_an_old_python_and_a_full_disk_are_failures_and_a_small_disk_is_worth_a_word(tmp_path: Path) -> None:
    assert workstation.python((3, 12, 0)).state == "ok"
    old = workstation.python((3, 11, 9))
    assert old.state == "fail" and "3.11.9" in old.message and "make install" in old.remedy
    states = [workstation.disk(tmp_path / "not" / "made", free).state for free in (2**40, 2**30, 2**20)]
    assert states == ["ok", "warn", "fail"]


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
    lines = (CHECKOUT / "requirements" / "run.txt").read_text().splitlines()
    pins = [line for line in lines if line and line[0] not in "# "]
    assert len(workstation.PIN.findall("\n".join(lines))) == len(pins) > 50


@pytest.mark.parametrize(
    ("said", "state"),
    [
        *(("v3.251.0", "ok"), ("v3.250.0\n", "ok"), ("v4.0.0", "ok")),
        *(("v3.249.1", "warn"), ("v2.99.0", "warn"), ("hello", "warn"), (Answer(exit_code=None), "warn")),
    ],
)
def test_pulumis_command_line_must_not_be_older_than_its_package(said: str | Answer, state: str) -> None:
    found = workstation.pulumi(machine({"pulumi version": said}).ask, "3.250.4")
    assert (found.state, bool(found.remedy)) == (state, state != "ok")


@pytest.mark.parametrize(
    ("version", "account", "states"),
    [
        ("478.0.0", "a@example.org\n", ["ok", "ok"]),
        ("477.0.1", "a@example.org\n", ["fail", "ok"]),
        ("99.0.0", "", ["fail", "fail"]),
        (None, Answer(exit_code=1, stderr="ERROR: broken"), ["warn", "fail"]),
    ],
)
def test_gcloud_has_to_have_an_account_and_tunnels_that_reach_tpu_hosts(
    version: str | None, account: str | Answer, states: list[str]
) -> None:
    said = json.dumps({"Google Cloud SDK": version, "core": "2026.01.01"}) if version else "hello"
    found = workstation.gcloud(machine({"gcloud version": said, "gcloud auth list": account}).ask)
    assert [each.state for each in found] == states
    if states[1] == "fail":  # its two logins are told apart
        assert found[1].remedy.startswith("`gcloud auth login`; `gcloud auth application-default")
    (absent,) = workstation.gcloud(machine().ask)
    assert absent.state == "fail" and "cloud.google.com/sdk" in absent.remedy


# --- keys and OS Login --------------------------------------------------------------------------------------------


@pytest.fixture
def make_key(tmp_path: Path) -> Callable[..., str]:
    """Writes a key pair as ssh-keygen does; the public key, as "TYPE BASE64"."""

    def make(name: str = "id_ed25519", passphrase: str | None = None) -> str:
        folder = tmp_path / ".ssh"
        folder.mkdir(exist_ok=True)
        key = asyncssh.generate_private_key("ssh-ed25519", comment="somebody@somewhere")
        (folder / name).write_bytes(
            key.export_private_key(passphrase=passphrase, rounds=1, ignore_few_rounds=True)
        )
        (folder / name).chmod(0o600)
        public = key.export_public_key().decode()
        (folder / f"{name}.pub").write_text(public)
        return " ".join(public.split()[:2])

    return make


def said(
    here: Machine, look: Callable[[Machine], list[Finding]] = workstation.usable
) -> list[tuple[str, str, str]]:
    found = carry_out([Check("this machine", "ssh keys", lambda: look(here))])
    return [(each.state, each.message, each.remedy) for each in found]


def test_one_key_that_nobody_has_to_unlock_and_nobody_else_may_read_is_enough(
    make_key: Callable[..., str], tmp_path: Path
) -> None:
    here = machine(home=tmp_path)
    ((state, _, remedy),) = said(here)
    assert state == "fail" and "ssh-keygen" in remedy
    make_key("google_compute_engine", passphrase="secret")
    ((state, message, _),) = said(here)
    assert state == "fail" and "ssh-add" in message
    make_key()
    fine, locked = said(here)
    assert fine[0] == "ok" and locked[0] == "warn" and "has a passphrase" in locked[1]
    (tmp_path / ".ssh/id_ed25519").chmod(0o644)
    *_, (state, _, remedy) = said(here)
    assert state == "warn" and remedy.startswith("chmod 600")


def profile(*public: str) -> str:
    known = {str(number): {"key": f"{key} me@laptop"} for number, key in enumerate(public)}
    return json.dumps({"posixAccounts": [{"username": "me_example_org"}], "sshPublicKeys": known})


def test_os_login_has_to_know_one_of_this_machines_keys(make_key: Callable[..., str], tmp_path: Path) -> None:
    other, public = make_key("id_rsa"), make_key()
    (tmp_path / ".ssh/id_rsa").unlink()

    def asked(answer: str | Answer) -> tuple[str, str, str]:
        (found,) = said(machine({"gcloud compute os-login": answer}, tmp_path), workstation.os_login)
        return found

    state, message, _ = asked(profile(other, "no key", public))
    assert state == "ok" and "me_example_org" in message
    state, message, remedy = asked(profile(other))
    assert state == "fail" and "SHA256:" in message and "os-login ssh-keys add" in remedy
    for answer in ("{}", '{"posixAccounts": [{}]}', '{"posixAccounts": [{"username": "me"}]}'):
        state, message, remedy = asked(answer)
        assert state == "warn" and "the first connection adds somebody@somewhere" in message
        assert "os-login ssh-keys add" in remedy
    unreadable = '{"posixAccounts": [{"username": "me"}], "sshPublicKeys": ["x"]}'
    answers: list[str | Answer] = [Answer(exit_code=1, stderr="x"), Answer(exit_code=None)]
    for each in ("[]", "not json", unreadable, *answers):
        state, _, remedy = asked(each)
        assert state == "fail" and remedy


# --- Google accounts ----------------------------------------------------------------------------------------------


def refusing(error: Exception) -> Callable[[], Any]:
    def credentials() -> Any:
        raise error

    return credentials


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (google.auth.exceptions.DefaultCredentialsError("none"), "fail"),  # type: ignore[no-untyped-call]
        (google.auth.exceptions.RefreshError("expired"), "fail"),  # type: ignore[no-untyped-call]
        (google.auth.exceptions.TransportError("no route"), "warn"),  # type: ignore[no-untyped-call]
    ],
)
def test_missing_and_refused_credentials_are_told_apart_from_a_network_that_is_away(
    monkeypatch: pytest.MonkeyPatch, error: Exception, state: str
) -> None:
    monkeypatch.setattr(workstation, "_credentials", refusing(error))
    assert workstation.default_credentials({}).state == state


def test_no_token_is_in_a_finding_and_a_rehearsal_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Credentials:
        token = "ya29.secret"

    monkeypatch.setattr(workstation, "_credentials", lambda: (Credentials(), "p"))
    said = workstation.default_credentials({})
    assert said.state == "ok" and "ya29" not in said.message
    monkeypatch.setattr(workstation, "_credentials", refusing(AssertionError()))
    environ = {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"}
    assert workstation.default_credentials(environ).state == "skip"
    assert [said.state for said in workstation.roles("p", environ)] == ["skip"]


def test_a_role_that_is_missing_is_named_and_one_that_cannot_be_asked_for_is_no_failure() -> None:
    def has(*names: str) -> workstation.Test:
        return lambda project, wanted: [name for name in wanted if name in names]

    def refused(project: str, wanted: Sequence[str]) -> Sequence[str]:
        raise RuntimeError("403")

    assert [said.state for said in workstation.roles("p", {}, has(*workstation.PERMISSIONS))] == ["ok"]
    (lacking,) = workstation.roles("p", {}, has("compute.instances.osLogin"))
    assert lacking.state == "warn" and "roles/iap.tunnelResourceAccessor" in lacking.remedy
    assert [said.state for said in workstation.roles("p", {}, refused)] == ["warn"]
