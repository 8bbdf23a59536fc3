"""Real SSH servers on loopback, each with its own address, key and home, with no file of the user read or written; and
a host's side of a deployment, carried out here: the runner under the oldest Python, in a home of its own."""

import contextlib
import dataclasses
import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from backends.vm.access import Access
from backends.vm.connection import Limits, Ssh
from backends.vm.deploy import RUNNER
from backends.vm.steps import Step, to_json
from backends.vm.transport import SshTransport
from launch.hosts import HostError
from tests.processes import run_program
from tests.servers import free_port

SSHD = "/usr/sbin/sshd"
RELAY = """
import socket, sys, threading
there = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def up():
    while data := sys.stdin.buffer.raw.read(65536):
        there.sendall(data)
    there.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while data := there.recv(65536):
    sys.stdout.buffer.write(data); sys.stdout.buffer.flush()
"""
"""A program whose standard input and output are a connection to the address and port that it is given."""
HASTY = Limits(connect_s=1.5, login_s=1.5, keepalive_s=0.3)


@dataclasses.dataclass(frozen=True, eq=False)
class Server:
    """A running sshd. folder: its files; home: what a login finds as its home directory."""

    name: str
    address: str
    port: int
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def access(self) -> Access:
        kind, data, *_ = (self.folder / "host_key.pub").read_text().split()
        return Access(
            name=self.name,
            address=self.address,
            port=self.port,
            user=getpass.getuser(),
            os_login=False,
            host_keys=(f"{kind} {data}",),
            made_by_pulumi=False,
        )

    def new_host_key(self) -> None:
        """It is set up again: sshd reads its configuration anew."""
        write_key(self.folder / "host_key")
        before = self.log.count("Server listening")
        self.process.send_signal(signal.SIGHUP)
        until_s = time.monotonic() + 30
        while self.log.count("Server listening") == before:
            assert time.monotonic() < until_s, self.log
            time.sleep(0.02)

    def connections(self) -> Iterator[int]:
        """The processes that serve one each: every child of the one that listens, and the children of those."""
        parents = {self.process.pid}
        for status in sorted(Path("/proc").glob("[0-9]*/stat"), key=lambda path: int(path.parent.name)):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pid, words = int(status.parent.name), status.read_text()
                name, _, rest = words.partition("(")[2].rpartition(")")
                if int(rest.split()[1]) in parents and name.startswith("sshd"):
                    parents.add(pid)
                    yield pid

    def cut(self) -> None:
        """Every connection breaks."""
        for pid in list(self.connections()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def logins(self) -> int:
        return self.log.count("Accepted publickey")


def write_key(path: Path) -> asyncssh.SSHKey:
    key = asyncssh.generate_private_key("ssh-ed25519", comment=path.name)
    for file in (path, path.with_name(path.name + ".pub")):
        file.unlink(missing_ok=True)
    key.write_private_key(path)
    path.chmod(0o600)
    key.write_public_key(path.with_name(path.name + ".pub"))
    return key


@pytest.fixture
def user_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The launching side's home directory, with one key in it and no agent."""
    home = tmp_path / "user"
    (home / ".ssh").mkdir(parents=True)
    write_key(home / ".ssh" / "id_ed25519")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.delenv("TPU_STACK_SSH_KEY", raising=False)
    return home


@pytest.fixture
def serve(tmp_path: Path, user_home: Path) -> Iterator[Callable[..., Server]]:
    """Starts an SSH server; lines are added to its configuration."""
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    started: list[Server] = []

    def start(*lines: str, name: str | None = None) -> Server:
        number = len(started)
        folder = tmp_path / f"server-{number}"
        (folder / "home").mkdir(parents=True)
        write_key(folder / "host_key")
        keys = folder / "authorized_keys"
        keys.write_text((user_home / ".ssh" / "id_ed25519.pub").read_text())
        address = f"127.0.0.{number + 11}"
        config = folder / "config"
        for _ in range(5):  # another process may take a free port first
            port = free_port(address)
            own = (
                f"ListenAddress {address}\nPort {port}\nHostKey {folder / 'host_key'}\nAuthorizedKeysFile {keys}\n"
                f'PidFile {folder / "pid"}\nSetEnv HOME="{folder / "home"}" SERVER={number}\n'
                "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPrintMotd no\nSubsystem sftp internal-sftp\n"
            )
            config.write_text("".join(f"{line}\n" for line in lines) + own)
            command = [SSHD, "-D", "-f", str(config), "-E", str(folder / "log")]
            process = subprocess.Popen(command, start_new_session=True)
            if _listens(process, folder / "log"):
                break
            process.wait()
        else:
            raise AssertionError((folder / "log").read_text())
        server = Server(name or f"host-{number}", address, port, folder, process)
        started.append(server)
        return server

    yield start
    for server in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.process.pid, signal.SIGCONT)
            server.process.terminate()
        server.process.wait(30)


def _listens(process: subprocess.Popen[bytes], log: Path) -> bool:
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        if log.exists() and "Server listening" in log.read_text():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.02)
    return False


@pytest.fixture
def ssh(user_home: Path) -> Iterator[Ssh]:
    with Ssh() as connections:
        yield connections


@pytest.fixture
def hasty_ssh(user_home: Path) -> Iterator[Ssh]:
    """One that gives up soon, for servers that do not answer."""
    with Ssh(HASTY) as connections:
        yield connections


@contextlib.contextmanager
def stand_in(ssh: Ssh, user_home: Path, **options: Any) -> Iterator[Access]:
    """A server of asyncssh's in the same event loop, for what no sshd does."""
    key = asyncssh.generate_private_key("ssh-ed25519")
    keys = str(user_home / ".ssh" / "id_ed25519.pub")

    async def listen() -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            "127.0.0.1", 0, server_host_keys=[key], authorized_client_keys=keys, **options
        )

    async def close() -> None:
        server.close()  # and not waiting: that would be until its connections end, which are the test's

    server = ssh.begin(listen()).result(30)
    try:
        yield Access(
            name="stand-in",
            address="127.0.0.1",
            port=server.get_port(),
            user="u",
            os_login=False,
            host_keys=(key.export_public_key().decode(),),
            made_by_pulumi=False,
        )
    finally:
        ssh.begin(close()).result(30)


def refusal(ssh: Ssh, access: Access) -> str:
    before_s = time.monotonic()
    with pytest.raises(HostError) as caught:
        SshTransport(access, ssh).connect().result(60)
    assert time.monotonic() - before_s < 30
    assert caught.value.remedy
    return str(caught.value)


def at(port: int, access: Access) -> Access:
    return dataclasses.replace(access, address="127.0.0.1", port=port)


# --- deployments -------------------------------------------------------------------------------------------

CarryOut = Callable[..., list[dict[str, Any]]]


def oldest_python() -> str:
    """The oldest from 3.10 on that is installed here, else the one that runs the tests."""
    for minor in (10, 11):
        places = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
        found = shutil.which(f"python3.{minor}", path=os.defpath) or next(map(str, places), None)
        if found is not None:
            return found
    return sys.executable


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home directory of the host's user; its name wants quoting."""
    path = tmp_path / "home of o'user"
    path.mkdir()
    return path


@pytest.fixture
def carry_out(home: Path) -> CarryOut:
    """Carries out steps as a host does; what it answered, line by line, without what is only under way."""

    def run(
        steps: Sequence[Step], *, environ: dict[str, str] | None = None, under_way: bool = False
    ) -> list[dict[str, Any]]:
        argv = [oldest_python(), "-S", "-E", "-c", RUNNER.read_text(), to_json(steps)]
        done = run_program(argv, {**os.environ, "HOME": str(home), **(environ or {})})
        assert done.stderr == ""
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == int(any(answer["state"] == "failed" for answer in answers))
        return [answer for answer in answers if under_way or answer["state"] != "doing"]

    return run
