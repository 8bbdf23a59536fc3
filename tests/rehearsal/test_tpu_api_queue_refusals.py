"""What the simulator's queue refuses: names that are taken, more than the quota, what contradicts itself."""

from typing import Any

import pytest

SPOT = "us-central1-a:v5litepod:spot"


def test_a_name_that_is_taken_is_refused_until_it_is_free(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 0})
    lab.enqueue("q")
    assert lab.refused(lambda: lab.enqueue("q", lab.wanted("other")))["status"] == "ALREADY_EXISTS"
    # Also the name of a node that another one is still waiting for.
    assert lab.refused(lambda: lab.enqueue("other", lab.wanted("q-node")))["code"] == 409
    assert lab.refused(lambda: lab.create_node("q-node"))["code"] == 409
    lab.delete_queued("q")
    lab.control.advance(2)
    lab.enqueue("q")


def test_a_request_sent_again_with_its_request_id_is_carried_out_once(lab: Any) -> None:
    first = lab.enqueue("q", requestId="6d2e")
    again = lab.enqueue("q", requestId="6d2e")
    assert again["name"] == first["name"]
    assert lab.refused(lambda: lab.enqueue("another", requestId="6d2e"))["status"] == "INVALID_ARGUMENT"
    assert lab.refused(lambda: lab.enqueue("q"))["status"] == "ALREADY_EXISTS"


def test_more_than_the_quota_is_refused_at_once_and_what_is_dead_counts_until_it_is_deleted(
    new_lab: Any,
) -> None:
    lab = new_lab(quota={SPOT: 16})
    lab.active("q")
    lab.control.preempt("q")
    lab.control.advance(60)
    assert lab.queue_state("q") == "SUSPENDED"
    error = lab.refused(lambda: lab.enqueue("next"))
    assert (error["code"], error["status"]) == (429, "RESOURCE_EXHAUSTED")
    assert error["message"] == (
        "Quota limit 'TPUV5sLitepodPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded."
        " Limit: 16 in zone us-central1-a."
    )
    lab.delete_queued("q")
    lab.control.advance(2)
    lab.active("next")


def test_a_queued_resource_and_its_nodes_count_against_the_quota_once(new_lab: Any) -> None:
    lab = new_lab(quota={SPOT: 32})
    lab.active("q")
    lab.active("next")
    # A quota is each project's own.
    elsewhere = lab.wanted("n")
    elsewhere["tpu"]["nodeSpec"][0]["parent"] = parent = "projects/another/locations/us-central1-a"
    lab.queue.create(parent=parent, queuedResourceId="q", body=elsewhere).execute()
    assert lab.refused(lambda: lab.enqueue("too-many"))["status"] == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"guaranteed": {}}, "one union"),
        ({"tpu": {}}, "ask for a node"),
        ({"queueingPolicy": {"validUntilDuration": "9s", "validAfterDuration": "1s"}}, "give one of them"),
        ({"queueingPolicy": {"validUntilTime": "2001-01-01T00:00:00Z"}}, "ended already"),
    ],
)
def test_what_contradicts_itself_is_refused(lab: Any, changes: dict[str, Any], said: str) -> None:
    error = lab.refused(lambda: lab.enqueue("q", lab.wanted("n") | changes))
    assert error["status"] == "INVALID_ARGUMENT"
    assert said in error["message"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parent": "projects/grant/locations/us-west4-a"}, "not the queued resource's own"),
        ({"multisliceParams": {"nodeCount": 2}}, "give one of them"),
        ({"nodeId": "a/b"}, "is no id"),
    ],
)
def test_a_node_that_contradicts_its_queued_resource_is_refused(
    lab: Any, changes: dict[str, Any], said: str
) -> None:
    body = lab.wanted("n")
    body["tpu"]["nodeSpec"][0] |= changes
    error = lab.refused(lambda: lab.enqueue("q", body))
    assert error["status"] == "INVALID_ARGUMENT"
    assert said in error["message"]
