"""The machines of one rehearsal: made, killed, started again, removed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import docker.errors
import docker.types
from docker.models.containers import Container

from rehearsal.machines import docker_engine, host_image, network, registry, removal, storage
from rehearsal.machines.container import options
from rehearsal.machines.docker_engine import LABEL, asking
from rehearsal.machines.errors import MachinesError
from rehearsal.machines.faults import Faults
from rehearsal.machines.go_program import BUCKET_SERVER, REGISTRY, GoProgram, find_or_build
from rehearsal.machines.guardian import Guardian
from rehearsal.machines.machine import Machine, Standing, check, files
from rehearsal.machines.waiting import shows_ssh, wait_for

START_LIMIT_S = 60

Say = Callable[[str], None]


class Machines:
    """One rehearsal's. Use it as a context: it is removed at the end, and also when this process is killed.

    Methods may be called from several threads, but for the same machine one after the other.
    """

    def __init__(
        self,
        *,
        name: str,
        say: Say,
        environ: Mapping[str, str] = os.environ,
        kind: host_image.Kind = "plain",
    ) -> None:
        """environ: where HOME, PATH, TPU_STACK_BASE_IMAGE and proxies are looked for. kind: of the hosts; those with
        Docker have an image registry beside them.

        Raises MachinesError where Docker is not there. Entering the context does where something of that name is.
        """
        self.name = docker_engine.checked_name(name, "rehearsal")
        self._say = say
        self._environ = environ
        self._kind = kind
        self._client = docker_engine.connect()
        self._guardian: Guardian | None = None
        self._once = threading.RLock()
        self._image: str | None = None
        self._network: network.Network | None = None
        self._storage: storage.Storage | None = None
        self._registry: registry.Registry | None = None
        self.faults = Faults(self._client, self.find, self.image)

    def __enter__(self) -> Machines:
        with asking(f"rehearsal {self.name}"):
            left = removal.left(self._client, self.name)
        if left:
            self._client.close()
            raise MachinesError(
                f"rehearsal {self.name} is there already ({', '.join(name for _, name in left)}): it is running, or"
                " was left by a machine that went down; take it down first, or choose another name"
            )
        self._guardian = Guardian(self.name)
        return self

    def __exit__(self, *_: object) -> None:
        guardian, self._guardian = self._guardian, None
        try:
            self.remove_everything()
        except BaseException:
            if guardian is not None:
                guardian.take_over()
            raise
        finally:
            self._client.close()
        if guardian is not None:
            guardian.dismiss()

    def prepare(self) -> str:
        """Builds what is not built yet, minutes the first time, and says how far it is; → the hosts' image."""
        with self._once:
            if self._image is None:
                self._program(BUCKET_SERVER)
                if self._kind == "docker":
                    self._program(REGISTRY)
                self._image = host_image.find_or_build(self._client, self._environ, self._say, self._kind)
            return self._image

    def image(self) -> str:
        """The hosts' image, prepared where it was not."""
        return self._image or self.prepare()

    def network(self) -> network.Network:
        """The same every time."""
        with self._once:
            if self._network is None:
                self._network = network.find_or_make(self._client, self.name)
            return self._network

    def storage(self, *, bucket: str | None = None) -> storage.Storage:
        """The same every time, with that bucket in it."""
        with self._once:
            if self._storage is None:
                program = self._program(BUCKET_SERVER)
                self._storage = storage.start(self._client, self.name, self.network(), self.image(), program)
            if bucket is not None:
                self._storage.make_bucket(bucket)
            return self._storage

    def registry(self) -> registry.Registry | None:
        """The same every time; None where the hosts have no Docker."""
        with self._once:
            if self._registry is None and self._kind == "docker":
                program = self._program(REGISTRY)
                self._registry = registry.start(
                    self._client, self.name, self.network(), self.image(), program
                )
            return self._registry

    def boot(self, machine: Machine) -> Standing:
        """Makes it and returns when its sshd answers. Raises MachinesError; then nothing of it is there."""
        docker_engine.checked_name(machine.name, "machine")
        check(machine)
        network, store, image = self.network(), self.storage(), self.image()
        environment = {**store.environment, **machine.environment}
        given = options(self.name, machine, self.registry())
        with asking(f"machine {machine.name}"):
            made = self._client.containers.create(
                image, name=self._container_name(machine.name), network=network.name,
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
        network = self.network().name
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
            self._client.networks.get(self.network().name).connect(
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
        with self._once:
            removed = removal.remove_everything(self.name, self._client)
            self._network = self._storage = self._registry = None
            return removed

    def _program(self, program: GoProgram) -> Path:
        return find_or_build(program, self._environ, self._say)

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
