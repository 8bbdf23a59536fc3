"""The pods that runs on node pools have, as the hosts of a target."""

from __future__ import annotations

from backends.pods.cluster_runs import ClusterRuns
from backends.pods.pods import AGENT_ROOT, CACHE_DIR
from contracts.errors import RequestError
from contracts.files import is_url
from contracts.inventory import Inventory, NodePool, Slice
from launch import inventories
from launch.remote_files import Buckets
from launch.targets import Target, Wanted, choose_hosts, place_of_runs, with_hosts


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
        cluster=cluster,
    )
