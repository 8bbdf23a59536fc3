"""What happens to a queued resource: made or adopted, waited for, changed in place, looked at, deleted.

What is ours carries the stack's owner label; what does not is never touched. What waits and what is over may be deleted
and made anew; what runs is deleted only by `delete`, that is when the engine asks for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from infra.cloud_tpu import request, states, workers
from infra.cloud_tpu import wanted as wanted_
from infra.cloud_tpu.client import Client
from infra.cloud_tpu.errors import AbandonedError, CloudTpuError
from infra.cloud_tpu.pace import Pace
from infra.cloud_tpu.remover import Remover
from infra.cloud_tpu.states import Look
from infra.cloud_tpu.upkeep import Upkeep
from infra.cloud_tpu.waiting import Waiting
from infra.cloud_tpu.wanted import Wanted

Json = dict[str, Any]
Props = Mapping[str, Any]

GUEST_LIMIT_S = 300.0
ROUNDS = 4  # to make one: what is in the way is removed, and someone may be quicker than we


class Lifecycle:
    """Every method raises CloudTpuError, with a message for the user. Properties come in and outputs go out."""

    def __init__(self, client: Client, pace: Pace) -> None:
        self._client = client
        self._pace = pace
        self._remover = Remover(client, pace)
        self._waiting = Waiting(client, pace)
        self._upkeep = Upkeep(client, pace, self._waiting)

    def create(self, props: Props) -> Json:
        """Ask for it and wait until it is ACTIVE; or go on with what an `up` that was interrupted has left.

        When wait_s is over and it still waits, that is a success without nodes: the state then knows it, so that
        `pulumi destroy` removes it and the next `pulumi up` waits on (see `changes`). For the same reason nothing that
        goes wrong with the waiting fails the creation, once there is a request. One that has failed is deleted again.
        """
        wanted = wanted_.of(props)
        operation = self._ask(wanted, is_recorded=False)
        look = self._wait(wanted, operation)
        try:
            return self._outputs(props, look, before=())
        except AbandonedError:
            raise
        except CloudTpuError as error:
            self._pace.say(
                f"warning: {wanted.queued_resource_id} is there, but {error}\n`pulumi up` goes on with it"
            )
            return self._shown(props, dataclasses.replace(look, kind="waiting", state=states.UNREAD), [])

    def update(self, before: Props, props: Props) -> Json:
        """Labels, metadata, tags, description and addresses in place, once it is ACTIVE; wait for that if it is not.

        One that was lost since the last look is made anew here, as it has nothing more to lose.
        """
        wanted = wanted_.of(props)
        operation = self._ask(wanted, is_recorded=True)
        return self._outputs(props, self._wait(wanted, operation), before=(before,))

    def read(self, props: Props) -> Json | None:
        """The outputs as they are; None where there is no such thing of ours. What is dead stays, in its state.

        It is not dropped from Pulumi's state, because it still counts against the quota until someone deletes it: the
        next `up` (delete and make again, see `changes`) or `destroy`. Raises where Google gives no answer: that says
        nothing about the resource.
        """
        wanted = wanted_.of(props)
        found = self._client.queued_resource(wanted.name)
        if found is None or not request.is_owned(request.node_of(found), wanted.owner):
            return None
        look = self._waiting.look(wanted, found)
        if look.kind == "lost":
            self._pace.say(f"{wanted.queued_resource_id} is lost: {look.why}; `pulumi up` makes it again")
        in_order = _in_order(wanted, look) if look.kind == "active" else []
        return self._shown(props, look, [workers.read(self._client, node) for node in in_order])

    def delete(self, props: Props) -> None:
        """With its nodes and whatever is left of them; over when all are gone. What is not ours (any more) stays."""
        wanted = wanted_.of(props)
        found = self._client.queued_resource(wanted.name)
        if found is not None and not request.is_owned(request.node_of(found), wanted.owner):
            self._pace.say(f"warning: {wanted.name} is not of this stack any more; it is left alone")
        elif found is not None:
            self._remover.remove(wanted.name, wanted.owner)
        self._remover.remove_orphans(wanted)

    # --- to have a request ------------------------------------------------------------------------------------------

    def _ask(self, wanted: Wanted, *, is_recorded: bool) -> str | None:
        """See to it that it is asked for. Returns the operation's name where we did so just now.

        is_recorded: Pulumi's state has it, so that it is known to ask for the same, but for what changes in place.
        """
        refusal: CloudTpuError | None = None
        for _ in range(ROUNDS):
            found = self._client.queued_resource(wanted.name)
            if found is None:
                self._clear_nodes(wanted)
                self._pace.require_wanted()
                try:
                    body = request.queued_resource(wanted)
                    made = self._client.create_queued_resource(wanted.parent, wanted.queued_resource_id, body)
                except CloudTpuError as error:
                    if error.status != "ALREADY_EXISTS":
                        raise
                    refusal = error
                    continue
                self._pace.say(f"{wanted.queued_resource_id}: asked for {wanted.hardware}")
                return str(made["name"])
            self._require_ours(wanted, found)
            look = self._waiting.look(wanted, found)
            other = () if is_recorded else request.differences(wanted, found, waiting=look.kind == "waiting")
            if look.kind == "lost" and look.may_be_running:
                raise CloudTpuError(
                    f"{wanted.name}: {look.why}, and its other nodes run. Nothing that runs is deleted without being"
                    f" asked:\n`pulumi up --refresh` makes it again, or delete it: {wanted.how_to_delete}"
                )
            if look.kind == "lost":
                self._pace.say(
                    f"{wanted.queued_resource_id}: removing what is left of an earlier one: {look.why}"
                )
                self._remover.remove(wanted.name, wanted.owner)
            elif not other:
                if not is_recorded:
                    self._pace.say(
                        f"{wanted.queued_resource_id}: taken over from an earlier `pulumi up`; it is {look.state}"
                    )
                return None
            elif look.kind == "active":
                raise CloudTpuError(
                    f"{wanted.name}: an earlier `pulumi up` of this stack, which was interrupted, has made it with"
                    f" another {', '.join(other)}, and it is ACTIVE. Nothing that runs is deleted without being asked:"
                    f"\nput the configuration back to what it was, or delete it: {wanted.how_to_delete}"
                )
            else:
                self._pace.say(
                    f"{wanted.queued_resource_id}: an earlier `pulumi up` asked for another {', '.join(other)};"
                    " that request is withdrawn"
                )
                self._remover.remove(wanted.name, wanted.owner)
        raise CloudTpuError(
            f"{wanted.name}: Google says that the name is taken, and shows nothing of that name: {refusal}"
            f"\nA request of someone else for a node {' or '.join(wanted.node_ids[:2])} may be waiting; see"
            f" `gcloud compute tpus queued-resources list --project={wanted.project} --zone={wanted.zone}`",
            "ALREADY_EXISTS",
        )

    def _require_ours(self, wanted: Wanted, found: Json) -> None:
        if not request.is_owned(request.node_of(found), wanted.owner):
            raise CloudTpuError(
                f"{wanted.name}: there is one already, and it is not of this stack; it is left alone."
                "\nGive the slice another name, or, if nobody needs the old one, delete it:"
                f" {wanted.how_to_delete}"
            )

    def _clear_nodes(self, wanted: Wanted) -> None:
        """Remove our dead nodes of these names. Raises CloudTpuError where there are others."""
        for node_id in wanted.node_ids:
            node = self._client.node(f"{wanted.parent}/nodes/{node_id}")
            if node is None:
                continue
            if request.is_owned(node, wanted.owner) and node.get("state") in states.LOST_NODE:
                self._remover.remove_node(f"{wanted.parent}/nodes/{node_id}", wanted.owner)
                continue
            raise CloudTpuError(
                f"{wanted.parent}/nodes/{node_id}: there is a node of this name already ({node.get('state')}), not made"
                f" by the queued resource {wanted.queued_resource_id}; it is left alone.\nIf it is this slice's own,"
                " which was direct before: remove the slice, `pulumi up`, add it again, `pulumi up`."
                "\nOtherwise give the slice another name, or, if nobody needs the node, delete it:"
                f" gcloud compute tpus tpu-vm delete {node_id} --project={wanted.project} --zone={wanted.zone}"
            )

    # --- to have it -------------------------------------------------------------------------------------------------

    def _wait(self, wanted: Wanted, operation: str | None) -> Look:
        """Active, or still waiting. Raises CloudTpuError where it is lost; what was left is gone then.

        Served, but a node is not shown: that may be an old answer, and no reason to give back what took hours to get.
        """
        look = self._waiting.until_active(wanted, operation)
        if look.kind != "lost":
            return look
        if look.state == states.MISSING:
            self._pace.say(f"warning: {wanted.queued_resource_id}: {look.why}; `pulumi up` looks again")
            return dataclasses.replace(look, kind="waiting", state=states.UNREAD)
        self._pace.require_wanted()
        why = f"{wanted.queued_resource_id} ({wanted.hardware}) was not to be had: {look.why}"
        try:
            self._remover.remove(wanted.name, wanted.owner)
        except AbandonedError:
            raise
        except CloudTpuError as error:
            raise CloudTpuError(
                f"{why}\nIts remains could not be deleted, the next `pulumi up` does that: {error}"
            ) from None
        raise CloudTpuError(f"{why}\nNothing is left of it; `pulumi up` asks for it again.")

    def _outputs(self, props: Props, look: Look, *, before: Sequence[Props]) -> Json:
        """Bring an active one's nodes up to date and describe it."""
        wanted = wanted_.of(props)
        if look.kind != "active":
            return self._shown(props, look, [])
        was = [*before, request.node_of(look.queued_resource)]
        nodes = self._upkeep.done(wanted, _in_order(wanted, look), was)
        found = workers.awaited(self._client, self._pace, nodes, GUEST_LIMIT_S)
        fresh = {node["name"].rpartition("/")[2]: node for node in nodes}
        return self._shown(props, states.look(look.queued_resource, fresh), found)

    def _shown(self, props: Props, look: Look, found: Sequence[list[Json]]) -> Json:
        wanted = wanted_.of(props)
        in_order = _in_order(wanted, look) if look.kind == "active" else []
        return {
            **props,
            "state": look.state,
            "nodes": [workers.output(node, of_node) for node, of_node in zip(in_order, found, strict=False)],
            "create_time": look.queued_resource.get("createTime", ""),
        }


def _in_order(wanted: Wanted, look: Look) -> list[Json]:
    return [look.nodes[node_id] for node_id in wanted.node_ids if node_id in look.nodes]
