"""Who a stack is: a random id, made once and kept in the stack's state.

Two people may give two stacks the same name in one project. What a stack makes carries its id in the owner label, and
what carries another is never touched (`infra.slice_apis.lifecycle`). It is made before any TPU and deleted after them:
`pulumi destroy` then deletes what interrupted ones have left behind, which no state knows of and which nobody could
recognise without the id. Before that it marks every slice as removed, also those that a refresh has not found and that
are in no state, so that nobody makes one of them again (`infra.documents.lease`). What a TPU stands on (network,
account, disks, bucket) is made before it and deleted after it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, Resource, UpdateResult

from contracts.aliases import Json
from infra.documents import DocumentsError, MissingError, lease
from infra.slice_apis import lifecycles, plugin
from infra.slice_apis.plugin import Provider
from infra.slice_apis.retry import AbandonedError, CloudTpuError, NoServiceError

GROWING = {"zones": (), "apis": (lifecycles.CLOUD_TPU,)}
"""Properties that only grow, with what an older state that lacks them has."""


class StackIdentityProvider(Provider):
    """Made once; nothing changes the id. `zones` and `apis` only grow: what was asked for may be there for good."""

    def create(self, props: Json) -> CreateResult:
        owner = uuid.uuid4().hex[:20]
        return CreateResult(owner, {**props, "owner": owner})

    def diff(self, _id: str, _olds: Json, _news: Json) -> DiffResult:
        is_grown = any(not _values(_news, name) <= _values(_olds, name) for name in GROWING)
        is_changed = any(_olds.get(name) != _news.get(name) for name in ("project", "control_url"))
        return DiffResult(changes=is_grown or is_changed)

    def update(self, _id: str, _olds: Json, _news: Json) -> UpdateResult:
        grown = {name: sorted(_values(_olds, name) | _values(_news, name)) for name in GROWING}
        return UpdateResult({**_news, **grown, "owner": _olds["owner"]})

    def delete(self, _id: str, _props: Json) -> None:
        """Raises CloudTpuError where it cannot be seen that nothing is left: without the id nobody would know it again.

        A project that is deleted, or in which the API is switched off, has nothing.
        """
        session, project = self.require_session(), _props["project"]
        with plugin.plain_errors():
            if _props.get("control_url"):
                _mark_removed(str(_props["control_url"]), session.backoff.say)
            try:
                apis = sorted(_values(_props, "apis"))
                for lifecycle in lifecycles.named_lifecycles(apis, session.clients, session.backoff):
                    lifecycle.remove_all(project, _props["owner"], _props.get("zones"))
            except AbandonedError:
                raise
            except NoServiceError as error:
                session.backoff.say(f"warning: nothing of the stack is looked for: {error}")
            except CloudTpuError as error:
                raise CloudTpuError(
                    f"an interrupted `pulumi up` may have left a TPU in {project}, and whether it did is not known: "
                    f"{error}\nThe stack keeps its id and all that its TPUs need. Try again; if you "
                    f"know that nothing is left (`gcloud compute tpus queued-resources list --zone=- "
                    f"--project={project}`), `pulumi state delete` the resource `owner`, whose URN "
                    "`pulumi stack --show-urns` shows, and try again",
                    error.status,
                ) from None


def _values(props: Json, name: str) -> set[str]:
    return {*(props.get(name) or GROWING[name])}


def _mark_removed(control_url: str, say: Callable[[str], None]) -> None:
    try:
        lease.mark_all_removed(control_url, lease.myself("`pulumi`"), say)
    except MissingError as error:
        say(f"{error}; no keeper acts without it")
    except (DocumentsError, lease.LeaseHeldError, lease.LeaseLostError) as error:
        raise CloudTpuError(
            f"slices cannot be marked as removed, and might be made again: {error}; try again"
        ) from None


class StackIdentity(Resource, module="tpu_stack", name="StackIdentity"):
    """owner: 20 hexadecimal digits, fit for a label. Whatever carries it must depend on this.

    zones: in which the stack may ask for TPUs now. apis: by which, as `infra.slice_apis.lifecycles` names them.
    control_url: its control documents, None where it has no bucket.
    """

    owner: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        project: pulumi.Input[str],
        zones: Collection[str],
        control_url: str | None,
        opts: pulumi.ResourceOptions | None = None,
        *,
        apis: Collection[str] = (lifecycles.CLOUD_TPU,),
    ) -> None:
        props = {
            "project": project,
            "zones": sorted(zones),
            "apis": sorted(apis),
            "control_url": control_url,
            "owner": None,
        }
        super().__init__(StackIdentityProvider(), name, props, opts)
