"""All or nothing: a host that cannot leaves nothing started, and whoever does not join is named."""

from __future__ import annotations

import base64
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from launch import launch
from launch.hosts import Agent, HostsError, stop_processes
from launch.jobs import Bundle
from launch.launch import NotJoined
from launch.plan import Container, Plan

MakeAgent = Callable[..., Agent]
PLAN = Plan(
    run_id="flax_mlm-20261120-214500-abcd",
    attempt=0,
    job="flax_mlm",
    stack="jax",
    arguments=(),
    platform="cpu",
    run_dir="/runs/one",
    cache_dir="/cache",
    cwd="/",
    python="/python",
    agent_root="/agent",
    bundle_sha256="ab" * 32,
    coordinator_host="127.0.0.1",
    local_devices=1,
    cpus=(None, None, None),
    hosts=(("w-0", "10.0.0.1", 22), ("w-1", "10.0.0.2", 22), ("w-2", "10.0.0.3", 22)),
    coordinator_port=4000,
)
BUNDLE = Bundle(sha256=PLAN.bundle_sha256, archive=b"archive")


def check(ok: bool, message: str = "", remedy: str | None = None) -> dict[str, Any]:
    return {"name": "n", "ok": ok, "message": message, "remedy": remedy}


class Hosts:
    """Three hosts that answer by verb and number; what was asked of them, in the order it came."""

    def __init__(self, make_agent: MakeAgent, answers: Mapping[str, Callable[[int], Any]]) -> None:
        self.asked: list[tuple[str, int]] = []
        lock = threading.Lock()

        def agent(number: int) -> Agent:
            def give(verb: str, request: dict[str, Any]) -> Any:
                with lock:
                    self.asked.append((verb, number))
                return answers[verb](number)

            return make_agent(give, host=f"w-{number}")

        self.agents = [agent(number) for number in range(3)]

    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.asked]


def test_a_preflight_lists_every_failed_check_of_every_host(make_agent: MakeAgent) -> None:
    def answer(number: int) -> dict[str, Any]:
        if number == 2:
            return {"ok": False, "error": {"message": "Python 3.7 is too old", "remedy": "bring 3.8"}}
        checks = [
            check(True, "fine"),
            check(False, "disk is full", "make room"),
            check(False, "port is taken"),
        ]
        return {"checks": checks if number == 0 else [check(True)], "facts": {}}

    with pytest.raises(HostsError) as error:
        launch.preflight(PLAN, Hosts(make_agent, {"preflight": answer}).agents)
    assert str(error.value).splitlines() == [
        "preflight failed, nothing was started:",
        "  w-0: disk is full → make room",
        "  w-0: port is taken",
        "  w-2: Python 3.7 is too old → bring 3.8",
    ]


def test_a_preflight_that_passes_gives_each_hosts_facts_in_order(make_agent: MakeAgent) -> None:
    hosts = Hosts(
        make_agent, {"preflight": lambda number: {"checks": [check(True)], "facts": {"number": number}}}
    )
    assert launch.preflight(PLAN, hosts.agents) == [{"number": 0}, {"number": 1}, {"number": 2}]


def test_code_is_sent_only_where_it_is_missing(make_agent: MakeAgent) -> None:
    hosts = Hosts(make_agent, {"stage": lambda number: {}})
    facts = [{"bundle_present": number == 1} for number in range(3)]
    assert launch.stage(PLAN, BUNDLE, hosts.agents, facts) == 2
    assert sorted(hosts.asked) == [("stage", 0), ("stage", 2)]
    assert launch.stage(PLAN, BUNDLE, hosts.agents, [{"bundle_present": True}] * 3) == 0


def test_hosts_that_share_one_directory_are_sent_the_code_once(make_agent: MakeAgent) -> None:
    received: list[dict[str, Any]] = []

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        received.append(request)
        return {}

    shared = make_agent(give)
    agents = [dataclasses.replace(shared, host=f"h/{number}") for number in range(3)]
    assert launch.stage(PLAN, BUNDLE, agents, [{"bundle_present": False}] * 3) == 1
    (request,) = received
    assert base64.b64decode(request["archive_base64"]) == b"archive"
    assert request["sha256"] == PLAN.bundle_sha256


def test_a_start_that_fails_on_one_host_stops_all_of_them_again(make_agent: MakeAgent) -> None:
    def start(number: int) -> dict[str, Any]:
        return {"ok": False, "error": {"message": "no fork", "remedy": None}} if number == 1 else {}

    hosts = Hosts(make_agent, {"start": start, "stop": lambda number: {"stopped": []}})
    with pytest.raises(HostsError, match="so it was stopped again:\n  w-1: no fork"):
        launch.start(PLAN, hosts.agents)
    assert hosts.verbs() == ["start"] * 3 + ["stop"] * 3


def test_a_start_that_succeeds_stops_nothing(make_agent: MakeAgent) -> None:
    hosts = Hosts(make_agent, {"start": lambda number: {}})
    launch.start(PLAN, hosts.agents)
    assert sorted(hosts.asked) == [("start", 0), ("start", 1), ("start", 2)]


def test_every_process_is_stopped_on_its_own_host_and_an_error_hides_no_answer(make_agent: MakeAgent) -> None:
    def stop(number: int) -> dict[str, Any]:
        return {"ok": False, "error": {"message": "gone"}} if number == 0 else {"stopped": [number]}

    answers = stop_processes(Hosts(make_agent, {"stop": stop}).agents, PLAN.run_id, 0, grace_s=1)
    assert str(answers[0]) == "w-0: gone"
    assert [answer["stopped"] for answer in answers[1:] if isinstance(answer, dict)] == [[1], [2]]


def joined(state: str, process: str = "running") -> dict[str, Any]:
    return {"state": state, "beat": None, "process": {"state": process}}


def join(make_agent: MakeAgent, *answers: Any, limit_s: float = 9) -> list[dict[str, Any]]:
    """Join with hosts that give these answers; what they were asked."""
    asked: list[dict[str, Any]] = []
    everyone = threading.Barrier(3)

    def agent(number: int) -> Agent:
        def give(verb: str, request: dict[str, Any]) -> Any:
            everyone.wait(timeout=30)  # would break if one were asked after another
            asked.append({"verb": verb, **request})
            return answers[number]

        return make_agent(give, host=f"w-{number}")

    launch.join(PLAN, [agent(number) for number in range(3)], limit_s=limit_s)
    return sorted(asked, key=lambda request: int(request["process_id"]))


def test_a_run_has_joined_when_every_process_has(make_agent: MakeAgent) -> None:
    done = joined("done", "exited")  # a run of no steps may be over already
    asked = join(make_agent, joined("joined"), joined("stepping"), done)
    assert [(each["verb"], each["process_id"], each["limit_s"]) for each in asked] == [
        ("join", 0, 9), ("join", 1, 9), ("join", 2, 9),
    ]  # fmt: skip


@pytest.mark.parametrize("answer", [joined("failed"), joined("starting", "exited"), joined("joined", "lost")])
def test_a_process_that_fails_or_ends_before_all_have_joined_is_a_failure(
    make_agent: MakeAgent, answer: dict[str, Any]
) -> None:
    with pytest.raises(NotJoined, match="a process failed before all had joined"):
        join(make_agent, joined("joined"), joined("starting"), answer)


def test_a_tpu_has_ten_minutes_to_join_and_a_cpu_three(make_agent: MakeAgent) -> None:
    for platform, limit_s in (("tpu", 600), ("cpu", 180)):
        plan = dataclasses.replace(PLAN, platform=platform, cpus=(None,))
        asked: list[float] = []

        def give(verb: str, request: dict[str, Any], asked: list[float] = asked) -> Any:
            asked.append(request["limit_s"])
            return joined("joined")

        launch.join(plan, [make_agent(give)])
        assert asked == [limit_s]


def test_who_does_not_join_in_time_is_named(make_agent: MakeAgent) -> None:
    with pytest.raises(NotJoined, match="^w-1, w-2 did not join within 9 s$"):
        join(make_agent, joined("joined"), joined("starting"), joined("starting"))


def test_who_cannot_be_asked_whether_it_has_joined_is_named_with_the_reason(make_agent: MakeAgent) -> None:
    gone = {"ok": False, "error": {"message": "cut off", "remedy": "see the network"}}
    with pytest.raises(NotJoined, match="^w-2: cut off → see the network$"):
        join(make_agent, joined("joined"), joined("joined"), gone)


CONTAINED = dataclasses.replace(PLAN, container=Container(image="r/jax@sha256:" + "0" * 64))


def test_an_image_is_pulled_where_it_is_missing_and_nobody_pulls_for_a_bare_run(
    make_agent: MakeAgent,
) -> None:
    hosts = Hosts(make_agent, {"pull": lambda number: {}})
    facts = [{"image_present": number == 1, "image_needs_bytes": 7} for number in range(3)]
    said: list[str] = []
    launch.pull(CONTAINED, hosts.agents, facts, said.append)
    assert sorted(hosts.asked) == [("pull", 0), ("pull", 2)]
    assert said[0] == f"pulling {'r/jax@sha256:' + '0' * 64} on 2 of 3 hosts …"
    launch.pull(PLAN, hosts.agents, [{}] * 3, said.append)
    launch.pull(CONTAINED, hosts.agents, [{"image_present": True}] * 3, said.append)
    assert len(hosts.asked) == len(said) == 2


def test_an_image_that_cannot_be_had_on_one_host_is_an_error_that_names_it(make_agent: MakeAgent) -> None:
    def give(number: int) -> dict[str, Any]:
        return {"ok": number != 2, "error": {"message": "denied", "remedy": "`fab deploy`"}}

    hosts = Hosts(make_agent, {"pull": give})
    with pytest.raises(HostsError) as error:
        launch.pull(
            CONTAINED, hosts.agents, [{"image_present": False, "image_needs_bytes": 7}] * 3, lambda line: None
        )
    assert str(error.value).splitlines() == [
        "the image could not be had everywhere, nothing was started:",
        "  w-2: denied → `fab deploy`",
    ]
