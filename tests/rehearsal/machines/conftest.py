"""Real machines: the host image made once, two of them standing for a whole module, and OpenSSH to reach them."""

from __future__ import annotations

import dataclasses
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import asyncssh
import pytest

from rehearsal.machines.machines import Machine, Machines
from tools import stand_in_base

ANSWER_LIMIT_S = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """private: in OpenSSH's form; public: a line "ssh-ed25519 AAAA…"."""

    private: str
    public: str


def new_key() -> Key:
    made = asyncssh.generate_private_key("ssh-ed25519")
    return Key(
        private=made.export_private_key().decode(),
        public=" ".join(made.export_public_key().decode().split()[:2]),
    )


class Lab:
    """Machines of one rehearsal, and a person who has a key to them."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines = machines
        self.faults = machines.faults
        self.keys: dict[str, Key] = {}
        self.addresses: dict[str, str] = {}
        self._folder = folder
        self._own = new_key()
        self._identity = folder / "identity"
        self._identity.touch(0o600)
        self._identity.write_text(self._own.private)

    def boot(self, name: str, address: str = "") -> None:
        """A machine with an address of its own, unless one is given, and the person's key."""
        free = iter(self.machines.network.addresses(4))
        self.addresses[name] = address or next(each for each in free if each not in self.addresses.values())
        self.keys[name] = new_key()
        self.machines.boot(
            Machine(
                name=name,
                address=self.addresses[name],
                host_key=self.keys[name].private,
                authorized_key=self._own.public,
            )
        )

    def ssh_command(self, name: str, command: str, *, host_key: str | None = None) -> list[str]:
        """OpenSSH's, with the machine's key pinned."""
        known = self._folder / f"known-{secrets.token_hex(4)}"
        known.write_text(f"{self.addresses[name]} {host_key or self.keys[name].public}\n")
        return [
            "ssh", "-F", "none", "-i", str(self._identity), "-o", f"UserKnownHostsFile={known}",
            "-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes", "-o", "ConnectTimeout=4", "-o", "LogLevel=ERROR",
            "-o", "ServerAliveInterval=0", "-o", "GlobalKnownHostsFile=none",
            f"sa_rehearsal@{self.addresses[name]}", command,
        ]  # fmt: skip

    def try_ssh(
        self, name: str, command: str, *, host_key: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.ssh_command(name, command, host_key=host_key),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_LIMIT_S, check=False,
        )  # fmt: skip

    def ssh(self, name: str, command: str) -> str:
        """What the command prints; it must end well."""
        done = self.try_ssh(name, command)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="session")
def environ() -> Mapping[str, str]:
    """With a base image for hosts that this machine can get."""
    base = stand_in_base.chosen(os.environ, print)
    return os.environ | ({stand_in_base.VARIABLE: base} if base else {})


@pytest.fixture(scope="session")
def new_name() -> Callable[[], str]:
    """Names of rehearsals that no other test has."""
    return lambda: f"test-{secrets.token_hex(4)}"


@pytest.fixture(scope="session")
def lab(
    environ: Mapping[str, str], new_name: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lab]:
    """Two machines, w-0 and w-1. What a test breaks it mends."""
    with Machines(name=new_name(), say=print, environ=environ) as machines:
        lab = Lab(machines, tmp_path_factory.mktemp("lab"))
        lab.boot("w-0")
        lab.boot("w-1")
        yield lab


@pytest.fixture
def empty_lab(environ: Mapping[str, str], new_name: Callable[[], str], tmp_path: Path) -> Iterator[Lab]:
    """No machine yet."""
    with Machines(name=new_name(), say=print, environ=environ) as machines:
        yield Lab(machines, tmp_path)
