"""What keeps a stack's keeper from making slices again once `pulumi destroy`, or `pulumi up` without it, has begun.

A slice that a refresh has not found is not in Pulumi's state, so no deletion of it tells the keeper, which may be about
to ask for it. Its lease does: see `infra.lease`. After a destruction that was broken off, `pulumi up` takes that back.
"""

from __future__ import annotations

from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, Resource

from infra import lease
from infra.cloud_tpu import plugin
from infra.cloud_tpu.plugin import Provider
from infra.cloud_tpu.retry import CloudTpuError
from infra.documents import DocumentsError, MissingError

Props = dict[str, Any]


class KeeperDismissalProvider(Provider):
    """Raises CloudTpuError where the keeper cannot be told, as it may go on then."""

    def create(self, props: Props) -> CreateResult:
        self._mark(props, removed=False)
        return CreateResult("keeper", props)

    def diff(self, _id: str, _olds: Props, _news: Props) -> DiffResult:
        other = _olds.get("store_url") != _news.get("store_url")
        return DiffResult(changes=other, replaces=["store_url"] if other else [])

    def delete(self, _id: str, _props: Props) -> None:
        self._mark(_props, removed=True)

    def _mark(self, props: Props, *, removed: bool) -> None:
        say = self.require_session().backoff.say
        with plugin.plain_errors():
            try:
                lease.mark_all(str(props["store_url"]), lease.myself("`pulumi`"), say, removed=removed)
            except MissingError as error:
                say(f"{error}; no keeper acts without it")
            except (DocumentsError, lease.LeaseHeldError, lease.LeaseLostError) as error:
                what = "makes no slice again" if removed else "makes slices again"
                raise CloudTpuError(f"the keeper cannot be told that it {what}: {error}; try again") from None


class KeeperDismissal(Resource, module="tpu_stack", name="KeeperDismissal"):
    """store_url: the keeper's documents. owner: the stack's id, whose deletion looks for what is left, after this one.

    It has to depend on the bucket, to be deleted before it.
    """

    def __init__(
        self,
        name: str,
        store_url: pulumi.Input[str],
        owner: pulumi.Input[str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__(KeeperDismissalProvider(), name, {"store_url": store_url, "owner": owner}, opts)
