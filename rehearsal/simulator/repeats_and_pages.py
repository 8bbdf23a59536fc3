"""How the simulated APIs treat a request that is repeated, and a list that is long."""

from collections.abc import Callable, Sequence

from contracts.aliases import Json
from rehearsal.simulator.api_error import invalid
from rehearsal.simulator.discovery import Call


class Repeats[Operation]:
    """The requests that had a requestId, and the operations that they began."""

    def __init__(self) -> None:
        self._answered: dict[tuple[str, str], tuple[Json, Operation]] = {}

    def once(self, call: Call, method: Callable[[Call], Operation]) -> Operation:
        """Carry out a request; one whose requestId was used before gets the same operation again.

        Raises ApiError where that was another request.
        """
        request_id = str(call.query.get("requestId") or "")
        if not request_id:
            return method(call)
        request = {"names": dict(call.names), "body": call.body, "query": call.query}
        key = (call.method.id, request_id)
        if key not in self._answered:
            self._answered[key] = (request, method(call))
        before, operation = self._answered[key]
        if before != request:
            raise invalid("requestId", f"{request_id!r} was used for another request")
        return operation


def page(call: Call, key: str, items: Sequence[Json], size: int) -> Json:
    """One page of a list of things with names, by name; without the key where nothing is left."""
    # A token is the name of the last thing that was listed, so that a list that changes meanwhile skips nothing.
    last = call.query.get("pageToken", "")
    remaining = sorted((item for item in items if item["name"] > last), key=lambda item: str(item["name"]))
    answer: Json = {key: remaining[:size]} if remaining else {}
    if len(remaining) > size:
        answer["nextPageToken"] = remaining[size - 1]["name"]
    return answer
