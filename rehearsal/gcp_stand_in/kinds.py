"""A type of resource: its id, what of it changes in place, what Google fills in. Pure; `table` has them all."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

Json = dict[str, Any]
Fill = Callable[[Json, int], Json]

COMPUTE = "https://www.googleapis.com/compute/v1/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """id: a template of the inputs. in_place: inputs that an update takes; any other makes the resource again.

    grows: of in_place, those that are made again when they get smaller. fill: (inputs, a number that is nobody else's)
    to what Google adds. guard: the input that has to be off for a deletion. sorted_by: of an input that is a list of
    objects, the field by which Google gives it back sorted.
    """

    id: str
    in_place: frozenset[str] = frozenset()
    grows: frozenset[str] = frozenset()
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    fill: Fill = lambda _inputs, _number: {}
    guard: str | None = None
    names_itself: bool = False
    sorted_by: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def replaces(self, name: str, old: object, new: object) -> bool:
        """Whether this change of an input makes the resource again."""
        if name == "deletionPolicy":
            return False
        if name in self.grows and isinstance(old, int | float) and isinstance(new, int | float):
            return new < old
        return name not in self.in_place


def as_kept(kind: Kind, inputs: Json) -> Json:
    """The inputs as Google gives them back."""
    lists = {name: field for name, field in kind.sorted_by.items() if inputs.get(name)}
    return inputs | {
        name: sorted(inputs[name], key=lambda each: each[field]) for name, field in lists.items()
    }


def outputs(kind: Kind, own_id: str, inputs: Json, place: Json, number: int) -> Json:
    """What the engine is told of a resource: its inputs, defaults, and what Google adds.

    place: the inputs, and what else `fill` goes by."""
    filled = dict(kind.defaults) | inputs | kind.fill(place | {"id": own_id}, number)
    if kind.id.startswith("projects/{project}/") and "selfLink" not in filled:
        filled["selfLink"] = COMPUTE + own_id
    return filled | labels(inputs)


def labels(inputs: Mapping[str, Any]) -> Json:
    """The outputs about labels: the provider adds one of its own."""
    if inputs.get("labels") is None:
        return {}
    effective = {**inputs["labels"], "goog-pulumi-provisioned": "true"}
    return {"effectiveLabels": effective, "pulumiLabels": effective}


def id_of(kind: Kind, inputs: Mapping[str, Any]) -> str:
    """The id that Google and the provider know a resource by. Raises KeyError for an input that is missing."""
    return kind.id.format_map({name: _last(str(value)) for name, value in inputs.items()})


def _last(value: str) -> str:
    """A name, of a name or of a link to it: projects/p/regions/r/routers/n is n."""
    return value.rpartition("/")[2] if re.match(r"(https://[^/]+/.*|projects/.+)", value) else value
