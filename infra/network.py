"""The network of a stack: a subnet and a way out in each region, and firewall rules. Nothing comes in but IAP.

Where a network is there already, only the firewall rules are made: they name our tags, so they touch nobody else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import pulumi
from pulumi_gcp import compute

from infra import naming
from infra.config import Config

IAP_RANGE = "35.235.240.0/20"
"""Where all of IAP's TCP tunnels come from (https://cloud.google.com/iap/docs/using-tcp-forwarding)."""

PRIVATE_RANGES = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
"""Of RFC 1918: all that a subnet that somebody else made can be in."""

OWN_RANGE = "10.0.0.0/8"
"""Of a network that we make: `address_range` stays within it."""

NFS_PORT = 2049
JUMBO_MTU = 8896
"""The most that a VPC takes, and what Google's multislice guide asks for: slices talk to each other in large messages
(https://cloud.google.com/tpu/docs/multislice-introduction)."""


class Network(pulumi.ComponentResource):
    """`network` and `subnetworks` (by region) are full names; `host_tag` and `gateway_tag` go on the VMs.

    It is made in two steps: first the network by itself, then, by `connect`, all that is in it.
    """

    network: pulumi.Output[str]
    subnetworks: dict[str, pulumi.Output[str]]

    def __init__(self, name: str, config: Config, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("tpu-stack:network:Network", name, {}, opts)
        self.host_tag = naming.resource_name(config.stack, "host")
        self.gateway_tag = naming.resource_name(config.stack, "gateway")
        if config.network.existing is not None:
            full_name = f"projects/{config.project}/global/networks/{config.network.existing}"
            self.network = pulumi.Output.from_input(full_name)
        elif is_needed(config):
            own_network = compute.Network(
                "network",
                name=naming.resource_name(config.stack),
                project=config.project,
                description=f"tpu-stack {config.stack}",
                auto_create_subnetworks=False,
                mtu=JUMBO_MTU,
                opts=pulumi.ResourceOptions(parent=self),
            )
            self.network = own_network.id

    def connect(self, config: Config, after: Sequence[pulumi.Resource]) -> None:
        """Make a subnet and a way out in each region, and the firewall rules. after: what is made before them."""
        if config.network.existing is None and not is_needed(config):
            self.register_outputs({})
            return
        self._child = pulumi.ResourceOptions(parent=self, depends_on=after)
        if config.network.existing is None:
            self._make(config)
        else:
            subnetwork = config.network.subnetwork or config.network.existing
            self.subnetworks = {
                region: pulumi.Output.from_input(
                    f"projects/{config.project}/regions/{region}/subnetworks/{subnetwork}"
                )
                for region in config.regions
            }
        if config.has_machines:
            self._firewall(config)
        self.register_outputs({"network": self.network, "subnetworks": self.subnetworks})

    def _make(self, config: Config) -> None:
        self.subnetworks = {}
        for region in config.regions:
            subnetwork = compute.Subnetwork(
                region,
                name=naming.resource_name(config.stack, region),
                project=config.project,
                network=self.network,
                region=region,
                ip_cidr_range=address_range(region),
                private_ip_google_access=True,
                opts=self._child,
            )
            router = compute.Router(
                region,
                name=naming.resource_name(config.stack, region),
                project=config.project,
                network=self.network,
                region=region,
                opts=self._child,
            )
            compute.RouterNat(
                region,
                name=naming.resource_name(config.stack, region),
                project=config.project,
                router=router.name,
                region=region,
                nat_ip_allocate_option="AUTO_ONLY",
                source_subnetwork_ip_ranges_to_nat="ALL_SUBNETWORKS_ALL_IP_RANGES",
                # A download in many streams runs out of the 64 ports that a VM has otherwise.
                enable_dynamic_port_allocation=True,
                enable_endpoint_independent_mapping=False,
                min_ports_per_vm=64,
                max_ports_per_vm=4096,
                log_config=compute.RouterNatLogConfigArgs(enable=True, filter="ERRORS_ONLY"),
                opts=self._child,
            )
            self.subnetworks[region] = subnetwork.id

    def _firewall(self, config: Config) -> None:
        gateway = config.gateway is not None
        ssh = {"tcp": ["22"]}
        self._allow(
            "iap-ssh",
            config,
            "SSH from IAP's tunnels, and from nowhere else",
            ssh,
            to=[self.host_tag, *([self.gateway_tag] if gateway else [])],
            ranges=[IAP_RANGE],
        )
        # JAX, libtpu and multislice talk on many ports, and those move with their versions.
        every_port: dict[str, list[str] | None] = {"tcp": None, "udp": None, "icmp": None}
        self._allow(
            "host-to-host", config, "TPU hosts of this stack to each other", every_port, to=[self.host_tag]
        )
        if gateway:
            nfs = {"tcp": [str(NFS_PORT)]}
            self._allow(
                "host-to-nfs", config, "NFS from the TPU hosts of this stack", nfs, to=[self.gateway_tag]
            )
        if gateway and config.keeper:
            described = "SSH from the keeper on the gateway to the TPU hosts of this stack"
            self._allow("keeper-ssh", config, described, ssh, to=[self.host_tag], sources=[self.gateway_tag])

    def _allow(
        self,
        rule: str,
        config: Config,
        description: str,
        ports: Mapping[str, list[str] | None],
        *,
        to: list[str],
        ranges: list[str] | None = None,
        sources: list[str] | None = None,
    ) -> None:
        """ports: by protocol, None for all. to: tags. Who comes in: `ranges`, or tags (None: this stack's hosts)."""
        compute.Firewall(
            rule,
            name=naming.resource_name(config.stack, rule),
            project=config.project,
            network=self.network,
            description=description,
            direction="INGRESS",
            allows=[
                compute.FirewallAllowArgs(protocol=protocol, ports=ports[protocol]) for protocol in ports
            ],
            source_ranges=ranges,
            source_tags=None if ranges else sources or [self.host_tag],
            target_tags=to,
            opts=self._child,
        )


def is_needed(config: Config) -> bool:
    """Not where all slices are in a cluster that is not the stack's."""
    return bool(config.regions) or config.has_machines


def client_ranges(config: Config) -> tuple[str, ...]:
    """The address ranges that hosts can be in, those of regions that join later included.

    A server's exports are made when it boots, so that a narrower range would shut out a new region until then. Who may
    come is said by the firewall, which knows hosts by their tag.
    """
    return PRIVATE_RANGES if config.network.existing is not None else (OWN_RANGE,)


def address_range(region: str) -> str:
    """The /20 (4092 hosts) of a region's subnet, within 10.0.0.0/8.

    It follows only from the region's name: a region that joins or leaves the configuration moves no other's subnet,
    which would replace it and every slice in it.
    """
    block = int.from_bytes(hashlib.sha256(region.encode()).digest()[:2]) % 4096
    return f"10.{block >> 4}.{(block & 15) << 4}.0/20"
