"""`ssh` is given what the launcher knows, and a user's own settings stay as they were but for one line."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import RequestError
from contracts.inventory import Gateway, Host
from launch import targets
from launch.commands import shells
from launch.commands.shells import INCLUDE, Entry, Keys, config, host_alias, known_hosts, with_include
from launch.hosts import HostError
from launch.ssh.access import Access
from launch.target import Target
from launch.targets import local

KEY = "ssh-ed25519 AAAAC3Nz"
Captured = pytest.CaptureFixture[str]


def target_of(reach: Any, *, user: str | None = "me", project: str | None = None, count: int = 3) -> Target:
    hosts = tuple(
        Host(
            index=index,
            name=f"dev-main-{index}",
            internal_address=f"10.0.0.{index}",
            external_address=f"34.0.0.{index}:2222" if reach == "direct" else None,
            user=user,
            host_keys=(KEY,),
            reach=reach,
        )
        for index in range(count)
    )
    target = targets.local(count, "cpu", [0])
    one_slice = dataclasses.replace(target.slice, name="main", zone="us-central1-a", hosts=hosts)
    gateway = Gateway(
        name="dev-gateway", zone="us-central1-a", address="10.0.0.9", host_keys=(KEY,), user=user
    )
    inventory = dataclasses.replace(
        target.inventory, stack="dev", project=project, slices=(one_slice,), gateway=gateway
    )
    return dataclasses.replace(target, name="dev", inventory=inventory, slice=one_slice, hosts=hosts)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory of the test's own, with one key."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh/id_ed25519").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TPU_STACK_SSH_KEY", raising=False)
    return home


@pytest.fixture
def gcloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `gcloud` that knows the user, first on PATH; it notes how often it was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    keys = {"1": {"key": asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().strip()}}
    profile = json.dumps({"posixAccounts": [{"username": "sa_me", "primary": True}], "sshPublicKeys": keys})
    (folder / "gcloud").write_text(f"#!/bin/sh\necho asked >> {folder}/asked\necho '{profile}'\n")
    (folder / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "gcloud"


def settings(path: str | Path, alias: str) -> dict[str, str]:
    """What the real `ssh` makes of it."""
    done = subprocess.run(
        ["ssh", "-G", "-F", str(path), alias], capture_output=True, text=True, timeout=30, check=True
    )
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def test_a_shell_on_a_host_goes_straight_there_with_the_users_keys(home: Path) -> None:
    argv = shells.command(target_of("direct"), 2)
    assert argv[:2] == ["ssh", "-F"]
    assert argv[3:] == ["tpu-dev-main-2"]
    found = settings(argv[2], argv[3])
    assert (found["hostname"], found["port"], found["user"]) == ("34.0.0.2", "2222", "me")
    assert found["identityfile"] == f"{home}/.ssh/id_ed25519"
    assert found["identitiesonly"] == "no"
    assert Path(found["userknownhostsfile"]).read_text() == f"tpu-dev-main-2 {KEY}\n"


def test_the_key_that_is_named_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_STACK_SSH_KEY", "/my keys/%one")
    found = settings(shells.command(target_of("direct"), None)[2], "tpu-dev-main-0")
    assert (found["identityfile"], found["identitiesonly"]) == ("/my keys/%%one", "yes")


def test_behind_a_gateway_the_way_leads_through_it_with_its_own_pinned_key() -> None:
    argv = shells.command(target_of("gateway"), 1)
    assert settings(argv[2], argv[3])["proxyjump"] == "tpu-dev-gateway"
    found = settings(argv[2], "tpu-dev-gateway")
    assert found["hostname"] == "10.0.0.9"
    assert Path(found["userknownhostsfile"]).read_text() == f"tpu-dev-gateway {KEY}\ntpu-dev-main-1 {KEY}\n"


def test_behind_iap_each_host_has_a_tunnel_of_its_own_and_os_login_is_asked_once(
    gcloud: Path, capsys: Captured
) -> None:
    assert shells.show_config(target_of("iap", user=None, project="my-project"), write=True) == 0
    path = Path.home() / ".ssh/tpu-stack/dev-main.conf"
    for index in range(3):
        found = settings(path, f"tpu-dev-main-{index}")
        assert found["user"] == "sa_me"
        assert found["proxycommand"] == (
            f"{gcloud} compute start-iap-tunnel dev-main-{index} 22 --listen-on-stdin "
            "--zone us-central1-a --project my-project"
        )
    assert (gcloud.parent / "asked").read_text() == "asked\n"


def test_without_being_told_to_nothing_in_ssh_is_changed(home: Path, capsys: Captured) -> None:
    assert shells.show_config(target_of("direct"), write=False) == 0
    assert os.listdir(home / ".ssh") == ["id_ed25519"]
    out = capsys.readouterr().out
    assert out.count("\nHost ") + out.startswith("Host ") == 3
    assert out.endswith("# Include tpu-stack/*.conf\n")


def test_it_is_kept_where_ssh_finds_it_and_doing_so_twice_changes_nothing(
    home: Path, capsys: Captured
) -> None:
    (home / ".ssh/config").write_text("Host mine\n    User other\n")
    (home / ".ssh/config").chmod(0o640)
    for _ in range(2):
        assert shells.show_config(target_of("direct"), write=True) == 0
    text = (home / ".ssh/config").read_text()
    assert text == "Include tpu-stack/*.conf\n\nHost mine\n    User other\n"
    modes = {
        path.name: path.stat().st_mode & 0o777
        for path in [home / ".ssh/config", home / ".ssh/tpu-stack", *(home / ".ssh/tpu-stack").iterdir()]
    }
    assert modes == {
        "config": 0o640,
        "tpu-stack": 0o700,
        "dev-main.conf": 0o600,
        "dev-main.known_hosts": 0o600,
    }
    assert "includes it already" in capsys.readouterr().out


def test_where_the_settings_are_a_link_it_stays_one(home: Path, tmp_path: Path) -> None:
    (tmp_path / "dotfiles").write_bytes(b"# \xff\nUser me\n")
    (home / ".ssh/config").symlink_to(tmp_path / "dotfiles")
    shells.show_config(target_of("direct"), write=True)
    assert (home / ".ssh/config").is_symlink()
    assert (tmp_path / "dotfiles").read_bytes() == b"Include tpu-stack/*.conf\n\n# \xff\nUser me\n"


def test_who_has_no_ssh_folder_yet_gets_a_private_one(home: Path) -> None:
    (home / ".ssh/id_ed25519").unlink()
    (home / ".ssh").rmdir()
    shells.show_config(target_of("direct"), write=True)
    assert (home / ".ssh").stat().st_mode & 0o777 == 0o700
    assert (home / ".ssh/config").stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_gone_to_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="this machine, which needs no SSH"):
        shells.command(targets.local(2, "cpu", [0]), None)
    with pytest.raises(RequestError, match="--host 7: the hosts are 0, 1, 2"):
        shells.command(target_of("direct"), 7)
    unknown = target_of("direct")
    hosts = tuple(dataclasses.replace(host, host_keys=()) for host in unknown.hosts)
    unknown = dataclasses.replace(unknown, slice=dataclasses.replace(unknown.slice, hosts=hosts))
    with pytest.raises(HostError, match="its host key is not known"):
        shells.command(unknown, 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RequestError, match="`ssh` is not on PATH"):
        shells.command(target_of("direct"), 0)


SSH = shutil.which("ssh")
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
needs_ssh = pytest.mark.skipif(SSH is None, reason="needs OpenSSH's client")
needs_sshd = pytest.mark.skipif(SSH is None or SSHD is None, reason="needs OpenSSH's client and server")

NO_KEYS = Keys(files=(), only=False)
HARD_PATHS = ["/a b/c", "/%h/%%/x", '/q"uote', "/it's", "/back\\slash", "/#hash", "/é/key", "/=equals,comma"]


def entry(**changed: Any) -> Entry:
    access = Access(
        name="host-0",
        address="10.0.0.2",
        port=22,
        user=None,
        os_login=False,
        host_keys=("ssh-ed25519 AAAAC3Nz",),
        made_by_pulumi=False,
    )
    return Entry(
        alias="tpu-dev-main-0", access=dataclasses.replace(access, **changed), user="me_x", jump=None
    )


def read_back(tmp_path: Path, text: str, alias: str) -> dict[str, list[str]]:
    """What the real `ssh` makes of a configuration."""
    path = tmp_path / "config"
    path.write_text(text)
    done = subprocess.run(
        [str(SSH), "-G", "-F", str(path), alias], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    return found


@needs_ssh
def test_ssh_is_told_where_to_go_as_whom_and_to_check_the_pinned_key_alone(tmp_path: Path) -> None:
    keys = Keys(files=("/keys/one", "/keys/two"), only=True)
    found = read_back(tmp_path, config([entry(port=2222)], "/kh", keys), "tpu-dev-main-0")
    assert {name: found[name] for name in ("hostname", "port", "user", "hostkeyalias", "identityfile")} == {
        "hostname": ["10.0.0.2"],
        "port": ["2222"],
        "user": ["me_x"],
        "hostkeyalias": ["tpu-dev-main-0"],
        "identityfile": ["/keys/one", "/keys/two"],
    }
    assert (found["userknownhostsfile"], found["globalknownhostsfile"]) == (["/kh"], ["/dev/null"])
    assert (found["stricthostkeychecking"], found["updatehostkeys"]) == (["true"], ["false"])
    assert found["identitiesonly"] == ["yes"]


@needs_ssh
@pytest.mark.parametrize("path", HARD_PATHS)
def test_a_path_reaches_ssh_as_it_is_whatever_is_in_it(tmp_path: Path, path: str) -> None:
    text = config([entry()], path, Keys(files=(path,), only=False))
    found = read_back(tmp_path, text, "tpu-dev-main-0")
    assert found["userknownhostsfile"] == [path]
    # Of this one `ssh -G` shows what it read, before it puts anything in place of %.
    assert found["identityfile"] == [path.replace("%", "%%")]


@needs_ssh
def test_the_words_of_a_proxy_command_arrive_as_themselves(tmp_path: Path) -> None:
    words = ["a b", "'", '"', "$HOME", "`id`", "%h", "%%", "é", "", "*", "\\", "#", ";", "${USER}"]
    script = tmp_path / "proxy"
    script.write_text(f'#!/bin/sh\nfor each; do printf "%s\\n" "$each"; done > {tmp_path}/words\n')
    script.chmod(0o755)
    path = tmp_path / "config"
    path.write_text(config([entry(proxy_command=(str(script), *words))], "/dev/null", NO_KEYS))
    subprocess.run(
        [str(SSH), "-F", str(path), "tpu-dev-main-0"], capture_output=True, timeout=30, check=False
    )
    assert (tmp_path / "words").read_text().splitlines() == words


@pytest.mark.parametrize(
    "changed",
    [
        {"address": "-oProxyCommand=id"},
        {"address": "a b"},
        {"address": "a\nProxyCommand id"},
        {"address": ""},
    ],
)
def test_an_address_that_is_none_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="cannot be written for OpenSSH"):
        config([entry(**changed)], "/kh", NO_KEYS)


@pytest.mark.parametrize("user", ["-l", "a b", "a\nHost *", "$(id)", "%u", ""])
def test_a_user_that_is_none_is_refused(user: str) -> None:
    with pytest.raises(RequestError, match="the user"):
        config([dataclasses.replace(entry(), user=user)], "/kh", NO_KEYS)


@pytest.mark.parametrize("path", ["/a\nHost *", "/${HOME}/x", "/a\x00b"])
def test_a_path_that_ssh_would_read_as_another_is_refused(path: str) -> None:
    with pytest.raises(RequestError, match="cannot be written for OpenSSH"):
        config([entry()], path, NO_KEYS)


def test_a_proxy_command_of_two_lines_is_refused() -> None:
    with pytest.raises(RequestError, match="control characters"):
        config([entry(proxy_command=("gcloud", "a\nb"))], "/kh", NO_KEYS)


def test_keys_are_pinned_under_the_alias_and_a_host_without_one_is_refused() -> None:
    two = entry(host_keys=("ssh-ed25519 AAAA", "ecdsa-sha2-nistp256 BBBB=="))
    assert (
        known_hosts([two]) == "tpu-dev-main-0 ssh-ed25519 AAAA\ntpu-dev-main-0 ecdsa-sha2-nistp256 BBBB==\n"
    )
    with pytest.raises(HostError, match="its host key is not known"):
        known_hosts([entry(host_keys=())])
    with pytest.raises(HostError, match="cannot be read"):
        known_hosts([entry(host_keys=("ssh-ed25519 AAAA\n* ssh-ed25519 BBBB",))])


def test_an_alias_is_a_plain_word() -> None:
    one_slice = dataclasses.replace(local(1, "cpu", [0]).slice, name="*.x y")
    assert host_alias("org/dev", one_slice, 3) == "tpu-org-dev-.x-y-3"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", f"{INCLUDE}\n"),
        ("Host a\n  User b\n", f"{INCLUDE}\n\nHost a\n  User b\n"),
        (f"Host a\n  {INCLUDE}\n", f"{INCLUDE}\n\nHost a\n  {INCLUDE}\n"),
        (f"match all\n{INCLUDE}\n", f"{INCLUDE}\n\nmatch all\n{INCLUDE}\n"),
        ("User b\r\n", f"{INCLUDE}\r\n\r\nUser b\r\n"),
        (f"# mine\n{INCLUDE}\nHost a\n", f"# mine\n{INCLUDE}\nHost a\n"),
        ("  include other.conf tpu-stack/*.conf\n", "  include other.conf tpu-stack/*.conf\n"),
    ],
)
def test_our_line_comes_before_every_host_and_only_once(before: str, after: str) -> None:
    assert with_include(before) == after


@given(st.text(st.sampled_from("Hosta* \nMch") | st.characters(), max_size=100))
def test_including_twice_is_including_once_and_nothing_of_the_users_is_changed(text: str) -> None:
    once = with_include(text)
    assert with_include(once) == once
    assert once.endswith(text)


@dataclasses.dataclass(frozen=True)
class Server:
    """A real sshd for the user who runs the tests; each connection has a process of its own."""

    config: Path
    host_key: str
    identity: Path

    @property
    def command(self) -> tuple[str, ...]:
        return (str(SSHD), "-i", "-f", str(self.config))


@pytest.fixture
def server(tmp_path: Path) -> Server:
    for name in ("host", "me"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)],
            check=True,
            timeout=30,
        )
    (tmp_path / "authorized_keys").write_text((tmp_path / "me.pub").read_text())
    (tmp_path / "sshd_config").write_text(
        f"HostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/authorized_keys\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin yes\nPasswordAuthentication no\nPidFile none\n"
    )
    key = " ".join((tmp_path / "host.pub").read_text().split()[:2])
    return Server(config=tmp_path / "sshd_config", host_key=key, identity=tmp_path / "me")


@pytest.fixture
def listen(server: Server) -> Iterator[Callable[[], int]]:
    """Starts listening for connections to the server on a free port."""
    with contextlib.ExitStack() as stack:

        def start() -> int:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with (
                        connection,
                        subprocess.Popen(
                            server.command,
                            stdin=connection.fileno(),
                            stdout=connection.fileno(),
                            stderr=subprocess.DEVNULL,
                        ),
                    ):
                        pass

            threading.Thread(target=serve, daemon=True).start()
            return int(listener.getsockname()[1])

        yield start


def ssh(tmp_path: Path, server: Server, entries: list[Entry], alias: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "known").write_text(known_hosts(entries))
    keys = Keys(files=(str(server.identity),), only=True)
    (tmp_path / "config").write_text(config(entries, str(tmp_path / "known"), keys))
    return subprocess.run(
        [str(SSH), "-F", str(tmp_path / "config"), alias, "echo", "here"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@needs_sshd
def test_ssh_comes_in_where_the_key_is_the_pinned_one_and_nowhere_else(
    tmp_path: Path, server: Server
) -> None:
    right = dataclasses.replace(
        entry(proxy_command=server.command, host_keys=(server.host_key,)), user=getpass.getuser()
    )
    done = ssh(tmp_path, server, [right], right.alias)
    assert (done.stdout, done.returncode) == ("here\n", 0)
    mine = " ".join(Path(f"{server.identity}.pub").read_text().split()[:2])
    wrong = dataclasses.replace(right, access=dataclasses.replace(right.access, host_keys=(mine,)))
    done = ssh(tmp_path, server, [wrong], wrong.alias)
    assert (done.stdout, done.returncode) == ("", 255)
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr


@needs_sshd
def test_ssh_goes_through_the_host_that_leads_there_and_checks_both_keys(
    tmp_path: Path, server: Server, listen: Callable[[], int]
) -> None:
    first = dataclasses.replace(
        entry(proxy_command=server.command, host_keys=(server.host_key,)),
        user=getpass.getuser(),
    )

    def second() -> Entry:
        access = dataclasses.replace(
            first.access, address="127.0.0.1", port=listen(), proxy_command=None, through=first.access
        )
        return dataclasses.replace(first, alias="tpu-dev-main-1", access=access, jump=first.alias)

    done = ssh(tmp_path, server, [first, second()], "tpu-dev-main-1")
    assert (done.stdout, done.returncode) == ("here\n", 0), done.stderr
    mine = " ".join(Path(f"{server.identity}.pub").read_text().split()[:2])
    wrong = dataclasses.replace(first, access=dataclasses.replace(first.access, host_keys=(mine,)))
    done = ssh(tmp_path, server, [wrong, second()], "tpu-dev-main-1")
    assert (done.stdout, done.returncode) == ("", 255)
