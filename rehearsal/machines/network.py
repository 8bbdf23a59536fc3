"""The rehearsal's network: a bridge of its own that leads nowhere else, so that no host reaches a real cloud."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Collection

import docker
import docker.errors
import docker.types

from rehearsal.machines.docker_engine import LABEL, asking, labels
from rehearsal.machines.errors import MachinesError

TRIES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """subnet: as 172.18.0.0/16; laptop_address: this machine's in it; storage_address: the bucket server's;
    registry_address: the image registry's, where there is one."""

    name: str
    subnet: str
    laptop_address: str
    storage_address: str
    registry_address: str

    def addresses(self, count: int, *, taken: Collection[str] = ()) -> list[str]:
        """The first `count` that are free for machines. Raises MachinesError where there are not so many."""
        reserved = {self.laptop_address, self.storage_address, self.registry_address, *taken}
        found: list[str] = []
        for address in ipaddress.ip_network(self.subnet).hosts():
            if len(found) == count:
                break
            if str(address) not in reserved:
                found.append(str(address))
        if len(found) < count:
            raise MachinesError(
                f"{self.name}: {self.subnet} has no {count} free addresses; ask for fewer hosts"
            )
        return found


def find_or_make(client: docker.DockerClient, rehearsal: str) -> Network:
    """The rehearsal's network. Raises MachinesError."""
    with asking(f"the network of rehearsal {rehearsal}"):
        labelled = client.api.networks(filters={"label": f"{LABEL}={rehearsal}"})
        there = [each for each in labelled if each["Name"] == name_of(rehearsal)]
        return described(there[0] if there else _make(client, rehearsal))


def name_of(rehearsal: str) -> str:
    return f"tpu-stack-{rehearsal}"


def described(attributes: dict[str, object]) -> Network:
    """Docker's words of a network in ours. Pure. Raises MachinesError where it has no IPv4 subnet."""
    ipam = attributes["IPAM"]
    assert isinstance(ipam, dict)
    for each in ipam.get("Config") or []:
        subnet = ipaddress.ip_network(each["Subnet"])
        if subnet.version == 4 and subnet.num_addresses >= 16:
            return Network(
                name=str(attributes["Name"]),
                subnet=str(subnet),
                laptop_address=each.get("Gateway") or str(subnet[1]),
                storage_address=str(subnet[-2]),
                registry_address=str(subnet[-3]),
            )
    raise MachinesError(
        f"Docker gave {attributes['Name']} no IPv4 subnet of 16 addresses or more; look at default-address-pools"
        " in /etc/docker/daemon.json"
    )


def _make(client: docker.DockerClient, rehearsal: str) -> dict[str, object]:
    """Docker chooses the subnet, but only in one that was asked for may a container ask for its address: so the
    network is made twice, and again from the start where another rehearsal took the subnet in between."""
    name = name_of(rehearsal)
    for left in reversed(range(TRIES)):
        probe = client.networks.create(f"{name}-probe", internal=True, labels=labels(rehearsal))
        probe.reload()
        chosen = probe.attrs["IPAM"]["Config"][0]
        probe.remove()
        pool = docker.types.IPAMPool(subnet=chosen["Subnet"])
        try:
            network = client.networks.create(
                name,
                internal=True,
                labels=labels(rehearsal),
                ipam=docker.types.IPAMConfig(pool_configs=[pool]),
            )
        except docker.errors.APIError as error:
            if left == 0 or "overlap" not in str(error).lower():
                raise
            continue
        network.reload()
        attributes: dict[str, object] = network.attrs
        return attributes
    raise AssertionError("the last try returns or raises")
