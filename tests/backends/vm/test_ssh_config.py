"""`ssh` is given what the launcher knows, and a user's own settings stay as they were but for one line."""

import contextlib
import dataclasses
import getpass
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from backends.local.local_backend import local
from backends.vm import ssh_config
from backends.vm.access import Access
from backends.vm.ssh_config import Entry, Keys, config, host_alias, known_hosts
from contracts.errors import RequestError
from contracts.inventory import Gateway
from launch.hosts import HostError
from launch.targets import Target
from tests.launch.slices import make_host, make_inventory, make_slice, make_target

KEY = "ssh-ed25519 AAAAC3Nz"
Captured = pytest.CaptureFixture[str]
pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client")


def target_of(reach: Any, *, user: str | None = "me", project: str | None = None) -> Target:
    outer = "34.0.0.{}:2222" if reach == "direct" else None
    given = {"user": user, "host_keys": (KEY,), "reach": reach}
    hosts = [
        make_host(index, name=f"dev-main-{index}", external_address=outer and outer.format(index), **given)
        for index in range(3)
    ]
    one = make_slice(hosts, name="main", zone="us-central1-a")
    gateway = Gateway(
        name="dev-gateway", zone="us-central1-a", address="10.0.0.9", host_keys=(KEY,), user=user
    )
    inventory = make_inventory(one, project=project, gateway=gateway)
    return make_target([], inventory=inventory, slice=one, hosts=one.hosts)


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
def gcloud(tmp_path: Path, program: Callable[[str, str], Path]) -> Path:
    """A `gcloud` that knows the user, first on PATH; it notes how often it was asked."""
    keys = {"1": {"key": asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().strip()}}
    profile = json.dumps({"posixAccounts": [{"username": "sa_me", "primary": True}], "sshPublicKeys": keys})
    return program("gcloud", f"echo asked >> {tmp_path}/bin/asked\necho '{profile}'")


def settings(path: str | Path, alias: str) -> dict[str, str]:
    """What the real `ssh` makes of a configuration; several values of one key are joined by blanks."""
    done = subprocess.run(
        ["ssh", "-G", "-F", str(path), alias], capture_output=True, text=True, timeout=30, check=True
    )
    found: dict[str, str] = {}
    for key, _, value in (line.partition(" ") for line in done.stdout.splitlines()):
        found[key] = f"{found[key]} {value}" if key in found else value
    return found


def test_a_shell_goes_straight_to_its_host_and_takes_no_other_host_key(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ssh_config.command(target_of("direct"), 2)
    assert argv[:2] == ["ssh", "-F"]
    assert argv[3:] == ["tpu-dev-main-2"]
    in_run = ssh_config.command(target_of("direct"), 2, ["python3", "_shell", "a run"])
    assert in_run[3:] == ["tpu-dev-main-2", "python3 _shell 'a run'"]
    found = settings(argv[2], argv[3])
    assert (found["hostname"], found["port"], found["user"]) == ("34.0.0.2", "2222", "me")
    assert (found["identityfile"], found["identitiesonly"]) == (f"{home}/.ssh/id_ed25519", "no")
    assert (found["hostkeyalias"], found["globalknownhostsfile"]) == ("tpu-dev-main-2", "/dev/null")
    assert (found["stricthostkeychecking"], found["updatehostkeys"]) == ("true", "false")
    assert Path(found["userknownhostsfile"]).read_text() == f"tpu-dev-main-2 {KEY}\n"
    monkeypatch.setenv("TPU_STACK_SSH_KEY", "/my keys/%one")
    found = settings(ssh_config.command(target_of("direct"), None)[2], "tpu-dev-main-0")
    assert (found["identityfile"], found["identitiesonly"]) == ("/my keys/%%one", "yes"), (
        "no key but the named one"
    )


def test_behind_a_gateway_the_way_leads_through_it_and_behind_iap_each_host_has_a_tunnel(
    gcloud: Path, capsys: Captured
) -> None:
    argv = ssh_config.command(target_of("gateway"), 1)
    assert settings(argv[2], argv[3])["proxyjump"] == "tpu-dev-gateway"
    found = settings(argv[2], "tpu-dev-gateway")
    assert found["hostname"] == "10.0.0.9"
    assert Path(found["userknownhostsfile"]).read_text() == f"tpu-dev-gateway {KEY}\ntpu-dev-main-1 {KEY}\n"
    assert ssh_config.show_config(target_of("iap", user=None, project="my-project"), write=True) == 0
    for index in range(3):
        found = settings(Path.home() / ".ssh/tpu-stack/dev-main.conf", f"tpu-dev-main-{index}")
        assert found["user"] == "sa_me"
        assert found["proxycommand"] == (
            f"{gcloud} compute start-iap-tunnel dev-main-{index} 22 --listen-on-stdin "
            "--zone us-central1-a --project my-project"
        )
    assert (gcloud.parent / "asked").read_text() == "asked\n", "OS Login is asked once for all"


def test_a_users_settings_change_by_one_line_once_and_only_when_asked_to(
    home: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert ssh_config.show_config(target_of("direct"), write=False) == 0
    assert os.listdir(home / ".ssh") == ["id_ed25519"]
    out = capsys.readouterr().out
    assert out.count("\nHost ") + out.startswith("Host ") == 3
    assert out.endswith("# Include tpu-stack/*.conf\n")
    # Somebody's own settings may be a link into a folder that is kept elsewhere; it stays one.
    (tmp_path / "dotfiles").write_bytes(b"# \xff\nHost mine\n    User other\n")
    (tmp_path / "dotfiles").chmod(0o640)
    (home / ".ssh/config").symlink_to(tmp_path / "dotfiles")
    for _ in range(2):
        assert ssh_config.show_config(target_of("direct"), write=True) == 0
    assert "includes it already" in capsys.readouterr().out
    assert (home / ".ssh/config").is_symlink()
    written = b"Include tpu-stack/*.conf\n\n# \xff\nHost mine\n    User other\n"
    assert (tmp_path / "dotfiles").read_bytes() == written
    places = [tmp_path / "dotfiles", home / ".ssh/tpu-stack", *(home / ".ssh/tpu-stack").iterdir()]
    modes = {path.name: path.stat().st_mode & 0o777 for path in places}
    ours = {"dev-main.conf": 0o600, "dev-main.known_hosts": 0o600}
    assert modes == {"dotfiles": 0o640, "tpu-stack": 0o700, **ours}


def test_what_cannot_be_gone_to_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="--host 7: the hosts are 0, 1, 2"):
        ssh_config.command(target_of("direct"), 7)
    unknown = target_of("direct")
    hosts = tuple(dataclasses.replace(host, host_keys=()) for host in unknown.hosts)
    unknown = dataclasses.replace(unknown, slice=dataclasses.replace(unknown.slice, hosts=hosts))
    with pytest.raises(HostError, match="its host key is not known"):
        ssh_config.command(unknown, 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RequestError, match="`ssh` is not on PATH"):
        ssh_config.command(target_of("direct"), 0)


NO_KEYS = Keys(files=(), only=False)


def entry(**changed: Any) -> Entry:
    given = {"host_keys": (KEY,), "os_login": False, "made_by_pulumi": False}
    access = Access(**{"name": "host-0", "address": "10.0.0.2", "port": 22, "user": None, **given, **changed})
    return Entry(alias="tpu-dev-main-0", access=access, user="me_x", jump=None)


@pytest.mark.parametrize(
    ("changed", "path", "said"),
    [
        ({"address": "-oProxyCommand=id"}, "/kh", "the address"),
        ({"address": "a\nProxyCommand id"}, "/kh", "the address"),
        ({"address": ""}, "/kh", "the address"),
        ({"user": "-l"}, "/kh", "the user"),
        ({"user": "a\nHost *"}, "/kh", "the user"),
        ({"user": "$(id)"}, "/kh", "the user"),
        ({"user": "%u"}, "/kh", "the user"),
        ({}, "/a\nHost *", "the path"),
        ({}, "/${HOME}/x", "the path"),
        ({}, "/a\x00b", "the path"),
        ({"proxy_command": ("gcloud", "a\nb")}, "/kh", "control characters"),
    ],
)
def test_what_ssh_would_read_as_something_else_is_refused(
    changed: dict[str, Any], path: str, said: str
) -> None:
    user = changed.get("user", "me_x")
    access = {name: value for name, value in changed.items() if name != "user"}
    with pytest.raises(RequestError, match="cannot be written for OpenSSH") as error:
        config([dataclasses.replace(entry(**access), user=user)], path, NO_KEYS)
    assert said in str(error.value)


def test_keys_are_pinned_under_an_alias_of_plain_letters_and_a_host_without_one_is_refused() -> None:
    one_slice = dataclasses.replace(local(1, "cpu", [0]).slice, name="*.x y")
    assert host_alias("org/dev", one_slice, 3) == "tpu-org-dev-.x-y-3"
    pinned = known_hosts([entry(host_keys=("ssh-ed25519 AAAA", "ecdsa-sha2-nistp256 BBBB=="))])
    assert pinned == "tpu-dev-main-0 ssh-ed25519 AAAA\ntpu-dev-main-0 ecdsa-sha2-nistp256 BBBB==\n"
    with pytest.raises(HostError, match="its host key is not known"):
        known_hosts([entry(host_keys=())])
    with pytest.raises(HostError, match="cannot be read"):
        known_hosts([entry(host_keys=("ssh-ed25519 AAAA\n* ssh-ed25519 BBBB",))])


SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")


@pytest.mark.skipif(SSHD is None, reason="needs OpenSSH's server")
def test_a_real_ssh_goes_through_the_host_that_leads_there_and_checks_both_keys(tmp_path: Path) -> None:
    for name in ("host", "me"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(command, check=True, timeout=30)
    (tmp_path / "sshd_config").write_text(
        f"HostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/me.pub\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin yes\nPasswordAuthentication no\nPidFile none\n"
    )
    host_key, my_key = (
        " ".join((tmp_path / f"{name}.pub").read_text().split()[:2]) for name in ("host", "me")
    )
    if os.geteuid() == 0:  # whose server needs this folder; the system's service would have made it
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    sshd = (str(SSHD), "-i", "-f", str(tmp_path / "sshd_config"))

    def echo(first: Entry) -> tuple[str, int, str]:
        """What `echo here` comes to on a second host, behind the first."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=serve, args=(listener, sshd), daemon=True).start()
            here = {"address": "127.0.0.1", "port": listener.getsockname()[1], "host_keys": (host_key,)}
            access = dataclasses.replace(first.access, **here, proxy_command=None, through=first.access)
            second = Entry(alias="tpu-dev-main-1", access=access, user=first.user, jump=first.alias)
            (tmp_path / "known").write_text(known_hosts([first, second]))
            keys = Keys(files=(str(tmp_path / "me"),), only=True)
            (tmp_path / "config").write_text(config([first, second], str(tmp_path / "known"), keys))
            command = ["ssh", "-F", str(tmp_path / "config"), second.alias, "echo", "here"]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
            )
        return done.stdout, done.returncode, done.stderr

    first = dataclasses.replace(entry(proxy_command=sshd, host_keys=(host_key,)), user=getpass.getuser())
    *echoed, complaint = echo(first)
    assert echoed == ["here\n", 0], complaint
    wrong_key = dataclasses.replace(first, access=dataclasses.replace(first.access, host_keys=(my_key,)))
    *echoed, complaint = echo(wrong_key)
    assert echoed == ["", 255]
    assert "key verification failed" in complaint


def serve(listener: socket.socket, sshd: Sequence[str]) -> None:
    """One connection, with a server of its own."""
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        ends = connection.fileno()
        with connection, subprocess.Popen(sshd, stdin=ends, stdout=ends, stderr=subprocess.DEVNULL):
            pass
