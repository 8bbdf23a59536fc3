"""Who a stack is: a random id, made once and kept in the stack's state.

Two people may give two stacks the same name in one project. What a stack makes carries its id in the owner label, and
what carries another is never touched (`infra.cloud_tpu.lifecycle`). It is the first to be made and the last to go:
`pulumi destroy` then deletes what interrupted ones have left behind, which no state knows of and which nobody could
recognise without the id.
"""

from __future__ import annotations

import uuid
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, Resource, UpdateResult

from infra.cloud_tpu import plugin
from infra.cloud_tpu.plugin import Provider
from infra.cloud_tpu.retry import AbandonedError, CloudTpuError

Props = dict[str, Any]


class StackIdentityProvider(Provider):
    """Made once; nothing changes the id."""

    def create(self, props: Props) -> CreateResult:
        owner = uuid.uuid4().hex[:20]
        return CreateResult(owner, {**props, "owner": owner})

    def diff(self, _id: str, _olds: Props, _news: Props) -> DiffResult:
        return DiffResult(changes=_olds.get("project") != _news.get("project"))

    def update(self, _id: str, _olds: Props, _news: Props) -> UpdateResult:
        return UpdateResult({**_news, "owner": _olds["owner"]})

    def delete(self, _id: str, _props: Props) -> None:
        """A project that does not answer any more must not keep a stack from being destroyed: that is a warning."""
        session = self.require_session()
        with plugin.plain_errors():
            try:
                session.lifecycle().remove_all(_props["project"], _props["owner"])
            except AbandonedError:
                raise
            except CloudTpuError as error:
                session.backoff.say(
                    f"warning: what an interrupted `pulumi up` may have left could not be looked for: {error}\nSee"
                    f" `gcloud compute tpus queued-resources list --zone=- --project={_props['project']}`"
                )


class StackIdentity(Resource, module="tpu_stack", name="StackIdentity"):
    """owner: 20 hexadecimal digits, fit for a label. Whatever carries it must depend on this."""

    owner: pulumi.Output[str]

    def __init__(
        self, name: str, project: pulumi.Input[str], opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__(StackIdentityProvider(), name, {"project": project, "owner": None}, opts)
