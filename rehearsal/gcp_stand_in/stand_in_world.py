"""What the stand-in has made, in a JSON file that outlives it: what is in no state but in the file is a zombie.

    {"things": {"gcp:compute/network:Network projects/p/global/networks/n": {"type", "id", "inputs", "outputs"}},
     "count": 1, "pulled": ["projects/p/zones/z/disks/d from projects/p/zones/z/instances/i"],
     "no_room": {"main": "GCE_STOCKOUT: …"}, "held": ["nodePools/main"],
     "errors": {"projects/…/nodePools/main": "GCE_STOCKOUT: …"}}

no_room: by name, the node pools that get no nodes, and why. held: the ends of ids of what is made and whose making does
not come to its end. errors: the node pools that are in state ERROR.

A test reads it and changes it. Several processes may do so at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import filelock

from contracts import atomic
from contracts.aliases import Json

LOCK_LIMIT_S = 30.0


class WorldError(Exception):
    """An error that Google would have answered, or something that the stand-in cannot do."""


class HalfMadeError(WorldError):
    """There is something now, and it is not as it was to be. own_id, outputs: what the engine keeps of it."""

    def __init__(self, message: str, own_id: str, outputs: Json) -> None:
        super().__init__(message)
        self.own_id, self.outputs = own_id, outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thing:
    """An existing resource."""

    type: str
    id: str
    inputs: Json
    outputs: Json

    @property
    def key(self) -> str:
        return thing_key(self.type, self.id)


def thing_key(type_token: str, own_id: str) -> str:
    return f"{type_token} {own_id}"


def same(reference: object, own_id: str) -> bool:
    """Whether a reference, by id or by link, is to the thing of that id."""
    return isinstance(reference, str) and (reference == own_id or reference.endswith(f"/{own_id}"))


def short(type_token: str) -> str:
    """compute:Network of gcp:compute/network:Network."""
    module, _, class_name = type_token.removeprefix("gcp:").partition(":")
    return f"{module.partition('/')[0]}:{class_name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """The file; one that is not there yet is an empty world."""

    path: Path

    def things(self) -> dict[str, Thing]:
        """Everything that there is, by type and id."""
        return {key: Thing(**thing) for key, thing in self._read()["things"].items()}

    def with_type(self, name: str) -> list[Thing]:
        """Everything of a type given as compute:Network."""
        return [thing for thing in self.things().values() if short(thing.type) == name]

    def find(self, type_token: str, own_id: str) -> Thing | None:
        return self.things().get(thing_key(type_token, own_id))

    def number(self) -> int:
        """A number that was never used before."""
        with self._change() as world:
            world["count"] += 1
            return int(world["count"])

    def add(self, thing: Thing) -> None:
        """Raises WorldError where there is one of that name."""
        with self._change() as world:
            if thing.key in world["things"]:
                raise WorldError(
                    f"googleapi: Error 409: The resource '{thing.id}' already exists, alreadyExists"
                )
            world["things"][thing.key] = dataclasses.asdict(thing)

    def replace(self, thing: Thing) -> None:
        """Replace a thing's inputs and outputs. Raises WorldError if it is gone."""
        with self._change() as world:
            if thing.key not in world["things"]:
                raise WorldError(f"googleapi: Error 404: The resource '{thing.id}' was not found, notFound")
            world["things"][thing.key] = dataclasses.asdict(thing)

    def remove(self, type_token: str, own_id: str) -> None:
        """Remove a thing; nothing happens if it is gone already."""
        with self._change() as world:
            world["things"].pop(thing_key(type_token, own_id), None)
            world["errors"].pop(own_id, None)

    def pull(self, disk: str, machine: Thing) -> None:
        """Detach a disk from a running machine: what was open on it is lost."""
        left = [
            attached
            for attached in machine.inputs.get("attachedDisks") or []
            if not same(attached["source"], disk)
        ]
        self.replace(dataclasses.replace(machine, inputs=machine.inputs | {"attachedDisks": left}))
        with self._change() as world:
            world["pulled"].append(f"{disk} from {machine.id}")

    def set_fault(self, *, no_room: Mapping[str, str] | None = None, held: Sequence[str] = ()) -> None:
        """Set the faults from now on, in place of earlier ones."""
        with self._change() as world:
            world["no_room"], world["held"] = dict(no_room or {}), list(held)

    def no_room(self, name: object) -> str | None:
        """Why a node pool of that name gets no nodes."""
        reason: str | None = self._read()["no_room"].get(name)
        return reason

    def is_held(self, own_id: str) -> bool:
        return any(same(own_id, ending) for ending in self._read()["held"])

    def errors(self) -> dict[str, str]:
        """The ids of node pools in state ERROR, and why they are."""
        return dict(self._read()["errors"])

    def set_error(self, own_id: str, reason: str) -> None:
        with self._change() as world:
            world["errors"][own_id] = reason

    def pulled(self) -> list[str]:
        """Every disk that was detached from a running machine, and the machine."""
        return [str(entry) for entry in self._read()["pulled"]]

    @contextlib.contextmanager
    def _change(self) -> Iterator[Json]:
        with filelock.FileLock(f"{self.path}.lock", timeout=LOCK_LIMIT_S):
            world = self._read()
            yield world
            atomic.write(self.path, json.dumps(world, indent=1, sort_keys=True) + "\n")

    def _read(self) -> Json:
        try:
            content: Json = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            content = {}
        empty: Json = {"things": {}, "count": 0, "pulled": [], "no_room": {}, "held": [], "errors": {}}
        return empty | content
