"""Errors that the simulator makes on purpose, the clock, what happens behind one's back, many clients at once."""

import concurrent.futures
import http.client
import json
import threading
import time
import urllib.parse
from typing import Any

import pytest

from rehearsal.clock import Clock
from rehearsal.cloud import Delays
from rehearsal.tpu_api import TpuApi

NODES = "/v2/projects/grant/locations/us-central1-a/nodes"


def post_once(lab: Any, path: str, body: object) -> int:
    """The answer's code, from a client that never tries again."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(lab.api.url).netloc, timeout=10)
    try:
        connection.request("POST", path, json.dumps(body))
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("kind", "code", "status"),
    [("too-many-requests", 429, "RESOURCE_EXHAUSTED"), ("unavailable", 503, "UNAVAILABLE")],
)
def test_the_next_requests_of_a_method_are_refused_and_no_others(
    lab: Any, kind: str, code: int, status: str
) -> None:
    lab.control.inject(kind, methods="nodes.create", times=2)
    lab.enqueue("q")
    for _ in range(2):
        error = lab.refused(lambda: lab.create_node("n"))
        assert (error["code"], error["status"]) == (code, status)
    lab.create_node("n")


def test_a_pattern_hits_every_method_that_it_names(lab: Any) -> None:
    lab.control.inject("unavailable", methods="queuedResources.*", times=2)
    assert lab.refused(lambda: lab.enqueue("q"))["code"] == 503
    assert lab.refused(lab.queue.list(parent=lab.zone))["code"] == 503


def test_faults_that_have_not_happened_can_be_taken_back(lab: Any) -> None:
    lab.control.inject("unavailable", times=9)
    lab.control.clear_faults()
    assert lab.control.alive()["faults"] == []
    lab.enqueue("q")


@pytest.mark.parametrize(("kind", "nodes"), [("cut-before", 0), ("cut-after", 1)])
def test_a_connection_is_cut_before_or_after_the_request_was_carried_out(
    lab: Any, kind: str, nodes: int
) -> None:
    lab.control.inject(kind)
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        post_once(lab, f"{NODES}?nodeId=n", lab.spec())
    assert len(lab.control.alive()["nodes"]) == nodes


def test_googles_client_sends_a_create_again_by_itself_when_its_answer_is_lost(lab: Any) -> None:
    # httplib2 does so once: a create whose answer is lost comes back as "already exists", not as a broken connection.
    lab.control.inject("cut-after")
    assert lab.refused(lambda: lab.enqueue("q"))["status"] == "ALREADY_EXISTS"
    assert lab.queue_state("q") == "ACCEPTED"


def test_with_a_request_id_a_create_whose_answer_is_lost_is_answered_the_second_time(lab: Any) -> None:
    lab.control.inject("cut-after")
    assert lab.enqueue("q", requestId="6d2e")["metadata"]["verb"] == "create"
    assert len(lab.control.alive()["queuedResources"]) == 1


def test_a_slow_answer_comes_after_its_time_and_holds_up_nobody_else(lab: Any) -> None:
    lab.control.inject("slow", methods="nodes.create", seconds=0.5)
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        slow = pool.submit(post_once, lab, f"{NODES}?nodeId=n", lab.spec())
        while not lab.control.alive()["nodes"]:  # it is carried out first
            assert time.monotonic() - started < 10
        assert lab.node_state("n") == "CREATING"
        assert not slow.done()
        assert slow.result() == 200
    assert time.monotonic() - started >= 0.5


def test_closing_does_not_wait_for_slow_answers_or_idle_connections() -> None:
    with TpuApi() as api:
        netloc = urllib.parse.urlsplit(api.url).netloc
        api.control.inject("slow", methods="nodes.list", seconds=600.0)
        slow, idle = http.client.HTTPConnection(netloc), http.client.HTTPConnection(netloc)
        slow.request("GET", NODES)
        idle.connect()
        started = time.monotonic()
    assert time.monotonic() - started < 10
    assert [thread for thread in threading.enumerate() if "process_request" in thread.name] == []
    slow.close()
    idle.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"kind": "explode"}, "choose one of"), ({"kind": "slow", "seconds": -1}, "give 0 to 3600"),
     ({"kind": "slow", "times": 0}, "give 1 or more")],
)  # fmt: skip
def test_a_fault_that_makes_no_sense_is_refused(lab: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lab.control.inject(**arguments)


def test_what_vanishes_is_gone_without_an_operation(lab: Any) -> None:
    lab.ready_node("n")
    lab.active("q")
    lab.active("whole")
    operations = len(lab.operations.list(name=lab.zone).execute()["operations"])
    for name in ("n", "q-node", "whole"):
        lab.control.vanish(name)
    lab.control.advance(60)
    assert lab.control.alive()["nodes"] == []
    assert lab.queue_state("q") == "SUSPENDED"
    assert lab.refused(lambda: lab.queued("whole"))["code"] == 404
    assert len(lab.operations.list(name=lab.zone).execute()["operations"]) == operations


def test_a_request_can_fail_late(lab: Any) -> None:
    lab.enqueue("q")
    lab.control.advance(2)
    assert lab.queue_state("q") == "PROVISIONING"
    lab.control.fail("q", "the network is not there")
    assert lab.queued("q")["state"]["failedData"]["error"]["message"] == "the network is not there"
    assert lab.control.alive()["nodes"] == []


def test_a_short_name_that_two_have_must_be_said_in_full(lab: Any) -> None:
    lab.active("same", lab.wanted("same"))
    with pytest.raises(ValueError, match="give the full name"):
        lab.control.preempt("same")
    lab.control.preempt(f"{lab.zone}/nodes/same")
    assert lab.queue_state("same") == "SUSPENDING"


def test_what_comes_due_in_one_jump_happens_each_at_its_own_moment(lab: Any) -> None:
    lab.enqueue("q")
    lab.control.advance(1000)
    moments = {line.state: line.moment - 1_800_000_000.0 for line in lab.control.journal()}
    delays = Delays()
    assert moments["WAITING_FOR_RESOURCES"] == delays.accept_s
    assert moments["ACTIVE"] == delays.accept_s + delays.create_s


def test_a_clock_that_thaws_goes_on_from_where_it_stood() -> None:
    clock = Clock(frozen_at=1000.0)
    clock.advance(5)
    assert clock.now() == 1005.0
    clock.thaw()
    assert 1005.0 <= clock.now() < 1065.0
    clock.freeze()
    assert clock.now() == clock.now()
    with pytest.raises(ValueError, match="forward only"):
        clock.advance(-1)


def test_chips_that_are_taken_away_take_no_node_and_are_missed_by_the_next(new_lab: Any) -> None:
    lab = new_lab(capacity={"us-central1-a:v5litepod:spot": 32})
    lab.active("q")
    lab.control.set_capacity("us-central1-a:v5litepod:spot", 0)
    lab.enqueue("next")
    lab.control.advance(60)
    assert (lab.queue_state("q"), lab.queue_state("next")) == ("ACTIVE", "WAITING_FOR_RESOURCES")
    assert lab.control.alive()["capacity"]["us-central1-a:v5litepod:spot"] == {"chips": 0, "held": 16}


def test_of_many_clients_that_ask_at_once_for_one_name_one_gets_it(new_lab: Any) -> None:
    lab = new_lab(capacity={"us-central1-a:v5litepod:on-demand": 64})

    def create(number: int) -> int:
        return post_once(lab, f"{NODES}?nodeId=n{number % 4}", lab.spec())

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        codes = sorted(pool.map(create, range(32)))
    assert codes == [200] * 4 + [409] * 28
    lab.control.advance(60)
    assert len(lab.control.alive()["nodes"]) == 4
