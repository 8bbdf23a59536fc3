"""Pods of a cluster's node pools: what they are like, the verbs on them, and those that a run will have as a target."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from backends.pods.api_server import shell
from backends.pods.cluster_runs import ANSWER_LIMIT_S, ClusterRuns
from backends.pods.pod_launcher import PodLauncher
from backends.pods.pods import AGENT_ROOT, CACHE_DIR, CONTAINER
from contracts.aliases import Say
from contracts.errors import RequestError
from contracts.files import is_url
from contracts.host_interface import SHELL
from contracts.inventory import Host, Inventory, Slice
from launch import inventories
from launch.hosts import STOP_LIMIT_S, Answer, HostError, wait_for_answer
from launch.remote_files import Buckets
from launch.runs import Conclusion, Look, Run
from launch.targets import (
    Capabilities,
    Environments,
    PodOptions,
    Require,
    Sleep,
    Target,
    TargetRequest,
)

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
CAPABILITIES = Capabilities(
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


@dataclasses.dataclass(frozen=True)
class PodBackend:
    """A `launch.targets.Backend` of pods. runs: those that the cluster has."""

    runs: ClusterRuns
    capabilities = CAPABILITIES
    environments: Environments | None = None

    def ensure(
        self,
        target: Target,
        reopen: Callable[[], Target],  # noqa: ARG002
        say: Say,  # noqa: ARG002
        sleep: Sleep = time.sleep,  # noqa: ARG002
    ) -> Target:
        """Return the target: its nodes are the cluster's, which brings them back. Raises HostError: it is away."""
        for error in self.status().errors:
            raise error
        return target

    def prepare(
        self,
        reopen: Callable[[], Target],
        say: Say,  # noqa: ARG002
        require: Require = lambda: None,  # noqa: ARG002
        sleep: Sleep = time.sleep,  # noqa: ARG002
    ) -> Target:
        return reopen()  # pods are made from an image

    def launcher(self, target: Target, options: PodOptions, before: Run | None) -> PodLauncher:
        recorded = (before.described.get("pods") or {}) if before else {}
        preset = {"restarts": options.restarts, "queue": options.queue}
        preset = {name: value for name, value in preset.items() if value is not None}
        return PodLauncher.for_target(self.runs, target, {**recorded, **preset}, wait_s=options.wait_s)

    def hold(self) -> contextlib.AbstractContextManager[Require]:
        return contextlib.nullcontext(lambda: None)  # of two Jobs of one name the cluster takes one

    def status(self, selected: Sequence[Run] | None = None) -> Look:
        run_id = selected[0].run_id if selected is not None and len(selected) == 1 else None

        def look() -> Look:
            chosen = (
                [*self.runs.observed_runs().values()]
                if run_id is None
                else [self.runs.run_in_cluster(run_id)]
            )
            return Look(
                processes=tuple(entry for observed in chosen for entry in self.runs.entries(observed)),
                errors=(),
                knowing=1,
                restarting=frozenset(observed.run_id for observed in chosen if observed.begins_pods),
            )

        try:
            return self.runs.begin(self.runs.connection.name, ANSWER_LIMIT_S, look).result()
        except HostError as error:
            return Look(processes=(), errors=(error,), knowing=1)

    def stop(self, run: Run, *, grace_s: float) -> list[Answer]:
        futures = [
            self.runs.begin(
                host["name"],
                grace_s + STOP_LIMIT_S,
                functools.partial(self.runs.stop, run.run_id, run.attempt, index, grace_s),
            )
            for index, host in enumerate(run.described["hosts"])
        ]
        return [*map(wait_for_answer, futures)]

    def logs(self, run: Run, index: int, *, offset: int, limit_bytes: int) -> dict[str, Any]:
        request = {**run.process(index), "offset": offset, "limit_bytes": limit_bytes}
        name = run.described["hosts"][index]["name"]
        return self.runs.begin(name, ANSWER_LIMIT_S, functools.partial(self.runs.logs, request)).result()

    def ask(self, run: Run, verb: str, request: Mapping[str, Any], *, timeout_s: float) -> list[Answer]:
        def ask(index: int) -> dict[str, Any]:
            session = self.runs.session(self.runs.running_pod(run.run_id, index))
            return session.ask(verb, {**run.process(index), **request}, timeout_s)

        futures = [
            self.runs.begin(host["name"], timeout_s + ANSWER_LIMIT_S, functools.partial(ask, index))
            for index, host in enumerate(run.described["hosts"])
        ]
        return [*map(wait_for_answer, futures)]

    def clear(self, run: Run) -> list[str]:  # noqa: ARG002 - a pod's disk goes with the pod
        return []

    def conclude(self, run_id: str) -> Conclusion | None:
        return self.runs.conclude(run_id)

    def forward(self, run_id: str, index: int, port: int) -> contextlib.AbstractContextManager[int]:
        pod = self.runs.running_pod(run_id, index)["metadata"]["name"]
        return self.runs.connection.forwarded(pod, port)

    def open_shell(self, target: Target, index: int | None, run: Run | None) -> int:  # noqa: ARG002
        assert run is not None, "a pod is found by its run"
        pod, argv = self.runs.running_pod(run.run_id, index or 0), SHELL
        with contextlib.suppress(HostError):  # its process has not begun
            argv = self.runs.session(pod).ask("shell", run.process(index or 0), ANSWER_LIMIT_S)["argv"]
        name = pod["metadata"]["name"]
        return shell(self.runs.connection.program(name, CONTAINER, argv, terminal=True))


def make_target(
    inventory: Inventory, one_slice: Slice, hosts: tuple[Host, ...], runs_url: str, request: TargetRequest
) -> Target:
    """Return the pods that a run on node pools has; nothing is asked of the cluster yet."""
    if inventory.cluster is None:
        raise RequestError(
            f"the slice {one_slice.name} is in a cluster, and the inventory of {inventory.stack} has none; "
            f"`pulumi up --stack {inventory.stack}` writes it"
        )
    if not is_url(runs_url):
        raise RequestError(
            f"--runs {runs_url}: pods share no disk; name a URL such as gs://…, or leave it out"
        )
    files = Buckets()
    return Target(
        name=request.stack,
        pulumi_stack=None if inventories.is_file(request.stack) else inventory.stack,
        inventory=inventory,
        slice=one_slice,
        hosts=hosts,
        platform=request.platform or (request.preset.platform if request.preset else "tpu"),
        transports=(),
        agents=(),
        python="python",
        runs_url=runs_url,
        files=files,
        agent_root=AGENT_ROOT,
        cache_dir=CACHE_DIR,
        cpus=(None,) * len(hosts),
        coordinator_host="",
        backend=PodBackend(ClusterRuns(inventory.cluster, files, runs_url)),
    )
