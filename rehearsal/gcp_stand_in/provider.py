"""What a provider does, without the engine's protocol: check, compare, make, read, change and delete resources."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from contracts.aliases import Json
from rehearsal.gcp_stand_in import arguments, server_resources
from rehearsal.gcp_stand_in.arguments import Mistake
from rehearsal.gcp_stand_in.stand_in_world import HalfMadeError, Thing, World, WorldError, same, short
from rehearsal.gcp_stand_in.table import KINDS, ResourceKind, label_outputs
from rehearsal.gcp_stand_in.tpu_vm import TpuVms

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
TPU_ENDPOINT, COMPUTE_ENDPOINT = "tpuV2CustomEndpoint", "computeCustomEndpoint"


def provider_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """The part of the provider's configuration that the stand-in needs, from gcp:config:project and so on. Credentials
    are left out on purpose."""
    names = (*FROM_CONFIG, TPU_ENDPOINT, COMPUTE_ENDPOINT)
    return {name: value for name in names if (value := variables.get(f"gcp:config:{name}"))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provider:
    """settings: as `provider_settings` returns them."""

    settings: Mapping[str, str]
    world: World

    def check(self, urn: str, old: Json, new: Json, seed: bytes) -> tuple[Json, list[Mistake]]:
        """The inputs with names and defaults filled in, and what is wrong with them."""
        type_token = urn_type(urn)
        kind, declared = resource_kind(type_token), arguments.resource_arguments(type_token)
        filled = dict(new)
        for name in FROM_CONFIG:
            if name in declared and name in self.settings and filled.get(name) is None:
                filled[name] = self.settings[name]
        if kind.names_itself and filled.get("name") is None:
            filled["name"] = old.get("name") or f"{urn_name(urn)}-{seed.hex()[:7]}"
        missing = [
            (name, f"required; set it, or gcp:{name} for all resources")
            for name in FROM_CONFIG
            if name in declared and f"{{{name}}}" in kind.id and filled.get(name) is None
        ]
        return filled, [*arguments.mistakes(type_token, filled), *missing]

    def diff(
        self, urn: str, old: Json, new: Json, ignored: list[str], outputs: Json | None = None
    ) -> tuple[list[str], list[str]]:
        """The inputs that differ, and those that force a replacement. outputs: as the state has them."""
        kind = resource_kind(urn_type(urn))
        computed = {name: (outputs or {}).get(name) for name in kind.computed.split()}
        old, new = old | computed, computed | {name: new[name] for name in new if new[name] is not None}
        changed = [name for name in changes(old, new) if name not in ignored]
        return changed, [name for name in changed if kind.replaces(name, old.get(name), new.get(name))]

    def old_first(self, urn: str, changed: list[str], again: list[str]) -> bool:
        """Whether a replacement deletes the old one before it makes the new one.

        Google has one thing of a name, so that is how it is where the program gives the name and keeps it. The provider
        knows this only of what it could give a name itself; of others, such as image repositories, the new comes first.
        """
        return bool(again) and resource_kind(urn_type(urn)).names_itself and "name" not in changed

    def create(self, urn: str, inputs: Json, limit_s: float) -> tuple[str, Json]:
        """The id and the outputs. Raises WorldError."""
        type_token = urn_type(urn)
        kind = resource_kind(type_token)
        own_id = kind.resource_id(inputs)
        if type_token == TPU_VM:
            self._tpus().create(own_id, inputs, limit_s)
        else:
            inputs = kind.as_kept(inputs)
            created = kind.outputs(own_id, inputs, self.world.number(), self._address_range(inputs))
            self._add(Thing(type=type_token, id=own_id, inputs=inputs, outputs=created))
            server_resources.write(type_token, inputs, self.settings.get(COMPUTE_ENDPOINT))
        return own_id, self._outputs(type_token, own_id, inputs) or {}

    def _add(self, thing: Thing) -> None:
        """Raises WorldError; HalfMadeError for a node pool that gets no nodes, with the provider's words, which say not
        why (resourceContainerNodePoolCreate)."""
        name = thing.inputs.get("name")
        if thing.type == NODE_POOL and self.world.find(thing.type, thing.id):
            raise WorldError(f"resource - {thing.id} - already exists")
        if resource_kind(thing.type).is_replaceable and self.world.find(thing.type, thing.id):
            self.world.replace(thing)
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
        """The current inputs and outputs; None if the resource is gone."""
        type_token = urn_type(urn)
        outputs = self._outputs(type_token, own_id, inputs)
        if outputs is None:
            return None
        thing = None if type_token == TPU_VM else self.world.find(type_token, own_id)
        return (inputs if thing is None else thing.inputs), outputs

    def update(self, urn: str, own_id: str, old: Json, new: Json, limit_s: float) -> Json:
        """The outputs after the update. Raises WorldError."""
        type_token = urn_type(urn)
        if type_token == TPU_VM:
            self._tpus().update(own_id, new, changes(old, new), limit_s)
            return self._outputs(type_token, own_id, new) or {}
        kind = resource_kind(type_token)
        new = kind.as_kept(new)
        existing = self.world.find(type_token, own_id)
        before = existing.outputs if existing else {}
        completed = {name: merged(before.get(name), new.get(name)) for name in kind.completed.split()}
        outputs = before | new | completed | label_outputs(new)
        self.world.replace(Thing(type=type_token, id=own_id, inputs=new, outputs=outputs))
        server_resources.write(type_token, new)
        return outputs

    def delete(self, urn: str, own_id: str, limit_s: float) -> None:
        """Raises WorldError for what is in use."""
        type_token = urn_type(urn)
        if type_token == TPU_VM:
            self._tpus().delete(own_id, limit_s)
            return
        existing = self.world.find(type_token, own_id)
        if existing is not None:
            self._free(existing)
            server_resources.remove(type_token, existing.inputs, self.settings.get(COMPUTE_ENDPOINT))
        elif type_token == MACHINE:  # of other types, the provider takes this for done
            message = f"googleapi: Error 404: The resource '{own_id}' was not found, notFound"
            raise WorldError(f"Error deleting instance: {message}")
        if type_token == MACHINE:
            time.sleep(SHUTDOWN_S)
        self.world.remove(type_token, own_id)

    def _free(self, thing: Thing) -> None:
        """Prepare a deletion. Raises WorldError if Google or the provider refuses it."""
        if thing.type == BUCKET and not server_resources.is_empty(thing.id):
            raise WorldError(
                f"Error trying to delete bucket {thing.id} containing objects without force_destroy set to true"
            )
        machine = next(
            (candidate for candidate in self.world.things().values() if _uses(candidate, thing)), None
        )
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
        """The name of a TPU node in that network or subnetwork or with that disk; empty if there is none."""
        if thing.type not in (NETWORK, SUBNETWORK, DISK) or TPU_ENDPOINT not in self.settings:
            return ""
        for node in self._tpus().all(thing.id.split("/")[1]):
            place = node.get("networkConfig") or {}
            disks = [disk.get("sourceDisk") for disk in node.get("dataDisks") or []]
            if any(same(used, thing.id) for used in (place.get("network"), place.get("subnetwork"), *disks)):
                return str(node["name"])
        return ""

    def _address_range(self, inputs: Json) -> str:
        """The range of the subnetwork that a machine or address is in; by default one like Google's own."""
        places = [inputs, *(inputs.get("networkInterfaces") or [])]
        named = [place["subnetwork"] for place in places if place.get("subnetwork")]
        for thing in self.world.with_type("compute:Subnetwork"):
            if any(same(subnetwork, thing.id) for subnetwork in named):
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


def _uses(user: Thing, thing: Thing) -> bool:
    """Whether `user` is a machine with that disk or address, or is in that network or subnetwork."""
    interfaces = user.inputs.get("networkInterfaces") or []
    if thing.type == DISK:
        return any(same(disk.get("source"), thing.id) for disk in user.inputs.get("attachedDisks") or [])
    if thing.type == ADDRESS:
        return thing.outputs["address"] in [interface.get("networkIp") for interface in interfaces]
    if thing.type in (NETWORK, SUBNETWORK) and user.type.startswith("gcp:compute/"):
        places = [user.inputs, *interfaces]
        return any(same(place.get(name), thing.id) for place in places for name in ("network", "subnetwork"))
    return False


def merged(before: Any, after: Any) -> Any:
    """Values of `after`, and of `before` what it does not have; of lists of one length, item by item."""
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [merged(*pair) for pair in zip(before, after, strict=True)]
    if not isinstance(before, dict) or not isinstance(after, dict):
        return before if after is None else after
    return {name: merged(before.get(name), after.get(name)) for name in {**before, **after}}


def resource_kind(type_token: str) -> ResourceKind:
    """The kind of a type. Raises WorldError for a type that the stand-in does not know."""
    if type_token not in KINDS:
        known_types = ", ".join(short(type_name) for type_name in sorted(KINDS))
        remedy = "add it to rehearsal/gcp_stand_in/table.py"
        raise WorldError(
            f"{type_token}: the stand-in cannot make this type; it can make {known_types}; {remedy}"
        )
    return KINDS[type_token]


def changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """The names of inputs that differ; null counts as absent."""
    return sorted(name for name in {*old, *new} if old.get(name) != new.get(name))


def urn_type(urn: str) -> str:
    """gcp:compute/network:Network of urn:pulumi:dev::tpu-stack::parent$gcp:compute/network:Network::name."""
    return urn.split("::")[2].rpartition("$")[2]


def urn_name(urn: str) -> str:
    return urn.split("::", 3)[3]
