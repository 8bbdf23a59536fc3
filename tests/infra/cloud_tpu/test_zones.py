"""A slice that may be in several zones: in which it comes to be, what is withdrawn, and what an interruption leaves."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from contracts.aliases import Json
from infra.cloud_tpu import tpu_request
from infra.cloud_tpu.tpu_client import Client
from infra.documents import Documents, stock_outs
from infra.queued_resource import changes_between
from infra.slice_apis.lifecycle import Lifecycle
from infra.slice_apis.retry import CloudTpuError, LostAgainError
from infra.slice_apis.slice_api import Look
from rehearsal.simulated_cloud import ApiError, Clock, Delays, SimulatedCloud
from tests.infra.cloud_tpu.conftest import CloudFactory
from tests.infra.cloud_tpu.lab import OWNER, Cloud, PowerCut, Stack, machine_of

A, B, C = ZONES = ("us-central1-a", "us-west4-a", "europe-west4-b")
ANYWHERE = {"zones": list(ZONES), "strategy": "first", "zone_wait_s": 600}


def pool(zone: str) -> str:
    return f"{zone}:v5litepod:spot"


def parent(zone: str) -> str:
    return f"projects/grant/locations/{zone}"


def name(zone: str, own_id: str = "main") -> str:
    return f"{parent(zone)}/queuedResources/{own_id}"


def ours(cloud: Cloud) -> dict[str, str]:
    """The state of every queued resource of ours, by zone."""
    return {
        each["name"].split("/")[3]: each["state"]["state"]
        for each in cloud.control.alive()["queuedResources"]
        if tpu_request.is_owned(tpu_request.requested_node(each), OWNER)
    }


def asked(cloud: Cloud) -> list[str]:
    """The zones in the order in which they were asked."""
    return [line.name.split("/")[3] for line in cloud.control.journal() if line.state == "ACCEPTED"]


def most_at_once(cloud: Cloud) -> int:
    """How many of ours there were at once that nobody had asked to delete."""
    live: set[str] = set()
    most = 0
    for line in cloud.control.journal():
        if "/queuedResources/main" in line.name:
            (live.discard if line.state in ("DELETING", "gone") else live.add)(line.name)
            most = max(most, len(live))
    return most


@pytest.fixture
def sold_out(new_cloud: CloudFactory) -> Cloud:
    return new_cloud(capacity={pool(zone): 0 for zone in ZONES})


# --- which zone -------------------------------------------------------------------------------------------------------


def test_zones_are_asked_in_their_order_each_for_its_time_and_never_two_at_once(sold_out: Cloud) -> None:
    stack = Stack(cloud=sold_out)
    sold_out.at_sleep(140, lambda: sold_out.control.set_capacity(pool(C), 16))
    stack.up(**ANYWHERE, wait_s=6 * 3600)
    assert stack.state is not None
    assert (stack.state["zone"], stack.state["state"], len(stack.state["nodes"])) == (C, "ACTIVE", 1)
    turns = asked(sold_out)
    assert turns == [ZONES[turn % 3] for turn in range(len(turns))] and len(turns) > 4
    assert most_at_once(sold_out) == 1
    accepted = [line.moment for line in sold_out.control.journal() if line.state == "ACCEPTED"]
    assert all(600 <= later - first < 660 for first, later in itertools.pairwise(accepted))
    sold_out.control.advance(60)
    assert ours(sold_out) == {C: "ACTIVE"}
    assert "withdrawn in us-central1-a: nothing within 10 min" in sold_out.said
    # One that is where it may be stays there, and nothing is asked.
    sold_out.control.inject("unavailable", times=1)
    stack.up(**ANYWHERE, wait_s=6 * 3600)
    assert len(sold_out.control.alive()["faults"]) == 1


def test_a_race_asks_everywhere_at_once_and_keeps_the_first_that_comes(sold_out: Cloud) -> None:
    stack = Stack(cloud=sold_out)
    props = {**ANYWHERE, "strategy": "race"}
    for _ in range(2):  # given up, and asked for again
        stack.destroy()
        assert sold_out.alive() == []
        stack.up(**props, wait_s=60)
        assert ours(sold_out) == dict.fromkeys(ZONES, "WAITING_FOR_RESOURCES")
    assert stack.state is not None and stack.state["nodes"] == []
    sold_out.at_sleep(2, lambda: sold_out.control.set_capacity(pool(B), 16))
    stack.up(**props, wait_s=3600)
    assert (stack.state["zone"], stack.state["state"], stack.state["others"]) == (B, "ACTIVE", [])
    sold_out.control.advance(60)
    assert ours(sold_out) == {B: "ACTIVE"}
    assert asked(sold_out) == [*ZONES, *ZONES]  # each has kept its place in the queue
    stack.destroy()
    assert sold_out.alive() == []


@pytest.mark.parametrize(("refusals", "others"), [(20, []), (1000, [B])])
def test_a_zone_that_does_not_let_go_of_a_slice_is_given_time_after_the_slice_is_there(
    cloud: Cloud, refusals: int, others: list[str]
) -> None:
    stack = Stack(cloud=cloud)
    props = {**ANYWHERE, "zones": [A, B], "strategy": "race", "wait_s": 600}
    cloud.control.inject("unavailable", "queuedResources.delete", times=refusals)
    stack.up(**props)
    assert stack.state is not None and "could not be withdrawn in us-west4-a" in cloud.said
    assert (stack.state["zone"], len(stack.state["nodes"]), stack.state["others"]) == (A, 1, others)
    cloud.control.clear_faults()
    stack.refresh()
    assert ("us-west4-a as well; `pulumi up` withdraws that" in cloud.said) is bool(others)
    stack.up(**props)
    cloud.control.advance(60)
    assert ours(cloud) == {A: "ACTIVE"}


@pytest.mark.parametrize("strategy", ["first", "race"])
def test_a_zone_that_refuses_or_fails_is_passed_over_and_where_all_do_every_reason_is_told(
    new_cloud: CloudFactory, strategy: str
) -> None:
    cloud = new_cloud(quota={pool(A): 8}, capacity={pool(B): 0, pool(C): 0})
    props = {**ANYWHERE, "strategy": strategy, "zone_wait_s": 7200}

    def fail() -> None:
        cloud.control.fail(name(B), "There is no more capacity in the zone")
        cloud.control.set_capacity(pool(C), 16)

    cloud.at_sleep(3, fail)
    outputs = cloud.create(**props, wait_s=7200)
    assert (outputs["zone"], outputs["state"]) == (C, "ACTIVE")
    cloud.control.advance(60)
    assert ours(cloud) == {C: "ACTIVE"}
    cloud.delete(outputs)

    cloud.control.set_quota(pool(B), 8)
    cloud.control.set_capacity(pool(C), 0)
    cloud.at_sleep(3, lambda: cloud.control.fail(name(C), "no such network"))
    with pytest.raises(CloudTpuError) as caught:
        cloud.create(**props, wait_s=7200)
    for said in (f"  {A}: asking for", f"  {B}: asking for", f"  {C}: it is FAILED: no such network"):
        assert said in str(caught.value)
    cloud.control.advance(60)
    assert cloud.alive() == []


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        (("PERMISSION_DENIED", "INVALID_ARGUMENT", "OUT_OF_RANGE"), "INVALID_ARGUMENT"),
        (("PERMISSION_DENIED", "INVALID_ARGUMENT", "NOT_FOUND"), "RESOURCE_EXHAUSTED"),
    ],
)
def test_a_request_that_is_wrong_in_every_zone_is_wrong(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, answers: tuple[str, ...], status: str
) -> None:
    def ask(_: Any, spec: Any, **__: Any) -> None:
        raise CloudTpuError("no", dict(zip(ZONES, answers, strict=True))[spec.zone])

    monkeypatch.setattr(Lifecycle, "ask", ask)
    with pytest.raises(CloudTpuError) as caught:
        cloud.create(**ANYWHERE, wait_s=60)
    assert caught.value.status == status


@pytest.mark.parametrize("where", [{}, ANYWHERE])
def test_what_is_taken_back_before_it_is_there_is_told_from_a_refusal(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, where: Json
) -> None:
    lost = Look(kind="lost", state="SUSPENDED", reason="it is SUSPENDED", resource={}, nodes={})
    monkeypatch.setattr(Lifecycle, "ask", lambda *_, **__: "operation")
    monkeypatch.setattr(Lifecycle, "look", lambda *_: lost)
    monkeypatch.setattr(Client, "queued_resource", lambda *_, **__: {"name": "main"})
    monkeypatch.setattr(tpu_request, "is_owned", lambda *_: False)
    with pytest.raises(LostAgainError):
        cloud.create(**where, wait_s=60)


def test_what_is_being_served_may_take_longer_than_a_zones_time(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(delays=Delays(create_s=1800))
    assert cloud.create(**ANYWHERE, wait_s=7200)["zone"] == A
    assert asked(cloud) == [A]


def test_one_look_without_waiting_gives_each_zone_its_time_by_googles_clock(sold_out: Cloud) -> None:
    """As a program does that begins anew every minute and remembers nothing, whatever its own clock says."""
    for _ in range(25):
        outputs = sold_out.create(**ANYWHERE, wait_s=0)
        assert outputs["nodes"] == [] and ours(sold_out)[outputs["zone"]] != "DELETING"
        sold_out.control.advance(60)
    assert asked(sold_out) == [A, B, C] and most_at_once(sold_out) == 1
    sold_out.control.set_capacity(pool(C), 16)
    sold_out.control.advance(30)
    assert sold_out.create(**ANYWHERE, wait_s=0)["state"] == "ACTIVE"


def test_a_change_of_zones_moves_a_slice_only_from_a_zone_that_is_none_of_them_any_more() -> None:
    def found(before: Json, now: Json) -> tuple[bool, list[str]]:
        result = changes_between({"state": "ACTIVE", **before}, now)
        return bool(result.changes), list(result.replaces or [])

    nets = {A: "net-a", B: "net-b"}
    one = {"zone": A, "subnetwork": "net-a"}
    two = {"zone": A, "zones": [A, B], "subnetworks": nets}
    assert found(one, two) == (True, [])
    assert found({**two, "zone": B}, two) == (False, [])
    assert found({**two, "zone": B}, {**two, "zones": [A, B, C]}) == (True, [])
    assert found({**two, "zone": B}, {**two, "zones": [A, C]}) == (True, ["zone", "subnetwork"])
    assert found({**two, "zone": B}, one) == (True, ["zone", "subnetwork"])
    assert found(two, one) == (True, [])
    assert found({**two, "zone": B}, {**two, "subnetworks": {A: "other", B: "net-b"}}) == (True, [])
    assert found({**two, "zone": B}, {**two, "subnetworks": {A: "net-a", B: "other"}}) == (
        True,
        ["subnetwork"],
    )
    assert found({**two, "others": [B]}, two) == (True, [])


@pytest.mark.parametrize("strategy", ["first", "race"])
def test_one_that_has_lost_a_node_while_others_run_is_not_deleted_for_another_zone(
    cloud: Cloud, strategy: str
) -> None:
    stack = Stack(cloud=cloud)
    props = {**ANYWHERE, "strategy": strategy, "node_count": 2, "zone_wait_s": 60, "wait_s": 600}
    cloud.control.set_capacity(pool(A), 0)
    cloud.control.set_capacity(pool(C), 0)
    stack.up(**props)
    cloud.control.vanish(f"{parent(B)}/nodes/main-1")
    cloud.control.advance(60)
    cloud.control.set_capacity(pool(A), 64)
    for again in (lambda: cloud.create(**props), lambda: stack.up(**props, labels={"team": "nlp"})):
        with pytest.raises(CloudTpuError, match="its other nodes run"):
            again()
        assert ours(cloud) == {B: "ACTIVE"}


@pytest.mark.parametrize("refused", ["delete_queued_resource", "queued_resource"])
def test_a_zone_that_refuses_the_deletion_of_what_it_has_is_named_with_the_remedy_and_not_forgotten(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """refused: of the client; a zone may refuse even to be looked at, and the listing of all zones shows it."""
    stack = Stack(cloud=cloud)
    stack.up(**ANYWHERE, wait_s=600)
    Stack(cloud=cloud).up(zone=B, wait_s=600)  # as an interrupted race can leave it
    real = getattr(Client, refused)

    def denied(client: Client, full_name: str, **how: Any) -> Any:
        if f"/{B}/" in full_name:
            raise CloudTpuError(f"{full_name}: the caller has no permission", "PERMISSION_DENIED")
        return real(client, full_name, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Client, refused, denied)
        with pytest.raises(CloudTpuError, match=rf"{B}/queuedResources/main: the caller has no permission"):
            stack.destroy()
        assert stack.state is not None and ours(cloud).keys() == {B}
    stack.destroy()
    cloud.control.advance(60)
    assert ours(cloud) == {}


def test_a_zone_that_the_project_may_not_use_keeps_nothing_from_going(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = Stack(cloud=cloud)
    stack.up(**ANYWHERE, wait_s=600)
    real = Client.queued_resource

    def denied(client: Client, full_name: str, **how: Any) -> Any:
        if f"/{B}/" in full_name:
            raise CloudTpuError(f"{full_name}: the caller has no permission", "PERMISSION_DENIED")
        return real(client, full_name, **how)

    monkeypatch.setattr(Client, "queued_resource", denied)
    cloud.control.cut_off(B)
    with pytest.raises(
        CloudTpuError, match=f"It may be in {B} all the same: gcloud compute tpus queued-resources"
    ):
        stack.destroy()
    cloud.control.clear_faults()
    stack.destroy()
    assert ours(cloud) == {}


def test_what_is_nobodys_or_anothers_is_passed_over_and_left_alone(cloud: Cloud) -> None:
    cloud.put(owner="someone-else")  # in A
    cloud.control.advance(60)
    outputs = cloud.create(**ANYWHERE, wait_s=600)
    assert outputs["zone"] == B
    cloud.delete(outputs)
    assert cloud.state() == "ACTIVE"


# --- what is remembered -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["first", "race"])
def test_stock_outs_are_remembered_by_zone_and_hour_and_so_is_what_was_served(
    sold_out: Cloud, tmp_path: Path, strategy: str
) -> None:
    sold_out.control.advance(-sold_out.clock.now() % 3600)  # a full hour
    sold_out.at_sleep(150, lambda: sold_out.control.set_capacity(pool(B), 16))
    props = {**ANYWHERE, "strategy": strategy, "store_url": str(tmp_path)}
    sold_out.create(**props, wait_s=6 * 3600)
    hours = {offer.zone: hours for offer, hours in stock_outs.read(Documents(str(tmp_path))).items()}
    assert set(hours) == set(ZONES)
    assert all(len(hours[zone].out) >= 1 for zone in ZONES)
    assert [zone for zone in ZONES if hours[zone].served] == [B]
    # One that is taken over when it is there says nothing, and one zone by itself is remembered too.
    sold_out.create(**props, wait_s=600)
    sold_out.create(queued_resource_id="lone", zone=C, store_url=str(tmp_path), wait_s=900)
    again = {offer.zone: hours for offer, hours in stock_outs.read(Documents(str(tmp_path))).items()}
    assert again[B] == hours[B] and again[C].out


def test_a_store_that_does_not_answer_stops_nothing(sold_out: Cloud, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sold_out.at_sleep(20, lambda: sold_out.control.set_capacity(pool(A), 16))
    outputs = sold_out.create(**ANYWHERE, store_url=str(tmp_path / "file" / "x"), wait_s=7200)
    assert outputs["state"] == "ACTIVE" and sold_out.said.count("is not remembered") <= 3
    (tmp_path / stock_outs.NAME).write_text("1\n[]")
    assert sold_out.create(**ANYWHERE, store_url=str(tmp_path), wait_s=600)["state"] == "ACTIVE"


# --- whatever happens -------------------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """Pulumi, and a keeper that makes a lost slice again, one at a time; both are cut off between any two requests.

    kept: the zone of the slice that a success has handed over, which only a `destroy` or a loss may take away.
    """

    @initialize(chips=st.tuples(*[st.sampled_from([0, 16, 32])] * 3))
    def start(self, chips: tuple[int, ...]) -> None:
        clock = Clock(frozen_at=1_800_000_000.0)
        self.api = SimulatedCloud(clock=clock, capacity=dict(zip(map(pool, ZONES), chips, strict=True)))
        self.api.__enter__()
        self.cloud = Cloud(self.api, clock)
        self.stack = Stack(cloud=self.cloud)
        self.props: Json = dict(ANYWHERE)
        self.kept: str | None = None
        self.seen = 0  # of the journal
        self.call = self.cloud.client._call

    @rule(
        strategy=st.sampled_from(["first", "race"]),
        zones=st.sampled_from([ZONES, ZONES, (B, C), (C, A)]),
        labels=st.sampled_from([{}, {"team": "nlp"}]),
        wait_s=st.sampled_from([0, 60, 1500]),
        cut=st.none() | st.tuples(st.integers(1, 25), st.booleans()),
    )
    def up(self, cut: tuple[int, bool] | None, wait_s: int, **props: Any) -> None:
        zones = list(props.pop("zones"))
        self.props |= {**props, "zones": zones, "zone": zones[0]}
        if self.kept not in zones:
            self.kept = None  # it is replaced
        if self._act(lambda: self.stack.up(**self.props, wait_s=wait_s), cut):
            assert self.stack.state is not None
            self._hand_over(self.stack.state)

    @rule(cut=st.none() | st.tuples(st.integers(1, 25), st.booleans()))
    def keep(self, cut: tuple[int, bool] | None) -> None:
        """A keeper's look, which remembers where the slice was."""
        home = self.kept or self.props["zones"][0]
        outputs: list[Json] = []
        self._act(lambda: outputs.append(self.cloud.create(**self.props | {"zone": home}, wait_s=0)), cut)
        if outputs:
            self._hand_over(outputs[0])

    @rule()
    def refresh(self) -> None:
        self._act(self.stack.refresh, None)

    @rule(cut=st.none() | st.tuples(st.integers(1, 12), st.booleans()))
    def destroy(self, cut: tuple[int, bool] | None) -> None:
        self.kept = None
        zones = (self.stack.state or {}).get("zones", ())
        if self._act(self.stack.destroy, cut):
            assert not zones or not ours(self.cloud)

    @rule(zone=st.sampled_from(ZONES), event=st.sampled_from(["preempt", "fail", "vanish"]))
    def befall(self, zone: str, event: str) -> None:
        try:
            getattr(self.api.control, event)(name(zone))
        except (ApiError, ValueError):
            return
        if zone == self.kept:
            self.kept = None
        self.seen = len(self.api.control.journal())

    @rule(
        zone=st.sampled_from(ZONES), chips=st.sampled_from([0, 16, 32]), seconds=st.sampled_from([1, 60, 900])
    )
    def capacity_changes(self, zone: str, chips: int, seconds: float) -> None:
        self.api.control.set_capacity(pool(zone), chips)
        self.api.control.advance(seconds)

    @rule(kind=st.sampled_from(["unavailable", "cut-before", "cut-after"]), times=st.integers(1, 3))
    def inject(self, kind: Any, times: int) -> None:
        self.api.control.inject(kind, "*", times)

    def _act(self, action: Callable[[], None], cut: tuple[int, bool] | None) -> bool:
        """Whether it succeeded."""
        left, before = cut or (0, False)

        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and before:
                raise PowerCut
            answer = self.call(*arguments, **more)
            if left == 0:
                raise PowerCut
            return answer

        self.cloud.client._call = call  # type: ignore[method-assign]
        try:
            action()
            return True
        except (CloudTpuError, PowerCut):
            return False
        finally:
            self.cloud.client._call = self.call  # type: ignore[method-assign]

    def _hand_over(self, outputs: Json) -> None:
        """An ACTIVE slice is the only one that there is, or the outputs say what is left to go."""
        if outputs["state"] != "ACTIVE":
            return
        self._no_slice_was_lost()
        live = {zone for zone, state in ours(self.cloud).items() if state != "DELETING"}
        self.kept = outputs["zone"] if outputs["zone"] in live else None
        assert live - {outputs["zone"]} <= set(outputs["others"]), (live, outputs["others"])

    @invariant()
    def _no_slice_was_lost(self) -> None:
        if not hasattr(self, "api"):
            return
        journal = self.api.control.journal()
        for line in journal[self.seen :]:
            if self.kept is not None and line.name == name(self.kept):
                assert line.state != "DELETING", line
        self.seen = len(journal)

    def teardown(self) -> None:
        """Once all is well, one `up` makes one slice of whatever there is, and a `destroy` leaves nothing."""
        if not hasattr(self, "api"):
            return
        try:
            self.api.control.clear_faults()
            for zone in ZONES:
                self.api.control.set_capacity(pool(zone), 64)
            self.stack.refresh()
            self.props |= {"zones": list(ZONES), "zone": A}
            self.stack.up(**self.props, wait_s=3600)
            self.api.control.advance(60)
            assert list(ours(self.cloud).values()) == ["ACTIVE"]
            self.stack.destroy()
            assert self.cloud.alive() == []
        finally:
            self.cloud.client.close()
            self.api.__exit__(None, None, None)


TestMachine = machine_of(Machine, 40)
TestMachineForLonger = pytest.mark.slow(pytest.mark.nightly(machine_of(Machine, 600)))
