"""What happens to a queued resource: made or adopted, waited for, changed in place, looked at, deleted.

What is ours carries the stack's owner label; what does not is never touched. What waits and what is over may be deleted
and made anew; what runs is deleted only by `delete`, that is when the engine asks for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from contracts.durations import spoken
from infra.cloud_tpu import request, states, workers
from infra.cloud_tpu.backoff import Backoff
from infra.cloud_tpu.client import Client
from infra.cloud_tpu.polling import Waiting
from infra.cloud_tpu.refusal import AbandonedError, CloudTpuError
from infra.cloud_tpu.spec import Spec
from infra.cloud_tpu.states import Look

Json = dict[str, Any]
Props = Mapping[str, Any]

GUEST_LIMIT_S = 300.0
PATCH_LIMIT_S = 300.0
PATCH_AGAIN_S = 10.0
ROUNDS = 4  # to make one: what is in the way is removed, and someone may be quicker than we


class Lifecycle:
    """Every method raises CloudTpuError, with a message for the user. Properties come in and outputs go out."""

    def __init__(self, client: Client, backoff: Backoff) -> None:
        self._client = client
        self._backoff = backoff
        self._waiting = Waiting(client, backoff)

    def create(self, props: Props) -> Json:
        """Ask for it and wait until it is ACTIVE; or go on with what an `up` that was interrupted has left.

        When wait_s is over and it still waits, that is a success without nodes: the state then knows it, so that
        `pulumi destroy` removes it and the next `pulumi up` waits on (see `changes`). For the same reason nothing that
        goes wrong with the waiting fails the creation, once there is a request. One that has failed is deleted again.
        """
        spec = Spec.of(props)
        operation = self._ask(spec, is_recorded=False)
        look = self._wait(spec, operation)
        try:
            return self._outputs(props, look, before=())
        except AbandonedError:
            raise
        except CloudTpuError as error:
            self._backoff.say(
                f"warning: {spec.queued_resource_id} is there, but {error}\n`pulumi up` goes on with it"
            )
            return self._shown(props, dataclasses.replace(look, kind="waiting", state=states.UNREAD), [])

    def update(self, before: Props, props: Props) -> Json:
        """Labels, metadata, tags, description and addresses in place, once it is ACTIVE; wait for that if it is not.

        One that was lost since the last look is made anew here, as it has nothing more to lose.
        """
        spec = Spec.of(props)
        operation = self._ask(spec, is_recorded=True)
        return self._outputs(props, self._wait(spec, operation), before=(before,))

    def read(self, props: Props) -> Json | None:
        """The outputs as they are; None where there is no such thing of ours. What is dead stays, in its state.

        It is not dropped from Pulumi's state, because it still counts against the quota until someone deletes it: the
        next `up` (delete and make again, see `changes`) or `destroy`. Raises where Google gives no answer: that says
        nothing about the resource.
        """
        spec = Spec.of(props)
        found = self._client.queued_resource(spec.name)
        if found is None or not request.is_owned(request.node_of(found), spec.owner):
            return None
        look = self._waiting.look(spec, found)
        if look.kind == "lost":
            self._backoff.say(f"{spec.queued_resource_id} is lost: {look.why}; `pulumi up` makes it again")
        in_order = _in_order(spec, look) if look.kind == "active" else []
        return self._shown(props, look, [workers.read(self._client, node) for node in in_order])

    def delete(self, props: Props) -> None:
        """With its nodes and whatever is left of them; over when all are gone. What is not ours (any more) stays."""
        spec = Spec.of(props)
        found = self._client.queued_resource(spec.name)
        if found is not None and not request.is_owned(request.node_of(found), spec.owner):
            self._backoff.say(f"warning: {spec.name} is not of this stack any more; it is left alone")
        elif found is not None:
            self._waiting.remove(spec.name, spec.owner)
        self._waiting.remove_orphans(spec)

    # --- to have a request ------------------------------------------------------------------------------------------

    def _ask(self, spec: Spec, *, is_recorded: bool) -> str | None:
        """See to it that it is asked for. Returns the operation's name where we did so just now.

        is_recorded: Pulumi's state has it, so that it is known to ask for the same, but for what changes in place.
        """
        refusal: CloudTpuError | None = None
        for _ in range(ROUNDS):
            found = self._client.queued_resource(spec.name)
            if found is None:
                self._clear_nodes(spec)
                self._backoff.require_awaited()
                try:
                    body = request.queued_resource(spec)
                    made = self._client.create_queued_resource(spec.parent, spec.queued_resource_id, body)
                except CloudTpuError as error:
                    if error.status != "ALREADY_EXISTS":
                        raise
                    refusal = error
                    continue
                self._backoff.say(f"{spec.queued_resource_id}: asked for {spec.hardware}")
                return str(made["name"])
            self._require_ours(spec, found)
            look = self._waiting.look(spec, found)
            other = () if is_recorded else request.differences(spec, found, waiting=look.kind == "waiting")
            if look.kind == "lost" and look.may_be_running:
                raise CloudTpuError(
                    f"{spec.name}: {look.why}, and its other nodes run. Nothing that runs is deleted without being"
                    f" asked:\n`pulumi up --refresh` makes it again, or delete it: {spec.how_to_delete}"
                )
            if look.kind == "lost":
                self._backoff.say(
                    f"{spec.queued_resource_id}: removing what is left of an earlier one: {look.why}"
                )
                self._waiting.remove(spec.name, spec.owner)
            elif not other:
                if not is_recorded:
                    self._backoff.say(
                        f"{spec.queued_resource_id}: taken over from an earlier `pulumi up`; it is {look.state}"
                    )
                return None
            elif look.kind == "active":
                raise CloudTpuError(
                    f"{spec.name}: an earlier `pulumi up` of this stack, which was interrupted, has made it with"
                    f" another {', '.join(other)}, and it is ACTIVE. Nothing that runs is deleted without being asked:"
                    f"\nput the configuration back to what it was, or delete it: {spec.how_to_delete}"
                )
            else:
                self._backoff.say(
                    f"{spec.queued_resource_id}: an earlier `pulumi up` asked for another {', '.join(other)};"
                    " that request is withdrawn"
                )
                self._waiting.remove(spec.name, spec.owner)
        raise CloudTpuError(
            f"{spec.name}: Google says that the name is taken, and shows nothing of that name: {refusal}"
            f"\nA request of someone else for a node {' or '.join(spec.node_ids[:2])} may be waiting; see"
            f" `gcloud compute tpus queued-resources list --project={spec.project} --zone={spec.zone}`",
            "ALREADY_EXISTS",
        )

    def _require_ours(self, spec: Spec, found: Json) -> None:
        if not request.is_owned(request.node_of(found), spec.owner):
            raise CloudTpuError(
                f"{spec.name}: there is one already, and it is not of this stack; it is left alone."
                "\nGive the slice another name, or, if nobody needs the old one, delete it:"
                f" {spec.how_to_delete}"
            )

    def _clear_nodes(self, spec: Spec) -> None:
        """Remove our dead nodes of these names. Raises CloudTpuError where there are others."""
        for node_id in spec.node_ids:
            node = self._client.node(f"{spec.parent}/nodes/{node_id}")
            if node is None:
                continue
            if request.is_owned(node, spec.owner) and node.get("state") in states.LOST_NODE:
                self._waiting.remove_node(f"{spec.parent}/nodes/{node_id}", spec.owner)
                continue
            raise CloudTpuError(
                f"{spec.parent}/nodes/{node_id}: there is a node of this name already ({node.get('state')}), not made"
                f" by the queued resource {spec.queued_resource_id}; it is left alone.\nIf it is this slice's own,"
                " which was direct before: remove the slice, `pulumi up`, add it again, `pulumi up`."
                "\nOtherwise give the slice another name, or, if nobody needs the node, delete it:"
                f" gcloud compute tpus tpu-vm delete {node_id} --project={spec.project} --zone={spec.zone}"
            )

    # --- to have it -------------------------------------------------------------------------------------------------

    def _wait(self, spec: Spec, operation: str | None) -> Look:
        """Active, or still waiting. Raises CloudTpuError where it is lost; what was left is gone then.

        Served, but a node is not shown: that may be an old answer, and no reason to give back what took hours to get.
        """
        look = self._waiting.until_active(spec, operation)
        if look.kind != "lost":
            return look
        if look.state == states.MISSING:
            self._backoff.say(f"warning: {spec.queued_resource_id}: {look.why}; `pulumi up` looks again")
            return dataclasses.replace(look, kind="waiting", state=states.UNREAD)
        self._backoff.require_awaited()
        why = f"{spec.queued_resource_id} ({spec.hardware}) was not to be had: {look.why}"
        try:
            self._waiting.remove(spec.name, spec.owner)
        except AbandonedError:
            raise
        except CloudTpuError as error:
            raise CloudTpuError(
                f"{why}\nIts remains could not be deleted, the next `pulumi up` does that: {error}"
            ) from None
        raise CloudTpuError(f"{why}\nNothing is left of it; `pulumi up` asks for it again.")

    def _outputs(self, props: Props, look: Look, *, before: Sequence[Props]) -> Json:
        """Bring an active one's nodes up to date and describe it."""
        spec = Spec.of(props)
        if look.kind != "active":
            return self._shown(props, look, [])
        was = [*before, request.node_of(look.queued_resource)]
        nodes = self._patched(spec, _in_order(spec, look), was)
        found = workers.awaited(self._client, self._backoff, nodes, GUEST_LIMIT_S)
        fresh = {node["name"].rpartition("/")[2]: node for node in nodes}
        return self._shown(props, states.look(look.queued_resource, fresh), found)

    def _patched(self, spec: Spec, nodes: Sequence[Json], before: Sequence[Mapping[str, Any]]) -> list[Json]:
        """Change nodes in place to what the spec says, and return them as they are then. before: see `request.patch`.

        Each node by itself: the API has no change of a queued resource, and only those of its nodes can change.
        """
        for node in nodes:
            mask, body = request.patch(spec, node, before)
            if mask:
                self._patch(_name(spec, node), mask, body)
        return [self._client.node(_name(spec, node)) or node for node in nodes]

    def _patch(self, name: str, mask: str, body: Json) -> None:
        until = self._backoff.now() + PATCH_LIMIT_S
        while True:
            try:
                self._waiting.until_done(self._client.patch_node(name, mask, body), PATCH_LIMIT_S)
                return
            except CloudTpuError as error:
                # A node under maintenance, or one that another change is under way on, takes it a little later.
                if error.status != "FAILED_PRECONDITION" or self._backoff.now() >= until:
                    raise
                left = spoken(until - self._backoff.now())
                self._backoff.say(f"{name.rpartition('/')[2]}: {error}; tried again for {left}")
            self._backoff.pause(PATCH_AGAIN_S)

    def _shown(self, props: Props, look: Look, found: Sequence[list[Json]]) -> Json:
        spec = Spec.of(props)
        in_order = _in_order(spec, look) if look.kind == "active" else []
        return {
            **props,
            "state": look.state,
            "nodes": [workers.output(node, of_node) for node, of_node in zip(in_order, found, strict=False)],
            "create_time": look.queued_resource.get("createTime", ""),
        }


def _in_order(spec: Spec, look: Look) -> list[Json]:
    return [look.nodes[node_id] for node_id in spec.node_ids if node_id in look.nodes]


def _name(spec: Spec, node: Json) -> str:
    """With the project as we call it: Google may write its number."""
    return f"{spec.parent}/nodes/{node['name'].rpartition('/')[2]}"
