"""`fab --list` in the order a user meets the tasks.

Invoke has no setting for it: its listing calls `sorted` on (name, task) pairs. The one way in is to give that
module a `sorted` of its own; were it to list otherwise one day, the list would be alphabetical again.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable
from typing import Any

import invoke.program
from invoke.collection import Collection
from invoke.tasks import Task


def in_order(*tasks: Task[Any]) -> Collection:
    """A namespace of `tasks` that `fab --list` shows in this order."""
    collection = Collection()
    places: dict[str, int] = {}
    for place, task in enumerate(tasks):
        places[task.name.replace("_", "-")] = place
        collection.add_task(task)

    def by_place(items: Iterable[Any], **options: Any) -> list[Any]:
        listed = list(items)
        if listed and all(isinstance(item, tuple) and item[0] in places for item in listed):
            return builtins.sorted(listed, key=lambda item: places[item[0]])
        return builtins.sorted(listed, **options)

    vars(invoke.program)["sorted"] = by_place
    return collection
