"""JobSet and Kueue, which an administrator adds to a cluster: their own programs, definitions and webhooks.

Programs and YAML are of the projects' Go modules. What differs from an installation by `kubectl`: they run beside the
API server, which reaches their webhooks by an address and not by a Service; they may do everything; they offer no
metrics; Kueue takes care of Jobs and JobSets only.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import yaml

from rehearsal.machines.docker_engine import MachinesError
from rehearsal.machines.servers import GoProgram

if TYPE_CHECKING:
    import kubernetes.client

ControllerName = Literal["jobset", "kueue"]
Object = dict[str, Any]

READY_LIMIT_S = 60.0
LOOK_AGAIN_S = 0.1
CHIPS = "google.com/tpu"
KUEUE_METRICS = "/etc/kueue/metrics/certs"
"""Where Kueue wants a certificate for its metrics, even if it offers none."""
MANIFESTS = ("config/components/crd/bases/*.yaml", "config/components/webhook/manifests.yaml")
"""Where both modules have their definitions and webhooks."""
JOB_SET_SELECTOR = {"matchExpressions": [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Controller:
    """settings: of its configuration file, beside those that all have. kinds: those whose webhooks are declared.

    offset: of its webhooks' port from the first one's.
    """

    program: GoProgram
    settings: Mapping[str, Any]
    kinds: frozenset[str]
    offset: int


CONTROLLERS: Mapping[ControllerName, Controller] = {
    "jobset": Controller(
        program=GoProgram(
            title="JobSet's controller",
            folder="jobset",
            package="sigs.k8s.io/jobset",
            manifests=MANIFESTS,
        ),
        settings={"apiVersion": "config.jobset.x-k8s.io/v1alpha1"},
        kinds=frozenset({"jobsets", "pods"}),
        offset=0,
    ),
    "kueue": Controller(
        program=GoProgram(
            title="Kueue",
            folder="kueue",
            package="sigs.k8s.io/kueue/cmd/kueue",
            manifests=MANIFESTS,
        ),
        settings={
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "namespace": "kueue-system",
            "manageJobsWithoutQueueName": False,
            "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
            "featureGates": {"VisibilityOnDemand": False},
        },
        kinds=frozenset(
            {"jobs", "jobsets", "clusterqueues", "cohorts", "localqueues", "resourceflavors", "workloads"}
        ),
        offset=1,
    ),
}


def settings(name: ControllerName, credentials: str, address: str, first_port: int) -> Object:
    """A controller's configuration file. credentials: a folder with tls.crt and tls.key. Pure."""
    controller = CONTROLLERS[name]
    return {
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": "0"},
        "metrics": {"bindAddress": "0"},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": address, "port": first_port + controller.offset, "certDir": credentials},
        **controller.settings,
    }


def declarations(
    name: ControllerName, text: str, url: str, authority: bytes
) -> tuple[list[Object], list[Object]]:
    """The definitions of a controller's kinds, which it needs before it starts, and its webhooks, which the API server
    asks as soon as they are declared. text: the YAML of its module. url: where its webhooks are. Pure."""
    documents = [document for document in yaml.safe_load_all(text) if document]
    definitions = [document for document in documents if document["kind"] == "CustomResourceDefinition"]
    webhooks = []
    for document in documents:
        if not document["kind"].endswith("WebhookConfiguration"):
            continue
        hooks = []
        for hook in document["webhooks"]:
            (resource,) = {kind.partition("/")[0] for rule in hook["rules"] for kind in rule["resources"]}
            if resource not in CONTROLLERS[name].kinds:
                continue
            path = hook["clientConfig"]["service"]["path"]
            client = {"url": f"{url}{path}", "caBundle": base64.b64encode(authority).decode()}
            chosen = {"objectSelector": JOB_SET_SELECTOR} if resource == "pods" else {}
            hooks.append({**hook, "clientConfig": client, **chosen})
        metadata = {"name": f"{name}-{document['metadata']['name']}"}
        webhooks.append({**document, "metadata": metadata, "webhooks": hooks})
    return definitions, webhooks


def install(
    api: kubernetes.client.ApiClient,
    name: ControllerName,
    text: str,
    address: tuple[str, int],
    authority: bytes,
    start: Callable[[], object],
) -> None:
    """Declares a controller's kinds, starts it, and declares its webhooks when they answer at that address.

    Raises:
        MachinesError: the kinds are not known, or the webhooks do not answer, within READY_LIMIT_S.
    """
    import kubernetes.client  # a second

    url = f"https://{address[0]}:{address[1]}"
    definitions, webhooks = declarations(name, text, url, authority)
    extensions = kubernetes.client.ApiextensionsV1Api(api)

    def is_known(definition: Object) -> bool:
        registered = extensions.read_custom_resource_definition(definition["metadata"]["name"])
        conditions = {condition.type: condition.status for condition in registered.status.conditions or ()}
        return conditions.get("Established") == "True"

    def answers() -> bool:
        try:
            socket.create_connection(address, READY_LIMIT_S).close()
        except OSError:
            return False
        return True

    for definition in definitions:
        extensions.create_custom_resource_definition(definition)
    _wait(lambda: all(map(is_known, definitions)), f"the API server does not know the kinds of {name}")
    start()
    _wait(answers, f"{name} does not answer at {url}")
    admission = kubernetes.client.AdmissionregistrationV1Api(api)
    for webhook in webhooks:
        if webhook["kind"] == "MutatingWebhookConfiguration":
            admission.create_mutating_webhook_configuration(webhook)
        else:
            admission.create_validating_webhook_configuration(webhook)


def _wait(is_so: Callable[[], bool], what_not: str) -> None:
    until = time.monotonic() + READY_LIMIT_S
    while not is_so():
        if time.monotonic() > until:
            raise MachinesError(f"{what_not} after {READY_LIMIT_S:.0f} s")
        time.sleep(LOOK_AGAIN_S)


def queue(objects: Sequence[Object], name: str, namespace: str, chips: int) -> list[tuple[str, Object]]:
    """A queue of Kueue for so many chips: plural and object, in the order of their making. objects: a ResourceFlavor, a
    ClusterQueue with one group of one flavor, and a LocalQueue, as docs/kubernetes.md has them. Pure."""
    flavor, cluster_queue, local = copy.deepcopy([*objects])
    for quota in cluster_queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"]:
        if quota["name"] == CHIPS:
            quota["nominalQuota"] = chips
    local["metadata"] = {"name": name, "namespace": namespace}
    return [("resourceflavors", flavor), ("clusterqueues", cluster_queue), ("localqueues", local)]
