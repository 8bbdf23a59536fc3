"""Pods of a cluster's node pools: what they are like, and those that a run will have as a target."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from backends.pods.cluster_runs import ClusterRuns
from backends.pods.pod_launcher import PodLauncher
from backends.pods.pods import AGENT_ROOT, CACHE_DIR
from contracts.errors import RequestError
from contracts.files import is_url
from contracts.inventory import Inventory, NodePool, Slice
from launch import inventories
from launch.backend import Capabilities, Say
from launch.remote_files import Buckets
from launch.targets import Target, Wanted, choose_hosts, place_of_runs, with_hosts

if TYPE_CHECKING:
    from launch.launch import Request

INSTEAD = {
    "deploy": "an image has all that they need: `fab build`, `fab push`, then `pulumi up`",
    "verify": "`fab doctor` looks at the cluster, and a run says when its devices are not there",
    "trust": "the cluster's API leads to them, and there is no SSH key to trust",
    "run": "`fab ssh` opens a shell in one of an active run; a job of every pod is `fab train -- COMMAND …`",
    "put": "put data into the stack's bucket, which every job reads as gs://…",
    "get": "what a run leaves is in its run directory, in the stack's bucket",
    "ssh-config": "`fab ssh` opens a shell in one of an active run",
    "submit": "`fab train --queue NAME` waits in a queue of the cluster's Kueue",
    "jupyter": "take a slice of TPU VMs for notebooks",
}


@dataclasses.dataclass(frozen=True)
class PodsBackend:
    """Pods of a cluster's node pools. runs: those that the cluster has."""

    runs: ClusterRuns
    capabilities = Capabilities(
        shares_files=False,
        shares_host=False,
        is_billed=True,
        hosts_outlive_runs=False,
        hosts_follow_run=False,
        restarts_runs=True,
        stops_with_launcher=False,
        python_remedy="take an image that has it",
        checks=("cluster",),
        instead={
            command: f"fab {command}: the hosts of {{slice}} are pods, which are there as long as a run is; {remedy}"
            for command, remedy in INSTEAD.items()
        },
    )

    def built_image(self, framework: str, platform: str) -> None:  # noqa: ARG002 - hosts pull what was pushed
        return None

    def environment(self, platform: str, framework: str) -> None:  # noqa: ARG002 - images have the frameworks
        return None

    def make_environment(self, framework: str, say: Say) -> None:
        """There is none to be made."""

    def prepare(self, target: Target) -> bool:  # noqa: ARG002 - they are made from an image
        return True

    def launcher(self, target: Target, request: Request) -> PodLauncher:
        before = (request.resume.described.get("pods") or {}) if request.resume else {}
        asked = {"restarts": request.restarts, "queue": request.queue}
        given = {name: value for name, value in asked.items() if value is not None}
        return PodLauncher.of(self.runs, target, {**before, **given}, wait_s=request.wait_s)

    def ensure(self, target: Target, say: Say) -> None:
        """Its nodes are the cluster's, which brings them back."""

    def conclude(self, run_id: str) -> str | None:
        return self.runs.conclude(run_id)

    def begins_again(self, run_id: str) -> bool:
        return self.runs.of(run_id).begins_pods

    def forward(
        self,
        target: Target,  # noqa: ARG002 - a pod is found by its run
        run_id: str,
        index: int,
        port: int,
    ) -> contextlib.AbstractContextManager[int]:
        return self.runs.forward(run_id, index, port)

    def open_shell(self, target: Target, index: int | None, run_id: str | None) -> int:  # noqa: ARG002
        assert run_id is not None, "a pod is found by its run"
        return self.runs.shell(run_id, index or 0)


def target_of(inventory: Inventory, one_slice: Slice, pool: NodePool, wanted: Wanted) -> Target:
    """Return the pods that a run on node pools has; nothing is asked of the cluster yet."""
    if inventory.cluster is None:
        raise RequestError(
            f"the slice {one_slice.name} is in a cluster, and the inventory of {inventory.stack} has none; "
            f"`pulumi up --stack {inventory.stack}` writes it"
        )
    one_slice = with_hosts(one_slice, pool.nodes * one_slice.count)
    runs_url = place_of_runs(inventory, one_slice, wanted.runs)
    if not is_url(runs_url):
        raise RequestError(
            f"--runs {runs_url}: pods share no disk; name a URL such as gs://…, or leave it out"
        )
    files = Buckets()
    cluster = ClusterRuns(inventory.cluster, files, runs_url)
    hosts = choose_hosts(one_slice.hosts, wanted.hosts)
    return Target(
        name=wanted.stack,
        pulumi_stack=None if inventories.is_file(wanted.stack) else inventory.stack,
        inventory=inventory,
        slice=one_slice,
        hosts=hosts,
        platform=wanted.platform or (wanted.given.platform if wanted.given else "tpu"),
        transports=(),
        agents=cluster.agents_called([inventory.cluster.name]),
        find_agents=cluster.agents,
        python="python",
        runs_url=runs_url,
        files=files,
        agent_root=AGENT_ROOT,
        cache_dir=CACHE_DIR,
        cpus=(None,) * len(hosts),
        coordinator_host="",
        backend=PodsBackend(cluster),
    )
