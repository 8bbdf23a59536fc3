"""The hub serves the hosts of its own attempt, each of them once, and nobody else."""

from __future__ import annotations

import contextlib
import json
import socket

from tests.host.conftest import until
from tests.host.lifeline.hosts import LIVE, UNTIL_ENOUGH, Hosts, left_over


def test_a_port_that_is_taken_fails_the_start_and_starts_nothing(hosts: Hosts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        request = hosts.agents[0].start_request(LIVE, 0, num_processes=4)
        hub = {"hub_host": "127.0.0.1", "hub_port": port, "hub_token": "t"}
        status, message = hosts.agents[0].refusal("start", **request, **hub)
    assert (status, f"port {port} of 127.0.0.1, for the lifeline, is taken" in message) == (1, True)
    until(lambda: not left_over(hosts.agents[0].root), 5.0)


def test_a_second_start_makes_no_second_hub(hosts: Hosts) -> None:
    hosts.start_all(LIVE)
    hosts.connect()
    assert hosts.start(0, LIVE)["already"] is True
    assert all(agent.status(rank)["state"] == "running" for rank, agent in enumerate(hosts.agents))


def test_strangers_are_dropped_and_harm_nothing(hosts: Hosts) -> None:
    hosts.start_all(UNTIL_ENOUGH)
    hosts.connect()
    strangers = [socket.create_connection(("127.0.0.1", hosts.port)) for _ in range(100)]
    for number, stranger in enumerate(strangers):
        with contextlib.suppress(OSError):
            stranger.settimeout(5)
            stranger.sendall(STRANGE[number % len(STRANGE)])
    heard = b""
    for stranger in strangers:
        with contextlib.suppress(OSError), stranger:
            heard += stranger.recv(100)
    assert heard == b""
    hosts.enough()
    assert [entry["code"] for entry in hosts.ended()] == [0, 0, 0, 0]


def test_a_host_that_connects_twice_replaces_itself_and_talks_nonsense_in_vain(hosts: Hosts) -> None:
    hosts.start_all(UNTIL_ENOUGH)
    hosts.connect()
    with socket.create_connection(("127.0.0.1", hosts.port)) as again:
        again.settimeout(10)
        again.sendall(json.dumps({"hello": HELLO}).encode() + b"\n" + NONSENSE)
        assert b"ping" in again.recv(1000)
        with contextlib.suppress(ConnectionResetError):
            while again.recv(1000):  # until the host itself, which has lost its place, takes it back
                pass
    hosts.enough()
    assert [entry["code"] for entry in hosts.ended()] == [0, 0, 0, 0]
    log = (hosts.agents[0].state_dir(0) / "supervisor.log").read_text()
    assert log.count("host 2 said something that is not understood") == NONSENSE.count(b"\n")


NONSENSE = b"""{"ended": {}}
{"ping": 5}
{"left": null}
{}
{"hung": {"step": "x"}}
{"a": 1, "b": 2}
"""
HELLO = {"token": "the token", "run_id": "run-1", "attempt": 0, "rank": 2}
STRANGE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"x" * 10000,
    b"\xff\xfe\n",
    b"[]\n",
    b"[" * 4000 + b"\n",
    b'{"stop": {}}\n',
    *(
        json.dumps({"hello": {**HELLO, **wrong}}).encode() + b'\n{"ended": {}}\n'
        for wrong in (
            {"token": ""},
            {"token": None},
            {"token": "é"},
            {"attempt": 1},
            {"rank": 4},
            {"rank": "2"},
        )
    ),
]
