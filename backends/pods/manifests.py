"""What a cluster is told of a run: from its plan to manifests, as plain objects. Pure.

A run on one slice is an Indexed Job, on several slices a JobSet with one Job a slice; pod i has the run's process i.
With it come a headless Service, by which its pods find each other, and a NetworkPolicy, by which nobody else does.
Everything of a run has the run's name and labels, and the first manifest is the owner of the others: whoever deletes it
deletes all.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from backends.pods.pods import (
    AGENT,
    AGENT_ROOT,
    CACHE_DIR,
    CODE_CONTAINER,
    CONTAINER,
    GRACE_S,
    MANAGED_BY,
    ROOT,
    RUN_LABEL,
    SLICE_INDEX,
    job_name,
    label,
)
from contracts.errors import FAILED, INTERRUPTED, PEER_LOST, RESUME_ME, WRONG_REQUEST
from contracts.host_interface import SECRETS_FILE
from contracts.inventory import Cluster, Host, NodePool, Slice
from contracts.run_directory import CODE, FOLDER
from launch import plan as plans
from launch.targets import Plan

Manifest = dict[str, Any]

COORDINATOR_PORT, LIVENESS_PORT, GATHER_PORT, FIRST_RANK_PORT = 8576, 8577, 8578, 8580
"""Fixed, as a pod has an address of its own; none is of those that libtpu and torch_tpu take (8070, 8471, 8476 …)."""
SECRETS_DIR, SECRETS_KEY = "/run/tpu-stack-secrets", "values.json"
TPU = "google.com/tpu"
"""The resource that pods ask for, and the taint of nodes that have it."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
JOBSET_INDEX = f"metadata.labels['{SLICE_INDEX}']"
SLICE = "slice"
"""What a JobSet calls each of its Jobs, with its index."""

NODE_LOST_S = 60
"""How long a node may be silent before its pods are given up; the cluster's own default is 300 s."""
KEPT_S = 24 * 3600
"""How long an ended run's pods stay, for `kubectl logs` and to say why it ended where it could not; the run directory
has its logs for ever."""
PROBE_PERIOD_S = 60
MOST_POD_FAILURES = 140
"""How often a pod of a Job may fail where the policy cannot be asked, as its bucket does not answer: about a day, by
the cluster's pauses of up to ten minutes, as long as the policy bears outages. The first pod asks the policy before
each attempt, and that ends all else; what is nobody's fault is not counted here."""
MOST_RESTARTS = 1000
"""The same of a JobSet, which makes no difference between failures and no pauses: half a day of tries to fetch the
code."""
AS_ROOT = {"runAsUser": 0, "runAsGroup": 0}
"""The device files of a TPU are root's, and only root may pin memory beyond the node's limit, as its driver does:
https://docs.cloud.google.com/kubernetes-engine/docs/how-to/tpus#privileged-mode. Of root's rights it has no other."""
MIN_REQUESTS = {"cpu": "1", "memory": "1Gi"}
"""A pod that asks for none of these is the last to be given a processor, and the first to be ended where memory is
short. It may use all that the node has."""


def rights(*, has_several_slices: bool, has_secrets: bool = False) -> list[tuple[str, str, str]]:
    """Return what `fab train`, `status`, `logs`, `shell` and `stop` ask for: API group, resource, verb.

    has_several_slices: the run is a JobSet. has_secrets: the launcher hands over secrets of the run.
    """
    works = [("batch", "jobs"), *([("jobset.x-k8s.io", "jobsets")] if has_several_slices else [])]
    return [
        *((*work, verb) for work in works for verb in ("create", "delete", "patch", "list", "watch")),
        *(("", "pods", verb) for verb in ("list", "watch", "delete")),
        # The client opens both by GET, which a newer API server counts as "create" too.
        *(("", f"pods/{part}", verb) for part in ("exec", "portforward") for verb in ("create", "get")),
        ("", "services", "create"),
        *([("", "secrets", "create")] if has_secrets else []),
        ("", "events", "list"),
        ("networking.k8s.io", "networkpolicies", "create"),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How the pods of a run are admitted and restarted.

    restarts: as in `control_documents.Limits`. queue: the Kueue queue that admits the run. suspended: created
    without starting. begin_by_s: the latest start of the first attempt, in Unix seconds; None: no limit.
    """

    restarts: int = 10
    queue: str | None = None
    suspended: bool = False
    begin_by_s: int | None = None


def run_labels(plan: Plan) -> dict[str, str]:
    target = plan.target
    return {
        **MANAGED_BY,
        RUN_LABEL: label(plan.run_id),
        "tpu-stack/stack": label(target.inventory.stack),
        "tpu-stack/slice": label(target.slice.name),
    }


def pod_names(name: str, slices: int, nodes: int) -> list[str]:
    """Return the host names of a run's pods, in the order of its processes. nodes: of each slice."""
    if slices == 1:
        return [f"{name}-{index}" for index in range(nodes)]
    return [f"{name}-{SLICE}-{one}-{index}" for one in range(slices) for index in range(nodes)]


def slice_count(plan: Plan) -> int:
    """Return how many slices a run is on: all, or one where it has fewer pods than they have nodes, as a server."""
    count = plan.target.slice.count
    return count if plan.processes == _pool(plan).nodes * count else 1


def placed(plan: Plan) -> Plan:
    """Return the plan with the run's pods as its hosts, and the ports that they find each other by.

    plan: of as many hosts as the run has pods, whatever these are called.
    """
    name, slices = job_name(plan.run_id), slice_count(plan)
    hosts = tuple(
        Host(
            index=index,
            name=pod,
            internal_address=f"{pod}.{name}",
            external_address=None,
            user=None,
            host_keys=(),
            reach="direct",
        )
        for index, pod in enumerate(pod_names(name, slices, _nodes(plan)))
    )
    count = len(hosts)
    target = dataclasses.replace(
        plan.target,
        hosts=hosts,
        coordinator_host=hosts[0].internal_address,
        agent_root=AGENT_ROOT,
        cache_dir=CACHE_DIR,
        cpus=(None,) * count,
    )
    ports = tuple(range(FIRST_RANK_PORT, FIRST_RANK_PORT + plan.ranks_per_host))
    return dataclasses.replace(
        plan,
        target=target,
        coordinator_port=COORDINATOR_PORT,
        liveness_port=LIVENESS_PORT,
        rank_ports=(ports,) * count if plan.finds_peers_by_rank else (),
        homes=(ROOT,) * count,
    )


def manifests(plan: Plan, options: Options) -> list[Manifest]:
    """Return what is to be made for one attempt of a run and those that follow it: the Job or JobSet, which is the
    owner of the rest, the Service, the NetworkPolicy and, where the launcher hands over secrets, the Secret.
    plan: as `placed` returns it, with a container.
    """
    cluster, name, labels = _cluster(plan), job_name(plan.run_id), run_labels(plan)
    has_several_slices = slice_count(plan) > 1
    work = _job_set(plan, options, name, labels) if has_several_slices else _job(plan, options, name, labels)
    own = {RUN_LABEL: labels[RUN_LABEL]}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        # Before they are ready, as pods look for each other from their first second on.
        "spec": {"clusterIP": "None", "selector": own, "publishNotReadyAddresses": True},
    }
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "podSelector": {"matchLabels": own},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": own}}]}],
        },
    }
    # A JobSet makes its own Service.
    objects = [work, policy] if has_several_slices else [work, service, policy]
    if values := plans.secret_values(plan):
        secret = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "immutable": True}
        objects.append(
            {
                **secret,
                "metadata": {"name": name, "labels": labels},
                "stringData": {SECRETS_KEY: json.dumps(values)},
            }
        )
    for manifest in objects:
        manifest["metadata"]["namespace"] = cluster.namespace
    return objects


def owned(manifest: Manifest, owner: Manifest) -> Manifest:
    """Return a manifest as a part of `owner`, an object that the cluster has made: it goes when that goes."""
    reference = {name: owner[name] for name in ("apiVersion", "kind")}
    reference |= {name: owner["metadata"][name] for name in ("name", "uid")}
    metadata = {**manifest["metadata"], "ownerReferences": [reference]}
    return {**manifest, "metadata": metadata}


def _pool(plan: Plan) -> NodePool:
    assert plan.target.slice.pool is not None, "a plan for a slice of hosts has no pods"
    return plan.target.slice.pool


def _nodes(plan: Plan) -> int:
    """How many pods the run has in a slice."""
    return plan.processes // slice_count(plan)


def _cluster(plan: Plan) -> Cluster:
    assert plan.target.inventory.cluster is not None, "a slice with a pool is in a cluster"
    return plan.target.inventory.cluster


def _queued(options: Options) -> dict[str, str]:
    return {} if options.queue is None else {QUEUE_LABEL: options.queue}


def _is_suspended(options: Options) -> bool:
    """Kueue takes a run that is suspended, and lets it begin when there is room."""
    return options.suspended or options.queue is not None


def _job(plan: Plan, options: Options, name: str, labels: dict[str, str]) -> Manifest:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {**labels, **_queued(options)}},
        "spec": {
            **_job_spec(plan, options, name, labels),
            "suspend": _is_suspended(options),
            # Of each pod, as they fail together: a limit of the whole Job would count one lost peer once a pod, and
            # the pause before the next start doubles with each.
            "backoffLimitPerIndex": MOST_POD_FAILURES,
            "maxFailedIndexes": 0,
            "ttlSecondsAfterFinished": KEPT_S,
        },
    }


def _job_set(plan: Plan, options: Options, name: str, labels: dict[str, str]) -> Manifest:
    """https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/: any pod that fails starts all Jobs again."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "labels": {**labels, **_queued(options)},
            # Each Job has a node pool, which is a slice, to itself.
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "suspend": _is_suspended(options),
            "ttlSecondsAfterFinished": KEPT_S,
            "network": {
                "enableDNSHostnames": True,
                "subdomain": name,
                "publishNotReadyAddresses": True,
            },
            "failurePolicy": {
                "maxRestarts": MOST_RESTARTS,
                "restartStrategy": "BlockingRecreate",  # two processes of one rank would be two too many
                "rules": [
                    {
                        "name": "fail",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name": SLICE,
                    "replicas": slice_count(plan),
                    "template": {
                        "metadata": {"labels": labels},
                        "spec": {**_job_spec(plan, options, name, labels), "backoffLimit": 0},
                    },
                }
            ],
        },
    }


def _job_spec(plan: Plan, options: Options, name: str, labels: dict[str, str]) -> Manifest:
    nodes, has_several_slices = _nodes(plan), slice_count(plan) > 1
    lost = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        {"action": "Ignore", "onExitCodes": _codes(CONTAINER, RESUME_ME, PEER_LOST)},
    ]
    final = [
        {"action": "FailJob", "onExitCodes": _codes(CONTAINER, FAILED, WRONG_REQUEST, INTERRUPTED)},
        {"action": "FailJob", "onExitCodes": _codes(CODE_CONTAINER, WRONG_REQUEST)},
    ]
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "podReplacementPolicy": "Failed",  # two processes of one rank would be two too many
        # In a JobSet every failure has to end the Job, which is started again with the others.
        "podFailurePolicy": {"rules": final if has_several_slices else [*lost, *final]},
        "template": {"metadata": {"labels": labels}, "spec": _pod(plan, options, name)},
    }


def _codes(container: str, *codes: int) -> Manifest:
    return {"containerName": container, "operator": "In", "values": sorted(codes)}


def _pod(plan: Plan, options: Options, name: str) -> Manifest:
    cluster = _cluster(plan)
    assert plan.container is not None, "a pod runs an image"
    environment = [_variable(key, text) for key, text in sorted(cluster.pod_environment.items())]
    safe, main = _security_contexts(plan.container.access, plan.target.platform)
    secret_mounts, secret_volumes = _secret_mounts(plan, name)
    chips = {TPU: str(_pool(plan).chips_per_node)}
    mounts = [{"name": "tpu-stack", "mountPath": ROOT}]
    code = [f"{plan.run_dir}/{CODE}", plan.bundle_sha256]
    for sha256 in plan.command.bundles if plan.command is not None else ():
        code += [plan.stored_at(sha256) or f"{plan.run_dir}/{FOLDER}", sha256]
    agent = ["python", "-S", "-E", f"{plan.code_dir}/{AGENT}"]
    return {
        "restartPolicy": "Never",
        "subdomain": name,
        "serviceAccountName": cluster.service_account,
        "terminationGracePeriodSeconds": GRACE_S,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "nodeSelector": _node_selector(plan),
        "tolerations": _tolerations(plan),
        "initContainers": [
            {
                "name": CODE_CONTAINER,
                "image": plan.container.image,
                "command": ["python", "-c", FETCH, f"{AGENT_ROOT}/bundles", *code],
                "terminationMessagePolicy": "FallbackToLogsOnError",  # its last line says why
                "env": environment,
                "resources": {"requests": MIN_REQUESTS},
                "volumeMounts": mounts,
                "securityContext": safe,
            }
        ],
        "containers": [
            {
                "name": CONTAINER,
                "image": plan.container.image,
                "command": [*agent, "_pod"],
                "env": [*environment, *_pod_variables(plan, options)],
                "resources": {"requests": {**chips, **MIN_REQUESTS}, "limits": chips},
                "volumeMounts": [
                    *mounts,
                    {"name": "shm", "mountPath": "/dev/shm"},
                    *secret_mounts,
                ],
                "securityContext": main,
                "livenessProbe": {
                    "exec": {"command": [*agent, "_alive"]},
                    "periodSeconds": PROBE_PERIOD_S,
                    "timeoutSeconds": PROBE_PERIOD_S // 2,
                    "failureThreshold": 3,
                },
            }
        ],
        "volumes": [
            {"name": "tpu-stack", "emptyDir": {}},
            {
                "name": "shm",
                "emptyDir": {"medium": "Memory", "sizeLimit": f"{plans.SHM_BYTES // 2**30}Gi"},
            },
            *secret_volumes,
        ],
    }


def _security_contexts(access: str, platform: str) -> tuple[Manifest, Manifest]:
    """Return the security contexts of what fetches the code, and of the run itself."""
    if access == "privileged":
        privileged = {"privileged": True, **AS_ROOT}
        return privileged, privileged
    safe: Manifest = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if platform != "tpu":
        return safe, safe
    safe |= AS_ROOT
    return safe, {**safe, "capabilities": {"drop": ["ALL"], "add": ["SYS_RESOURCE"]}}


def _secret_mounts(plan: Plan, name: str) -> tuple[list[Manifest], list[Manifest]]:
    """Return how the run's Secret is mounted and where it comes from; nothing where it has none."""
    if not plans.secret_values(plan):
        return [], []
    mount = {"name": "secrets", "mountPath": SECRETS_DIR, "readOnly": True}
    # Kubernetes keeps it in the node's memory, as root's; the process of an image may be another user's.
    return [mount], [{"name": "secrets", "secret": {"secretName": name, "defaultMode": 0o444}}]


def _pod_variables(plan: Plan, options: Options) -> list[Manifest]:
    """What the pod's process 1 finds in its environment: all that it is told, and what only the cluster knows."""
    target = plan.target
    request = json.dumps(pod_request(plan, options), separators=(",", ":"))
    variables: list[Manifest] = [
        _variable("TPU_STACK_POD", request),
        {"name": "TPU_STACK_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    if (slices := slice_count(plan)) > 1:
        index = {"valueFrom": {"fieldRef": {"fieldPath": JOBSET_INDEX}}}
        variables += [
            {"name": "TPU_STACK_POD_SLICE", **index},
            {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": target.coordinator_host},
            {"name": "MEGASCALE_NUM_SLICES", "value": str(slices)},
            {"name": "MEGASCALE_SLICE_ID", **index},
        ]
    return variables


def _variable(name: str, text: str) -> Manifest:
    """A variable with exactly this text: Kubernetes takes $(NAME) in it for another variable, and $$ for a $."""
    return {"name": name, "value": text.replace("$", "$$")}


def pod_request(plan: Plan, options: Options) -> dict[str, Any]:
    """Return what `host.agent.pod` is told: the start request of process 0, which each pod makes its own.

    Its `ranks` say how the pods' environments differ by more than their index, where they do; `nodes` is of each slice,
    and `limits` are as `launch.attempts.Limits` has them.
    """
    start = {**plans.start(plan, 0), "container": None, "root": plan.target.agent_root}
    if start.pop("secrets", None):
        start["env"] |= {SECRETS_FILE: f"{SECRETS_DIR}/{SECRETS_KEY}"}
    one_rank = plan.finds_peers_by_rank and plan.command is None and plan.ranks_per_host == 1
    return {
        "start": start,
        "ranks": dataclasses.asdict(plan.ranks) if one_rank else None,
        "nodes": _nodes(plan),
        "port": GATHER_PORT,
        "limits": {
            "restarts": options.restarts,
            "budget_s": start.get("budget_s"),
            "budget_reason": start.get("budget_reason"),
            "begin_by_s": options.begin_by_s,
        },
    }


def slice_labels(slice_spec: Slice, pool: NodePool) -> dict[str, str]:
    """Return the labels that GKE gives the nodes of a kind of TPU slice."""
    return {
        "cloud.google.com/gke-tpu-accelerator": pool.accelerator,
        "cloud.google.com/gke-tpu-topology": slice_spec.topology,
    }


def _node_selector(plan: Plan) -> dict[str, str]:
    """By the labels that GKE gives the nodes of its TPU pools:
    https://cloud.google.com/kubernetes-engine/docs/how-to/tpus."""
    slice_spec, pool = plan.target.slice, _pool(plan)
    labels = slice_labels(slice_spec, pool)
    # A pool of ours is named, so that no similar pool is taken.
    if _cluster(plan).endpoint is not None and slice_spec.count == 1:
        labels["cloud.google.com/gke-nodepool"] = slice_spec.origin.removeprefix("node-pool ")
    if slice_spec.capacity == "spot":
        labels["cloud.google.com/gke-spot"] = "true"
    if slice_spec.capacity == "flex-start":
        labels["cloud.google.com/gke-flex-start"] = "true"
    if pool.reservation is not None:
        labels["cloud.google.com/reservation-name"] = pool.reservation
    return labels


def _tolerations(plan: Plan) -> list[Manifest]:
    keys = [TPU]
    keys += {"spot": ["gke-spot"], "flex-start": ["gke-flex-start"]}.get(plan.target.slice.capacity, [])
    lost = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    return [
        *(
            {
                "key": key if "/" in key else f"cloud.google.com/{key}",
                "operator": "Exists",
                "effect": "NoSchedule",
            }
            for key in keys
        ),
        *(
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": NODE_LOST_S}
            for key in lost
        ),
    ]


FETCH = """\
import base64, hashlib, os, sys, tarfile, time
import fsspec

AWAY, WRONG = 69, 2  # as contracts.errors has them

PIECE = 4 * 2**20  # of base64, whose groups have four letters

def leave(code, message):
    print(message, file=sys.stderr, flush=True)
    sys.exit(code)

def is_refused(error):
    is_missing = isinstance(error, FileNotFoundError) and error.__cause__ is None
    return is_missing or isinstance(error, PermissionError) or str(error).startswith("Forbidden")

def fetch(url, packed):
    digest = hashlib.sha256()
    with fsspec.open(url, "rb") as source, open(packed, "wb") as target:
        while piece := source.read(PIECE):
            data = base64.b64decode(piece)
            digest.update(data)
            target.write(data)
    return digest.hexdigest()

folder, *wanted = sys.argv[1:]
os.makedirs(folder, exist_ok=True)
for url, sha256 in zip(wanted[::2], wanted[1::2]):
    path = os.path.join(folder, sha256)
    packed = path + ".tar.gz"
    for pause_s in (1, 2, 4, 8, 16, None):
        try:
            actual = fetch(url, packed)
            break
        except Exception as error:
            print(f"{url}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if pause_s is None and is_refused(error):
                leave(WRONG, f"{url}: cannot be read; is it there, and may this service account read the bucket?")
            if pause_s is None:
                leave(AWAY, f"{url}: does not answer now ({type(error).__name__}: {error})")
            time.sleep(pause_s)
    if actual == sha256:
        with tarfile.open(packed, mode="r:gz") as tar:
            tar.extractall(path + ".part", filter="data")
    os.remove(packed)
    if actual != sha256:
        leave(WRONG, f"{url}: its sha256 is {actual}; launch the run again")
    os.rename(path + ".part", path)
"""
"""Puts each bundle, by its URL and hash, under its hash in a folder. Code that could do it is not
there yet, so it is a program for the image's Python."""
