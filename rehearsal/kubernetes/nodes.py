"""A node: a kubelet over containerd in a container of the machines' network, with chips that are only a number.

Pods are on that network too, each node's in a share of its own, so that everything reaches everything by its address.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
from collections.abc import Mapping
from typing import Any

from rehearsal.kubernetes.control_plane import DOMAIN
from rehearsal.kubernetes.controllers import CHIPS
from rehearsal.machines.docker_engine import MachinesError
from rehearsal.machines.servers import HostNetwork

CREDENTIALS = "/etc/kubernetes"
DATA = "/var/lib/containerd"
KUBELET = "/opt/tpu-stack/kubelet"
IMAGES = "/opt/tpu-stack/images"
"""Archives to be imported, a folder of this machine."""
# The network is cut into so many shares: the first is the machines', the last the servers', the others are nodes'.
SHARES = 16
MOST_NODES = SHARES - 2
MEMORY_MIB = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """index: of the nodes of one cluster. labels: as a node pool of GKE has them."""

    index: int
    name: str
    address: str
    chips: int
    labels: Mapping[str, str]


def pod_addresses(network: HostNetwork, index: int) -> tuple[str, str]:
    """The first and the last address of a node's pods. Pure. Raises MachinesError where there are too many nodes."""
    subnet = ipaddress.ip_network(network.subnet)
    if index >= MOST_NODES or subnet.num_addresses < SHARES * 16:
        raise MachinesError(
            f"{network.subnet} has no addresses for the pods of node {index}; a cluster has at most {MOST_NODES} nodes"
            " and needs a subnet of 256 addresses (default-address-pools in /etc/docker/daemon.json)"
        )
    size = subnet.num_addresses // SHARES
    first = subnet[(index + 1) * size]
    return str(first + 1), str(first + size - 2)


def files(
    node: ClusterNode, network: HostNetwork, kubeconfig: bytes, authority: bytes
) -> dict[str, tuple[bytes, int]]:
    """Path → (content, mode) of what a node is told. Pure."""
    first, last = pod_addresses(network, node.index)
    return {
        f"{CREDENTIALS}/kubelet.kubeconfig": (kubeconfig, 0o600),
        f"{CREDENTIALS}/ca.crt": (authority, 0o644),
        f"{CREDENTIALS}/kubelet.json": (_json(kubelet_settings(network)), 0o644),
        "/etc/cni/net.d/pods.conflist": (_json(pod_network(network.subnet, first, last)), 0o644),
        "/etc/containerd/config.toml": (CONTAINERD.encode(), 0o644),
    }


def kubelet_settings(network: HostNetwork) -> dict[str, Any]:
    """A KubeletConfiguration, of a kubelet in a container. Pure."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": f"{CREDENTIALS}/ca.crt"},
        },
        # Whoever has a certificate of this cluster's authority may ask; that is the API server.
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "clusterDNS": [control_plane_address(network)],
        "clusterDomain": DOMAIN,
        "resolvConf": "",
        "registerWithTaints": [{"key": CHIPS, "value": "present", "effect": "NoSchedule"}],
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": [],
        "localStorageCapacityIsolation": False,
        # An image that is removed cannot be had again, and a full disk is its owner's affair.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "nodeStatusUpdateFrequency": "5s",
    }


def kubelet_arguments(node: ClusterNode) -> list[str]:
    """Pure."""
    return [
        f"--config={CREDENTIALS}/kubelet.json", f"--kubeconfig={CREDENTIALS}/kubelet.kubeconfig",
        f"--hostname-override={node.name}", f"--node-ip={node.address}",
        "--node-labels=" + ",".join(f"{name}={value}" for name, value in sorted(node.labels.items())),
    ]  # fmt: skip


def control_plane_address(network: HostNetwork) -> str:
    """The address of the API server and of DNS, beside the other servers. Pure."""
    return str(ipaddress.ip_address(network.registry_address) - 1)


def pod_network(subnet: str, first: str, last: str) -> dict[str, Any]:
    """The settings of the CNI plugins: a port of the node's bridge for each pod, and an address of its range. Pure."""
    share = {"subnet": subnet, "rangeStart": first, "rangeEnd": last}
    bridge = {"type": "bridge", "bridge": "pods", "ipam": {"type": "host-local", "ranges": [[share]]}}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}


def chips_patch(chips: int) -> list[dict[str, Any]]:
    """A JSON patch of a node's status. Pure."""
    name = CHIPS.replace("/", "~1")
    return [
        {"op": "add", "path": f"/status/{field}/{name}", "value": str(chips)}
        for field in ("capacity", "allocatable")
    ]


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()


# What a node's processes may not do they need not: a process here cannot be given less than its parent's score.
CONTAINERD = """version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/tpu-stack/pause:1"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
"""
