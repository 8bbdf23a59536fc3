"""The cluster of one rehearsal: its control plane and its nodes as containers beside the bucket server.

Everything carries the rehearsal's label, so that its guardian removes it however the rehearsal ends. The parts of the
control plane share a network, and each can be stopped by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker
import docker.types
import kubernetes.client
import kubernetes.config
import yaml
from docker.models.containers import Container
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from contracts.aliases import Say
from rehearsal.kubernetes import controllers, nodes
from rehearsal.kubernetes.control_plane import (
    ADMINISTRATORS,
    API_PROGRAMS,
    CONTEXT,
    CONTROLLER_PROGRAMS,
    READY_LIMIT_S,
    Layout,
    ProgramName,
    answers,
    arguments,
    corefile,
    write_credentials,
)
from rehearsal.kubernetes.controllers import KUEUE_METRICS
from rehearsal.kubernetes.nodes import CREDENTIALS, DATA, IMAGES, KUBELET, MEMORY_MIB, ClusterNode
from rehearsal.machines.containers import container_name
from rehearsal.machines.docker_engine import MachinesError, asking, labels, wait_for
from rehearsal.machines.host_image import ROOT
from rehearsal.machines.machines import DOCKER_RIGHTS, Machines
from rehearsal.machines.servers import manifests_beside

NAMESPACE = "tpu-stack"
SERVICE_ACCOUNT = "tpu-stack-runs"
PAGE = ROOT / "docs" / "kubernetes.md"
YAML = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = "/opt/tpu-stack/program"
COMPONENTS: tuple[ProgramName, ...] = (*API_PROGRAMS, *CONTROLLER_PROGRAMS, "coredns")
# To enter a container whose processes are not root's, as `exec` and probes do, takes one right more.
NODE_RIGHTS = {**DOCKER_RIGHTS, "cap_add": [*DOCKER_RIGHTS["cap_add"], "SYS_PTRACE"]}
NODE_LIMIT_S = 120.0
IMPORT_LIMIT_S = 600
ANSWER_LIMIT_S = 10
# A repository and what `fab build` calls an image for machines without TPUs.
IMAGE_PREFIX = "tpu-stack/"
IMAGE_VERSION = "cpu-"


class RehearsalCluster:
    """A cluster, as a context. folder: a new one, for files that nobody else may read.

    machines: of the same rehearsal, for its network and its guardian. user: whom its kubeconfig is for. images:
    references by digest, by framework. kubeconfig: of that user, who has the rights that docs/kubernetes.md names.
    added: controllers beside Kubernetes' own. queue: of Kueue, for the chips of all nodes; empty: none.
    """

    def __init__(
        self,
        *,
        folder: Path,
        machines: Machines,
        programs: Mapping[ProgramName, Path],
        pool: Sequence[ClusterNode],
        user: str,
        say: Say,
        added: Sequence[controllers.ControllerName] = (),
        queue: str = "",
    ) -> None:
        self.folder = folder
        self._added, self._queue = added, queue
        self.kubeconfig = folder / "kubeconfig"
        self.images: dict[str, str] = {}
        self.nodes = {node.name: node for node in pool}
        self._machines = machines
        self._programs = programs
        self._user = user
        self._say = say
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> RehearsalCluster:
        """Returns when every node is ready and has the images. Raises MachinesError."""
        try:
            self._open()
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """The containers are removed with the rehearsal's other ones."""
        self._exits.close()

    def _open(self) -> None:
        machines = self._machines
        # Importing images takes a while, during which Docker says nothing.
        self.client = docker.from_env(timeout=IMPORT_LIMIT_S)
        self._exits.callback(self.client.close)
        self.containers = dataclasses.replace(machines.containers, client=self.client)
        address = nodes.control_plane_address(machines.network)
        self.layout = Layout(credentials=CREDENTIALS, data="/var/lib/etcd", address=address)
        self.folder.mkdir(mode=0o700, parents=True)
        (self.folder / "images").mkdir()
        self.authority = write_credentials(self.folder / "credentials", self.layout)
        server = self.layout.server
        administrator = self.folder / "administrator"
        self.authority.kubeconfig(
            administrator, server, "administrator", context=CONTEXT, groups=[ADMINISTRATORS]
        )
        self.authority.kubeconfig(self.kubeconfig, server, self._user, context=CONTEXT, namespace=NAMESPACE)
        with ThreadPoolExecutor() as threads:
            saving = threads.submit(self._save_images)
            self._start_control_plane()
            self.api = kubernetes.config.new_client_from_config(str(administrator), context=CONTEXT)
            self._exits.callback(self.api.close)
            self._declare()
            self._add_controllers()
            list(threads.map(self._make_node, self.nodes.values()))
            archives = saving.result()
            list(threads.map(lambda name: self._import_images(name, archives), self.nodes))
            list(threads.map(self.register, self.nodes))
        for file_name in archives.values():
            (self.folder / "images" / file_name).unlink()

    # --- control plane ---------------------------------------------------------------------------------------------

    def _start_control_plane(self) -> None:
        for name in COMPONENTS:
            container = self._start_component(name)
            if name == "kube-apiserver":
                awaited = f"the API server at {self.layout.server}"
                wait_for(lambda: not answers(self.layout), READY_LIMIT_S, container, awaited)

    @functools.cached_property
    def _files(self) -> dict[str, tuple[bytes, int]]:
        """The files of every component's container."""
        credentials = {path.name: path.read_bytes() for path in (self.folder / "credentials").iterdir()}
        files = {f"{CREDENTIALS}/{name}": (content, 0o600) for name, content in credentials.items()}
        files |= {f"{KUEUE_METRICS}/{name}": (credentials[name], 0o600) for name in ("tls.crt", "tls.key")}
        return files | {f"{CREDENTIALS}/Corefile": (corefile(self.layout).encode(), 0o644)}

    def _start_component(self, name: ProgramName) -> Container:
        # etcd has the address, and the others are in its network: so they may come and go.
        first = container_name(self._machines.name, "etcd")
        place = (
            {"network": self._machines.network.name, "address": self.layout.address}
            if name == "etcd"
            else {"network_mode": f"container:{first}"}
        )
        container = self.containers.create(
            name,
            role="control-plane",
            files=self._files,
            entrypoint=[PROGRAM],
            command=arguments(name, self.layout),
            cap_drop=["ALL"],
            cap_add=["NET_BIND_SERVICE"],
            mounts=[_program_at(PROGRAM, self._programs[name])],
            **place,
        )
        with asking(f"starting {name}"):
            container.start()
        return container

    def _add_controllers(self) -> None:
        for name in self._added:
            text = manifests_beside(self._programs[name]).read_text(encoding="utf-8")
            address = (self.layout.address, self.layout.controller_port(name))
            start = functools.partial(self._start_component, name)
            with _answered(f"installing {name}"):
                controllers.install(self.api, name, text, address, self.authority.certificate, start)
        if not self._queue:
            return
        custom, version = kubernetes.client.CustomObjectsApi(self.api), ("kueue.x-k8s.io", "v1beta2")
        chips = sum(node.chips for node in self.nodes.values())
        with _answered(f"making the queue {self._queue}"):
            objects = on_page(PAGE.read_text(encoding="utf-8"), "ResourceFlavor")
            for plural, queue_object in controllers.queue(objects, self._queue, NAMESPACE, chips):
                if "namespace" in queue_object["metadata"]:
                    custom.create_namespaced_custom_object(*version, NAMESPACE, plural, queue_object)
                else:
                    custom.create_cluster_custom_object(*version, plural, queue_object)

    def _declare(self) -> None:
        """The namespace of the stack's runs, whom they act as, and what the user may do."""
        core = kubernetes.client.CoreV1Api(self.api)
        role = launch_role(PAGE.read_text(encoding="utf-8"))
        binding = {
            "metadata": {"name": role["metadata"]["name"]},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "Role",
                "name": role["metadata"]["name"],
            },
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": self._user}],
        }
        with _answered("declaring the stack's namespace"):
            core.create_namespace({"metadata": {"name": NAMESPACE}})
            core.create_namespaced_service_account(NAMESPACE, {"metadata": {"name": SERVICE_ACCOUNT}})
            rights = kubernetes.client.RbacAuthorizationV1Api(self.api)
            rights.create_namespaced_role(NAMESPACE, role)
            rights.create_namespaced_role_binding(NAMESPACE, binding)

    # --- nodes -----------------------------------------------------------------------------------------------------

    def _make_node(self, node: ClusterNode) -> None:
        machines = self._machines
        network, name = machines.network, node.name
        path = self.folder / "credentials" / f"{name}.kubeconfig"
        user = f"system:node:{name}"
        self.authority.kubeconfig(path, self.layout.server, user, groups=["system:nodes"], context=CONTEXT)
        node_files = nodes.files(node, network, path.read_bytes(), self.authority.certificate)
        data = docker.types.Mount(DATA, None, type="volume", labels=labels(machines.name))
        images = docker.types.Mount(IMAGES, str(self.folder / "images"), type="bind", read_only=True)
        container = self.containers.create(
            name,
            role="node",
            files=node_files,
            network=network.name,
            address=node.address,
            command=nodes.kubelet_arguments(node),
            cgroupns="private",
            mounts=[data, images, _program_at(KUBELET, self._programs["kubelet"])],
            mem_limit=f"{MEMORY_MIB}m",
            **NODE_RIGHTS,
        )
        with asking(f"node {name}"):
            container.start()

    def register(self, name: str) -> None:
        """Returns when the node is ready and offers its chips. Raises MachinesError."""
        core = kubernetes.client.CoreV1Api(self.api)

        def is_ready() -> bool:
            try:
                node = core.read_node(name, _request_timeout=ANSWER_LIMIT_S)
            except (ApiException, HTTPError):
                return False
            conditions = {condition.type: condition.status for condition in node.status.conditions or []}
            return conditions.get("Ready") == "True"

        wait_for(is_ready, NODE_LIMIT_S, self.containers.find(name), f"the kubelet of {name}")
        with _answered(f"the chips of {name}"):
            core.patch_node_status(name, nodes.chips_patch(self.nodes[name].chips))

    def kill_node(self, name: str) -> None:
        """Cut a node's power and remove it from the cluster's list, as the cloud does."""
        container = self.containers.find(name)
        with asking(f"killing {name}"):
            if container.status in ("running", "paused"):
                container.kill("SIGKILL")
        self.forget_node(name)

    def forget_node(self, name: str) -> None:
        """Remove a node from the cluster's list; its pods are removed within a minute."""
        with _answered(f"node {name}", but=404):
            kubernetes.client.CoreV1Api(self.api).delete_node(name)

    def restart_node(self, name: str) -> None:
        """Starts what was killed; returns when it is ready, with the images that it had and no pod."""
        container = self.containers.find(name)
        with asking(f"starting {name}"):
            container.start()
        self.register(name)

    # --- images ----------------------------------------------------------------------------------------------------

    def _save_images(self) -> dict[str, str]:
        """Save the newest local image of each framework for CPUs. Returns image name → archive file name."""
        with asking("this machine's images"):
            local_images = sorted(self.client.images.list(), key=lambda image: str(image.attrs["Created"]))
        newest = {
            tag.partition(":")[0].removeprefix(IMAGE_PREFIX): tag
            for image in local_images
            for tag in image.tags
            if tag.startswith(IMAGE_PREFIX) and tag.partition(":")[2].startswith(IMAGE_VERSION)
            and not tag.endswith("-failed")
        }  # fmt: skip
        if not newest:
            raise MachinesError(
                "pods need an image, and none for CPUs was built on this machine: fab build --framework jax --platform"
                " cpu, then try again"
            )
        archives = {}
        for framework, tag in newest.items():
            self._say(f"the image {tag}, for the nodes")
            with asking(f"saving {tag}"), (self.folder / "images" / f"{framework}.tar").open("wb") as file:
                for chunk in self.client.images.get(tag).save(named=tag):
                    file.write(chunk)
            archives[tag] = f"{framework}.tar"
        return archives

    def _import_images(self, name: str, archives: Mapping[str, str]) -> None:
        """Import images on a node, and name them by digest too, as a registry would."""
        control = ["ctr", "--namespace", "k8s.io", "images"]
        for tag, file in archives.items():
            full = f"docker.io/{tag}"
            self.containers.run_in(name, [*control, "import", f"{IMAGES}/{file}"])
            listed = self.containers.run_in(name, [*control, "list", f"name=={full}"]).split()
            digest = next(word for word in listed if word.startswith("sha256:"))
            reference = f"{full.rpartition(':')[0]}@{digest}"
            self.containers.run_in(name, [*control, "tag", "--force", full, reference])
            self.images[tag.partition(":")[0].removeprefix(IMAGE_PREFIX)] = reference


def launch_role(page: str) -> dict[str, Any]:
    """The role that people are told to have made for them, in the rehearsal's namespace. Pure."""
    (role,) = on_page(page, "Role")
    return {**role, "metadata": {"name": role["metadata"]["name"]}}


def on_page(page: str, kind: str) -> list[dict[str, Any]]:
    """The objects of the YAML block of a page whose first object is of that kind. Pure."""
    for text in YAML.findall(page):
        objects: list[dict[str, Any]] = list(yaml.safe_load_all(text))
        if objects[0].get("kind") == kind:
            return objects
    raise MachinesError(f"{PAGE} has no {kind}, which the rehearsal makes")


def _program_at(path: str, program: Path) -> docker.types.Mount:
    return docker.types.Mount(path, str(program), type="bind", read_only=True)


@contextlib.contextmanager
def _answered(action: str, but: int = 0) -> Iterator[None]:
    """Turn the API server's errors into a MachinesError, except for the status `but`."""
    try:
        yield
    except ApiException as error:
        if error.status != but:
            raise MachinesError(
                f"{action}: the API server answers {error.status}: {str(error.body)[:500]}"
            ) from None
    except HTTPError as error:
        raise MachinesError(f"{action}: the API server does not answer: {error}") from None
