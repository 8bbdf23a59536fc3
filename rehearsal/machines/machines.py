"""The machines of one rehearsal: containers that are made, killed, started again, removed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docker.errors
import docker.types
from docker.models.containers import Container

from contracts.aliases import Say
from contracts.host_interface import SECRET_MANAGER
from rehearsal.machines import docker_engine, guardian
from rehearsal.machines.containers import Containers, Standing
from rehearsal.machines.docker_engine import (
    LABEL,
    MachinesError,
    asking,
    labels,
    shows_ssh,
    wait_for,
)
from rehearsal.machines.faults import Faults
from rehearsal.machines.host_image import (
    AUTHORIZED_KEYS,
    DEVICE,
    DOCKER_DATA,
    HOME,
    HOME_MIB,
    HOST_KEY,
    SETTINGS,
    SHARE,
    SPARE_SHARE,
    USER,
    HostKind,
    find_or_build,
)
from rehearsal.machines.servers import (
    BUCKET_SERVER,
    REGISTRY_PORT,
    REGISTRY_SERVER,
    STORAGE,
    HostNetwork,
    RegistryServer,
    StorageServer,
    find_or_build_program,
    make_network,
    share_at,
    start_registry,
    start_storage,
)
from rehearsal.simulator.http_server import SimulatorServer
from rehearsal.simulator.secret_manager import SecretManager

# Enough for a small job and what it writes to home and share; what runs away ends itself and not this computer.
MEMORY_MIB = 4096
PROCESSES = 2048
# Of a machine with a Docker daemon of its own, which makes no networks: its containers have the host's or none, as
# training has. It may mount, which a container otherwise may not, and is confined by no seccomp or AppArmor profile:
# whoever is root on such a machine can get at this computer. Hence only where it is asked for.
DOCKER_RIGHTS: dict[str, Any] = {
    # Not --privileged, which some computers cannot give and this needs no more than a part of.
    "cap_add": ["SYS_ADMIN", "NET_ADMIN"],
    "security_opt": ["apparmor=unconfined", "seccomp=unconfined"],
    "pids_limit": 4096,  # two daemons, and a shim for each container, are added to what the machine runs
}
START_LIMIT_S = 60
ROLE = "machine"
"""Of a host's container."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A host to be made.

    address: out of the network's subnet. host_key: private, ed25519, in OpenSSH's form. authorized_key: the public
    line that its user is let in with.
    """

    name: str
    address: str
    host_key: str
    authorized_key: str


def container_options(rehearsal: str, registry: RegistryServer | None) -> dict[str, Any]:
    """The options of a machine's container. Pure.

    registry: set if the machine has Docker.
    """
    environment = {"USER_NAME": USER, "DEVICE": DEVICE}
    # The share twice: from the spare one it is mounted again where it was unmounted.
    mounts = [share_at(rehearsal, path) for path in (SHARE, SPARE_SHARE)]
    options: dict[str, Any] = {
        # A home that can be full without this computer's disk being so.
        "tmpfs": {HOME: f"size={HOME_MIB}m,exec,mode=0755"},
        "mem_limit": f"{MEMORY_MIB}m",
        "pids_limit": PROCESSES,
        "shm_size": "256m",
    }
    if registry is not None:
        options |= DOCKER_RIGHTS
        environment["REGISTRY"] = f"{registry.port} {registry.address}:{REGISTRY_PORT}"
        # Its images, in a volume that goes with the machine: no file system can be stacked upon a container's own.
        mounts.append(docker.types.Mount(DOCKER_DATA, None, type="volume", labels=labels(rehearsal)))
    return {**options, "environment": environment, "mounts": mounts}


def files(machine: Machine, environment: Mapping[str, str]) -> dict[str, tuple[bytes, int]]:
    """The files of a machine, path → (content, mode): no secret is in the container's environment or image.

    environment: of every ssh session. All variables stand in one SetEnv: sshd heeds only the first.
    """
    settings = " ".join(f'"{name}={value}"' for name, value in environment.items())
    return {
        HOST_KEY: (f"{machine.host_key.strip()}\n".encode(), 0o600),
        AUTHORIZED_KEYS: (f"{machine.authorized_key.strip()}\n".encode(), 0o644),
        SETTINGS: (f"SetEnv {settings}\n".encode(), 0o644),
    }


class Machines:
    """The machines of one rehearsal. A context: they are removed at its end, and also when this process is killed.

    Methods may be called from several threads, but for the same machine one after the other.
    """

    containers: Containers
    network: HostNetwork
    storage: StorageServer
    registry: RegistryServer | None = None  # where the hosts have Docker
    faults: Faults
    environment: dict[str, str]
    """Of hosts and of this machine: where the simulated services are."""

    def __init__(
        self,
        *,
        name: str,
        say: Say,
        environ: Mapping[str, str] = os.environ,
        kind: HostKind = "plain",
        secrets: Path | None = None,
    ) -> None:
        """environ: where HOME, PATH, TPU_STACK_BASE_IMAGE and proxies are looked for. kind: of the hosts. secrets: the
        folder of those in Secret Manager; None: there is no Secret Manager.

        Raises MachinesError where Docker is not there. Entering the context does where something of that name is.
        """
        self.name = name
        self._say = say
        self._environ = environ
        self._kind = kind
        self._secrets = secrets
        self._exits = contextlib.ExitStack()
        self._client = docker_engine.connect()
        self._guardian: guardian.Guardian | None = None

    def __enter__(self) -> Machines:
        """Builds what is not built yet, minutes the first time, and starts what stands beside the hosts."""
        with asking(f"rehearsal {self.name}"):
            left = guardian.left(self._client, self.name)
        if left:
            self._client.close()
            raise MachinesError(
                f"rehearsal {self.name} is there already ({', '.join(name for _, name in left)}): it is running, or"
                " was left by a machine that went down; take it down first, or choose another name"
            )
        self._guardian = guardian.Guardian(self.name)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        client, name, environ, say = self._client, self.name, self._environ, self._say
        bucket_server = find_or_build_program(BUCKET_SERVER, environ, say)
        has_docker = self._kind == "docker"
        registry_server = find_or_build_program(REGISTRY_SERVER, environ, say) if has_docker else None
        image = find_or_build(client, environ, say, self._kind)
        self.containers = Containers(client=client, rehearsal=name, image=image)
        self.network = make_network(client, name)
        self.storage = start_storage(self.containers, self.network, bucket_server)
        if registry_server is not None:
            self.registry = start_registry(self.containers, self.network, registry_server)
        self.faults = Faults(self.containers)
        self.environment = dict(self.storage.environment)
        if self._secrets is not None:
            # The address that this machine has in the hosts' own network, which leads nowhere else.
            services = {"/": SecretManager(self._secrets)}
            server = SimulatorServer(services, address=self.network.laptop_address)
            self.environment[SECRET_MANAGER] = self._exits.enter_context(server).url

    def freeze_bucket(self, *, frozen: bool) -> None:
        """Let the bucket server answer nobody, or everybody again. Raises MachinesError."""
        self.containers.freeze(STORAGE, frozen=frozen)

    def __exit__(self, *_: object) -> None:
        self._exits.close()
        watcher, self._guardian = self._guardian, None
        try:
            self.remove_everything()
        except BaseException:
            if watcher is not None:
                watcher.take_over()
            raise
        finally:
            self._client.close()
        if watcher is not None:
            watcher.dismiss()

    def boot(self, machine: Machine) -> None:
        """Make a machine, and return when its sshd answers. Raises MachinesError, after removing it."""
        name = machine.name
        with asking(f"machine {name}"):
            container = self.containers.create(
                name,
                role=ROLE,
                files=files(machine, self.environment),
                network=self.network.name,
                address=machine.address,
                **container_options(self.name, self.registry),
            )
            try:
                container.start()
                _wait_for_ssh(container, name, machine.address)
            except BaseException:
                with contextlib.suppress(docker.errors.DockerException):
                    container.remove(force=True, v=True)
                raise

    def kill(self, name: str) -> None:
        """Kill a machine as a power cut does: off the network first, so that no peer sees its connections end."""
        container = self.containers.find(name)
        network = self.network.name
        with asking(f"killing {name}"), contextlib.suppress(docker.errors.NotFound):
            if network in container.attrs["NetworkSettings"]["Networks"]:
                self._client.networks.get(network).disconnect(container, force=True)
            container.reload()
            if container.status in ("running", "paused"):
                container.kill("SIGKILL")
                container.wait(timeout=docker_engine.ANSWER_LIMIT_S)

    def restart(self, name: str) -> None:
        """Starts what was killed; what runs is killed before. Its home is empty again, as after a preemption."""
        self.kill(name)
        container = self.containers.find(name)
        address = container.labels[f"{LABEL}.address"]
        with asking(f"starting {name}"):
            network = self._client.networks.get(self.network.name)
            network.connect(container, ipv4_address=address, aliases=[name])
            container.start()
            _wait_for_ssh(container, name, address)

    def remove(self, name: str) -> None:
        """Kill a machine and remove it. Does nothing if there is none."""
        if name in [machine.name for machine in self.list()]:
            self.kill(name)
            self.containers.remove(name)

    def list(self) -> list[Standing]:
        """All machines by name, also killed ones."""
        return self.containers.list(ROLE)

    def remove_everything(self) -> Sequence[str]:
        """Remove everything that carries this rehearsal's label, and return the names; may be repeated."""
        return guardian.remove_everything(self.name, self._client)


def _wait_for_ssh(container: Container, name: str, address: str) -> None:
    wait_for(lambda: shows_ssh(address), START_LIMIT_S, container, f"sshd of {name} at {address}")
