"""What a configuration opens: who can reach the hosts, and what can be lost. Pure."""

from __future__ import annotations

from infra.config import Config
from infra.policy.findings import Finding, warning

ADDRESSES_IN_USE = 8
"""The quota of external addresses in use that a project begins with."""


def findings(config: Config) -> tuple[Finding, ...]:
    return (*_addresses(config), *_existing_network(config), *_access(config), *_protection(config))


def _addresses(config: Config) -> list[Finding]:
    if not config.network.external_addresses:
        return []
    hosts = sum(each.hosts for each in config.slices)
    of = "more than" if hosts > ADDRESSES_IN_USE else "of"
    return [
        warning(
            "tpu-stack:network.external-addresses",
            f"true gives each of the {hosts} hosts an address on the internet, {of} the {ADDRESSES_IN_USE} that a "
            "project may use by default; the firewall still admits IAP alone",
        )
    ]


def _existing_network(config: Config) -> list[Finding]:
    name = config.network.existing
    if name is None:
        return []
    rules = (
        "default-allow-ssh admits all of the internet to port 22, default-allow-internal all its VMs to every port"
        if name == "default"
        else "see what they admit"
    )
    return [
        warning(
            "tpu-stack:network.existing",
            f'"{name}" has firewall rules of its own that this stack leaves as they are: {rules}; its subnets need '
            "Private Google Access, and Cloud NAT for what is not Google's",
        )
    ]


def _access(config: Config) -> list[Finding]:
    if config.access.members or config.access.administrators:
        return []
    return [
        warning(
            "tpu-stack:access",
            "names nobody, so nobody but the project's owners may open a tunnel to the hosts; add members",
        )
    ]


def _protection(config: Config) -> list[Finding]:
    if config.protect:
        return []
    lost = ["the image repository"]
    if any(not disk.source for each in config.slices for disk in each.data_disks):
        lost.insert(0, "data disks that were made with slices")
    if config.nfs is not None:
        lost.insert(0, "all data of the NFS server")
    if config.bucket is not None:
        lost.insert(0, f'bucket "{config.bucket.name}" (once it is empty)')
    return [
        warning(
            "tpu-stack:protect",
            f"false lets `pulumi destroy`, and a change that replaces them, delete {', '.join(lost)}",
        )
    ]
