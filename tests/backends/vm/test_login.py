"""Who logs in and with which key: nothing is asked for, and what is missing is said at once."""

import asyncio
import dataclasses
import getpass
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncssh
import pytest

from backends.vm import login
from backends.vm.connection import Ssh
from backends.vm.login import MOST_OFFERED, Identities, load, os_login_user, user_of_profile
from backends.vm.transport import SshTransport
from launch.hosts import HostError
from tests.backends.vm.conftest import Server, write_key


def loaded(home: Path) -> Identities:
    async def work() -> Identities:
        found = await load(os.environ, home)
        await found.close()
        return found

    return asyncio.run(work())


def lock(path: Path) -> None:
    key = asyncssh.read_private_key(path)
    key.write_private_key(path, passphrase="secret", rounds=1, ignore_few_rounds=True)


@pytest.fixture
def agent(
    tmp_path: Path, user_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Path], None]]:
    """A real SSH agent; the function puts a key into it."""
    socket_path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket_path)], stdout=subprocess.DEVNULL)
    until_s = time.monotonic() + 30
    while not socket_path.exists():
        assert time.monotonic() < until_s
        time.sleep(0.02)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(socket_path))

    def add(path: Path) -> None:
        subprocess.run(["ssh-add", "-q", str(path)], check=True, stdin=subprocess.DEVNULL)

    yield add
    process.terminate()
    process.wait(30)


def test_a_key_with_a_passphrase_is_used_through_the_agent_alone(
    agent: Callable[[Path], None], user_home: Path, serve: Callable[..., Server], ssh: Ssh
) -> None:
    server = serve()
    agent(user_home / ".ssh" / "id_ed25519")
    lock(user_home / ".ssh" / "id_ed25519")
    found = loaded(user_home)
    assert (found.names, found.kept_back) == (("id_ed25519",), ())
    SshTransport(server.access, ssh).connect().result(30)


def test_a_key_with_a_passphrase_and_no_agent_is_said_at_once(
    user_home: Path, serve: Callable[..., Server], ssh: Ssh
) -> None:
    lock(user_home / ".ssh" / "id_ed25519")
    before_s = time.monotonic()
    with pytest.raises(
        HostError, match=r"host-0: .*id_ed25519 has a passphrase, and no agent holds it .*ssh-add"
    ):
        SshTransport(serve().access, ssh).connect().result(30)
    assert time.monotonic() - before_s < 10
    write_key(user_home / ".ssh" / "id_ecdsa")  # no server lets it in
    with pytest.raises(
        HostError, match=r"host-1: does not let \w+ in with id_ecdsa; .*id_ed25519 has a passphrase"
    ):
        SshTransport(serve().access, ssh).connect().result(30)


def test_the_key_that_the_environment_names_is_the_only_one_offered(
    agent: Callable[[Path], None], user_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_key(tmp_path / "held")
    agent(tmp_path / "held")
    write_key(tmp_path / "mine")
    monkeypatch.setenv("TPU_STACK_SSH_KEY", str(tmp_path / "mine"))
    assert loaded(user_home).names == ("mine",)
    monkeypatch.setenv("TPU_STACK_SSH_KEY", str(tmp_path / "missing"))
    with pytest.raises(HostError, match="missing cannot be read: No such file"):
        loaded(user_home)


def test_no_more_keys_are_offered_than_a_server_takes_and_an_agent_that_is_none_is_named(
    agent: Callable[[Path], None], user_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MOST_OFFERED + 2):
        write_key(tmp_path / f"held-{number}")
        agent(tmp_path / f"held-{number}")
    found = loaded(user_home)
    assert len(found.keys) == MOST_OFFERED
    assert found.names[0] == "id_ed25519"
    assert "3 more keys are not offered" in found.kept_back[0]
    (tmp_path / "socket").write_text("")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "socket"))
    found = loaded(user_home)
    assert found.names == ("id_ed25519",)
    assert "the SSH agent at" in found.kept_back[0]


def test_the_primary_account_of_os_login_gives_the_user() -> None:
    accounts = [{"username": "first"}, {"username": "mine", "primary": True}]
    assert user_of_profile(json.dumps({"posixAccounts": accounts})) == "mine"
    assert user_of_profile(json.dumps({"posixAccounts": accounts[:1]})) == "first"
    for text in ("", "[]", "{}", '{"posixAccounts": []}', '{"posixAccounts": [{}]}'):
        with pytest.raises(HostError, match="has no user name in OS Login yet"):
            user_of_profile(text)


OF_ANOTHER_MACHINE = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().strip()


def test_gcloud_is_asked_once_for_all_hosts(
    program: Callable[[str, str], Path], serve: Callable[..., Server], ssh: Ssh, tmp_path: Path
) -> None:
    profile = json.dumps(
        {"posixAccounts": [{"username": "no_such_user"}], "sshPublicKeys": {"1": {"key": OF_ANOTHER_MACHINE}}}
    )
    program("gcloud", f"echo \"$@\" >>{tmp_path}/asked; echo '{profile}'")
    hosts = [dataclasses.replace(serve().access, user=None, os_login=True) for _ in range(2)]
    for future in [SshTransport(access, ssh).connect() for access in hosts]:
        with pytest.raises(HostError, match="does not let no_such_user in"):
            future.result(30)
    assert (tmp_path / "asked").read_text() == "compute os-login describe-profile --format=json\n"


def test_what_keeps_gcloud_from_answering_is_said(
    program: Callable[[str, str], Path], user_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(
        "gcloud", "echo 'ERROR: (gcloud) You do not currently have an active account selected.' >&2; exit 1"
    )
    with pytest.raises(HostError, match="not currently have an active account.*gcloud auth login"):
        asyncio.run(os_login_user())
    does_not_take = "*) echo 'ERROR: Login profile size exceeds 32 KiB.' >&2; exit 1"
    program("gcloud", f"case $* in *describe*) echo '{{}}';; {does_not_take};; esac")
    with pytest.raises(HostError, match="gcloud does not take a key for OS Login: ERROR: Login profile size"):
        asyncio.run(os_login_user("p", loaded(user_home)))
    program("gcloud", "exec sleep 600")
    monkeypatch.setattr(login, "PROFILE_LIMIT_S", 0.5)
    with pytest.raises(HostError, match="gave no answer within 0.5 s"):
        asyncio.run(os_login_user())
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(HostError, match="gcloud cannot be run.*install the Google Cloud CLI"):
        asyncio.run(os_login_user())


NEW_ACCOUNT = """
case "$*" in
*describe-profile*) cat {folder}/profile ;;
*"ssh-keys add"*) echo "$@" >>{folder}/added; echo '{after}' >{folder}/profile ;;
esac
"""


def test_an_account_that_os_login_knows_no_key_of_gets_this_machines_first_one_once_and_is_told(
    program: Callable[[str, str], Path],
    serve: Callable[..., Server],
    ssh: Ssh,
    user_home: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    expired = {"key": OF_ANOTHER_MACHINE, "expirationTimeUsec": "1700000000000000"}
    (tmp_path / "profile").write_text(json.dumps({"name": "1", "sshPublicKeys": {"old": expired}}))
    public = " ".join((user_home / ".ssh" / "id_ed25519.pub").read_text().split()[:2])
    after = {"posixAccounts": [{"username": getpass.getuser()}], "sshPublicKeys": {"1": {"key": public}}}
    program("gcloud", NEW_ACCOUNT.format(folder=tmp_path, after=json.dumps(after)))
    hosts = [dataclasses.replace(serve().access, user=None, os_login=True, project="p-1") for _ in range(2)]
    for future in [SshTransport(access, ssh).connect() for access in hosts]:
        future.result(30)
    wanted = f"compute os-login ssh-keys add --key={public} --format=json --project=p-1\n"
    assert (tmp_path / "added").read_text() == wanted
    told = capfd.readouterr().err
    assert told.count("added id_ed25519 (SHA256:") == 1 and "ssh-keys list" in told
    with Ssh() as later:
        SshTransport(hosts[0], later).connect().result(30)
    assert (tmp_path / "added").read_text() == wanted
