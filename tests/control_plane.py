"""etcd and the API server of a cluster as processes of this machine, which listen on loopback.

Without a node no pod ever runs, but everything that an API server refuses it refuses here.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import kubernetes.config

from rehearsal.kubernetes import controllers
from rehearsal.kubernetes.control_plane import (
    ADMINISTRATORS,
    API_PROGRAMS,
    CONTEXT,
    READY_LIMIT_S,
    Layout,
    ProgramName,
    answers,
    arguments,
    write_credentials,
)
from rehearsal.machines.docker_engine import MachinesError
from rehearsal.machines.servers import manifests_beside
from tests.servers import free_ports

END_LIMIT_S = 10.0
LOOK_AGAIN_S = 0.05
LAST_LINES = 15


class LocalControlPlane:
    """etcd and the API server as processes of this machine, from `with` to the end of its block. They end with this
    process.

    folder: a new one, which is removed. programs: of `find_or_build`. added: controllers. kubeconfig: of an
    administrator.
    """

    def __init__(
        self,
        *,
        folder: Path,
        programs: Mapping[ProgramName, Path],
        added: Sequence[controllers.ControllerName] = (),
    ) -> None:
        ports = free_ports(4)
        self.layout = Layout(
            credentials=str(folder / "credentials"),
            data=str(folder / "etcd"),
            address="127.0.0.1",
            port=ports[0],
            etcd_port=ports[1],
            peer_port=ports[2],
            webhook_port=ports[3],
        )
        self._added = added
        self.kubeconfig = folder / "kubeconfig"
        self._folder = folder
        self.programs = programs
        self.running: dict[ProgramName, subprocess.Popen[bytes]] = {}
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> LocalControlPlane:
        """Raises MachinesError, with a component's last words."""
        try:
            self._folder.mkdir(mode=0o700, parents=True)
            self._exits.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self.authority = write_credentials(self._folder / "credentials", self.layout)
            self.authority.kubeconfig(
                self.kubeconfig, self.layout.server, "administrator", groups=[ADMINISTRATORS], context=CONTEXT
            )
            for name in API_PROGRAMS:
                self.start(name)
            self.wait_until_ready()
            for controller in self._added:
                self._install(controller)
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _install(self, name: controllers.ControllerName) -> None:
        text = manifests_beside(self.programs[name]).read_text(encoding="utf-8")
        with kubernetes.config.new_client_from_config(str(self.kubeconfig)) as api:
            port = self.layout.controller_port(name)
            controllers.install(
                api,
                name,
                text,
                (self.layout.address, port),
                self.authority.certificate,
                lambda: self.start(name),
            )

    def start(self, name: ProgramName) -> None:
        """Starts a component, again after `end`."""
        log: IO[bytes] = (self._folder / f"{name}.log").open("ab")
        with log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", str(self.programs[name]), *arguments(name, self.layout)],
                cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.running[name] = process
        self._exits.callback(self.end, name)

    def end(self, name: ProgramName) -> None:
        """Ends a component; nothing where it has ended."""
        process = self.running.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def wait_until_ready(self) -> None:
        """Wait for the API server. Raises MachinesError."""
        until = time.monotonic() + READY_LIMIT_S
        while reason := answers(self.layout):
            ended = [name for name, process in self.running.items() if process.poll() is not None]
            if ended or time.monotonic() > until:
                name = ended[0] if ended else "kube-apiserver"
                lines = (self._folder / f"{name}.log").read_text(errors="replace").splitlines()
                raise MachinesError(
                    f"{name} {'ended' if ended else f'is not ready after {READY_LIMIT_S:.0f} s ({reason})'}; it said"
                    " last:\n" + "\n".join(lines[-LAST_LINES:])
                )
            time.sleep(LOOK_AGAIN_S)
