"""Any sequence of creations, deletions, preemptions and waiting, and what must hold after each step."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rehearsal.tpu_api import ApiError, Clock, Delays, NoHardware
from rehearsal.tpu_api.capacity import ChipPool, Offers
from rehearsal.tpu_api.cloud import Cloud
from rehearsal.tpu_api.control import Control
from rehearsal.tpu_api.discovery import shipped
from rehearsal.tpu_api.methods import Methods
from rehearsal.tpu_api.resources import NODE_EDGES, QUEUE_EDGES, QUEUED

ZONE = "/v2/projects/grant/locations/us-central1-a"
SPOT = ChipPool(zone="us-central1-a", prefix="v5litepod", tier="spot")
IDS = st.sampled_from(["a", "b", "c"])
SIZES = st.sampled_from([1, 8, 16, 32])


class Machine(RuleBasedStateMachine):
    """The cloud without HTTP. Capacity only grows, so that more held than there is can only be a bug."""

    @initialize(chips=st.integers(0, 64))
    def start(self, chips: int) -> None:
        self.cloud = Cloud(
            clock=Clock(frozen_at=0.0),
            delays=Delays(),
            capacity={SPOT: chips},
            quota={},
            hardware=NoHardware(),
        )
        self.control = Control(self.cloud)
        self.methods = Methods(self.cloud, Offers([SPOT]))
        self.forced: list[Any] = []  # operations of forced deletions, and the names that they are about

    def send(self, http_method: str, path: str, body: str = "") -> dict[str, Any] | None:
        """A request as the server carries it out; None where it was refused. No answer may be ill-formed."""
        call = shipped().call(http_method, f"{ZONE}/{path}", body.encode())
        self.cloud.settle()
        try:
            answer = self.methods.carry_out(call)
        except ApiError as error:
            assert error.status in ("NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION"), error
            return None
        assert shipped().wrong(call.method.response, answer) == []
        return answer

    @rule(own_id=IDS, chips=SIZES, count=st.integers(1, 3), limit_s=st.sampled_from([3, 30, 3000]))
    def enqueue(self, own_id: str, chips: int, count: int, limit_s: int) -> None:
        many = f', "multisliceParams": {{"nodeCount": {count}}}' if count > 1 else ""
        node = f'{{"acceleratorType": "v5litepod-{chips}", "runtimeVersion": "v2-alpha-tpuv5-lite"}}'
        spec = f'{{"parent": "{ZONE.removeprefix("/v2/")}", "node": {node}{many}}}'
        policy = f'{{"validUntilDuration": "{limit_s}s"}}'
        body = f'{{"spot": {{}}, "tpu": {{"nodeSpec": [{spec}]}}, "queueingPolicy": {policy}}}'
        self.send("POST", f"queuedResources?queuedResourceId={own_id}", body)

    @rule(own_id=IDS, chips=SIZES)
    def create_node(self, own_id: str, chips: int) -> None:
        body = f'{{"acceleratorType": "v5litepod-{chips}", "runtimeVersion": "v2-alpha-tpuv5-lite"'
        self.send("POST", f"nodes?nodeId={own_id}", body + ', "schedulingConfig": {"spot": true}}')

    @rule(own_id=IDS, force=st.booleans())
    def delete_queued_resource(self, own_id: str, force: bool) -> None:
        name = f"{ZONE.removeprefix('/v2/')}/queuedResources/{own_id}"
        self.cloud.settle()
        qr = self.cloud.queued_resources.get(name)
        owned = self.cloud.owned_nodes(qr) if qr is not None else []
        operation = self.send("DELETE", f"queuedResources/{own_id}?force={str(force).lower()}")
        if operation is not None and force:
            self.forced.append((operation["name"], [qr, *owned]))
        assert operation is None or force or owned == []

    @rule(own_id=IDS)
    def delete_node(self, own_id: str) -> None:
        self.send("DELETE", f"nodes/{own_id}")

    @rule(
        data=st.data(), what=st.sampled_from(["preempt", "terminate", "maintain", "vanish", "leave", "fail"])
    )
    def befall(self, data: st.DataObject, what: str) -> None:
        self.cloud.settle()
        names = sorted([*self.cloud.nodes, *self.cloud.queued_resources])
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        try:
            if what == "leave":
                self.control.preempt(name, leave_nodes=True)
            else:
                getattr(self.control, what)(name)
        except (ApiError, ValueError):
            pass  # its state does not allow it, or it is no queued resource

    @rule(chips=st.integers(0, 32))
    def add_capacity(self, chips: int) -> None:
        self.control.set_capacity(str(SPOT), self.cloud.capacity[SPOT] + chips)

    @rule(seconds=st.sampled_from([0.5, 1, 2, 5, 60]))
    def wait(self, seconds: float) -> None:
        self.control.advance(seconds)

    @invariant()
    def no_more_chips_are_held_than_there_are(self) -> None:
        assert self.cloud.held()[SPOT] <= self.cloud.capacity[SPOT]

    @invariant()
    def every_node_of_a_queued_resource_has_it(self) -> None:
        for node in self.cloud.nodes.values():
            assert node.queued_resource is None or node.queued_resource in self.cloud.queued_resources

    @invariant()
    def what_was_deleted_by_force_is_gone_when_its_operation_is_done(self) -> None:
        for operation, things in self.forced:
            if self.cloud.operations[operation].done:
                assert not any(thing in self.cloud.nodes.values() for thing in things)
                assert not any(thing in self.cloud.queued_resources.values() for thing in things)

    @invariant()
    def an_active_one_has_nodes_and_what_is_over_holds_no_chips(self) -> None:
        for qr in self.cloud.queued_resources.values():
            owned = self.cloud.owned_nodes(qr)
            if qr.state in ("PROVISIONING", "ACTIVE"):
                assert any(node.state != "DELETING" for node in owned), qr.state
            elif qr.state in ("SUSPENDED", "FAILED"):
                assert not any(node.placed for node in owned)
            elif qr.state in QUEUED:
                assert owned == []

    @invariant()
    def states_only_follow_along_the_edges(self) -> None:
        last: dict[str, str] = {}
        for line in self.cloud.journal:
            edges = NODE_EDGES if "/nodes/" in line.name else QUEUE_EDGES
            before = last.get(line.name, "gone")
            if before == "gone":
                assert line.state in ("CREATING", "ACCEPTED")
            elif line.state != "gone":
                assert line.state in edges[before], (line.name, before, line.state)
            last[line.name] = line.state

    def teardown(self) -> None:
        """Long afterwards every operation has ended, and a forced deletion of everything leaves nothing."""
        self.control.advance(10_000)
        assert [each for each in self.cloud.operations.values() if not each.done] == []
        for name in list(self.cloud.queued_resources):
            self.send("DELETE", f"queuedResources/{name.rpartition('/')[2]}?force=true")
        for name, node in list(self.cloud.nodes.items()):
            if node.queued_resource is None:
                self.send("DELETE", f"nodes/{name.rpartition('/')[2]}")
        self.control.advance(10)
        assert not self.cloud.nodes
        assert not self.cloud.queued_resources


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=40)
