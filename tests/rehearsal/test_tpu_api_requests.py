"""How the simulator is asked: what Google's discovery document refuses, the program, its control over HTTP."""

import http.client
import json
import logging
import os
import re
import signal
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from rehearsal.tpu_api import Node, discovery
from rehearsal.tpu_api.__main__ import main
from rehearsal.tpu_api.server import CHANGES

ROOT = Path(__file__).resolve().parents[2]
NODES = "/v2/projects/grant/locations/us-central1-a/nodes"
QUEUE = "/v2/projects/grant/locations/us-central1-a/queuedResources"


def send(
    lab: Any, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, dict[str, Any], http.client.HTTPResponse]:
    """A request as it is, not as the client would allow it."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(lab.api.url).netloc, timeout=10)
    try:
        content = body if isinstance(body, str) or body is None else json.dumps(body)
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read()), response
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v1/projects/grant/locations"),
        ("GET", "/v2/projects/grant"),
        ("PUT", f"{NODES}/n"),
        ("PATCH", f"{QUEUE}/q"),
        ("POST", f"{NODES}/n:explode"),
    ],
)
def test_a_method_or_path_that_is_not_in_the_document_is_refused(lab: Any, method: str, path: str) -> None:
    code, answer, _ = send(lab, method, path, {})
    assert code == answer["error"]["code"] == 400
    assert answer["error"]["status"] == "INVALID_ARGUMENT"


def test_a_known_path_with_another_method_is_told_which_there_are(lab: Any) -> None:
    _, answer, _ = send(lab, "PUT", f"{NODES}/n", {})
    assert "DELETE, GET, PATCH only" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"colour": "red"}, "Node.colour", "unknown name"),
        ({"network_config": {}}, "Node.network_config", "unknown name"),
        ({"networkConfig": {"ports": 3}}, "Node.networkConfig.ports", "unknown name"),
        ({"tags": "one"}, "Node.tags", "is no array"),
        ({"tags": ["one", 2]}, "Node.tags[1]", "is no string"),
        ({"labels": {"a": 1}}, "Node.labels.a", "is no string"),
        ({"networkConfig": []}, "Node.networkConfig", "is no NetworkConfig object"),
        ({"networkConfig": {"enableExternalIps": "yes"}}, "Node.networkConfig.enableExternalIps", "no boolean"),
        ({"networkConfig": {"queueCount": 2**31}}, "Node.networkConfig.queueCount", "is no int32"),
        ({"networkConfig": {"queueCount": True}}, "Node.networkConfig.queueCount", "is no integer"),
        ({"health": "POORLY"}, "Node.health", "choose one of"),
        ({"dataDisks": [{"mode": "APPEND"}]}, "Node.dataDisks[0].mode", "READ_WRITE, READ_ONLY"),
        ({"runtimeVersion": ""}, "Node.runtimeVersion", "is required"),
        ({"acceleratorConfig": {"type": "V4"}}, "Node.acceleratorConfig.topology", "is required"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_as_the_document_says_is_named_and_refused(
    lab: Any, change: dict[str, Any], field: str, said: str
) -> None:
    code, answer, _ = send(lab, "POST", f"{NODES}?nodeId=n", lab.spec() | change)
    assert code == 400
    (violation,) = answer["error"]["details"][0]["fieldViolations"]
    assert violation["field"] == field
    assert said in violation["description"]


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"validUntilDuration": "1h"}, "google-duration"),
        ({"validUntilDuration": 3600}, "is no string"),
        ({"validUntilTime": "tomorrow"}, "google-datetime"),
        ({"validUntilTime": "2026-11-20T21:45:00"}, "google-datetime"),
    ],
)
def test_a_time_or_duration_must_be_written_as_google_writes_it(
    lab: Any, policy: dict[str, Any], said: str
) -> None:
    error = lab.refused(lambda: lab.enqueue("q", lab.wanted("n", queueingPolicy=policy)))
    assert said in error["message"]


def test_all_that_is_wrong_is_said_at_once(lab: Any) -> None:
    _, answer, _ = send(lab, "POST", f"{NODES}?nodeID=n", {"colour": "red"})
    fields = {found["field"] for found in answer["error"]["details"][0]["fieldViolations"]}
    assert fields == {"nodeID", "Node.colour", "Node.runtimeVersion"}


@pytest.mark.parametrize(
    ("method", "path", "field"),
    [
        ("POST", f"{NODES}?nodeId=n&nodeId=m", "nodeId"),
        ("GET", f"{QUEUE}?pageSize=many", "pageSize"),
        ("GET", f"{QUEUE}?alt=proto", "alt"),
        ("GET", f"{QUEUE}?fields=name", "fields"),
        ("DELETE", f"{QUEUE}/q?force=yes", "force"),
        ("PATCH", f"{NODES}/n", "updateMask"),
    ],
)
def test_a_query_parameter_that_is_not_as_the_document_says_is_refused(
    lab: Any, method: str, path: str, field: str
) -> None:
    code, answer, _ = send(lab, method, path, lab.spec() if method == "POST" else None)
    assert code == 400
    assert answer["error"]["details"][0]["fieldViolations"][0]["field"] == field


@pytest.mark.parametrize("body", ["{", "[]", "7", '"text"'])
def test_a_body_that_is_no_json_object_is_refused(lab: Any, body: str) -> None:
    code, answer, _ = send(lab, "POST", f"{NODES}?nodeId=n", body)
    assert (code, answer["error"]["status"]) == (400, "INVALID_ARGUMENT")


def test_a_body_where_the_method_takes_none_is_refused(lab: Any) -> None:
    assert send(lab, "GET", QUEUE, {"name": "n"})[0] == 400


def test_output_only_fields_of_a_request_are_ignored_as_google_documents(lab: Any) -> None:
    # Google's own provider for Pulumi and Terraform sends `name` with a node.
    lab.create_node("n", name="another", state="READY", queuedResource="nobody", createTime="never")
    node = lab.node("n")
    assert node["name"] == f"{lab.zone}/nodes/n"
    assert node["state"] == "CREATING"
    assert "queuedResource" not in node


def test_every_answer_says_that_it_is_a_simulators(lab: Any) -> None:
    for path in (QUEUE, "/nowhere", "/_control/alive"):
        assert "not Google" in (send(lab, "GET", path)[2].getheader("X-Rehearsal") or "")


def test_a_token_is_taken_from_anybody_and_logged_nowhere(
    lab: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        for headers in ({}, {"Authorization": "Bearer a-secret"}):
            assert send(lab, "GET", f"{QUEUE}?access_token=a-secret", **headers)[0] == 200
    printed = capfd.readouterr()
    assert "a-secret" not in caplog.text + printed.out + printed.err


def test_an_answer_that_the_document_does_not_allow_is_a_bug_that_names_the_field(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.ready_node("n")
    rendered = Node.render
    monkeypatch.setattr(Node, "render", lambda self: rendered(self) | {"state": "FINE"})
    error = lab.refused(lambda: lab.node("n"))
    assert (error["code"], error["status"]) == (500, "INTERNAL")
    assert "Node.state" in error["message"]


def test_the_response_inside_an_operation_is_checked_by_the_schema_that_it_names() -> None:
    response = {"@type": "type.googleapis.com/google.cloud.tpu.v2.Node", "colour": "red"}
    wrong = discovery.shipped().wrong("Operation", {"name": "o", "response": response})
    assert [at for at, _ in wrong] == ["Operation.response.colour"]


def test_nothing_listens_beyond_loopback(lab: Any) -> None:
    assert lab.api.url.startswith("http://127.0.0.1:")


def test_every_method_of_the_document_is_there(lab: Any) -> None:
    for method in discovery.shipped().methods:
        path = method.path.pattern.replace("(?P<resource>", "").replace(")", "").replace("\\", "")
        for part in ("grant", "us-central1-a", "n"):
            path = path.replace("[^/:?]+", part, 1)
        code, answer, _ = send(lab, method.http_method, f"/{path}?alt=json", {} if method.request else None)
        assert "bug of the simulator" not in json.dumps(answer), (method.id, answer)
        assert code in (200, 400, 404, 501), (method.id, answer)


def ask(url: str, method: str, verb: str, body: object = None) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=10)
    try:
        connection.request(method, f"/_control/{verb}", None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_the_program_says_what_it_is_and_where_and_ends_at_a_signal() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "rehearsal.tpu_api", "--capacity", "us-central1-a:v5litepod:spot=64"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as program:  # fmt: skip
        try:
            assert program.stdout is not None
            said = program.stdout.readline()
            assert "not Google" in said
            url = re.findall(r"http://127\.0\.0\.1:\d+", said)[0]
            code, answer = ask(url, "GET", "alive")
            assert code == 200
            assert answer["capacity"] == {"us-central1-a:v5litepod:spot": {"chips": 64, "held": 0}}
            program.send_signal(signal.SIGTERM)
            assert program.wait(10) == 0
        finally:
            program.kill()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("us-central1-a:v5litepod:spot", "write ZONE:PREFIX:TIER=CHIPS"),
        ("us-central1-a:v5litepod=4", "write ZONE:PREFIX:TIER"),
        ("us-central1-a:v5litepod:cheap=4", "on-demand, spot, reserved"),
        ("us-central1-a:v5e:spot=4", "types begin with"),
    ],
)
def test_a_capacity_that_makes_no_sense_is_refused_with_what_would(
    capsys: pytest.CaptureFixture[str], option: str, said: str
) -> None:
    assert main(["--capacity", option]) == 2
    assert said in capsys.readouterr().err


def test_every_change_can_be_made_over_http(lab: Any) -> None:
    lab.active("q")
    lab.ready_node("n")
    spot = "us-central1-a:v5litepod:spot"
    bodies: dict[str, dict[str, Any]] = {
        "set_capacity": {"pool": spot, "chips": 16},
        "set_quota": {"pool": spot, "chips": 160},
        "set_guest_attribute": {"name": "n", "worker": 0, "namespace": "a", "key": "b", "value": "c"},
        "maintain": {"name": "n", "seconds": 3},
        "preempt": {"name": "q", "leave_nodes": True},
        "terminate": {"name": "n"},
        "vanish": {"name": "n"},
        "inject": {"kind": "unavailable", "methods": "nodes.*", "times": 2},
        "clear_faults": {},
        "thaw": {},
        "freeze": {},
        "advance": {"seconds": 60},
    }
    for verb, body in bodies.items():
        assert ask(lab.api.url, "POST", verb, body) == (200, {}), verb
    lab.enqueue("late")
    assert ask(lab.api.url, "POST", "fail", {"name": "late"}) == (200, {})
    assert {*bodies, "fail"} == set(CHANGES)
    journal = ask(lab.api.url, "GET", "journal")[1]["journal"]
    assert [line["state"] for line in journal if line["name"].endswith("nodes/n")] == [
        "CREATING", "READY", "REPAIRING", "TERMINATED", "gone",
    ]  # fmt: skip
    assert lab.queue_state("q") == "SUSPENDED"


@pytest.mark.parametrize(
    ("method", "verb", "body", "code", "said"),
    [
        ("POST", "explode", {}, 404, "GET alive, GET journal, POST set_capacity"),
        ("GET", "preempt", None, 404, "POST set_capacity"),
        ("POST", "preempt", {}, 400, "missing a required argument: 'name'"),
        ("POST", "preempt", {"name": "q", "how": "fast"}, 400, "unexpected keyword argument 'how'"),
        ("POST", "preempt", {"name": 7}, 400, "name=7 has the wrong type"),
        ("POST", "advance", {"seconds": True}, 400, "seconds=True has the wrong type"),
        ("POST", "inject", {"kind": "explode"}, 400, "kind='explode' has the wrong type"),
        ("POST", "advance", [], 400, "no JSON object"),
        ("POST", "vanish", {"name": "nobody"}, 404, "no such node or queued resource"),
        ("POST", "set_capacity", {"pool": "here", "chips": 1}, 400, "write ZONE:PREFIX:TIER"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(
    lab: Any, method: str, verb: str, body: object, code: int, said: str
) -> None:
    answered, answer = ask(lab.api.url, method, verb, body)
    assert answered == code
    assert said in answer["error"]["message"]


def test_the_readme_names_every_change_of_the_control_interface() -> None:
    readme = (ROOT / "rehearsal" / "README.md").read_text()
    assert [verb for verb in CHANGES if f"`{verb}`" not in readme] == []
