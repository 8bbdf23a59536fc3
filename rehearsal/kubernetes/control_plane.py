"""etcd, the API server, the controllers and DNS of one cluster: their settings, and as processes of this machine.

JobSet and Kueue may be among the controllers (`rehearsal.kubernetes.controllers`).

    with LocalControlPlane(folder=tmp_path / "kubernetes", programs=find_or_build(os.environ, print)) as cluster:
        ...  # cluster.kubeconfig: of an administrator, for the official client

A process of this machine listens on loopback. Without a node no pod ever runs, but everything that an API server
refuses it refuses here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

from contracts.aliases import Say
from rehearsal.kubernetes import controllers
from rehearsal.kubernetes.controllers import CONTROLLERS
from rehearsal.kubernetes.credentials import Authority
from rehearsal.machines.docker_engine import MachinesError
from rehearsal.machines.servers import GoProgram, find_or_build_program, manifests_beside

ProgramName = Literal[
    "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "coredns", "jobset", "kueue"
]  # fmt: skip

VERSION = "v1.35.4"
DOMAIN = "cluster.local"
ADMINISTRATORS = "system:masters"
SERVICES = "10.96.0.0/16"
CONTEXT = "rehearsal"

READY_LIMIT_S = 60.0
END_LIMIT_S = 10.0
ANSWER_LIMIT_S = 5.0
LOOK_AGAIN_S = 0.05
LAST_LINES = 15
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
    authority.signing_pair("service-account")
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
        f"--service-account-key-file={at}/service-account.pub",
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


class LocalControlPlane:
    """etcd and the API server as processes of this machine, from `with` to the end of its block. They end with this
    process.

    folder: a new one, which is removed. programs: of `find_or_build`. added: controllers. kubeconfig: of an
    administrator.
    """

    def __init__(
        self,
        *,
        folder: Path,
        programs: Mapping[ProgramName, Path],
        added: Sequence[controllers.ControllerName] = (),
    ) -> None:
        ports = _free_ports(4)
        self.layout = Layout(
            credentials=str(folder / "credentials"),
            data=str(folder / "etcd"),
            address="127.0.0.1",
            port=ports[0],
            etcd_port=ports[1],
            peer_port=ports[2],
            webhook_port=ports[3],
        )
        self._added = added
        self.kubeconfig = folder / "kubeconfig"
        self._folder = folder
        self.programs = programs
        self.running: dict[ProgramName, subprocess.Popen[bytes]] = {}
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> LocalControlPlane:
        """Raises MachinesError, with a component's last words."""
        try:
            self._folder.mkdir(mode=0o700, parents=True)
            self._exits.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self.authority = write_credentials(self._folder / "credentials", self.layout)
            self.authority.kubeconfig(
                self.kubeconfig, self.layout.server, "administrator", groups=[ADMINISTRATORS], context=CONTEXT
            )
            for name in API_PROGRAMS:
                self.start(name)
            self.wait_until_ready()
            for controller in self._added:
                self._install(controller)
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _install(self, name: controllers.ControllerName) -> None:
        import kubernetes.config  # a second

        text = manifests_beside(self.programs[name]).read_text(encoding="utf-8")
        with kubernetes.config.new_client_from_config(str(self.kubeconfig)) as api:
            port = self.layout.controller_port(name)
            controllers.install(
                api,
                name,
                text,
                (self.layout.address, port),
                self.authority.certificate,
                lambda: self.start(name),
            )

    def start(self, name: ProgramName) -> None:
        """Starts a component, again after `end`."""
        log: IO[bytes] = (self._folder / f"{name}.log").open("ab")
        with log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", str(self.programs[name]), *arguments(name, self.layout)],
                cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.running[name] = process
        self._exits.callback(self.end, name)

    def end(self, name: ProgramName) -> None:
        """Ends a component; nothing where it has ended."""
        process = self.running.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def wait_until_ready(self) -> None:
        """Wait for the API server. Raises MachinesError."""
        until = time.monotonic() + READY_LIMIT_S
        while reason := answers(self.layout):
            ended = [name for name, process in self.running.items() if process.poll() is not None]
            if ended or time.monotonic() > until:
                name = ended[0] if ended else "kube-apiserver"
                lines = (self._folder / f"{name}.log").read_text(errors="replace").splitlines()
                raise MachinesError(
                    f"{name} {'ended' if ended else f'is not ready after {READY_LIMIT_S:.0f} s ({reason})'}; it said"
                    " last:\n" + "\n".join(lines[-LAST_LINES:])
                )
            time.sleep(LOOK_AGAIN_S)


def _free_ports(count: int) -> list[int]:
    """Free ports of loopback."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for opened_socket in sockets:
            opened_socket.bind(("127.0.0.1", 0))
        return [opened_socket.getsockname()[1] for opened_socket in sockets]


if __name__ == "__main__":  # `make programs` builds what tests start, on this machine and in clusters
    try:
        find_or_build(os.environ, print, (*TEST_PROGRAMS, *CLUSTER_PROGRAMS))
    except MachinesError as error:
        sys.exit(str(error))
