"""Somebody at a terminal, and the rehearsal that is theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rehearsal import state
from rehearsal.machines import Kind, docker_engine, guardian
from rehearsal.room import begin

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 120.0


class Person:
    """Somebody at a terminal. `said`: what the rehearsal told."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self.environ = {**environ, state.FOLDER_VARIABLE: str(folder)}
        self.said: list[str] = []

    def up(self, hosts: int = 1, kind: Kind = "plain") -> None:
        begin.up(self.folder, hosts, self.said.append, kind=kind)

    def type(self, *words: str, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """In a shell that has the rehearsal's environment, and `fab`."""
        opened = state.open_rehearsal(self.environ).environment
        path = os.pathsep.join([opened["PATH"], str(Path(sys.executable).parent)])
        return subprocess.run(
            words, env={**self.environ, **opened, "PATH": path}, capture_output=True, text=True, timeout=limit_s,
            check=False, stdin=subprocess.DEVNULL, cwd=ROOT,
        )  # fmt: skip

    def succeed(self, *words: str, limit_s: float = LIMIT_S) -> str:
        """What a command prints; it must end well."""
        done = self.type(*words, limit_s=limit_s)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def hosts(self) -> dict[str, str]:
        """Name → host key, as the inventory has them."""
        (one,) = json.loads(state.open_rehearsal(self.environ).inventory_json)["slices"]
        return {host["name"]: host["host_keys"][0] for host in one["hosts"]}

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

    def act(self, *words: str) -> str:
        done = self.typed_python(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def typed_python(self, *words: str) -> subprocess.CompletedProcess[str]:
        program = (
            "import os, sys; from rehearsal.room.person import Typed, carry_out;"
            "carry_out(Typed(action=sys.argv[1], hosts=1, host=''.join(sys.argv[2:])), os.environ, print)"
        )
        return subprocess.run(
            [sys.executable, "-c", program, *words], cwd=ROOT, env=self.environ, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip

    def left(self) -> list[str]:
        """Of Docker's things, what carries this rehearsal's label."""
        client = docker_engine.connect()
        try:
            return [name for _, name in guardian.left(client, state.name_of(self.folder))]
        finally:
            client.close()
