"""OpenSSH reads what we write as we mean it: the real one is asked, and a real server is gone to."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import RequestError
from launch.commands.shells import INCLUDE, Entry, Keys, config, host_alias, known_hosts, with_include
from launch.hosts import HostError
from launch.ssh.access import Access
from launch.targets import local

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
