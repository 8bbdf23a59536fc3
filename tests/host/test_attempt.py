"""The hosts of an attempt end together: whatever becomes of one of them, none goes on and none is left over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host.conftest import CHECKOUT, until
from tests.host.hosts import LIVE, SILENCE_S, SIZE, UNTIL_ENOUGH, Hosts, established, left_over


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Four hosts with agents, all of whose processes are ended after the test."""
    made = Hosts(tmp_path, tmp_path / "run")
    yield made
    made.end_all()


def test_hosts_that_end_well_tell_so_and_stop_nobody(hosts: Hosts) -> None:
    hosts.start_all("step(4)", "step(8)", "step(20)", "step(12); sys.exit(75)")
    assert [entry["code"] for entry in hosts.ended()] == [0, 0, 0, 75]
    assert not (hosts.run_dir / "result.json").exists()


def test_a_killed_process_stops_all_hosts_within_seconds_and_is_blamed(hosts: Hosts) -> None:
    hosts.start_all(LIVE)
    hosts.connect()
    killed = hosts.kill(0)
    entries = hosts.ended()
    assert time.monotonic() - killed < 10
    reason = "stopped because host 0 failed: killed by signal 9 (SIGKILL)"
    assert {entry["reason"] for entry in entries[1:]} == {reason}
    assert [agent.heartbeat(rank)["exit_code"] for rank, agent in enumerate(hosts.agents)] == [
        None,
        76,
        76,
        76,
    ]
    result = hosts.result()
    assert (result["outcome"], result["failed_host"]) == ("failed", 0)
    assert result["error"] == "host 0: killed by signal 9 (SIGKILL)\nup"
    assert result["steps"] >= 1


def test_an_exit_code_is_told_with_the_last_lines_of_that_hosts_log(hosts: Hosts) -> None:
    hosts.start_all(LIVE, LIVE, LIVE, 'step(8); say("no such vocabulary"); sys.exit(2)')
    hosts.ended()
    result = hosts.result()
    assert result["error"] == "host 3: exit code 2: no such vocabulary\nup\nno such vocabulary"
    assert result["request"] is True


def test_of_two_that_fail_at_once_the_one_that_did_not_lose_a_peer_is_blamed(hosts: Hosts) -> None:
    fail = 'step(3)\nwhile not os.path.exists(run_dir + "/now"): time.sleep(0.001)\n'
    hosts.start_all(LIVE, fail + "sys.exit(76)", LIVE, fail + 'sys.exit("a bug")')
    (hosts.run_dir / "now").touch()
    hosts.ended()
    assert hosts.result()["error"].startswith("host 3: exit code 1: a bug")


def test_a_host_that_was_not_started_stops_those_that_were(hosts: Hosts) -> None:
    began = time.monotonic()
    for rank in (0, 2, 3):
        hosts.start(rank, LIVE, assemble_s=3)
    reasons = {entry["reason"] for entry in hosts.ended([0, 2, 3])}
    assert time.monotonic() - began < 15
    assert reasons == {"stopped because only hosts 0, 2, 3 of 4 were started"}
    assert (hosts.result()["outcome"], hosts.result()["failed_host"]) == ("failed", 1)


def test_without_host_0_the_others_end_and_the_result_names_it(hosts: Hosts) -> None:
    (hosts.run_dir / "heartbeats").mkdir()
    earlier = {"attempt": 7, "state": "failed", "time": 1, "message": "of another attempt"}
    (hosts.run_dir / "heartbeats" / "host-9.json").write_text(json.dumps(earlier))
    for rank in (1, 2, 3):
        hosts.start(rank, LIVE, assemble_s=2)
    (reason,) = {entry["reason"] for entry in hosts.ended([1, 2, 3])}
    assert reason.startswith(f"stopped because host 0 was not reached at 127.0.0.1:{hosts.port} within 2 s")
    assert hosts.result()["failed_host"] == 0


@pytest.mark.parametrize("rank", [0, 2])
def test_a_host_whose_supervisor_is_killed_is_missed_by_all_and_leaves_nothing(
    hosts: Hosts, rank: int
) -> None:
    hosts.start_all(LIVE)
    hosts.connect()
    killed = time.monotonic()
    os.kill(hosts.agents[rank].record(rank)["supervisor_pid"], signal.SIGKILL)
    entries = hosts.ended()
    assert time.monotonic() - killed < 15
    assert entries[rank]["reason"].startswith("stopped because its supervisor was killed")
    others = [entry["reason"] for entry in entries if entry["process_id"] != rank]
    assert all(f"host {rank} was lost" in reason for reason in others)
    assert (hosts.result()["outcome"], hosts.result()["failed_host"]) == ("failed", rank)


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_a_host_that_cannot_be_reached_any_more_is_lost_and_stops_by_itself(hosts: Hosts, how: str) -> None:
    proxy = hosts.proxy()
    hosts.start(2, LIVE, liveness_port=proxy.port)
    for rank in (0, 1, 3):
        hosts.start(rank, LIVE)
    hosts.up(2)
    until(lambda: proxy.connections > 0 and established(hosts.port) >= SIZE)
    cut = time.monotonic()
    proxy.mode = how
    entries = hosts.ended()
    assert time.monotonic() - cut < 2 * SILENCE_S + 15
    said = {"closed": "its connection ended", "silent": f"it has not been heard of for {SILENCE_S:g} s"}[how]
    assert entries[1]["reason"].startswith(f"stopped because host 2 was lost: {said}")
    assert "host 0" in entries[2]["reason"]
    # Each side is right about the other, and one of them was first.
    assert hosts.result()["failed_host"] in (0, 2)


def test_a_stop_that_was_asked_for_fails_nothing(hosts: Hosts) -> None:
    hosts.start_all(LIVE)
    hosts.connect()
    for rank in (1, 0, 3, 2):
        hosts.agents[rank]("stop", run_id="run-1", grace_s=0)
    hosts.ended()
    assert not (hosts.run_dir / "result.json").exists()


def test_a_port_that_is_taken_fails_the_start_and_starts_nothing(hosts: Hosts) -> None:
    agent = hosts.agents[0]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = agent.refusal("start", **agent.start_request(LIVE, 0, liveness_port=port))
    assert f"port {port} of 127.0.0.1, for the liveness server, is taken" in message
    until(lambda: not left_over(agent.root), 5.0)


HELLO = {"token": "the token", "run_id": "run-1", "attempt": 0, "rank": 2}
WRONG = ({"token": ""}, {"token": None}, {"token": "é"}, {"attempt": 1}, {"rank": 4}, {"rank": "2"})
STRANGE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"x" * 10000,
    b"\xff\xfe\n",
    b"[]\n",
    b"[" * 4000 + b"\n",
    b'{"stop": {}}\n',
    *(json.dumps({"hello": {**HELLO, **wrong}}).encode() + b'\n{"ended": {}}\n' for wrong in WRONG),
]
NONSENSE = b"""{"ended": {}}
{"ping": 5}
{"left": null}
{}
{"hung": {"step": "x"}}
{"a": 1, "b": 2}
"""


def test_strangers_nonsense_a_cut_connection_and_a_second_start_harm_nothing(hosts: Hosts) -> None:
    proxy = hosts.proxy()
    hosts.start(1, UNTIL_ENOUGH, liveness_port=proxy.port)
    for rank in (0, 2, 3):
        hosts.start(rank, UNTIL_ENOUGH)
    for rank in range(SIZE):
        hosts.up(rank)
    until(lambda: proxy.connections > 0 and established(hosts.port) >= SIZE)

    before = proxy.connections
    proxy.mode = "cut"
    until(lambda: proxy.connections > before)

    with contextlib.ExitStack() as open_sockets:
        strangers = []
        for number in range(100):
            stranger = open_sockets.enter_context(socket.create_connection(("127.0.0.1", hosts.port)))
            stranger.settimeout(15)
            with contextlib.suppress(OSError):
                stranger.sendall(STRANGE[number % len(STRANGE)])
            strangers.append(stranger)
        for stranger in strangers:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""

    with socket.create_connection(("127.0.0.1", hosts.port)) as again:  # host 2 a second time
        again.settimeout(10)
        again.sendall(json.dumps({"hello": HELLO}).encode() + b"\n" + NONSENSE)
        assert b"ping" in again.recv(1000)
        with contextlib.suppress(ConnectionResetError):
            while again.recv(1000):  # until the host itself, which has lost its place, takes it back
                pass

    assert hosts.start(0, UNTIL_ENOUGH)["already"] is True
    hosts.enough()
    assert [entry["code"] for entry in hosts.ended()] == [0, 0, 0, 0]
    log = (hosts.agents[0].state_dir(0) / "supervisor.log").read_text()
    assert log.count("host 2 said something that is not understood") == NONSENSE.count(b"\n")


HANGS = """
import faulthandler
faulthandler.register(signal.SIGUSR1, file=open(os.environ["RUN_CONTROL_DIR"] + "/stacks.txt", "a"))
def beat_again():
    path = os.environ["RUN_CONTROL_DIR"] + "/heartbeat.json"
    with open(path) as file:
        found = json.load(file)
    with open(path + ".new", "w") as file:
        json.dump(dict(found, time=time.time()), file)
    os.replace(path + ".new", path)
    time.sleep(0.5)
stopped = run_dir + "/stopped"
for number in range(1, 10**6):
    while os.path.exists(stopped) and number > 30:
        beat_again()
    beat("stepping", number)
    if number == 30: say("up")
    time.sleep(0.05)
"""


def test_a_stopped_process_is_found_and_its_run_is_hung_with_the_stacks_of_all(hosts: Hosts) -> None:
    hosts.start_all(HANGS, hang_floor_s=7)
    hosts.kill(2, signal.SIGSTOP)
    (hosts.run_dir / "stopped").touch()
    entries = hosts.ended()
    result = hosts.result()
    assert (result["outcome"], result["failed_host"]) == ("hung", 2)
    assert result["error"].startswith("host 2 stood still at step ")
    assert f"{hosts.run_dir}/stacks/0" in result["error"]
    texts = [(hosts.run_dir / f"stacks/0/host-{rank}.txt").read_text() for rank in range(SIZE)]
    assert all("beat_again" in texts[rank] for rank in (0, 1, 3))
    assert "did not answer SIGUSR1" in texts[2]
    assert "T (stopped)" in texts[2]
    assert entries[0]["reason"].startswith("stopped because the run hung: host 2 stood still")
    beats = [hosts.agents[rank].heartbeat(rank) for rank in range(SIZE)]
    assert {beat["state"] for beat in beats} == {"failed"}
    assert [beat["exit_code"] for beat in beats] == [76, 76, None, 76]
    assert beats[2]["message"].startswith("host 2 stood still at step ")


def test_in_a_bucket_the_supervisors_deliver_heartbeats_logs_and_the_result(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    hosts = Hosts(tmp_path, bucket, size=2)
    for folder in ("heartbeats", "logs/0"):
        (bucket / folder).mkdir(parents=True)
    for rank, script in enumerate((LIVE, "step(8); sys.exit(3)")):
        request = hosts.agents[rank].start_request("", rank)
        env = {**request["env"], "RUN_DIR": f"file://{bucket}", "PYTHONPATH": str(CHECKOUT)}
        log = str(tmp_path / f"host-{rank}.log")
        hosts.start(rank, script, run_dir=None, env=env, log_path=log)
    hosts.ended()
    hosts.end_all()
    assert hosts.result()["error"].startswith("host 1: exit code 3")
    assert hosts.agents[0].heartbeat(0)["exit_code"] == 76
    assert hosts.agents[1].heartbeat(1)["message"] == "exit code 3: up"
    assert [(bucket / f"logs/0/host-{rank}.log").read_text() for rank in range(2)] == ["up\n", "up\n"]
