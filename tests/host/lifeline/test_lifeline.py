"""The hosts of an attempt end together: whatever becomes of one of them, none goes on alone and none is left over."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.host.conftest import until
from tests.host.lifeline.hosts import LIVE, SILENCE_S, SIZE, UNTIL_ENOUGH, Hosts, established


def test_hosts_that_end_well_tell_so_and_stop_nobody(hosts: Hosts) -> None:
    hosts.start_all("step(4)", "step(8)", "step(20)", "step(12); sys.exit(75)")
    assert [entry["code"] for entry in hosts.ended()] == [0, 0, 0, 75]
    assert not (hosts.run_dir / "result.json").exists()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_process_stops_all_hosts_within_seconds_and_is_blamed(hosts: Hosts, rank: int) -> None:
    hosts.start_all(LIVE)
    hosts.connect()
    killed = hosts.kill(rank)
    entries = hosts.ended()
    assert time.monotonic() - killed < 10
    reason = f"stopped because host {rank} failed: killed by signal 9 (SIGKILL)"
    assert {entry["reason"] for entry in entries if entry["process_id"] != rank} == {reason}
    result = hosts.result()
    assert (result["outcome"], result["failed_host"]) == ("failed", rank)
    assert result["error"] == f"host {rank}: killed by signal 9 (SIGKILL)\nup"
    assert result["steps"] >= 1


def test_an_exit_code_is_told_with_the_last_lines_of_that_hosts_log(hosts: Hosts) -> None:
    hosts.start_all(LIVE, LIVE, LIVE, 'step(8); say("no such vocabulary"); sys.exit(2)')
    hosts.ended()
    result = hosts.result()
    assert result["error"].splitlines() == [
        "host 3: exit code 2: no such vocabulary",
        "up",
        "no such vocabulary",
    ]
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
    for rank in (1, 2, 3):
        hosts.start(rank, LIVE, assemble_s=2)
    (reason,) = {entry["reason"] for entry in hosts.ended([1, 2, 3])}
    assert reason.startswith(f"stopped because host 0 was not reached at 127.0.0.1:{hosts.port} within 2 s")
    assert hosts.result()["failed_host"] == 0


def test_a_hub_whose_supervisor_is_killed_is_missed_by_all_and_leaves_nothing(hosts: Hosts) -> None:
    hosts.start_all(LIVE)
    hosts.connect()
    killed = time.monotonic()
    os.kill(hosts.agents[0].record(0)["supervisor_pid"], signal.SIGKILL)
    entries = hosts.ended()
    assert time.monotonic() - killed < 15
    assert entries[0]["reason"].startswith("stopped because its supervisor was killed")
    assert all("host 0 was lost" in entry["reason"] for entry in entries[1:])
    assert (hosts.result()["outcome"], hosts.result()["failed_host"]) == ("failed", 0)


def test_a_member_whose_supervisor_is_killed_is_lost_and_leaves_nothing(hosts: Hosts) -> None:
    hosts.start_all(LIVE)
    hosts.connect()
    os.kill(hosts.agents[2].record(2)["supervisor_pid"], signal.SIGKILL)
    entries = hosts.ended()
    assert entries[1]["reason"].startswith("stopped because host 2 was lost: its connection ended")
    assert hosts.result()["failed_host"] == 2


def test_a_connection_that_is_cut_comes_back_and_nothing_happens(hosts: Hosts) -> None:
    proxy = hosts.proxy()
    hosts.start(2, UNTIL_ENOUGH, hub_port=proxy.port)
    for rank in (0, 1, 3):
        hosts.start(rank, UNTIL_ENOUGH)
    hosts.up(2)
    until(lambda: proxy.connections > 0 and established(hosts.port) >= SIZE)
    before = proxy.connections
    proxy.mode = "cut"
    until(lambda: proxy.connections > before)
    hosts.enough()
    assert [entry["code"] for entry in hosts.ended()] == [0, 0, 0, 0]


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_a_host_that_cannot_be_reached_any_more_is_lost_and_stops_by_itself(hosts: Hosts, how: str) -> None:
    proxy = hosts.proxy()
    hosts.start(2, LIVE, hub_port=proxy.port)
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
    assert hosts.result()["failed_host"] in (
        0,
        2,
    )  # each side is right about the other, and one of them was first


def test_a_stop_that_was_asked_for_fails_nothing(hosts: Hosts) -> None:
    hosts.start_all(LIVE)
    hosts.connect()
    for rank in (1, 0, 3, 2):
        hosts.agents[rank]("stop", run_id="run-1", grace_s=0)
    hosts.ended()
    assert not (hosts.run_dir / "result.json").exists()


def test_a_process_alone_has_a_lifeline_too(tmp_path: Path) -> None:
    alone = Hosts(tmp_path, tmp_path / "run", size=1)
    alone.start_all("step(8); sys.exit(3)")
    alone.ended()
    assert alone.result()["error"].startswith("host 0: exit code 3")
