"""A rehearsal whose slices are hosts: their machines, the simulated Cloud TPU API, and the stack that asks for them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contracts.aliases import Say
from infra.catalogue import Accelerator
from rehearsal import state
from rehearsal.daemon import rehearsal_stack
from rehearsal.daemon.cli import UpRequest
from rehearsal.daemon.control_socket import Caller
from rehearsal.daemon.fault_commands import FaultCommands
from rehearsal.daemon.gateway import KeeperGateway
from rehearsal.daemon.node_machines import NodeMachines, new_identity
from rehearsal.daemon.rehearsal_stack import RehearsalStack
from rehearsal.gcp_stand_in import server_resources
from rehearsal.machines.docker_engine import MachinesError
from rehearsal.machines.host_image import DEVICE, PYTHON
from rehearsal.machines.machines import Machines
from rehearsal.simulated_cloud import COMPUTE_PATH, Delays, SimulatedCloud
from rehearsal.state import SECRETS, RehearsalError
from tools import pulumi_cli

BOOT_LIMIT_S = 300.0
ADDRESSES = 240
SPARE = 2  # times as many chips as the slice takes, so that a second `up` beside the first has room
KEEPER_LOG = "keeper.log"
DELAY_FACTOR = 0.5  # of what a person who watches the simulator by itself sees


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What a rehearsal is made from.

    folder: a new one. accelerator: of each slice. say: gets every step. changed: called when the state file has to be
    written anew. require_going_on: raises RehearsalError once the daemon is ending.
    """

    folder: Path
    request: UpRequest
    accelerator: Accelerator
    say: Say
    changed: Callable[[], None]
    require_going_on: Callable[[], None]

    def machines(self) -> Machines:
        """The rehearsal's machines, to be entered. Raises MachinesError."""
        name, secrets = state.rehearsal_name(self.folder), self.folder / SECRETS
        return Machines(name=name, say=self.say, kind=self.request.kind, secrets=secrets)


class HostRehearsal:
    """`open` makes the stack, until every host answers. `ClusterRehearsal` has the same methods.

    environment: of the commands that use it. faults: None until there is something that can go wrong. tpu_url: of the
    simulated Cloud TPU API.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup, self._folder, self._say = setup, setup.folder, setup.say
        self._exits = contextlib.ExitStack()
        log = setup.folder / KEEPER_LOG
        self._gateway = (
            KeeperGateway(environ=self._keeper_environment, log=log) if setup.request.keeper else None
        )
        self._hosts: NodeMachines | None = None
        self._stack: RehearsalStack | None = None
        self.environment: dict[str, str] = {}
        self.faults: FaultCommands | None = None
        self.tpu_url = ""

    def close(self) -> None:
        self._exits.close()

    def open(self) -> None:
        environ = {**os.environ, "PATH": state.without_stand_ins(os.environ.get("PATH", os.defpath))}
        cli = pulumi_cli.find_or_build(environ, self._say)
        self._setup.require_going_on()
        self._open_machines()
        self._setup.require_going_on()
        self._open_stack(cli)
        if self._gateway is not None:
            self._exits.callback(self._gateway.power_off)

    def is_ready(self) -> None:
        """To be called once the state file says so."""
        if self._gateway is not None:
            self._gateway.power_on()

    def _keeper_environment(self) -> Mapping[str, str]:
        """The environment of the keeper: the user's, and the URL of the stack's documents."""
        opened = state.open_rehearsal({**os.environ, state.FOLDER_VARIABLE: str(self._folder)})
        store = f"gs://{rehearsal_stack.BUCKET}/control"
        return {**os.environ, **opened.environment, "TPU_STACK_KEEPER": store}

    def _open_machines(self) -> None:
        self._machines = self._exits.enter_context(self._setup.machines())
        public = new_identity(self._folder / "ssh")
        self.environment = {
            **self._machines.environment,
            "TPU_STACK_SSH_KEY": str(self._folder / "ssh" / "id_ed25519"),
            "TPU_STACK_REHEARSAL_PYTHON": sys.executable,
        }
        self._hosts = NodeMachines(
            machines=self._machines,
            addresses=self._machines.network.addresses(ADDRESSES),
            authorized_key=public,
            say=self._say,
            moved=self._setup.changed,
        )
        self._exits.callback(self._hosts.close)

    def _open_stack(self, cli: pulumi_cli.PulumiCli) -> None:
        assert self._hosts is not None
        machines, accelerator = self._machines, self._setup.accelerator
        zone = rehearsal_stack.default_zone(accelerator)
        pool, chips = f"{zone}:{accelerator.generation.type_prefix}:spot", SPARE * accelerator.chips
        self._api = self._exits.enter_context(
            SimulatedCloud(capacity={pool: chips}, delays=Delays().scaled(DELAY_FACTOR), hardware=self._hosts)
        )
        self.environment["GOOGLE_TPU_V2_CUSTOM_ENDPOINT"] = self._api.url
        self.environment["GOOGLE_COMPUTE_CUSTOM_ENDPOINT"] = f"{self._api.url}{COMPUTE_PATH}"
        self.faults = FaultCommands(
            hosts=self._hosts,
            machines=machines,
            control=self._api.control,
            pool=pool,
            chips=chips,
            gateway=self._gateway,
        )
        self._exits.callback(self.faults.close)
        self._stack = RehearsalStack(
            folder=self._folder / "engine",
            cli=cli,
            tpu_url=self._api.url,
            accelerator=accelerator,
            registry=machines.registry.host if machines.registry else None,
            keeper=self._gateway is not None,
            provisioning=self._setup.request.provisioning,
            variables={
                **machines.environment,
                server_resources.HOSTS: json.dumps(
                    {"platform": "cpu", "python": PYTHON, "stand_in_devices": [DEVICE], "reach": "iap"}
                ),
            },
        )
        self.tpu_url = self._api.url
        self._exits.callback(self._stack.close)
        self._say(f"pulumi up: the program of infra/ on the real engine, {cli.version}")
        report = self._stack.carry_out("up", self._say, lambda: False)
        if not report.ok:
            raise RehearsalError(f"`pulumi up` failed:\n{report.text}")
        self._wait_for_hosts(self._hosts)

    @staticmethod
    def _wait_for_hosts(hosts: NodeMachines) -> None:
        """Raises RehearsalError: a machine is not in its desired state within BOOT_LIMIT_S."""
        settled = hosts.settle(BOOT_LIMIT_S)
        if hosts.failed or not settled:
            problems = [f"{name}: {reason}" for name, reason in sorted(hosts.failed.items())]
            raise RehearsalError(
                "\n  ".join(
                    [
                        f"machines did not come up within {BOOT_LIMIT_S:.0f} s; `fab rehearsal up` tries again:",
                        *problems,
                    ]
                )
            )

    @property
    def inventory(self) -> str:
        return self._stack.inventory if self._stack else ""

    @property
    def instances(self) -> Mapping[str, str]:
        return self._hosts.instances() if self._hosts else {}

    def status(self) -> Mapping[str, Any]:
        """Nodes with their states, hosts with addresses and whether they are up."""
        slices = self._api.control.slices() if self._stack is not None else {}
        hosts = self._hosts
        if hosts is None:
            return {}
        registry = self._machines.registry
        return {
            "registry": registry.host if registry else "",
            "nodes": [{"name": name, "state": state} for name, state in slices.items()],
            "hosts": [
                {"name": name, "address": address, "is": hosts.stands(name)}
                for name, address in hosts.instances().items()
            ],
            "failed": dict(hosts.failed),
        }

    def pulumi(self, arguments: list[str], caller: Caller) -> Mapping[str, Any]:
        if self._stack is None:
            raise RehearsalError("the rehearsal has no stack yet; `fab rehearsal status` says how far it is")
        command = rehearsal_stack.parse_pulumi(arguments)
        if command.kind == "output":
            return {"code": 0, "stdout": rehearsal_stack.shown_outputs(self._stack.outputs, command.options)}
        if command.kind == "other":
            ok, output = self._stack.type(*command.arguments)
            return {"code": 0 if ok else 255, "stdout": f"{output}\n"}
        caller.say(
            f"rehearsal: the real engine on the stack {state.STACK}; what it makes are containers here"
        )
        report = self._stack.carry_out(command.kind, caller.say, caller.has_left, **command.options)
        self._setup.changed()
        return {"code": 0 if report.ok else 255, "stdout": ""}

    def destroy(self, caller: Caller) -> None:
        """Empty the bucket, as its runs go with the rehearsal, then as `pulumi destroy`. Raises RehearsalError."""
        if self._stack is not None:
            with contextlib.suppress(MachinesError):  # one that does not answer, the destruction tells of
                self._machines.storage.empty_bucket(rehearsal_stack.BUCKET)
            report = self._stack.carry_out("destroy", caller.say, lambda: False)
            if not report.ok:
                raise RehearsalError(f"`pulumi destroy` failed:\n{report.text}")
