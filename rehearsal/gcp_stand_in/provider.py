"""What a provider does, without the engine's protocol: check, compare, make, read, change and delete resources."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from rehearsal.gcp_stand_in import arguments, bucket_server
from rehearsal.gcp_stand_in.arguments import Mistake
from rehearsal.gcp_stand_in.table import KINDS, Kind, labels_of
from rehearsal.gcp_stand_in.tpu_vm import TpuVms
from rehearsal.gcp_stand_in.world import HalfMadeError, Thing, World, WorldError, same, short

Json = dict[str, Any]

WORLD_VARIABLE = "TPU_STACK_STAND_IN_WORLD"
TPU_VM = "gcp:tpu/v2Vm:V2Vm"
MACHINE = "gcp:compute/instance:Instance"
DISK = "gcp:compute/disk:Disk"
BUCKET = "gcp:storage/bucket:Bucket"
NODE_POOL = "gcp:container/nodePool:NodePool"
ADDRESS = "gcp:compute/address:Address"
NETWORK = "gcp:compute/network:Network"
SUBNETWORK = "gcp:compute/subnetwork:Subnetwork"
HELD_POLL_S = 0.1
SHUTDOWN_S = 0.5
"""A machine has its disks and addresses until it is gone: whoever deletes those at the same time is seen."""

# Inputs that the provider's own configuration gives where a resource leaves them out.
FROM_CONFIG = ("project", "region", "zone")
TPU_ENDPOINT = "tpuV2CustomEndpoint"


def settings_of(variables: Mapping[str, str]) -> dict[str, str]:
    """The part of the provider's configuration that the stand-in needs, of gcp:config:project and so on, as the engine
    hands them over. Credentials are not in it, on purpose."""
    names = (*FROM_CONFIG, TPU_ENDPOINT)
    return {name: value for name in names if (value := variables.get(f"gcp:config:{name}"))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provider:
    """settings: as `settings_of` gives them."""

    settings: Mapping[str, str]
    world: World

    def check(self, urn: str, olds: Json, news: Json, seed: bytes) -> tuple[Json, list[Mistake]]:
        """The inputs with names and defaults filled in, and what is wrong with them."""
        type_token = type_of(urn)
        kind, known = kind_of(type_token), arguments.of_type(type_token)
        filled = dict(news)
        for name in FROM_CONFIG:
            if name in known and name in self.settings and filled.get(name) is None:
                filled[name] = self.settings[name]
        if kind.names_itself and filled.get("name") is None:
            filled["name"] = olds.get("name") or f"{name_of(urn)}-{seed.hex()[:7]}"
        missing = [
            (name, f"required; set it, or gcp:{name} for all resources")
            for name in FROM_CONFIG
            if name in known and f"{{{name}}}" in kind.id and filled.get(name) is None
        ]
        return filled, [*arguments.mistakes(type_token, filled), *missing]

    def diff(
        self, urn: str, olds: Json, news: Json, ignored: list[str], outputs: Json | None = None
    ) -> tuple[list[str], list[str]]:
        """The inputs that differ, and those of them that make the resource again. outputs: as the state has them."""
        kind = kind_of(type_of(urn))
        computed = {name: (outputs or {}).get(name) for name in kind.computed.split()}
        olds, news = olds | computed, computed | {name: news[name] for name in news if news[name] is not None}
        changed = [name for name in changes(olds, news) if name not in ignored]
        return changed, [name for name in changed if kind.replaces(name, olds.get(name), news.get(name))]

    def old_first(self, urn: str, changed: list[str], again: list[str]) -> bool:
        """Whether a replacement deletes the old one before it makes the new one.

        Google has one thing of a name, so that is how it is where the program gives the name and keeps it. The provider
        knows this only of what it could give a name itself; of others, such as image repositories, the new comes first.
        """
        return bool(again) and kind_of(type_of(urn)).names_itself and "name" not in changed

    def create(self, urn: str, inputs: Json, limit_s: float) -> tuple[str, Json]:
        """The id and the outputs. Raises WorldError."""
        type_token = type_of(urn)
        kind = kind_of(type_token)
        own_id = kind.id_of(inputs)
        if type_token == TPU_VM:
            self._tpus().create(own_id, inputs, limit_s)
        else:
            inputs = kind.as_kept(inputs)
            made = kind.outputs(own_id, inputs, self.world.number(), self._address_range(inputs))
            self._add(Thing(type=type_token, id=own_id, inputs=inputs, outputs=made))
            bucket_server.put(type_token, inputs)
        return own_id, self._outputs(type_token, own_id, inputs) or {}

    def _add(self, thing: Thing) -> None:
        """Raises WorldError; HalfMadeError for a node pool that gets no nodes, with the provider's words, which say not
        why (resourceContainerNodePoolCreate)."""
        name = thing.inputs.get("name")
        if thing.type == NODE_POOL and self.world.find(thing.type, thing.id):
            raise WorldError(f"resource - {thing.id} - already exists")
        if kind_of(thing.type).is_binding and self.world.find(thing.type, thing.id):
            self.world.put(thing)
        else:
            self.world.add(thing)
        while self.world.is_held(thing.id):
            time.sleep(HELD_POLL_S)
        reason = self.world.no_room(name) if thing.type == NODE_POOL else None
        if reason is not None:
            self.world.set_error(thing.id, reason)
            message = f'NodePool {name} was created in the error state "ERROR"'
            raise HalfMadeError(message, thing.id, thing.outputs)

    def read(self, urn: str, own_id: str, inputs: Json) -> tuple[Json, Json] | None:
        """The inputs and outputs as they are; None where it is gone."""
        type_token = type_of(urn)
        made = self._outputs(type_token, own_id, inputs)
        if made is None:
            return None
        thing = None if type_token == TPU_VM else self.world.find(type_token, own_id)
        return (inputs if thing is None else thing.inputs), made

    def update(self, urn: str, own_id: str, olds: Json, news: Json, limit_s: float) -> Json:
        """The outputs after it. Raises WorldError."""
        type_token = type_of(urn)
        if type_token == TPU_VM:
            self._tpus().update(own_id, news, changes(olds, news), limit_s)
            return self._outputs(type_token, own_id, news) or {}
        kind = kind_of(type_token)
        news = kind.as_kept(news)
        there = self.world.find(type_token, own_id)
        before = there.outputs if there else {}
        completed = {name: merged(before.get(name), news.get(name)) for name in kind.completed.split()}
        made = before | news | completed | labels_of(news)
        self.world.put(Thing(type=type_token, id=own_id, inputs=news, outputs=made))
        bucket_server.put(type_token, news)
        return made

    def delete(self, urn: str, own_id: str, limit_s: float) -> None:
        """Raises WorldError for what is in use."""
        type_token = type_of(urn)
        if type_token == TPU_VM:
            self._tpus().delete(own_id, limit_s)
            return
        there = self.world.find(type_token, own_id)
        if there is not None:
            self._free(there)
            bucket_server.remove(type_token, there.inputs)
        elif type_token == MACHINE:  # of other types, the provider takes this for done
            said = f"googleapi: Error 404: The resource '{own_id}' was not found, notFound"
            raise WorldError(f"Error deleting instance: {said}")
        if type_token == MACHINE:
            time.sleep(SHUTDOWN_S)
        self.world.remove(type_token, own_id)

    def _free(self, thing: Thing) -> None:
        """What comes before a deletion. Raises WorldError where Google or the provider refuses it."""
        if thing.type == BUCKET and not bucket_server.is_empty(thing.id):
            raise WorldError(
                f"Error trying to delete bucket {thing.id} containing objects without force_destroy set to true"
            )
        machine = next((each for each in self.world.things().values() if _uses(each, thing)), None)
        if machine is not None and thing.type == DISK:
            self.world.pull(thing.id, machine)  # the provider detaches it, whatever the machine is doing
            return
        user = machine.id if machine is not None else self._tpu_with(thing)
        if user:
            raise WorldError(
                f"Error when reading or editing {short(thing.type).partition(':')[2]}: googleapi: Error 400: The "
                f"resource '{thing.id}' is already being used by '{user}', resourceInUseByAnotherResource"
            )

    def _tpu_with(self, thing: Thing) -> str:
        """The name of a TPU node that is in that network or subnetwork or has that disk; empty where there is none."""
        if thing.type not in (NETWORK, SUBNETWORK, DISK) or TPU_ENDPOINT not in self.settings:
            return ""
        for node in self._tpus().all(thing.id.split("/")[1]):
            place = node.get("networkConfig") or {}
            disks = [each.get("sourceDisk") for each in node.get("dataDisks") or []]
            if any(same(each, thing.id) for each in (place.get("network"), place.get("subnetwork"), *disks)):
                return str(node["name"])
        return ""

    def _address_range(self, inputs: Json) -> str:
        """Of the subnetwork that a machine or address is in; of one that the world does not hold, as Google's own."""
        places = [inputs, *(inputs.get("networkInterfaces") or [])]
        named = [each["subnetwork"] for each in places if each.get("subnetwork")]
        for thing in self.world.of_type("compute:Subnetwork"):
            if any(same(each, thing.id) for each in named):
                return str(thing.inputs["ipCidrRange"])
        return "10.128.0.0/20"

    def _outputs(self, type_token: str, own_id: str, inputs: Json) -> Json | None:
        if type_token == TPU_VM:
            node = self._tpus().read(own_id)
            return None if node is None else inputs | node
        thing = self.world.find(type_token, own_id)
        return None if thing is None else thing.outputs

    def _tpus(self) -> TpuVms:
        if TPU_ENDPOINT not in self.settings:
            raise WorldError("the stand-in has no Cloud TPU API to ask: set gcp:tpuV2CustomEndpoint")
        return TpuVms(endpoint=self.settings[TPU_ENDPOINT])


def _uses(other: Thing, thing: Thing) -> bool:
    """Whether `other` is a machine with that disk or address, or is in that network or subnetwork."""
    interfaces = other.inputs.get("networkInterfaces") or []
    if thing.type == DISK:
        return any(same(each.get("source"), thing.id) for each in other.inputs.get("attachedDisks") or [])
    if thing.type == ADDRESS:
        return thing.outputs["address"] in [each.get("networkIp") for each in interfaces]
    if thing.type in (NETWORK, SUBNETWORK) and other.type.startswith("gcp:compute/"):
        places = [other.inputs, *interfaces]
        return any(same(each.get(name), thing.id) for each in places for name in ("network", "subnetwork"))
    return False


def merged(before: Any, after: Any) -> Any:
    """Values of `after`, and of `before` what it does not have; of lists of one length, item by item."""
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [merged(*pair) for pair in zip(before, after, strict=True)]
    if not isinstance(before, dict) or not isinstance(after, dict):
        return before if after is None else after
    return {name: merged(before.get(name), after.get(name)) for name in {**before, **after}}


def kind_of(type_token: str) -> Kind:
    """Raises WorldError for a type that the stand-in does not know."""
    if type_token not in KINDS:
        there = ", ".join(short(each) for each in sorted(KINDS))
        remedy = "add it to rehearsal/gcp_stand_in/table.py"
        raise WorldError(f"{type_token}: the stand-in cannot make this type; it can make {there}; {remedy}")
    return KINDS[type_token]


def changes(olds: Mapping[str, object], news: Mapping[str, object]) -> list[str]:
    """The names of inputs that differ; one that is null counts as one that is not there."""
    return sorted(name for name in {*olds, *news} if olds.get(name) != news.get(name))


def type_of(urn: str) -> str:
    """gcp:compute/network:Network of urn:pulumi:dev::tpu-stack::parent$gcp:compute/network:Network::name."""
    return urn.split("::")[2].rpartition("$")[2]


def name_of(urn: str) -> str:
    return urn.split("::", 3)[3]
