"""The machines of one rehearsal: containers that are made, killed, started again, removed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import docker.errors
import docker.types
from docker.models.containers import Container

from rehearsal.machines import docker_engine, guardian
from rehearsal.machines.docker_engine import LABEL, MachinesError, asking, labels, shows_ssh, wait_for
from rehearsal.machines.faults import Faults
from rehearsal.machines.host_image import Kind, find_or_build
from rehearsal.machines.machine import (
    DEVICE,
    DOCKER_DATA,
    HOME_MIB,
    SPARE_SHARE,
    Machine,
    Standing,
    check,
    files,
    home,
)
from rehearsal.machines.servers import (
    BUCKET_SERVER,
    REGISTRY_PORT,
    REGISTRY_SERVER,
    Network,
    Registry,
    Storage,
    find_or_build_program,
    make_network,
    share_at,
    start_registry,
    start_storage,
)

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

Say = Callable[[str], None]


def container_options(rehearsal: str, machine: Machine, registry: Registry | None) -> dict[str, Any]:
    """What the container of a machine is made with, apart from image, name and network. Pure.

    registry: where the machine is to have Docker.
    """
    environment = {"USER_NAME": machine.user, "DEVICE": DEVICE}
    found: dict[str, Any] = {
        "hostname": machine.name,
        "init": True,
        "labels": labels(
            rehearsal, role="machine", machine=machine.name, address=machine.address, user=machine.user,
            share=machine.share_mount or "",
        ),
        # A home that can be full without this computer's disk being so.
        "tmpfs": {home(machine.user): f"size={HOME_MIB}m,exec,mode=0755"},
        "mem_limit": f"{MEMORY_MIB}m",
        "pids_limit": PROCESSES,
        "shm_size": "256m",
    }  # fmt: skip
    mounts: list[docker.types.Mount] = []
    if machine.share_mount is not None:
        # Twice: from the spare one it is mounted again where it was unmounted.
        mounts += [share_at(rehearsal, path) for path in (machine.share_mount, SPARE_SHARE)]
    if registry is not None:
        found |= DOCKER_RIGHTS
        environment["REGISTRY"] = f"{registry.port} {registry.address}:{REGISTRY_PORT}"
        # Its images, in a volume that goes with the machine: no file system can be stacked upon a container's own.
        mounts.append(docker.types.Mount(DOCKER_DATA, None, type="volume", labels=labels(rehearsal)))
    return {**found, "environment": environment, "mounts": mounts}


class Machines:
    """One rehearsal's. Use it as a context: it is removed at the end, and also when this process is killed.

    Methods may be called from several threads, but for the same machine one after the other.
    """

    image: str
    network: Network
    storage: Storage
    registry: Registry | None = None  # where the hosts have Docker
    faults: Faults

    def __init__(
        self, *, name: str, say: Say, environ: Mapping[str, str] = os.environ, kind: Kind = "plain"
    ) -> None:
        """environ: where HOME, PATH, TPU_STACK_BASE_IMAGE and proxies are looked for. kind: of the hosts.

        Raises MachinesError where Docker is not there. Entering the context does where something of that name is.
        """
        self.name = docker_engine.checked_name(name, "rehearsal")
        self._say = say
        self._environ = environ
        self._kind = kind
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
        self.image = find_or_build(client, environ, say, self._kind)
        self.network = make_network(client, name)
        self.storage = start_storage(client, name, self.network, self.image, bucket_server)
        if registry_server is not None:
            self.registry = start_registry(client, name, self.network, self.image, registry_server)
        self.faults = Faults(client, self.find, self.image)

    def __exit__(self, *_: object) -> None:
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

    def boot(self, machine: Machine) -> Standing:
        """Makes it and returns when its sshd answers. Raises MachinesError; then nothing of it is there."""
        docker_engine.checked_name(machine.name, "machine")
        check(machine)
        network = self.network
        environment = {**self.storage.environment, **machine.environment}
        given = container_options(self.name, machine, self.registry)
        with asking(f"machine {machine.name}"):
            made = self._client.containers.create(
                self.image, name=self._container_name(machine.name), network=network.name,
                networking_config={network.name: self._endpoint(machine.name, machine.address)}, **given,
            )  # fmt: skip
            with self._removed_if_it_fails(made):
                made.put_archive("/", files(machine, environment))
                made.start()
                self._wait_for_ssh(made, machine.name, machine.address)
        return self.find(machine.name)[1]

    def kill(self, name: str) -> None:
        """As a power cut: it is off the network first, so that no peer is told that its connections ended."""
        container, _ = self.find(name)
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
        container, standing = self.find(name)
        with asking(f"starting {name}"):
            self._client.networks.get(self.network.name).connect(
                container, ipv4_address=standing.address, aliases=[name]
            )
            container.start()
            self._wait_for_ssh(container, name, standing.address)

    def remove(self, name: str) -> None:
        """As abruptly as `kill`, and the machine is gone. Nothing where there is none."""
        if name not in [each.name for each in self.list()]:
            return
        self.kill(name)
        with asking(f"removing {name}"), contextlib.suppress(docker.errors.NotFound):
            self._client.api.remove_container(self._container_name(name), force=True, v=True)

    def list(self) -> list[Standing]:
        """By name, also those that were killed."""
        only = {"label": [f"{LABEL}={self.name}", f"{LABEL}.role=machine"]}
        with asking("listing the machines"):
            found = self._client.api.containers(all=True, filters=only)
        return sorted(
            (_standing(each["Labels"], each["State"]) for each in found), key=lambda each: each.name
        )

    def find(self, name: str) -> tuple[Container, Standing]:
        """Raises MachinesError where there is none of that name; the message has those that there are."""
        try:
            with asking(f"machine {name}"):
                container = self._client.containers.get(self._container_name(name))
        except MachinesError:
            there = ", ".join(each.name for each in self.list()) or "none"
            raise MachinesError(f"there is no machine {name!r}; there are: {there}") from None
        return container, _standing(container.labels, container.status)

    def remove_everything(self) -> Sequence[str]:
        """All that carries this rehearsal's label, by name; twice is as good as once."""
        return guardian.remove_everything(self.name, self._client)

    def _container_name(self, machine: str) -> str:
        return f"tpu-stack-{self.name}-{machine}"

    def _endpoint(self, name: str, address: str) -> dict[str, object]:
        endpoint: dict[str, object] = self._client.api.create_endpoint_config(
            ipv4_address=address, aliases=[name]
        )
        return endpoint

    def _wait_for_ssh(self, container: Container, name: str, address: str) -> None:
        wait_for(lambda: shows_ssh(address), START_LIMIT_S, container, f"sshd of {name} at {address}")

    @contextlib.contextmanager
    def _removed_if_it_fails(self, container: Container) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with contextlib.suppress(docker.errors.DockerException):
                container.remove(force=True, v=True)
            raise


def _standing(said: dict[str, str], state: str) -> Standing:
    return Standing(
        name=said[f"{LABEL}.machine"],
        address=said[f"{LABEL}.address"],
        state=state,
        user=said[f"{LABEL}.user"],
        share_mount=said[f"{LABEL}.share"],
    )
