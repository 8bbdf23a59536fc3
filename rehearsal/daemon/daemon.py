"""The daemon: holds a rehearsal up, records its state in a file, and answers at a socket.

    python -m rehearsal.daemon.daemon FOLDER REQUEST [OWNER]     `fab rehearsal up` starts it in the background

The process opens a rehearsal, answers at its socket, and takes all down when it is told to, or after a day.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import filelock

from contracts.aliases import Say
from rehearsal import state
from rehearsal.daemon import rehearsal_stack
from rehearsal.daemon.cli import PROBLEM, SOCKET_FOLDER, UpRequest
from rehearsal.daemon.control_socket import Caller, ControlSocket
from rehearsal.daemon.fault_commands import FaultRequest
from rehearsal.daemon.host_rehearsal import HostRehearsal, Setup
from rehearsal.machines.docker_engine import MachinesError
from rehearsal.machines.host_image import DEVICE, PYTHON, USER, require_base
from rehearsal.state import RehearsalError, State
from tools import pulumi_cli

if TYPE_CHECKING:
    from rehearsal.daemon.cluster_rehearsal import ClusterRehearsal

LIFE_S = 24 * 3600.0  # one that was forgotten goes by itself
POLL_S = 0.5
LOCK_LIMIT_S = 5.0  # somebody may just be looking whether it is free


class Daemon:
    """A context; `open` makes the rehearsal. `done`: set when the daemon has to end.

    folder: a new one, for this rehearsal only. socket_path: recorded for clients. say: gets every step.
    """

    def __init__(self, *, folder: Path, request: UpRequest, socket_path: Path, say: Say) -> None:
        if request.hosts % request.slices:
            raise RehearsalError(
                f"--slices {request.slices}: {request.hosts} hosts do not make slices of one size; choose --hosts"
                f" {request.slices}, {2 * request.slices}, …"
            )
        self._accelerator = rehearsal_stack.accelerator_with(
            request.hosts // request.slices, request.provisioning
        )
        self._folder, self._request, self._socket_path, self._say = folder, request, socket_path, say
        self._exits = contextlib.ExitStack()
        self._phase: state.Phase = "starting"
        self._writing = threading.Lock()
        self._rehearsal: HostRehearsal | ClusterRehearsal | None = None
        self.problem = ""
        self.done = threading.Event()

    def __enter__(self) -> Daemon:
        self.write_state()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._set_phase("ending")
        self._exits.close()

    def open(self) -> None:
        """Open the rehearsal, until every host answers.

        Raises:
            RehearsalError: a part of it cannot be started.
        """
        try:
            require_base(os.environ, self._request.kind)
            self._rehearsal = rehearsal = self._make()
            self._exits.callback(rehearsal.close)
            rehearsal.open()
        except (MachinesError, pulumi_cli.PulumiCliError) as error:
            raise RehearsalError(str(error)) from None
        self._set_phase("ready")
        rehearsal.is_ready()

    def _make(self) -> HostRehearsal | ClusterRehearsal:
        setup = Setup(
            folder=self._folder,
            request=self._request,
            accelerator=self._accelerator,
            say=self._say,
            changed=self.write_state,
            require_going_on=self._require_going_on,
        )
        if self._request.kind != "kubernetes":
            return HostRehearsal(setup)
        from rehearsal.daemon.cluster_rehearsal import (
            ClusterRehearsal,  # a second, for the client of Kubernetes
        )

        return ClusterRehearsal(setup)

    def _require_going_on(self) -> None:
        """Refuse to start anything once the daemon is ending."""
        if self._phase == "ending":
            raise RehearsalError("it was ended before it was ready")

    def _set_phase(self, phase: state.Phase) -> None:
        self._phase = phase
        self.write_state()

    def write_state(self) -> None:
        """So that the file says what is so now. A folder that was removed stays so."""
        with self._writing:
            if not self._folder.is_dir():
                return
            rehearsal = self._rehearsal
            state.write(
                self._folder,
                State(
                    phase=self._phase,
                    pid=os.getpid(),
                    socket=str(self._socket_path),
                    hosts=self._request.hosts,
                    inventory=rehearsal.inventory if rehearsal else "",
                    environment=rehearsal.environment if rehearsal else {},
                    instances=rehearsal.instances if rehearsal else {},
                    tpu_url=rehearsal.tpu_url if rehearsal else "",
                    user=USER,
                    python=PYTHON,
                    devices=(DEVICE,),
                ),
            )

    def answer(self, do: str, arguments: Mapping[str, Any], caller: Caller) -> Any:
        """Answer a request of the control socket. Raises RehearsalError."""
        rehearsal = self._rehearsal
        if do == "status":
            return self._status()
        if do == "destroy":
            return rehearsal.destroy(caller) if rehearsal else None
        if do == "pulumi":
            if rehearsal is None:
                raise RehearsalError(
                    "the rehearsal has no stack yet; `fab rehearsal status` says how far it is"
                )
            return rehearsal.pulumi(list(arguments["arguments"]), caller)
        if do == "act":
            if rehearsal is None or rehearsal.faults is None:
                raise RehearsalError(
                    "the rehearsal has no hosts yet; `fab rehearsal status` says how far it is"
                )
            return rehearsal.faults.carry_out(str(arguments["name"]), FaultRequest(**arguments["asked"]))
        raise RehearsalError(f'"{do}" is nothing that the daemon does; pulumi, act, status or destroy are')

    def _status(self) -> Mapping[str, Any]:
        return {
            "phase": self._phase,
            "accelerator": self._accelerator.type_name,
            "zone": rehearsal_stack.default_zone(self._accelerator),
            "registry": "",
            "nodes": [],
            "hosts": [],
            "failed": {},
            "cluster": None,
            **(self._rehearsal.status() if self._rehearsal else {}),
        }


# --- its process ---------------------------------------------------------------------------------------------------


def say(line: str) -> None:
    print(line, flush=True)


def serve(folder: Path, request: UpRequest, owner: int | None) -> int:
    """Run the daemon. Returns the exit code: 0, or 2 if the rehearsal could not be started; the reason comes last."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        lock = filelock.FileLock(folder / state.LOCK, timeout=LOCK_LIMIT_S).acquire()
    except filelock.Timeout:
        say(f"a rehearsal is up in {folder} already; `fab rehearsal status`, or `fab rehearsal down`")
        return 2
    # The path of a socket may not be longer than some 100 characters, and that of the folder may.
    socket_folder = tempfile.mkdtemp(prefix=SOCKET_FOLDER)
    try:
        with lock:
            return _serve(folder, request, owner, Path(socket_folder) / "control")
    finally:
        shutil.rmtree(socket_folder, ignore_errors=True)


def _serve(folder: Path, request: UpRequest, owner: int | None, path: Path) -> int:
    try:
        with Daemon(folder=folder, request=request, socket_path=path, say=say) as daemon:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: daemon.done.set())
            with ControlSocket(path, daemon.answer):
                threading.Thread(target=_watch, args=(folder, owner, daemon.done), daemon=True).start()
                opening = threading.Thread(target=_open, args=(daemon,), daemon=True)
                opening.start()
                daemon.done.wait(LIFE_S)
    finally:
        (folder / state.FILE).unlink(missing_ok=True)
    if daemon.problem:
        say(f"{PROBLEM}{daemon.problem}")
        return 2
    say("the rehearsal is over; nothing of it is left")
    return 0


def _open(daemon: Daemon) -> None:
    """Open the rehearsal in a separate thread, so that the daemon can be ended meanwhile."""
    try:
        daemon.open()
    except RehearsalError as error:
        daemon.problem = str(error)
    except Exception as error:
        daemon.problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        if daemon.problem:
            daemon.done.set()


def _watch(folder: Path, owner: int | None, done: threading.Event) -> None:
    """Set `done` when the owner is gone, however it ended, or the folder, without which nobody finds the rehearsal."""
    while not done.wait(POLL_S):
        try:
            (folder / state.LOCK).stat()
            if owner is not None:
                os.kill(owner, 0)
        except (FileNotFoundError, ProcessLookupError):
            done.set()


def main(folder: str, request: str, owner: str = "") -> int:
    """request: of `up`, as JSON. owner: the id of the process with which the rehearsal ends; empty: none."""
    os.umask(0o077)
    try:
        return serve(Path(folder), UpRequest(**json.loads(request)), int(owner) if owner else None)
    except RehearsalError as error:
        say(f"{PROBLEM}{error}")
        return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
