"""`ssh` is given what the launcher knows, and a user's own settings stay as they were but for one line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from contracts.errors import RequestError
from contracts.inventory import Gateway, Host
from launch import targets
from launch.commands import shells
from launch.hosts import HostError
from launch.target import Target

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
