"""The containers of one rehearsal: hosts, servers, the nodes and the control plane of a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import docker
import docker.errors
from docker.models.containers import Container

from rehearsal.machines.docker_engine import LABEL, MachinesError, archive, asking, labels


def container_name(rehearsal: str, name: str) -> str:
    return f"tpu-stack-{rehearsal}-{name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """A container that was made. state: as Docker calls it, "running" or "exited" above all."""

    name: str
    address: str
    state: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Containers:
    """The containers of one rehearsal, by their names in it; image: of all of them. Methods raise MachinesError.

    They carry the rehearsal's label, so that its guardian removes them however it ends.
    """

    client: docker.DockerClient
    rehearsal: str
    image: str

    def create(
        self,
        name: str,
        *,
        role: str,
        files: Mapping[str, tuple[bytes, int]] | None = None,
        network: str = "",
        address: str = "",
        **options: Any,
    ) -> Container:
        """Make a container, to be started.

        Args:
            files: path → (content, mode), which it has from the beginning.
            network, address: where it is, by its name too; else `options` say.
        """
        if network:
            endpoint = self.client.api.create_endpoint_config(ipv4_address=address, aliases=[name])
            options |= {"network": network, "networking_config": {network: endpoint}, "hostname": name}
        with asking(f"making {name}"):
            container = self.client.containers.create(
                self.image,
                name=container_name(self.rehearsal, name),
                labels=labels(self.rehearsal, role=role, name=name, address=address),
                init=True,
                **options,
            )
            container.put_archive("/", archive(files or {}))
        return container

    def find(self, name: str) -> Container:
        """If there is none of that name, the message lists those that there are."""
        with asking(name), contextlib.suppress(docker.errors.NotFound):
            return self.client.containers.get(container_name(self.rehearsal, name))
        there = ", ".join(standing.name for standing in self.list()) or "none"
        raise MachinesError(f"there is no machine {name!r}; there are: {there}")

    def list(self, role: str = "") -> list[Standing]:
        """All, or those of a role, by name; also those that do not run."""
        only = [f"{LABEL}={self.rehearsal}", f"{LABEL}.name", *([f"{LABEL}.role={role}"] if role else [])]
        with asking("listing the containers"):
            found = self.client.api.containers(all=True, filters={"label": only})
        return sorted(
            (
                Standing(
                    name=container["Labels"][f"{LABEL}.name"],
                    address=container["Labels"][f"{LABEL}.address"],
                    state=container["State"],
                )
                for container in found
            ),
            key=lambda standing: standing.name,
        )

    def remove(self, name: str) -> None:
        """Nothing happens where there is none."""
        with asking(f"removing {name}"), contextlib.suppress(docker.errors.NotFound):
            self.client.api.remove_container(container_name(self.rehearsal, name), force=True, v=True)

    def run_in(self, name: str, command: Sequence[str], *, user: str = "root") -> str:
        """Run a command in a container with the rights of its own processes, and return its output."""
        container = self.running(name)
        with asking(f"in {name}"):
            done = container.exec_run(list(command), user=user, demux=True)
        output, complained = (part.decode(errors="replace") if part else "" for part in done.output)
        if done.exit_code != 0:
            problem = f"{command[0]}: exit code {done.exit_code}: {complained.strip()[-500:]}"
            raise MachinesError(f"in {name}: {problem}")
        return output

    def running(self, name: str) -> Container:
        """A container that runs."""
        container = self.find(name)
        if container.status != "running":
            raise MachinesError(f"{name} is {container.status}, not running; start it first")
        return container

    def freeze(self, name: str, *, frozen: bool) -> None:
        """Stop all processes of a container in mid-work, or let them go on; nothing happens where that is so."""
        container = self.find(name)
        with asking(name):
            if (container.status == "paused") is not frozen:
                (container.pause if frozen else container.unpause)()
