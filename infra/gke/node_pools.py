"""What GKE has of the stack's cluster and node pools, where the gcp provider says too little of it.

- A pool that GKE could not fill ends in state ERROR. The provider says so without GKE's reason, and at the next
  `pulumi up` takes the pool for made. So each preview and `pulumi up` looks first; one in state ERROR is made again.
- What an interrupted `pulumi up` has made is at GKE and not in the state, and the provider refuses to make it a second
  time. That is seen before it is tried, and the message has the command that adopts it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pulumi

from contracts.aliases import Json
from infra import naming
from infra.config import ClusterConfig, Config, SliceConfig
from infra.policy import offered
from infra.policy.findings import Finding, note, warning

CONTAINER = "https://container.googleapis.com/v1"
PATH = "tpu-stack:slices"
FAILED, IMPAIRED = "ERROR", "RUNNING_WITH_ERROR"
ATTEMPT = "tpu-stack-attempt"
"""A key of nodes' metadata. GKE cannot change metadata, so that another value is another pool."""

COMPONENT = "cluster"
"""The component that holds the cluster and its system pool; a slice's pools are in one of the slice's name."""
IS_FREE = "name-is-free"
FAILURE_REASON = "why-it-failed (add --run-program to see it)"
"""Names of hooks, which Pulumi shows: a `pulumi destroy` that does not run the program has no hook of this name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """reason: in GKE's words; empty where it gives none."""

    status: str
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """pools: by name; empty also where the cluster is not there. not_asked: why GKE could not be asked."""

    pools: Mapping[str, Pool] = dataclasses.field(default_factory=dict)
    not_asked: str | None = None

    def attempt(self, pool: str) -> str | None:
        """A new value at each call for a pool that has to be made again; None for all others."""
        observed = self.pools.get(pool)
        return str(time.time_ns()) if observed is not None and observed.status == FAILED else None


UNKNOWN = Observed()


class GkeClient:
    """Google's API of clusters, for the one cluster of the stack. `cluster`: its full name, which is its id in Pulumi.

    Every method is over within the limit and raises offered.NotAskedError where it has no answer.
    """

    def __init__(self, config: Config, cluster: ClusterConfig, setting: offered.Setting) -> None:
        name = naming.cluster_name(config.stack)
        self._location = f"projects/{config.project}/locations/{cluster.zone}"
        self.cluster = f"{self._location}/clusters/{name}"
        self._setting = setting

    def exists(self, full_name: str) -> bool:
        return self._get(full_name) is not None

    def pools(self) -> dict[str, Pool]:
        response = self._get(f"{self.cluster}/nodePools") or {}
        return {str(pool["name"]): self._pool(pool) for pool in response.get("nodePools", [])}

    def _pool(self, pool: Json) -> Pool:
        status = str(pool.get("status", ""))
        reason = pool_error(pool)
        if status == FAILED and not reason:
            operations = (self._get(f"{self._location}/operations") or {}).get("operations", [])
            reason = operation_error(operations, str(pool["name"]))
        return Pool(status=status, reason=reason)

    def _get(self, path: str) -> Json | None:
        """The answer; None if there is no such thing, or if a cloud on this machine has no such API."""
        # Loading Google's client takes half a second, and most stacks have no cluster.
        import google_auth_httplib2  # type: ignore[import-untyped]  # noqa: F401

        from infra.slice_apis import google_settings

        settings = google_settings.read(self._setting)
        url = offered.endpoint(self._setting, "container", CONTAINER, ours=settings.is_rehearsal)
        if url is None:
            return None
        (answer,) = offered.together(
            [lambda: offered.Api(google_settings.credentials(settings)).get(f"{url}/{path}")], offered.LIMIT_S
        )
        if isinstance(answer, Exception):
            raise offered.NotAskedError(offered.describe_error(answer))
        response: Json | None = answer
        return response


def pool_error(pool: Json) -> str:
    """Why a node pool failed, as GKE reports it: all its conditions, or the older text."""
    conditions = [
        ": ".join(
            filter(None, (condition.get("code") or condition.get("canonicalCode"), condition.get("message")))
        )
        for condition in pool.get("conditions", [])
    ]
    return "; ".join(filter(None, conditions)) or str(pool.get("statusMessage", ""))


def operation_error(operations: Sequence[Json], pool: str) -> str:
    """Why the last failed operation on a pool failed."""
    failed = [
        operation
        for operation in operations
        if str(operation.get("targetLink", "")).endswith(f"/nodePools/{pool}") and operation.get("error")
    ]
    last = max(failed, key=lambda operation: str(operation.get("startTime", "")), default={})
    return str(last.get("error", {}).get("message", ""))


def observe(config: Config, setting: offered.Setting) -> Observed:
    """Ask GKE for the stack's node pools. Never raises."""
    if config.gke is None:
        return Observed()
    try:
        return Observed(pools=GkeClient(config, config.gke, setting).pools())
    except Exception as error:  # whatever it is, it is said and stops nothing
        return Observed(not_asked=offered.describe_error(error))


def findings(observed: Observed) -> Iterator[Finding]:
    """What is wrong with existing pools. Pure."""
    for name, pool in observed.pools.items():
        reason = pool.reason or "GKE gives no reason"
        if pool.status == FAILED:
            yield warning(
                PATH,
                f'node pool "{name}" is in state {FAILED} ({reason}); `pulumi up` deletes it and asks GKE for it again',
            )
        if pool.status == IMPAIRED:
            yield warning(
                PATH, f'node pool "{name}" is in state {IMPAIRED} ({reason}); its nodes are left as they are'
            )
    if observed.not_asked is not None:
        yield note(
            PATH, f"the state of the node pools is not known, as GKE could not be asked: {observed.not_asked}"
        )


# --- hooks ----------------------------------------------------------------------------------------------------


class ExistsError(Exception):
    """Something of that name is at GKE and not in the stack's state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """The hooks that Pulumi calls around the creation of the cluster and of a pool."""

    cluster: pulumi.ResourceHookBinding
    pool: pulumi.ResourceHookBinding


def hooks(config: Config, setting: offered.Setting) -> Hooks | None:
    """The hooks, to be made while a program runs; None if the stack makes no cluster."""
    if config.gke is None:
        return None
    gke = GkeClient(config, config.gke, setting)

    async def name_is_free(args: pulumi.ResourceHookArgs) -> None:
        full_name = gke.cluster if args.type.endswith(":Cluster") else f"{gke.cluster}/nodePools/{args.name}"
        if await _unless_unknown(lambda: gke.exists(full_name)):
            raise ExistsError(adoption(config, args.urn, full_name))

    async def why_it_failed(args: pulumi.ErrorHookArgs) -> bool:
        if args.failed_operation == "create" and "error state" in args.errors[0]:
            pools = await _unless_unknown(gke.pools) or {}
            pulumi.log.error(refusal(args.name, pools.get(args.name)))
        return False

    is_free = pulumi.ResourceHook(IS_FREE, name_is_free)
    return Hooks(
        cluster=pulumi.ResourceHookBinding(before_create=[is_free]),
        pool=pulumi.ResourceHookBinding(
            before_create=[is_free], on_error=[pulumi.ErrorHook(FAILURE_REASON, why_it_failed)]
        ),
    )


async def _unless_unknown[Answer](question: Callable[[], Answer]) -> Answer | None:
    """Call a function; None if GKE does not answer: the provider asks it too and reports that."""
    try:
        return await asyncio.to_thread(question)
    except Exception:
        return None


def refusal(name: str, pool: Pool | None) -> str:
    """The message about a pool that GKE has made without its nodes."""
    reason = pool.reason if pool is not None and pool.reason else "GKE gives no reason"
    return (
        f'node pool "{name}": GKE could not make its nodes ({reason}); the next `pulumi up` deletes the pool and asks '
        "for it again, and capacity: flex-start waits in Google's queue instead"
    )


def adoption(config: Config, urn: str, full_name: str) -> str:
    """The remedy for a resource that an interrupted `pulumi up` has left. urn: the one that Pulumi would give it."""
    stack, project, types, name = urn.split("::", 3)
    parent_type, _, own_type = types.rpartition("$")
    slice_by_pool = {
        pool: slice_config.name
        for slice_config in config.slices
        if slice_config.in_cluster
        for pool in pool_names(slice_config)
    }
    parent = slice_by_pool.get(name, COMPONENT) if own_type.endswith(":NodePool") else COMPONENT
    # `pulumi import` confuses a parent with the resource where both have one name.
    parent_urn = f"parent={stack}::{project}::{parent_type}::{parent}"
    command = ["pulumi", "import", own_type, name, full_name, "--parent", parent_urn]
    command += ["--protect=false", "--generate-code=false", "--stack", stack.rpartition(":")[2]]
    return (
        f"{full_name} exists, and the stack's state does not know it, as after a `pulumi up` that was interrupted; "
        f"`{shlex.join(command)}` adopts it, and `pulumi up` then goes on. If it is not this stack's, delete it"
    )


def pool_names(slice_config: SliceConfig) -> tuple[str, ...]:
    """NAME, or NAME-0, NAME-1, …: within their cluster, and no longer than Google takes."""
    return naming.part_names(slice_config.name, slice_config.count)
