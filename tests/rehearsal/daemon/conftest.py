"""A person whose rehearsal is up, and the base image of its hosts."""

import os
import shlex
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from contracts.inventory import RECORDED, from_json
from launch.inventories import with_kept
from rehearsal import state
from rehearsal.daemon import cli
from rehearsal.daemon.fault_commands import FaultRequest
from rehearsal.machines import docker_engine, guardian
from tools import stand_in_base

ROOT = Path(__file__).resolve().parents[3]


LIMIT_S = 120.0


class Person:
    """Somebody at a terminal. `said`: what the rehearsal told."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self.environ = {**environ, state.FOLDER_VARIABLE: str(folder)}
        self.said: list[str] = []

    def up(self, wanted: cli.UpRequest | None = None) -> None:
        # However this process ends, its rehearsals do.
        cli.up(self.folder, wanted or cli.UpRequest(), self.said.append, owner=os.getpid())

    def type(self, *words: str, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """In a shell that has the rehearsal's environment, and `fab`."""
        opened = state.open_rehearsal(self.environ).environment
        path = os.pathsep.join([opened["PATH"], str(Path(sys.executable).parent)])
        return subprocess.run(
            words, env={**self.environ, **opened, "PATH": path}, capture_output=True, text=True, timeout=limit_s,
            check=False, stdin=subprocess.DEVNULL, cwd=ROOT,
        )  # fmt: skip

    def succeed(self, line: str, limit_s: float = LIMIT_S) -> str:
        """What a command line prints; it must end well."""
        done = self.type(*shlex.split(line), limit_s=limit_s)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    def hosts(self) -> dict[str, str]:
        """Name → host key, as the inventory has them, or what `fab recover` has recorded of a slice since."""
        opened = state.open_rehearsal(self.environ)
        (one,) = with_kept(from_json(opened.inventory_json), self._recorded(opened)).slices
        return {host.name: host.host_keys[0] for host in one.hosts}

    def _recorded(self, opened: state.OpenRehearsal) -> bytes | None:
        control = from_json(opened.inventory_json).control
        if control is None or "STORAGE_EMULATOR_HOST" not in opened.environment:
            return None
        return self.object(f"{control}/{RECORDED}")

    def object(self, url: str) -> bytes | None:
        """Of the bucket, by its gs:// URL; None: there is none."""
        bucket, _, path = url.removeprefix("gs://").partition("/")
        name = urllib.parse.quote(path, safe="")
        server = state.open_rehearsal(self.environ).environment["STORAGE_EMULATOR_HOST"]
        url = f"{server}/storage/v1/b/{bucket}/o/{name}?alt=media"
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None

    def ssh(self, name: str, command: str) -> subprocess.CompletedProcess[str]:
        """Through the stand-in for gcloud, with the pinned key."""
        known = self.folder / "known_hosts"
        known.write_text("".join(f"{host} {key}\n" for host, key in self.hosts().items()))
        return self.type(
            "ssh", "-F", "none", "-i", str(self.folder / "ssh" / "id_ed25519"), "-o", f"UserKnownHostsFile={known}",
            "-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
            "-o", "ProxyCommand=gcloud compute start-iap-tunnel %h 22 --listen-on-stdin --zone z --project p",
            f"sa_rehearsal@{name}", command,
        )  # fmt: skip

    def act(self, action: str, host: str = "", *, zone: str = "", amount: float | None = None) -> str:
        """What `fab rehearsal` says."""
        lines: list[str] = []
        fault = FaultRequest(host=host, zone=zone, amount=amount)
        cli.carry_out(action, self.environ, lines.append, request=cli.UpRequest(), fault=fault)
        return "\n".join(lines)

    def left(self) -> list[str]:
        """Of Docker's things, what carries this rehearsal's label."""
        client = docker_engine.connect()
        try:
            return [name for _, name in guardian.left(client, state.rehearsal_name(self.folder))]
        finally:
            client.close()


@pytest.fixture(scope="module")
def environ() -> Iterator[Mapping[str, str]]:
    """With a base image for the hosts that this computer can get; the daemon inherits it."""
    base = stand_in_base.chosen(os.environ, print)
    with pytest.MonkeyPatch.context() as patch:
        if base:
            patch.setenv(stand_in_base.VARIABLE, base)
        yield dict(os.environ)


@pytest.fixture
def person(tmp_path: Path, environ: Mapping[str, str]) -> Iterator[Person]:
    made = Person(tmp_path / "rehearsal", environ)
    yield made
    cli.down(made.folder, made.said.append)
