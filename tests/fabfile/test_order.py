"""Tasks are listed as they were given, and whatever else Invoke sorts it sorts as before."""

from __future__ import annotations

from typing import Any

import invoke.program
from invoke.tasks import Task

from fabfile.order import in_order


def nothing(c: object) -> None: ...


zebra: Task[Any] = Task(nothing, name="zebra")
a_bear: Task[Any] = Task(nothing, name="a_bear")


def test_tasks_are_sorted_by_their_place_and_other_things_as_ever() -> None:
    known = dict(vars(invoke.program))
    try:
        collection = in_order(zebra, a_bear)
        listing = vars(invoke.program)["sorted"]
        assert list(collection.task_names) == ["zebra", "a-bear"]
        assert listing([("a-bear", a_bear), ("zebra", zebra)]) == [("zebra", zebra), ("a-bear", a_bear)]
        assert listing([3, 1, 2], reverse=True) == [3, 2, 1]
        assert listing([("other", 1), ("another", 2)]) == [("another", 2), ("other", 1)]
        assert listing([]) == []
    finally:
        vars(invoke.program).clear()
        vars(invoke.program).update(known)
