"""The daemon: what a rehearsal holds while it is up (machines, the simulated API, the stack), and what it answers.

    python -m rehearsal.daemon.daemon FOLDER --hosts 2     `fab rehearsal up` starts it in the background

The process opens a rehearsal, answers at its socket, and takes all down when it is told to, or after a day.
"""

from __future__ import annotations

import argparse
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
from typing import TYPE_CHECKING, Any, get_args

import filelock

from contracts.aliases import Say
from rehearsal import state
from rehearsal.daemon import rehearsal_stack
from rehearsal.daemon.cli import PROBLEM, SOCKET_FOLDER, UpRequest
from rehearsal.daemon.control_socket import Caller, ControlSocket
from rehearsal.daemon.fault_commands import FaultCommands, FaultRequest
from rehearsal.daemon.gateway import KeeperGateway
from rehearsal.daemon.node_machines import NodeMachines, new_identity
from rehearsal.daemon.rehearsal_stack import RehearsalStack
from rehearsal.gcp_stand_in import bucket_server
from rehearsal.kubernetes.control_plane import find_or_build as find_or_build_programs
from rehearsal.machines.docker_engine import MachinesError
from rehearsal.machines.host_image import DEVICE, PYTHON, USER, HostKind, require_base
from rehearsal.machines.machines import Machines
from rehearsal.machines.servers import RegistryServer
from rehearsal.state import RehearsalError, State
from rehearsal.tpu_api import Delays, TpuApi
from tools import pulumi_cli

if TYPE_CHECKING:
    from rehearsal.daemon.cluster_faults import ClusterFaults
    from rehearsal.daemon.cluster_rehearsal import ClusterRehearsal


BOOT_LIMIT_S = 300.0
ADDRESSES = 240
SPARE = 2  # times as many chips as the slice takes, so that a second `up` beside the first has room
LIFE_S = 24 * 3600.0  # one that was forgotten goes by itself
OWNER_POLL_S = 0.5
LOCK_LIMIT_S = 5.0  # somebody may just be looking whether it is free
KEEPER_LOG = "keeper.log"
DELAY_FACTOR = 0.5  # of what a person who watches the simulator by itself sees


class Daemon:
    """A context; `open` makes the stack. `done`: set when the daemon has to end.

    folder: a new one, for this rehearsal only. socket_path: recorded for clients. say: gets every step.
    accelerator: of each slice.
    """

    def __init__(self, *, folder: Path, request: UpRequest, socket_path: Path, say: Say) -> None:
        if request.hosts % request.slices:
            raise RehearsalError(
                f"--slices {request.slices}: {request.hosts} hosts do not make slices of one size; choose --hosts"
                f" {request.slices}, {2 * request.slices}, …"
            )
        self.accelerator = rehearsal_stack.accelerator_with(request.hosts // request.slices)
        self.zone = rehearsal_stack.default_zone(self.accelerator)
        self.folder = folder
        self.say = say
        self._socket_path = socket_path
        self._request, self._kind = request, request.kind
        self._exits = contextlib.ExitStack()
        self._phase: state.Phase = "starting"
        self._environment: dict[str, str] = {}
        self._writing = threading.Lock()
        self.problem = ""
        self.done = threading.Event()
        self.faults: FaultCommands | ClusterFaults | None = None
        self.cluster: ClusterRehearsal | None = None
        self.registry: RegistryServer | None = None
        self.gateway = (
            KeeperGateway(environ=self._keeper_environment, log=folder / KEEPER_LOG)
            if request.keeper
            else None
        )
        self.hosts: NodeMachines | None = None
        self.stack: RehearsalStack | None = None

    def __enter__(self) -> Daemon:
        self.write_state()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.set_phase("ending")
        self._exits.close()

    # --- up ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Machines, API and stack, until every host answers.

        Raises:
            RehearsalError: a part of it cannot be started.
        """
        try:
            require_base(os.environ, self._kind)
            if self._kind == "kubernetes":
                self._open_cluster()
                self.set_phase("ready")
                return
            cli = pulumi_cli.find_or_build(
                {**os.environ, "PATH": state.without_stand_ins(os.environ.get("PATH", os.defpath))}, self.say
            )
            self._require_going_on()
            self._open_machines()
            self._require_going_on()
            self._open_stack(cli)
        except (MachinesError, pulumi_cli.PulumiCliError) as error:
            raise RehearsalError(str(error)) from None
        self.set_phase("ready")
        if self.gateway is not None:
            self._exits.callback(self.gateway.power_off)
            self.gateway.power_on()

    def _keeper_environment(self) -> Mapping[str, str]:
        """The environment of the keeper: the user's, and the URL of the stack's documents."""
        opened = state.open_rehearsal({**os.environ, state.FOLDER_VARIABLE: str(self.folder)})
        store = f"gs://{rehearsal_stack.BUCKET}/control"
        return {
            **os.environ,
            **opened.environment,
            "TPU_STACK_KEEPER": store,
        }

    def _require_going_on(self) -> None:
        """Refuse to start anything once the daemon is ending."""
        if self._phase == "ending":
            raise RehearsalError("it was ended before it was ready")

    def _open_cluster(self) -> None:
        from rehearsal.daemon.cluster_rehearsal import (
            ClusterRehearsal,  # a second, for the client of Kubernetes
            programs_for,
        )

        slices, queue = self._request.slices, self._request.queue
        programs = find_or_build_programs(os.environ, self.say, programs_for(slices, queue))
        self._require_going_on()
        self.machines = self._exits.enter_context(
            Machines(name=state.rehearsal_name(self.folder), say=self.say, kind=self._kind)
        )
        self._require_going_on()
        self.cluster = self._exits.enter_context(
            ClusterRehearsal(
                folder=self.folder / "kubernetes",
                machines=self.machines,
                programs=programs,
                accelerator=self.accelerator,
                slices=slices,
                queue=queue,
                say=self.say,
            )
        )
        self.faults = self.cluster.faults
        self._environment = {
            **self.machines.storage.environment,
            "TPU_STACK_REHEARSAL_PYTHON": sys.executable,
            "KUBECONFIG": str(self.cluster.cluster.kubeconfig),
        }

    def _open_machines(self) -> None:
        self.machines = self._exits.enter_context(
            Machines(name=state.rehearsal_name(self.folder), say=self.say, kind=self._kind)
        )
        self.storage, self.registry = self.machines.storage, self.machines.registry
        public = new_identity(self.folder / "ssh")
        self._environment = {
            **self.storage.environment,
            "TPU_STACK_SSH_KEY": str(self.folder / "ssh" / "id_ed25519"),
            "TPU_STACK_REHEARSAL_PYTHON": sys.executable,
        }
        self.hosts = NodeMachines(
            machines=self.machines,
            addresses=self.machines.network.addresses(ADDRESSES),
            authorized_key=public,
            say=self.say,
            moved=self.write_state,
        )
        self._exits.callback(self.hosts.close)

    def _open_stack(self, cli: pulumi_cli.PulumiCli) -> None:
        assert self.hosts is not None
        pool = f"{self.zone}:{self.accelerator.generation.type_prefix}:spot"
        chips = SPARE * self.accelerator.chips
        self.api = self._exits.enter_context(
            TpuApi(
                capacity={pool: chips},
                delays=Delays().scaled(DELAY_FACTOR),
                hardware=self.hosts,
            )
        )
        self._environment["GOOGLE_TPU_V2_CUSTOM_ENDPOINT"] = self.api.url
        self.faults = FaultCommands(
            hosts=self.hosts,
            faults=self.machines.faults,
            control=self.api.control,
            pool=pool,
            chips=chips,
            freeze_bucket=self.machines.freeze_bucket,
            gateway=self.gateway,
        )
        self._exits.callback(self.faults.close)
        self.stack = RehearsalStack(
            folder=self.folder / "engine",
            cli=cli,
            tpu_url=self.api.url,
            accelerator=self.accelerator,
            registry=self.registry.host if self.registry else None,
            keeper=self.gateway is not None,
            variables={
                **self.storage.environment,
                bucket_server.HOSTS: json.dumps(
                    {"platform": "cpu", "python": PYTHON, "stand_in_devices": [DEVICE], "reach": "iap"}
                ),
            },
        )
        self._exits.callback(self.stack.close)
        self.say(f"pulumi up: the program of infra/ on the real engine, {cli.version}")
        report = self.stack.carry_out("up", self.say, lambda: False)
        if not report.ok:
            raise RehearsalError(f"`pulumi up` failed:\n{report.text}")
        self.wait_for_hosts()
        url = json.loads(self.stack.inventory)["storage"]["bucket_url"] or ""
        if bucket := url.removeprefix("gs://"):
            self.storage.make_bucket(bucket)

    def wait_for_hosts(self) -> None:
        """Wait until every machine is in its desired state.

        Raises:
            RehearsalError: one is not, within BOOT_LIMIT_S.
        """
        assert self.hosts is not None
        settled = self.hosts.settle(BOOT_LIMIT_S)
        if self.hosts.failed or not settled:
            problems = [f"{name}: {reason}" for name, reason in sorted(self.hosts.failed.items())]
            raise RehearsalError(
                "\n  ".join([f"machines did not come up within {BOOT_LIMIT_S:.0f} s:", *problems])
            )

    # --- what it tells ----------------------------------------------------------------------------------------

    def set_phase(self, phase: state.Phase) -> None:
        self._phase = phase
        self.write_state()

    def write_state(self) -> None:
        """So that the file says what is so now."""
        with self._writing:
            state.write(
                self.folder,
                State(
                    phase=self._phase,
                    pid=os.getpid(),
                    socket=str(self._socket_path),
                    hosts=self._request.hosts,
                    inventory=self._inventory(),
                    environment=self._environment,
                    instances=self.hosts.instances() if self.hosts else {},
                    tpu_url=self.api.url if self.stack else "",
                    user=USER,
                    python=PYTHON,
                    devices=(DEVICE,),
                ),
            )

    def _inventory(self) -> str:
        if self.cluster is not None:
            return self.cluster.inventory
        return self.stack.inventory if self.stack else ""

    # --- what is asked of it ----------------------------------------------------------------------------------

    def answer(self, do: str, arguments: Mapping[str, Any], caller: Caller) -> Any:
        """Answer a request of the control socket. Raises RehearsalError."""
        if do == "pulumi":
            return self.pulumi(list(arguments["arguments"]), caller)
        if do == "act":
            if self.faults is None:
                raise RehearsalError(
                    "the rehearsal has no hosts yet; `fab rehearsal status` says how far it is"
                )
            return self.faults.carry_out(str(arguments["name"]), FaultRequest(**arguments["asked"]))
        if do == "status":
            return self.status()
        if do == "destroy":
            return self.destroy(caller)
        raise RehearsalError(f'"{do}" is nothing that the daemon does; pulumi, act, status or destroy are')

    def pulumi(self, arguments: list[str], caller: Caller) -> Mapping[str, Any]:
        """Run a `pulumi` command. Returns its exit code and standard output."""
        if self.cluster is not None:
            raise RehearsalError("this rehearsal is a cluster that Pulumi has not made; fab rehearsal status")
        if self.stack is None:
            raise RehearsalError("the rehearsal has no stack yet; `fab rehearsal status` says how far it is")
        command = rehearsal_stack.parse_pulumi(arguments)
        if command.kind == "output":
            return {"code": 0, "stdout": rehearsal_stack.shown_outputs(self.stack.outputs, command.options)}
        if command.kind == "other":
            ok, output = self.stack.type(*command.arguments)
            return {"code": 0 if ok else 255, "stdout": f"{output}\n"}
        caller.say(
            f"rehearsal: the real engine on the stack {state.STACK}; what it makes are containers here"
        )
        report = self.stack.carry_out(command.kind, caller.say, caller.has_left, **command.options)
        self.write_state()
        return {"code": 0 if report.ok else 255, "stdout": ""}

    def status(self) -> Mapping[str, Any]:
        """phase, pool and its chips, nodes with their states, hosts with addresses and whether they are up."""
        nodes = self.api.control.alive()["nodes"] if self.stack is not None else []
        instances = self.hosts.instances() if self.hosts else {}
        return {
            "phase": self._phase,
            "registry": self.registry.host if self.registry else "",
            "accelerator": self.accelerator.type_name,
            "zone": self.zone,
            "nodes": [{"name": node["name"], "state": node["state"]} for node in nodes],
            "hosts": [
                {"name": name, "address": address, "is": self.hosts.stands(name) if self.hosts else "gone"}
                for name, address in instances.items()
            ],
            "failed": dict(self.hosts.failed) if self.hosts else {},
            "cluster": self.cluster.status() if self.cluster else None,
        }

    def destroy(self, caller: Caller) -> None:
        """Empty the bucket, as its runs go with the rehearsal, then as `pulumi destroy`. Raises RehearsalError."""
        if self.stack is not None:
            with contextlib.suppress(MachinesError):  # one that does not answer, the destruction tells of
                self.storage.empty_bucket(rehearsal_stack.BUCKET)
            report = self.stack.carry_out("destroy", caller.say, lambda: False)
            if not report.ok:
                raise RehearsalError(f"`pulumi destroy` failed:\n{report.text}")


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
                if owner is not None:
                    threading.Thread(target=_end_with, args=(owner, daemon.done), daemon=True).start()
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


def _end_with(process_id: int, done: threading.Event) -> None:
    """Sets `done` when that process is gone, however it ended."""
    while not done.wait(OWNER_POLL_S):
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            done.set()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rehearsal.daemon.daemon", description="The rehearsal's daemon."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--kind", choices=get_args(HostKind), default="plain", help="of the hosts")
    parser.add_argument("--keeper", action="store_true", help="with a gateway that starts the keeper")
    parser.add_argument("--slices", type=int, default=1, help="of a cluster, of as many hosts each")
    parser.add_argument("--queue", default="", help="of a cluster: a queue of Kueue")
    parser.add_argument("--owner", type=int, metavar="PID", help="end when that process does")
    options = parser.parse_args()
    os.umask(0o077)
    try:
        request = UpRequest(
            hosts=options.hosts,
            kind=options.kind,
            keeper=options.keeper,
            slices=options.slices,
            queue=options.queue,
        )
        return serve(options.folder.absolute(), request, options.owner)
    except RehearsalError as error:
        say(f"{PROBLEM}{error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
