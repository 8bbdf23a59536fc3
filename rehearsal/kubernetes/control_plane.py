"""etcd, the API server, the controllers and DNS of one cluster: their programs and settings.

JobSet and Kueue may be among the controllers (`rehearsal.kubernetes.controllers`).
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from contracts.aliases import Say
from rehearsal.kubernetes import controllers
from rehearsal.kubernetes.controllers import CONTROLLERS
from rehearsal.kubernetes.credentials import Authority
from rehearsal.machines.docker_engine import MachinesError
from rehearsal.machines.servers import GoProgram, find_or_build_program

ProgramName = Literal[
    "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "coredns", "jobset", "kueue"
]  # fmt: skip

VERSION = "v1.35.4"
DOMAIN = "cluster.local"
ADMINISTRATORS = "system:masters"
SERVICES = "10.96.0.0/16"
CONTEXT = "rehearsal"

READY_LIMIT_S = 60.0
ANSWER_LIMIT_S = 5.0
# A cloud sees at once that a node is gone. Here a node that says nothing for so long is not ready, and half a minute
# later its pods are evicted; Kubernetes' own defaults are 50 s and 5 minutes.
NODE_GRACE_S = 20
EVICTION_S = 30


def _kubernetes_program(name: str, title: str) -> GoProgram:
    return GoProgram(
        title=title, folder="kubernetes", package=f"k8s.io/kubernetes/cmd/{name}", name=name, version=VERSION
    )


PROGRAMS: Mapping[ProgramName, GoProgram] = {
    "etcd": GoProgram(title="etcd", folder="etcd", package="go.etcd.io/etcd/server/v3"),
    "kube-apiserver": _kubernetes_program("kube-apiserver", "the API server of Kubernetes"),
    "kube-controller-manager": _kubernetes_program(
        "kube-controller-manager", "the controllers of Kubernetes"
    ),
    "kube-scheduler": _kubernetes_program("kube-scheduler", "the scheduler of Kubernetes"),
    "kubelet": _kubernetes_program("kubelet", "the kubelet"),
    "coredns": GoProgram(title="CoreDNS", folder="coredns", package="github.com/coredns/coredns"),
    **{name: controller.program for name, controller in CONTROLLERS.items()},
}
API_PROGRAMS: tuple[ProgramName, ...] = ("etcd", "kube-apiserver")
CONTROLLER_PROGRAMS: tuple[ProgramName, ...] = ("kube-controller-manager", "kube-scheduler")
TEST_PROGRAMS: tuple[ProgramName, ...] = (*API_PROGRAMS, "jobset")
CLUSTER_PROGRAMS: tuple[ProgramName, ...] = (*API_PROGRAMS, *CONTROLLER_PROGRAMS, "kubelet", "coredns")


def find_or_build(
    environ: Mapping[str, str], say: Say, names: Sequence[ProgramName] = API_PROGRAMS
) -> dict[ProgramName, Path]:
    """The paths of these programs; building all takes 4 minutes the first time. Raises MachinesError."""
    return {name: find_or_build_program(PROGRAMS[name], environ, say) for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """credentials: the folder of an Authority, as the components see it. data: a folder for etcd.

    address, port: where the API server is. etcd_port, peer_port: of etcd, on the components' own loopback.
    webhook_port: the first one of the webhooks of `controllers`."""

    credentials: str
    data: str
    address: str
    port: int = 6443
    etcd_port: int = 2379
    peer_port: int = 2380
    webhook_port: int = 9443

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.port}"

    def controller_port(self, name: controllers.ControllerName) -> int:
        """The port of a controller's webhooks."""
        return self.webhook_port + CONTROLLERS[name].offset


def write_credentials(folder: Path, layout: Layout) -> Authority:
    """Write all credentials of the components into a new folder; Layout.credentials is its path as they see it."""
    authority = Authority(folder)
    addresses = [layout.address, "127.0.0.1", "localhost", "kubernetes.default.svc"]
    authority.issue("apiserver", "kube-apiserver", addresses=addresses)
    authority.issue("apiserver-kubelet", "kube-apiserver", groups=[ADMINISTRATORS])
    authority.issue("service-account", "service-accounts")  # what their tokens are signed and checked with
    authority.issue("tls", "webhooks", addresses=[layout.address])
    for controller in CONTROLLERS:
        settings = controllers.settings(controller, layout.credentials, layout.address, layout.webhook_port)
        (folder / f"{controller}.json").write_text(json.dumps(settings), encoding="utf-8")
    for name in (*CONTROLLER_PROGRAMS, "coredns", *CONTROLLERS):
        user = f"system:{name}" if name in CONTROLLER_PROGRAMS else f"rehearsal-{name}"
        groups = [] if name in CONTROLLER_PROGRAMS else [ADMINISTRATORS]
        authority.kubeconfig(
            folder / f"{name}.kubeconfig", layout.server, user, groups=groups, context=CONTEXT
        )
    return authority


def arguments(name: ProgramName, layout: Layout) -> list[str]:
    """The arguments of a component, without its program. Pure."""
    return _ARGUMENTS[name](layout)


def _etcd(layout: Layout) -> list[str]:
    client, peer = f"http://127.0.0.1:{layout.etcd_port}", f"http://127.0.0.1:{layout.peer_port}"
    return [
        f"--data-dir={layout.data}", f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
        # It is thrown away: nothing is lost by a power cut that was not lost anyway.
        "--unsafe-no-fsync", "--log-level=warn",
    ]  # fmt: skip


def _api_server(layout: Layout) -> list[str]:
    at = layout.credentials
    return [
        f"--etcd-servers=http://127.0.0.1:{layout.etcd_port}",
        f"--bind-address={layout.address}", f"--advertise-address={layout.address}", f"--secure-port={layout.port}",
        f"--tls-cert-file={at}/apiserver.crt", f"--tls-private-key-file={at}/apiserver.key",
        f"--client-ca-file={at}/ca.crt", "--endpoint-reconciler-type=none", f"--service-cluster-ip-range={SERVICES}",
        f"--kubelet-client-certificate={at}/apiserver-kubelet.crt",
        f"--kubelet-client-key={at}/apiserver-kubelet.key", "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
        f"--service-account-key-file={at}/service-account.crt",
        f"--service-account-signing-key-file={at}/service-account.key",
        "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
        f"--default-not-ready-toleration-seconds={EVICTION_S}",
        f"--default-unreachable-toleration-seconds={EVICTION_S}",
    ]  # fmt: skip


def _controllers(layout: Layout) -> list[str]:
    at = layout.credentials
    return [
        f"--kubeconfig={at}/kube-controller-manager.kubeconfig", "--leader-elect=false", "--secure-port=0",
        f"--root-ca-file={at}/ca.crt", f"--service-account-private-key-file={at}/service-account.key",
        f"--node-monitor-grace-period={NODE_GRACE_S}s", "--use-service-account-credentials",
    ]  # fmt: skip


def _scheduler(layout: Layout) -> list[str]:
    return [
        f"--kubeconfig={layout.credentials}/kube-scheduler.kubeconfig", "--leader-elect=false", "--secure-port=0",
    ]  # fmt: skip


def _dns(layout: Layout) -> list[str]:
    return ["-conf", f"{layout.credentials}/Corefile"]


def _controller(name: controllers.ControllerName) -> Callable[[Layout], list[str]]:
    def arguments(layout: Layout) -> list[str]:
        at = layout.credentials
        return [f"--config={at}/{name}.json", f"--kubeconfig={at}/{name}.kubeconfig"]

    return arguments


_ARGUMENTS: Mapping[ProgramName, Callable[[Layout], list[str]]] = {
    "etcd": _etcd,
    "kube-apiserver": _api_server,
    "kube-controller-manager": _controllers,
    "kube-scheduler": _scheduler,
    "coredns": _dns,
    **{name: _controller(name) for name in CONTROLLERS},
}


def corefile(layout: Layout) -> str:
    """CoreDNS's configuration: it answers for the cluster's services and pods, and NXDOMAIN for other names. Pure."""
    kubeconfig = f"{layout.credentials}/coredns.kubeconfig"
    common = f"  errors\n  bind {layout.address}\n"
    cluster = f"{common}  kubernetes {DOMAIN} in-addr.arpa {{\n    kubeconfig {kubeconfig}\n    ttl 1\n  }}\n"
    # Of one block CoreDNS would ask `template` first, whatever the order here.
    nothing = f"{common}  template ANY ANY {{\n    rcode NXDOMAIN\n  }}\n"
    return f"{DOMAIN}:53 in-addr.arpa:53 {{\n{cluster}}}\n.:53 {{\n{nothing}}}\n"


def answers(layout: Layout, path: str = "/readyz") -> str:
    """Why the API server is not ready; empty if it is. Anonymous requests are allowed for these paths."""
    context = ssl._create_unverified_context()
    connection = http.client.HTTPSConnection(
        layout.address, layout.port, timeout=ANSWER_LIMIT_S, context=context
    )
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return str(error)
    finally:
        connection.close()
    return "" if answer.status == 200 else f"{answer.status}: {body[:300]}"


if __name__ == "__main__":  # `make programs` builds what tests start, on this machine and in clusters
    try:
        find_or_build(os.environ, print, (*TEST_PROGRAMS, *CLUSTER_PROGRAMS))
    except MachinesError as error:
        sys.exit(str(error))
