"""A simulator on a frozen clock, and Google's own client to drive it with."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import google.oauth2.credentials
import pytest
from googleapiclient import discovery
from googleapiclient.errors import HttpError

from contracts.aliases import Json
from rehearsal.tpu_api import Clock, TpuApi

ZONE = "projects/grant/locations/us-central1-a"


class Lab:
    """A simulator and a client of it. `zone` is the parent of everything that is made in it."""

    zone = ZONE

    def __init__(self, api: TpuApi) -> None:
        self.api = api
        self.control = api.control
        token = google.oauth2.credentials.Credentials(token="a-secret")  # type: ignore[no-untyped-call]
        self.client = discovery.build(
            "tpu", "v2", static_discovery=True, credentials=token, client_options={"api_endpoint": api.url}
        )
        self.locations = self.client.projects().locations()
        self.nodes = self.locations.nodes()
        self.queue = self.locations.queuedResources()
        self.operations = self.locations.operations()

    def spec(self, accelerator: str = "v5litepod-16", **more: Any) -> Json:
        """What a node is asked for with."""
        return {"acceleratorType": accelerator, "runtimeVersion": "v2-alpha-tpuv5-lite", **more}

    def wanted(self, node_id: str, accelerator: str = "v5litepod-16", **more: Any) -> Json:
        """A queued resource's body: a spot node of that id."""
        node_spec = {"parent": ZONE, "nodeId": node_id, "node": self.spec(accelerator)}
        return {"spot": {}, "tpu": {"nodeSpec": [node_spec]}, **more}

    def enqueue(self, own_id: str, body: Json | None = None, **query: Any) -> Json:
        """The operation. Its node is called as itself with -node behind."""
        wanted = body or self.wanted(f"{own_id}-node")
        return self._json(self.queue.create(parent=ZONE, queuedResourceId=own_id, body=wanted, **query))

    def active(self, own_id: str, body: Json | None = None) -> Json:
        """The queued resource, ACTIVE."""
        self.enqueue(own_id, body)
        self.control.advance(60)
        assert self.queue_state(own_id) == "ACTIVE"
        return self.queued(own_id)

    def queued(self, own_id: str) -> Json:
        return self._json(self.queue.get(name=f"{ZONE}/queuedResources/{own_id}"))

    def queue_state(self, own_id: str) -> str:
        return str(self.queued(own_id)["state"]["state"])

    def refused(self, request: Any) -> Json:
        """The error that a request is answered with; it must be one, in Google's form."""
        with pytest.raises(HttpError) as caught:
            request() if callable(request) else request.execute()
        answer: Json = json.loads(caught.value.content)
        assert answer.keys() == {"error"}
        assert answer["error"]["code"] == caught.value.resp.status
        error: Json = answer["error"]
        return error

    @staticmethod
    def _json(request: Any) -> Json:
        answer: Json = request.execute()
        return answer


LabFactory = Callable[..., Lab]


@pytest.fixture
def new_lab() -> Iterator[LabFactory]:
    """Make a lab with a simulator of these arguments; its clock stands still unless another is given."""
    labs: list[Lab] = []

    def make(**arguments: Any) -> Lab:
        api = TpuApi(**({"clock": Clock(frozen_at=1_800_000_000.0)} | arguments))
        api.__enter__()
        labs.append(Lab(api))
        return labs[-1]

    yield make
    for lab in labs:
        lab.client.close()
        lab.api.__exit__(None, None, None)


@pytest.fixture
def lab(new_lab: LabFactory) -> Lab:
    """A lab with no end of capacity."""
    return new_lab()
