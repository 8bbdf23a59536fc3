"""What a cluster is told of a run, compared as plain objects."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from backends.pods import manifests
from backends.pods.api_server import PLACES
from backends.pods.cluster_runs import ClusterRuns
from backends.pods.manifests import Options
from backends.pods.pod_launcher import PodLauncher
from backends.pods.pods import AGENT, LONGEST_NAME, job_name
from console import dry_run
from contracts.errors import UNAVAILABLE, WRONG_REQUEST
from contracts.ranks import decoded
from contracts.run_directory import RunDirectory
from launch import jobs
from launch.request.run_request import Planned
from launch.targets import Secret
from tests.backends.pods.pod_plans import CLUSTER, CODE, FOLDER, IMAGE, OWN, PACKAGES, TABLE, a_plan

NODE = "cloud.google.com/"


def made(name: str) -> dict[str, Any]:
    return manifests.manifests(*TABLE[name])[0]


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    if manifest["kind"] == "JobSet":
        manifest = manifest["spec"]["replicatedJobs"][0]["template"]
    found: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return found


def told(manifest: dict[str, Any]) -> dict[str, Any]:
    """What the pods' process 1 is told, as Kubernetes hands it on."""
    variables = {each["name"]: each.get("value") for each in pod_of(manifest)["containers"][0]["env"]}
    found: dict[str, Any] = json.loads(variables["TPU_STACK_POD"].replace("$$", "$"))
    return found


def test_a_run_on_one_host_is_this_job() -> None:
    job, service, policy = manifests.manifests(*TABLE["one host"])
    name = "flax-mlm-20261123-120000-abcd"
    own = {"tpu-stack/run": "flax_mlm-20261123-120000-abcd"}
    labels = {
        "app.kubernetes.io/managed-by": "tpu-stack", **own, "tpu-stack/stack": "dev", "tpu-stack/slice": "s",
    }  # fmt: skip
    metadata = {"name": name, "labels": labels, "namespace": "tpu-stack"}
    assert service["metadata"] == policy["metadata"] == job["metadata"] == metadata
    assert service["spec"] == {"clusterIP": "None", "selector": own, "publishNotReadyAddresses": True}
    assert policy["spec"] == {
        "podSelector": {"matchLabels": own}, "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": own}}]}],
    }  # fmt: skip
    template = job["spec"].pop("template")
    for_good = {"containerName": "run", "operator": "In", "values": [1, 2, 130]}
    not_counted = {"containerName": "run", "operator": "In", "values": [75, 76]}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        {"action": "Ignore", "onExitCodes": not_counted},
        {"action": "FailJob", "onExitCodes": for_good},
        {"action": "FailJob", "onExitCodes": {"containerName": "code", "operator": "In", "values": [2]}},
    ]
    assert job["spec"] == {
        "completionMode": "Indexed", "completions": 1, "parallelism": 1, "podReplacementPolicy": "Failed",
        "suspend": False, "backoffLimitPerIndex": 140, "maxFailedIndexes": 0, "ttlSecondsAfterFinished": 24 * 3600,
        "podFailurePolicy": {"rules": rules},
    }  # fmt: skip
    assert template["metadata"] == {"labels": labels}
    pod = template["spec"]
    (init,), (run,) = pod.pop("initContainers"), pod.pop("containers")
    lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
    assert pod == {
        "restartPolicy": "Never", "subdomain": name, "serviceAccountName": "runs", "terminationGracePeriodSeconds": 120,
        "enableServiceLinks": False, "automountServiceAccountToken": False,
        "nodeSelector": {
            f"{NODE}gke-tpu-accelerator": "tpu-v5-lite-podslice", f"{NODE}gke-tpu-topology": "2x2",
            f"{NODE}gke-nodepool": "main", f"{NODE}gke-spot": "true",
        },
        "tolerations": [
            {"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": f"{NODE}gke-spot", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "node.kubernetes.io/not-ready", **lost},
            {"key": "node.kubernetes.io/unreachable", **lost},
        ],
        "volumes": [
            {"name": "tpu-stack", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        ],
    }  # fmt: skip
    # A TPU is given to root, who has one right.
    safe = {
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsUser": 0, "runAsGroup": 0,
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    bucket = {"name": "STORAGE_EMULATOR_HOST", "value": "http://10.0.0.9:80"}
    root = {"name": "tpu-stack", "mountPath": "/tpu-stack"}
    assert init == {
        "name": "code", "image": IMAGE, "env": [bucket], "volumeMounts": [root], "securityContext": safe,
        "command": [
            *["python", "-c", manifests.FETCH, "/tpu-stack/agent/bundles"],
            *["gs://b/runs/flax_mlm-20261123-120000-abcd/code.tar.gz.base64", CODE],
        ],
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }  # fmt: skip
    agent = ["python", "-S", "-E", f"/tpu-stack/agent/bundles/{CODE}/host/agent/__main__.py"]
    request = run["env"].pop(1)
    assert request["name"] == "TPU_STACK_POD"
    pod_name = {"name": "TPU_STACK_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    assert run == {
        "name": "run", "image": IMAGE, "command": [*agent, "_pod"], "env": [bucket, pod_name],
        "resources": {
            "requests": {"google.com/tpu": "4", "cpu": "1", "memory": "1Gi"}, "limits": {"google.com/tpu": "4"},
        },
        "volumeMounts": [root, {"name": "shm", "mountPath": "/dev/shm"}],
        "securityContext": {**safe, "capabilities": {"drop": ["ALL"], "add": ["SYS_RESOURCE"]}},
        "livenessProbe": {
            "exec": {"command": [*agent, "_alive"]}, "periodSeconds": 60, "timeoutSeconds": 30, "failureThreshold": 3,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "selector"),
    [
        ("on demand", {}),
        ("reserved", {"reservation-name": "mine"}),
        ("flex-start", {"gke-flex-start": "true"}),
    ],
)
def test_the_nodes_of_a_capacity_are_found_by_their_labels(name: str, selector: dict[str, str]) -> None:
    found = pod_of(made(name))["nodeSelector"]
    assert found == {
        f"{NODE}gke-tpu-accelerator": "tpu-v5-lite-podslice",
        f"{NODE}gke-tpu-topology": "4x4",
        f"{NODE}gke-nodepool": "main",
        **{f"{NODE}{key}": value for key, value in selector.items()},
    }


def test_a_cluster_that_is_not_ours_promises_no_names_of_node_pools() -> None:
    theirs = dataclasses.replace(CLUSTER, endpoint=None, context="theirs")
    (job, *_) = manifests.manifests(a_plan(cluster=theirs), Options())
    assert f"{NODE}gke-nodepool" not in pod_of(job)["nodeSelector"]


def test_a_pod_without_a_tpu_has_no_rights() -> None:
    plan, options = TABLE["one host"]
    on_cpus = dataclasses.replace(plan, target=dataclasses.replace(plan.target, platform="cpu"))
    safe = pod_of(manifests.manifests(on_cpus, options)[0])["containers"][0]["securityContext"]
    assert safe["capabilities"] == {"drop": ["ALL"]} and "runAsUser" not in safe


def test_several_slices_are_a_jobset_that_fails_whole_and_tells_each_its_number() -> None:
    job_set, policy = manifests.manifests(*TABLE["two slices"])
    assert policy["kind"] == "NetworkPolicy"
    name, spec = "flax-mlm-20261123-120000-abcd", dict(job_set["spec"])
    (replicated,) = spec.pop("replicatedJobs")
    assert spec == {
        "suspend": False,
        "ttlSecondsAfterFinished": 24 * 3600,
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": 1000,
            "restartStrategy": "BlockingRecreate",
            "rules": [{"name": "fail", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
    }
    assert (replicated["name"], replicated["replicas"]) == ("slice", 2)
    job = replicated["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (4, 4, 0)
    assert [rule["action"] for rule in job["podFailurePolicy"]["rules"]] == ["FailJob", "FailJob"]
    index = {"valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-index']"}}}
    first = f"{name}-slice-0-0.{name}"
    assert job["template"]["spec"]["containers"][0]["env"][3:] == [
        {"name": "TPU_STACK_POD_SLICE", **index},
        {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": first},
        {"name": "MEGASCALE_NUM_SLICES", "value": "2"},
        {"name": "MEGASCALE_SLICE_ID", **index},
    ]
    found = told(job_set)
    assert (found["nodes"], found["start"]["num_processes"]) == (4, 8)
    assert found["start"]["env"]["RUN_COORDINATOR"] == f"{first}:8576"
    plan, _ = TABLE["two slices"]
    assert plan.target.hosts[5].internal_address == f"{name}-slice-1-1.{name}"


def test_an_own_command_finds_its_folder_its_packages_and_every_rank_of_the_others() -> None:
    job = made("own command")
    fetched = pod_of(job)["initContainers"][0]["command"][4:]
    run = "gs://b/runs/flax_mlm-20261123-120000-abcd"
    assert fetched == [
        *[f"{run}/code.tar.gz.base64", CODE, f"{run}/folder.tar.gz.base64", FOLDER],
        *[f"gs://b/runs/.packages/{PACKAGES}.base64", PACKAGES],
    ]
    found = told(job)
    spec = decoded(found["start"]["argv"][-1])
    assert spec.words == ("python", "train.py", "--name", "a b")
    assert (spec.folder, spec.python) == (f"/tpu-stack/agent/bundles/{FOLDER}", None)
    assert spec.packages == f"/tpu-stack/agent/bundles/{PACKAGES}"
    name = "flax-mlm-20261123-120000-abcd"
    assert spec.layer == "/tpu-stack/agent/runs/flax_mlm-20261123-120000-abcd/venv-0"
    assert spec.ranks.addresses() == [f"{name}-{index}.{name}:8580" for index in range(4)]


def test_what_kubernetes_takes_for_a_variable_reaches_the_pod_as_it_was_typed() -> None:
    words = ("sh", "-c", "echo $(HOME) $$ ${x}")
    (job, *_) = manifests.manifests(a_plan(**{**OWN, "arguments": words}), Options())
    (variable,) = [
        each["value"] for each in pod_of(job)["containers"][0]["env"] if each["name"] == "TPU_STACK_POD"
    ]
    assert "$(HOME)" not in variable.replace("$$", "")
    assert decoded(told(job)["start"]["argv"][-1]).words == words


def test_names_that_are_no_dns_label_stay_apart_and_short() -> None:
    assert job_name("flax_mlm-20261123-120000-abcd") == "flax-mlm-20261123-120000-abcd"
    ids = ["A.b-1", "a-b-1", "a.b-1", "7seas", "x" * 60 + "1", "x" * 60 + "2"]
    found = [job_name(each) for each in ids]
    assert len(set(found)) == len(ids)
    assert all(len(each) <= LONGEST_NAME and each[0].isalpha() for each in found)


def test_the_code_is_unpacked_under_its_hash_and_refused_where_it_is_not_that(tmp_path: Path) -> None:
    bundle = jobs.bundle(jobs.CHECKOUT)
    file, into = tmp_path / "code.tar.gz.base64", tmp_path / "bundles"
    impatient = manifests.FETCH.replace("(1, 2, 4, 8, 16, None)", "(None,)")
    assert impatient != manifests.FETCH
    file.write_text(bundle.text)

    def fetch(sha256: str, url: str = f"file://{file}") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", impatient, str(into), url, sha256]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert fetch(bundle.sha256).returncode == 0
    assert (into / bundle.sha256 / AGENT).is_file()
    refused = fetch("0" * 64)
    assert refused.returncode == WRONG_REQUEST
    assert f"its sha256 is {bundle.sha256}" in refused.stderr
    assert [path.name for path in into.iterdir()] == [bundle.sha256]
    missing = fetch(bundle.sha256, f"file://{tmp_path}/code")
    assert (missing.returncode, "is it there" in missing.stderr) == (WRONG_REQUEST, True)
    away = fetch(bundle.sha256, "http://127.0.0.1:1/code")
    assert (away.returncode, "does not answer now" in away.stderr) == (UNAVAILABLE, True)


def test_a_dry_run_prints_the_manifests_as_they_would_be_sent() -> None:
    plan, options = TABLE["four hosts"]
    nowhere = RunDirectory("/nowhere")
    launcher = PodLauncher(runs=cast(ClusterRuns, None), options=options, wait_s=0.0)
    planned = Planned(plan=plan, launcher=launcher, config=None, bundles=(), directory=nowhere)
    printed = list(dry_run.lines(planned, plan.target))
    text = "\n".join(printed[printed.index("apiVersion: batch/v1") :])
    assert list(yaml.safe_load_all(text)) == manifests.manifests(plan, options)
    assert "          import base64, hashlib, os, sys, tarfile, time" in printed


def test_only_the_secret_of_a_run_has_its_secrets_and_a_dry_run_has_none() -> None:
    plan, options = TABLE["one host"]
    secrets = {
        "TOKEN": Secret(source="shell", value="hunter2!"),
        "MANAGED": Secret(source="sm://my-project/name"),
    }
    plan = dataclasses.replace(plan, secrets=secrets)
    job, *_, secret = manifests.manifests(plan, options)
    assert json.loads(secret["stringData"]["values.json"]) == {"TOKEN": "hunter2!"}
    assert (secret["kind"], secret["metadata"]) == ("Secret", job["metadata"])
    assert "hunter2!" not in json.dumps(job)
    start = told(job)["start"]
    assert start["env"]["RUN_SECRETS_FILE"] == "/run/tpu-stack-secrets/values.json"
    assert decoded(start["argv"][-1]).secrets == {"MANAGED": "sm://my-project/name"}
    mount = {"name": "secrets", "mountPath": "/run/tpu-stack-secrets", "readOnly": True}
    assert mount in pod_of(job)["containers"][0]["volumeMounts"]
    launcher = PodLauncher(runs=cast(ClusterRuns, None), options=options, wait_s=1.0)
    assert "hunter2!" not in json.dumps(launcher.documents(plan))
    assert PLACES["secrets"] == "/api/v1"
    assert ("", "secrets", "create") in manifests.rights(has_several_slices=False, has_secrets=True)
