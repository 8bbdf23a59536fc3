"""A simulator on a frozen clock with our provider in front of it, and a model of what Pulumi's engine does with both.

Sleeping moves the clock, so nothing takes time."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine

from contracts.aliases import Json
from infra.cloud_tpu.tpu_client import Client
from infra.queued_resource import QueuedResourceProvider
from infra.slice_apis.lifecycle import Lifecycle
from infra.slice_apis.lifecycles import lifecycle_for
from infra.slice_apis.plugin import Session
from infra.slice_apis.retry import Backoff
from rehearsal.simulated_cloud import Clock, SimulatedCloud

ZONE = "us-central1-a"
PARENT = f"projects/grant/locations/{ZONE}"
POOL = f"{ZONE}:v5litepod:spot"
OWNER = "a1b2c3"


def wanted_props(**more: Any) -> Json:
    """Properties of a spot slice of 16 chips, 4 workers, as the engine hands them over."""
    props = {
        "project": "grant",
        "zone": ZONE,
        "queued_resource_id": "main",
        "owner": OWNER,
        "accelerator_type": "v5litepod-16",
        "runtime_version": "v2-alpha-tpuv5-lite",
        "capacity": "spot",
        "wait_s": 3600.0,
        "node_count": 1.0,
    }
    return {name: value for name, value in (props | more).items() if value is not None}


class PowerCut(BaseException):
    """The process ends: no `except` and no clean-up of ours runs any more."""


def machine_of(model: type[RuleBasedStateMachine], max_examples: int) -> Any:
    """A test that walks through a model."""
    case: Any = type(f"{max_examples} examples", (model.TestCase,), {})
    case.settings = settings(
        max_examples=max_examples,
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    return case


class Cloud:
    """The simulator with a provider of ours. Sleeping moves its clock, and nothing takes time."""

    def __init__(
        self,
        api: SimulatedCloud,
        clock: Clock,
        provider: QueuedResourceProvider | None = None,
        props: Callable[..., Json] = wanted_props,
    ) -> None:
        """provider, props: of slices of another API than the Cloud TPU API."""
        self.api = api
        self.props = props
        self.control = api.control
        self.clock = clock
        self.lines: list[str] = []
        self.while_sleeping: Callable[[], None] = lambda: None
        self.engine_is_there = True
        self.session = self._session()
        self.provider = provider or QueuedResourceProvider()
        self.provider._session = self.session

    def _session(self) -> Session:
        backoff = Backoff(
            now=self.clock.now,
            sleep=self._sleep,
            jitter=lambda: 0.5,
            is_awaited=lambda: self.engine_is_there,
            say=self.lines.append,
        )
        endpoints = {
            "gcp:tpuV2CustomEndpoint": f"{self.api.url}/v2/",
            "gcp:computeCustomEndpoint": f"{self.api.url}/compute/v1/",
        }
        return Session(endpoints.get, backoff)

    def _sleep(self, seconds: float) -> None:
        self.while_sleeping()
        self.control.advance(seconds)

    @property
    def client(self) -> Client:
        return self.session.client()

    def lifecycle(self) -> Lifecycle[Any]:
        return lifecycle_for(self.props(), self.session.clients, self.session.backoff)

    @property
    def said(self) -> str:
        return "\n".join(self.lines)

    def create(self, **more: Any) -> Json:
        """The outputs."""
        return dict(self.provider.create(wire(self.props(**more))).outs or {})

    def update(self, before: Json, **more: Any) -> Json:
        return dict(self.provider.update("id", wire(before), wire(self.props(**more))).outs or {})

    def read(self, outputs: Json) -> Json | None:
        """None: the engine drops it from its state."""
        result = self.provider.read("id", wire(outputs))
        return dict(result.outs or {}) if result.id else None

    def delete(self, outputs: Json) -> None:
        self.provider.delete("id", wire(outputs))

    def at_sleep(self, number: int, action: Callable[[], None]) -> None:
        """Do something once, when the provider sleeps for the n-th time from now on."""
        left = number

        def count() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                action()

        self.while_sleeping = count

    # --- what others do, and what there is -------------------------------------------------------------------------

    def put(
        self, own_id: str = "main", owner: str | None = None, node_id: str | None = None, **more: Any
    ) -> None:
        """A queued resource of somebody else's making."""
        labels = {"tpu-stack-owner": owner} if owner else {}
        node = {"acceleratorType": "v5litepod-16", "runtimeVersion": "v2-alpha-tpuv5-lite", "labels": labels}
        spec = {"parent": PARENT, "nodeId": node_id or own_id, "node": node | more}
        self.client.create_queued_resource(PARENT, own_id, {"spot": {}, "tpu": {"nodeSpec": [spec]}})

    def put_node(self, owner: str, node_id: str = "main") -> None:
        """A node without a queued resource."""
        spec = {"acceleratorType": "v5litepod-16", "runtimeVersion": "v2-alpha-tpuv5-lite"}
        body = spec | {"labels": {"tpu-stack-owner": owner}, "schedulingConfig": {"spot": True}}
        self.client._call("", lambda at: at.nodes.create(parent=PARENT, nodeId=node_id, body=body), PARENT)

    def queued(self, own_id: str = "main") -> Json | None:
        return self.client.queued_resource(f"{PARENT}/queuedResources/{own_id}")

    def node(self, node_id: str = "main") -> Json | None:
        return self.client.node(f"{PARENT}/nodes/{node_id}")

    def state(self, own_id: str = "main") -> str | None:
        found = self.queued(own_id)
        return None if found is None else str(found["state"]["state"])

    def history(self, own_id: str = "main") -> list[str]:
        """The states that the queued resource of this name has come into."""
        return [
            each.state for each in self.control.journal() if each.name.endswith(f"/queuedResources/{own_id}")
        ]

    def alive(self) -> list[str]:
        found = self.control.alive()
        return sorted(thing["name"] for thing in (*found["queuedResources"], *found["nodes"]))


def wire(props: Json) -> Json:
    """As values come over the wire: copies, whole numbers as floats, nothing that is None."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items() if item is not None}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    found: Json = plain(json.loads(json.dumps(props)))
    return found


@dataclasses.dataclass(kw_only=True)
class Stack:
    """A stack with one queued resource, as the engine runs it: its state file and the order of its calls.

    What the engine does: check; without a state create; with one diff, then nothing, update, or delete and create.
    A failed call leaves the state as it was before that call. Refresh: read; an empty id drops it. Destroy: delete.
    """

    cloud: Cloud
    state: Json | None = None

    def up(self, **more: Any) -> None:
        """Raises what the provider raises."""
        props = wire(self.cloud.props(**more))
        provider = self.cloud.provider
        assert provider.check({}, props).failures == []
        if self.state is not None:
            found = provider.diff("id", self.state, props)
            if not found.changes and not found.replaces:
                return
            if not found.replaces:
                self.state = wire(provider.update("id", self.state, props).outs or {})
                return
            assert found.delete_before_replace
            provider.delete("id", self.state)
            self.state = None
        self.state = wire(provider.create(props).outs or {})

    def refresh(self) -> None:
        if self.state is not None:
            found = self.cloud.provider.read("id", self.state)
            self.state = wire(found.outs or {}) if found.id else None

    def destroy(self) -> None:
        if self.state is not None:
            self.cloud.provider.delete("id", self.state)
            self.state = None
