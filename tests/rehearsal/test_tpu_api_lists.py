"""What the simulator lists: nodes and queued resources in pages, operations, zones, hardware, runtimes."""

from typing import Any

import pytest


@pytest.mark.parametrize(("collection", "key"), [("nodes", "nodes"), ("queue", "queuedResources")])
def test_a_list_in_pages_is_the_whole_list(new_lab: Any, collection: str, key: str) -> None:
    lab = new_lab()
    for number in range(5):
        lab.create_node(f"n{number}") if key == "nodes" else lab.enqueue(f"n{number}")
    methods = getattr(lab, collection)
    found, pages = [], 0
    request = methods.list(parent=lab.zone, pageSize=2)
    while request is not None:
        answer = request.execute()
        found += [each["name"].rpartition("/")[2] for each in answer.get(key, [])]
        pages += 1
        request = methods.list_next(request, answer)
    assert (found, pages) == (["n0", "n1", "n2", "n3", "n4"], 3)


def test_a_page_begins_where_the_one_before_ended_whatever_was_deleted_meanwhile(lab: Any) -> None:
    for number in range(4):
        lab.ready_node(f"n{number}")
    first = lab.nodes.list(parent=lab.zone, pageSize=2).execute()
    lab.control.vanish("n0")
    second = lab.nodes.list(parent=lab.zone, pageSize=2, pageToken=first["nextPageToken"]).execute()
    assert [node["name"].rpartition("/")[2] for node in second["nodes"]] == ["n2", "n3"]


def test_a_list_is_of_its_project_and_zone_and_a_dash_stands_for_all_zones(lab: Any) -> None:
    for parent in ("projects/grant/locations/us-central1-a", "projects/grant/locations/us-west4-a",
                   "projects/another/locations/us-central1-a"):  # fmt: skip
        lab.nodes.create(parent=parent, nodeId="n", body=lab.spec()).execute()

    def listed(parent: str) -> list[str]:
        nodes = lab.nodes.list(parent=parent).execute().get("nodes", [])
        return [node["name"].split("/")[3] for node in nodes]

    assert listed("projects/grant/locations/us-central1-a") == ["us-central1-a"]
    assert listed("projects/grant/locations/-") == ["us-central1-a", "us-west4-a"]
    assert listed("projects/grant/locations/us-south1-a") == []


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({"pageToken": "7b7d"}, "INVALID_ARGUMENT"),
        ({"pageToken": "nonsense"}, "INVALID_ARGUMENT"),
        ({"pageSize": -1}, "INVALID_ARGUMENT"),
    ],
)
def test_a_page_that_no_list_gave_is_refused(lab: Any, query: dict[str, Any], status: str) -> None:
    assert lab.refused(lab.nodes.list(parent=lab.zone, **query))["status"] == status


def test_a_zone_that_is_not_there_is_refused_as_google_does(lab: Any) -> None:
    error = lab.refused(lab.nodes.list(parent="projects/grant/locations/us-nowhere1-a"))
    assert (error["code"], error["status"]) == (403, "PERMISSION_DENIED")


def test_every_zone_of_the_catalogue_is_a_location_and_those_of_named_pools_too(new_lab: Any) -> None:
    lab = new_lab(capacity={"mars-north1-a:v6e:spot": 8})
    answer = lab.locations.list(name="projects/grant").execute()
    zones = [location["locationId"] for location in answer["locations"]]
    assert {"us-central2-b", "europe-west4-b", "mars-north1-a"} <= set(zones)
    name = "projects/grant/locations/us-central2-b"
    assert lab.locations.get(name=name).execute()["locationId"] == "us-central2-b"


def test_a_zone_lists_the_accelerator_types_that_can_be_created_there(lab: Any) -> None:
    types = lab.locations.acceleratorTypes()
    found = types.list(parent="projects/grant/locations/us-central2-b").execute()["acceleratorTypes"]
    assert all(each["type"].startswith("v4-") for each in found)
    (v4_8,) = [each for each in found if each["type"] == "v4-8"]
    assert v4_8["acceleratorConfigs"] == [{"type": "V4", "topology": "2x2x1"}]
    assert types.get(name=v4_8["name"]).execute() == v4_8
    error = lab.refused(types.get(name=f"{lab.zone}/acceleratorTypes/v4-8"))
    assert error["status"] == "NOT_FOUND"


def test_runtime_versions_are_listed_and_can_be_looked_up(lab: Any) -> None:
    versions = lab.locations.runtimeVersions()
    found = versions.list(parent=lab.zone).execute()["runtimeVersions"]
    assert "v2-alpha-tpuv5-lite" in [each["version"] for each in found]
    assert versions.get(name=found[0]["name"]).execute() == found[0]
    error = lab.refused(versions.get(name=f"{lab.zone}/runtimeVersions/none"))
    assert error["status"] == "NOT_FOUND"


def test_operations_are_listed_and_can_be_forgotten(lab: Any) -> None:
    operation = lab.create_node("n")
    listed = lab.operations.list(name=lab.zone).execute()["operations"]
    assert [each["name"] for each in listed] == [operation["name"]]
    lab.operations.delete(name=operation["name"]).execute()
    assert lab.refused(lambda: lab.operation(operation))["status"] == "NOT_FOUND"
    lab.control.advance(60)
    assert lab.node_state("n") == "READY"  # forgetting is not cancelling


def test_cancelling_gives_up_a_node_that_is_being_created(lab: Any) -> None:
    operation = lab.create_node("n")
    lab.operations.cancel(name=operation["name"]).execute()
    cancelled = lab.operation(operation)
    assert cancelled["error"]["code"] == 1
    assert cancelled["metadata"]["cancelRequested"] is True
    assert lab.refused(lambda: lab.node("n"))["code"] == 404


def test_cancelling_anything_else_changes_nothing_as_google_allows(lab: Any) -> None:
    lab.ready_node("n")
    operation = lab.delete_node("n")
    lab.operations.cancel(name=operation["name"]).execute()
    lab.control.advance(2)
    assert "error" not in lab.operation(operation)


@pytest.mark.parametrize("query", [{"filter": "done=true"}, {"returnPartialSuccess": True}])
def test_what_the_simulator_can_not_do_it_says_instead_of_ignoring_it(
    lab: Any, query: dict[str, Any]
) -> None:
    error = lab.refused(lab.operations.list(name=lab.zone, **query))
    assert (error["code"], error["status"]) == (501, "UNIMPLEMENTED")
