"""The simulator as a person has it: the program, and the control interface over HTTP."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from rehearsal import server, tpu_api

ROOT = Path(__file__).resolve().parents[2]


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
    assert tpu_api.main(["--capacity", option]) == 2
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
    assert {*bodies, "fail"} == set(server.CHANGES)
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
    assert [verb for verb in server.CHANGES if f"`{verb}`" not in readme] == []
