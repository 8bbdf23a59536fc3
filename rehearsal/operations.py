"""A long-running operation: what was asked, of what, and how it ended."""

import dataclasses
from typing import Any

from rehearsal.clock import timestamp
from rehearsal.errors import ApiError

Json = dict[str, Any]
EMPTY: Json = {"@type": "type.googleapis.com/google.protobuf.Empty"}


@dataclasses.dataclass(kw_only=True)
class Operation:
    """A record of the cloud, changed as time goes on. It is done once it has a response or an error."""

    name: str
    target: str
    verb: str
    created: float
    ended: float | None = None
    response: Json | None = None
    error: ApiError | None = None
    cancel_requested: bool = False

    @property
    def parent(self) -> str:
        """projects/…/locations/…"""
        return self.name.rpartition("/operations/")[0]

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.ended is not None

    def end(self, moment: float, outcome: Json | ApiError) -> None:
        """End it, unless it has ended already: the first end counts."""
        if self.done:
            return
        self.ended = moment
        if isinstance(outcome, ApiError):
            self.error = outcome
        else:
            self.response = outcome

    def render(self) -> Json:
        """As the API answers. `done` is absent while it runs, as false is from all of Google's answers."""
        metadata: Json = {
            "@type": "type.googleapis.com/google.cloud.tpu.v2.OperationMetadata",
            "createTime": timestamp(self.created),
            "target": self.target,
            "verb": self.verb,
            "apiVersion": "v2",
            "cancelRequested": self.cancel_requested,
        }
        answer: Json = {"name": self.name, "metadata": metadata}
        if self.ended is not None:
            metadata["endTime"] = timestamp(self.ended)
            answer["done"] = True
        if self.error is not None:
            answer["error"] = self.error.as_status()
        elif self.response is not None:
            answer["response"] = self.response
        return answer
