"""Plans of runs on a cluster, of every kind that there is; for tests of what the cluster is told."""

import dataclasses
from typing import Any

from backends.pods import manifests
from backends.pods.manifests import Options
from backends.pods.pod_backend import PodBackend
from contracts.inventory import Cluster, Inventory, NodePool, Slice
from launch.pricing import Budget
from launch.targets import Container, OwnCommand, Plan
from tests.launch.slices import make_host, make_inventory, make_slice, make_target

IMAGE = "europe-west4-docker.pkg.dev/p/r/jax@sha256:" + "0" * 64
CODE, FOLDER, PACKAGES = "ab" * 32, "cd" * 32, "ef" * 32
NO_CLUSTER: Any = None
"""Nothing of it is asked."""
CLUSTER = Cluster(
    name="c",
    context=None,
    endpoint="https://gke-1.europe-west4.gke.goog",
    namespace="tpu-stack",
    service_account="runs",
    pod_environment={"STORAGE_EMULATOR_HOST": "http://10.0.0.9:80"},
)


def a_pool(nodes: int, reservation: str | None = None) -> NodePool:
    return NodePool(
        machine_type="ct5lp-hightpu-4t",
        accelerator="tpu-v5-lite-podslice",
        nodes=nodes,
        reservation=reservation,
    )


def a_plan(
    *,
    nodes: int = 4,
    reservation: str | None = None,
    cluster: Cluster = CLUSTER,
    of_slice: dict[str, Any] | None = None,
    **changed: Any,
) -> Plan:
    topology = {1: "2x2", 2: "2x4", 4: "4x4"}[nodes]
    one: Slice = make_slice(
        [], pool=a_pool(nodes, reservation), topology=topology, origin="node-pool main", **of_slice or {}
    )
    inventory: Inventory = make_inventory(one, cluster=cluster)
    hosts = tuple(make_host(index) for index in range(nodes * one.count))
    target = make_target(
        [], inventory=inventory, slice=one, hosts=hosts, cpus=(None,) * len(hosts), python="python",
        runs_url="gs://b/runs", backend=PodBackend(NO_CLUSTER),
    )  # fmt: skip
    run_id = "flax_mlm-20261123-120000-abcd"
    plan = Plan(
        target=target, run_id=run_id, job="flax_mlm", framework="jax", arguments=("--steps", "5"),
        run_dir=f"gs://b/runs/{run_id}", cwd="~", bundle_sha256=CODE, container=Container(image=IMAGE),
    )  # fmt: skip
    return manifests.placed(dataclasses.replace(plan, **changed))


OWN: dict[str, Any] = {
    "job": "command",
    "arguments": ("python", "train.py", "--name", "a b"),
    "command": OwnCommand(folder_sha256=FOLDER, packages_sha256=PACKAGES, python="python", progress=None),
}
TABLE: dict[str, tuple[Plan, Options]] = {
    "one host": (a_plan(nodes=1), Options()),
    "four hosts": (a_plan(), Options()),
    "two slices": (a_plan(of_slice={"count": 2}), Options()),
    "on demand": (a_plan(of_slice={"capacity": "on-demand"}), Options()),
    "reserved": (a_plan(reservation="mine", of_slice={"capacity": "reserved"}), Options()),
    "flex-start": (a_plan(of_slice={"capacity": "flex-start"}), Options()),
    "own command": (a_plan(**OWN), Options()),
    "own image": (a_plan(container=Container(image="me.example/own@sha256:" + "1" * 64)), Options()),
    "serve": (a_plan(nodes=1, job="serve", run_id="serve-20261123-120000-abcd"), Options(restarts=3)),
    "pytorch, a rank a chip": (a_plan(framework="pytorch_xla", ranks_per_host=4), Options()),
    "queued": (a_plan(), Options(queue="team")),
    "suspended": (a_plan(), Options(suspended=True)),
    "budget": (a_plan(budget=Budget(max_usd=10, spent_usd=0, usd_per_hour=5)), Options()),
    "a long name": (a_plan(run_id="a_job_with_a_very_long_name-20261123-120000-abcd"), Options()),
}
