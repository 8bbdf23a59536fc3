"""Errors that are injected on purpose: which requests they hit, how often, and what happens then."""

import dataclasses
import fnmatch
from typing import Literal, get_args

from rehearsal.errors import ApiError
from rehearsal.methods import PREFIX

Kind = Literal["too-many-requests", "unavailable", "cut-before", "cut-after", "slow"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """`methods` is a pattern of method names less "tpu.projects.locations.": "nodes.create", "queuedResources.*", "*".

    cut-before: the connection ends and nothing was done. cut-after: it was done and the answer is lost. slow: the
    answer comes after `seconds` of real time, whatever the cloud's clock does.
    """

    kind: Kind
    methods: str = "*"
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r}: choose one of {', '.join(get_args(Kind))}")
        if not 0 <= self.seconds <= 3600:
            raise ValueError(f"seconds={self.seconds}: give 0 to 3600")

    def error(self) -> ApiError | None:
        """What the request is refused with, if it is refused."""
        if self.kind == "too-many-requests":
            return ApiError(
                "RESOURCE_EXHAUSTED",
                "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute' of service"
                " 'tpu.googleapis.com'.",
            )
        return (
            ApiError("UNAVAILABLE", "The service is currently unavailable.")
            if self.kind == "unavailable"
            else None
        )


class Faults:
    """Those that are still to happen, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._waiting: list[Fault] = []

    def add(self, fault: Fault, times: int) -> None:
        """Raises ValueError for a number of times that is none."""
        if times < 1:
            raise ValueError(f"times={times}: give 1 or more")
        self._waiting += [fault] * times

    def take(self, method_id: str) -> Fault | None:
        """The first one that hits this method; it has happened then."""
        for index, fault in enumerate(self._waiting):
            if fnmatch.fnmatchcase(method_id.removeprefix(PREFIX), fault.methods):
                return self._waiting.pop(index)
        return None

    def clear(self) -> None:
        """None of them will happen."""
        self._waiting.clear()

    def waiting(self) -> list[Fault]:
        """Those that have not happened."""
        return list(self._waiting)
