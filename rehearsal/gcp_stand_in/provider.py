"""What a provider does, without the engine's protocol: check, compare, make, read, change and delete resources."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rehearsal.gcp_stand_in import arguments, table
from rehearsal.gcp_stand_in.arguments import Mistake
from rehearsal.gcp_stand_in.table import KINDS, Kind
from rehearsal.gcp_stand_in.tpu_vm import TpuVms
from rehearsal.gcp_stand_in.world import Thing, World, WorldError, same, short

Json = dict[str, Any]

WORLD_VARIABLE = "TPU_STACK_STAND_IN_WORLD"
TPU_VM = "gcp:tpu/v2Vm:V2Vm"
MACHINE = "gcp:compute/instance:Instance"
DISK = "gcp:compute/disk:Disk"
ADDRESS = "gcp:compute/address:Address"
NETWORK = "gcp:compute/network:Network"
SUBNETWORK = "gcp:compute/subnetwork:Subnetwork"
HANG_POLL_S = 0.05
SHUTDOWN_S = 0.5
"""A machine has its disks and addresses until it is gone: whoever deletes those at the same time is seen."""

# Inputs that the provider's own configuration gives where a resource leaves them out.
FROM_CONFIG = ("project", "region", "zone")

REFUSALS = {
    "quota": "googleapi: Error 403: Quota exceeded (a fault of the rehearsal), quotaExceeded",
    "denied": "googleapi: Error 403: Required permission is missing (a fault of the rehearsal), forbidden",
    "disabled": "googleapi: Error 403: The API has not been used in this project before or it is disabled"
    " (a fault of the rehearsal), accessNotConfigured",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Of the provider's configuration what the stand-in needs. Credentials are not among it, on purpose."""

    project: str | None = None
    region: str | None = None
    zone: str | None = None
    tpu_endpoint: str | None = None

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Settings:
        """From gcp:config:project and so on, as the engine hands them over."""
        said = {name.removeprefix("gcp:config:"): value or None for name, value in variables.items()}
        return cls(
            project=said.get("project"),
            region=said.get("region"),
            zone=said.get("zone"),
            tpu_endpoint=said.get("tpuV2CustomEndpoint"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provider:
    """world_file: where what is made is kept; None: nothing can be made, only checked and compared."""

    settings: Settings
    world_file: Path | None

    def check(self, urn: str, olds: Json, news: Json, seed: bytes) -> tuple[Json, list[Mistake]]:
        """The inputs with names and defaults filled in, and what is wrong with them."""
        type_token = type_of(urn)
        kind, known = kind_of(type_token), arguments.of_type(type_token)
        filled = dict(news)
        for name in FROM_CONFIG:
            value = getattr(self.settings, name)
            if name in known and filled.get(name) is None and value is not None:
                filled[name] = value
        if kind.names_itself and filled.get("name") is None:
            filled["name"] = olds.get("name") or f"{name_of(urn)}-{seed.hex()[:7]}"
        missing = [
            Mistake(path=name, reason=f"required; set it, or gcp:{name} for all resources")
            for name in FROM_CONFIG
            if name in known and f"{{{name}}}" in kind.id and filled.get(name) is None
        ]
        return filled, [*arguments.mistakes(type_token, filled), *missing]

    def old_first(self, urn: str, changed: list[str], again: list[str]) -> bool:
        """Whether a replacement deletes the old one before it makes the new one.

        Google has one thing of a name, so that is how it is where the program gives the name and keeps it. The provider
        knows this only of what it could give a name itself; of others, such as image repositories, the new comes first.
        """
        return bool(again) and kind_of(type_of(urn)).names_itself and "name" not in changed

    def diff(self, urn: str, olds: Json, news: Json, ignored: list[str]) -> tuple[list[str], list[str]]:
        """The inputs that differ, and those of them that make the resource again."""
        kind = kind_of(type_of(urn))
        changed = [name for name in changes(olds, news) if name not in ignored]
        return changed, [name for name in changed if kind.replaces(name, olds.get(name), news.get(name))]

    def create(self, urn: str, inputs: Json, limit_s: float) -> tuple[str, Json]:
        """The id and the outputs. Raises WorldError."""
        type_token = type_of(urn)
        kind = kind_of(type_token)
        own_id = table.id_of(kind, inputs)
        self._suffer(type_token, "hang-before")
        if type_token == TPU_VM:
            self._tpus().create(own_id, inputs, limit_s)
        else:
            inputs = table.as_kept(kind, inputs)
            place = inputs | {"addressRange": self._address_range(inputs)}
            made = table.outputs_of(kind, own_id, inputs, place, self._world().number())
            self._world().add(Thing(type=type_token, id=own_id, inputs=inputs, outputs=made))
        self._suffer(type_token, "hang-after")
        return own_id, self._outputs(type_token, own_id, inputs) or {}

    def read(self, urn: str, own_id: str, inputs: Json) -> tuple[Json, Json] | None:
        """The inputs and outputs as they are; None where it is gone."""
        type_token = type_of(urn)
        kind_of(type_token)
        made = self._outputs(type_token, own_id, inputs)
        if made is None:
            return None
        thing = None if type_token == TPU_VM else self._world().find(type_token, own_id)
        return (inputs if thing is None else thing.inputs), made

    def update(self, urn: str, own_id: str, olds: Json, news: Json, limit_s: float) -> Json:
        """The outputs after it. Raises WorldError."""
        type_token = type_of(urn)
        kind = kind_of(type_token)
        if type_token == TPU_VM:
            self._tpus().update(own_id, news, changes(olds, news), limit_s)
            return self._outputs(type_token, own_id, news) or {}
        news = table.as_kept(kind, news)
        there = self._world().find(type_token, own_id)
        made = (there.outputs if there else {}) | news
        made |= table.labels_of(news)
        self._world().put(Thing(type=type_token, id=own_id, inputs=news, outputs=dict(kind.defaults) | made))
        return made

    def delete(self, urn: str, own_id: str, told: Json, limit_s: float) -> None:
        """told: the outputs that the engine remembers. Raises WorldError for what is protected."""
        type_token = type_of(urn)
        kind = kind_of(type_token)
        if told.get("deletionPolicy") == "ABANDON":
            return
        if told.get("deletionPolicy") == "PREVENT" or (kind.guard and told.get(kind.guard)):
            guard = kind.guard if kind.guard and told.get(kind.guard) else "deletionPolicy"
            raise WorldError(f"Error: {own_id} is protected by {guard} and was not deleted")
        if type_token == TPU_VM:
            self._tpus().delete(own_id, limit_s)
            return
        is_bucket = short(type_token) == "storage:Bucket"
        if is_bucket and not told.get("forceDestroy") and self._world().objects_in(own_id):
            raise WorldError(
                f"Error trying to delete bucket {own_id} containing objects without `force_destroy` set to true"
            )
        self._free(type_token, own_id)
        if type_token == MACHINE:
            time.sleep(SHUTDOWN_S)
        self._world().remove(type_token, own_id)

    def _free(self, type_token: str, own_id: str) -> None:
        """What comes before a deletion. Raises WorldError where Google refuses it, and where nothing is there of a type
        whose deletion the provider does not take for done then."""
        world, name = self._world(), short(type_token).partition(":")[2]
        there = world.find(type_token, own_id)
        if there is None:
            if type_token == MACHINE:
                raise WorldError(
                    f"Error deleting instance: googleapi: Error 404: The resource '{own_id}' was not found, notFound"
                )
            return
        user = next(iter(self._users(there)), None)
        if type_token == DISK and user is not None and world.fault(type_token) != "kept":
            world.pull(own_id, user)  # the provider detaches it, whatever the machine is doing
        elif user is not None or world.fault(type_token) == "kept":
            by = user.id if user else "something (a fault of the rehearsal)"
            raise WorldError(
                f"Error when reading or editing {name}: googleapi: Error 400: The resource '{own_id}' is already being"
                f" used by '{by}', resourceInUseByAnotherResource"
            )

    def _users(self, thing: Thing) -> list[Thing]:
        """Machines that have a disk or an address, and what is in a network or subnetwork."""
        found = []
        for other in self._world().things().values():
            interfaces = other.inputs.get("networkInterfaces") or []
            if thing.type == DISK:
                used = [each.get("source") for each in other.inputs.get("attachedDisks") or []]
            elif thing.type == ADDRESS:
                taken = [each.get("networkIp") for each in interfaces]
                used = [thing.id] if thing.outputs["address"] in taken else []
            elif thing.type in (NETWORK, SUBNETWORK):
                parts = [other.inputs, *interfaces] if other.type.startswith("gcp:compute/") else []
                used = [each.get(field) for each in parts for field in ("network", "subnetwork")]
            else:
                return []
            if any(same(each, thing.id) for each in used):
                found.append(other)
        return found

    def _address_range(self, inputs: Json) -> str:
        """Of the subnetwork that a machine or address is in; of one that the world does not hold, as Google's own."""
        places = [inputs, *(inputs.get("networkInterfaces") or [])]
        named = [each["subnetwork"] for each in places if each.get("subnetwork")]
        for thing in self._world().of_type("compute:Subnetwork"):
            if any(same(each, thing.id) for each in named):
                return str(thing.inputs["ipCidrRange"])
        return "10.128.0.0/20"

    def invoke(self, function: str, given: Json) -> Json:
        """A look-up. Raises WorldError for one that the stand-in cannot answer."""
        if function == "gcp:organizations/getProject:getProject":
            project = given.get("projectId") or self.settings.project
            return {"id": f"projects/{project}", "projectId": project, "name": project, "number": "1"}
        raise WorldError(f"{function}: the stand-in answers no such call; add it to rehearsal/gcp_stand_in")

    def _outputs(self, type_token: str, own_id: str, inputs: Json) -> Json | None:
        if type_token == TPU_VM:
            node = self._tpus().read(own_id)
            return None if node is None else inputs | node
        thing = self._world().find(type_token, own_id)
        return None if thing is None else thing.outputs

    def _suffer(self, type_token: str, moment: str) -> None:
        """What the world file wants to go wrong at this moment. Raises WorldError for a refusal."""
        if self.world_file is None:
            return
        while (fault := self._world().fault(type_token)) == moment:
            time.sleep(HANG_POLL_S)
        if moment == "hang-before" and fault in REFUSALS:
            raise WorldError(f"Error creating {short(type_token)}: {REFUSALS[fault]}")

    def _world(self) -> World:
        if self.world_file is None:
            raise WorldError(
                f"the stand-in has no world to make things in: set {WORLD_VARIABLE} to a file's path"
            )
        return World(path=self.world_file)

    def _tpus(self) -> TpuVms:
        if self.settings.tpu_endpoint is None:
            raise WorldError("the stand-in has no Cloud TPU API to ask: set gcp:tpuV2CustomEndpoint")
        return TpuVms(endpoint=self.settings.tpu_endpoint)


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
