"""What a pod makes of what it is told, and the codes that it ends with; pods that run are in tests/runs."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import UNAVAILABLE
from contracts.process_environment import ProcessEnvironment
from host.agent import pod
from host.agent.pod import Pod, exit_code, is_alive, pod_start_request

ENVIRONMENT = ProcessEnvironment(
    run_id="r",
    run_dir="gs://b/runs/r",
    job="j",
    framework="jax",
    attempt=0,
    num_processes=4,
    process_id=0,
    coordinator="r-0.r:8576",
    platform="tpu",
    cache_dir="/tpu-stack/cache",
    local_devices=None,
    peak_flops_per_s=None,
    control_dir=None,
)
TOLD: dict[str, Any] = {
    "start": {
        "run_id": "r",
        "attempt": 0,
        "process_id": 0,
        "argv": ["python", "-m", "jobs.j"],
        "env": {**ENVIRONMENT.variables(), "PYTHONPATH": "/code"},
        "cwd": "/",
        "log_path": "/tpu-stack/agent/runs/r/logs/0/host-0.log",
        "run_dir": None,
        "num_processes": 4,
        "cpus": None,
        "liveness_host": "r-0.r",
        "liveness_port": 8577,
        "liveness_token": "",
        "hang_floor_s": 120.0,
        "heartbeat_limit_s": 300.0,
        "container": None,
        "root": "/tpu-stack/agent",
        "budget_s": 100,
        "budget_reason": "spent",
    },
    "ranks": None,
    "nodes": 2,
    "port": 8578,
    "limits": {"begin_by_s": None},
}
AGREED = {"attempt": 3, "token": "t", "budget_s": 40}


class Heard:
    """Another pod's end of a connection."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.told.append(message)


def test_a_pod_that_waits_looks_whether_the_run_is_over_and_bears_that_nobody_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Pod(TOLD, {"JOB_COMPLETION_INDEX": "0"})
    said: list[Exception] = [pod.Ended(69, "the bucket is away"), pod.Over(1, "process 2 was done")]
    monkeypatch.setattr(waiting, "_program", lambda: None)

    def answer(*_: Any) -> None:
        raise said.pop(0)

    monkeypatch.setattr(waiting, "_ask", answer)
    other: Any = Heard()
    waiting._look([other], [2])
    assert other.told == []
    with pytest.raises(pod.Over):
        waiting._look([other], [2])
    assert other.told == [{"over": 1, "reason": "process 2 was done"}]


@pytest.mark.parametrize(("begin_in_s", "limit_s"), [(None, 3600), (-9.0, 3600), (14 * 3600.0, 14 * 3600)])
def test_a_pod_waits_for_the_others_until_the_run_has_to_begin(
    begin_in_s: float | None, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_by_s = None if begin_in_s is None else time.time() + begin_in_s
    waiting = Pod({**TOLD, "limits": {"begin_by_s": begin_by_s}}, {"JOB_COMPLETION_INDEX": "0"})
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + limit_s - 60)
    waiting._check("pod 1")
    monkeypatch.setattr(time, "monotonic", lambda: now + limit_s + 60)
    with pytest.raises(pod.Ended, match=r"pod 1 did not come within \d+ s") as ended:
        waiting._check("pod 1")
    assert ended.value.code == UNAVAILABLE  # which the Job counts


def test_each_pod_makes_the_request_of_process_0_its_own() -> None:
    found = pod_start_request(TOLD, 2, AGREED)
    assert (found["attempt"], found["process_id"], found["liveness_token"]) == (3, 2, "t")
    assert found["log_path"] == "/tpu-stack/agent/runs/r/logs/3/host-2.log"
    assert (found["liveness_host"], found["budget_s"]) == ("r-0.r", 40)
    env = found["env"]
    assert (env["RUN_ATTEMPT"], env["RUN_PROCESS_ID"], env["RUN_NUM_PROCESSES"]) == ("3", "2", "4")
    assert env["PYTHONPATH"] == "/code"
    assert found["assemble_s"] is None  # complete, as the supervisor reads it


def test_pod_0_listens_whether_or_not_its_name_is_known_yet() -> None:
    assert pod_start_request(TOLD, 0, AGREED)["liveness_host"] == "0.0.0.0"


def test_frameworks_that_find_their_peers_by_rank_are_told_their_own() -> None:
    hosts = [f"r-{index}.r" for index in range(4)]
    told = {**TOLD, "ranks": {"hosts": hosts, "ports": [[8580]] * 4, "per_host": 1, "topology": None}}
    told["start"] = {
        **TOLD["start"],
        "env": {**TOLD["start"]["env"], "RUN_FRAMEWORK": "tensorflow", "RUN_PLATFORM": "cpu"},
    }
    env = pod_start_request(told, 1, AGREED)["env"]
    assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == ("1", "4", "r-0.r")
    assert json.loads(env["TF_CONFIG"]) == {
        "cluster": {"worker": [f"{host}:8580" for host in hosts]},
        "task": {"type": "worker", "index": 1},
    }


ORDER = {"outcome": "failed", "reason": "host 1 was lost"}
HANGS = {"outcome": "hung", "reason": "the run hung"}


def blamed(exit_code: int | None, outcome: str = "failed") -> dict[str, Any]:
    return {"outcome": outcome, "exit_code": exit_code}


@pytest.mark.parametrize(
    ("ended", "is_first", "was_asked", "code"),
    [
        pytest.param({"code": 0}, True, False, 0, id="done"),
        pytest.param({"code": 0}, True, True, 0, id="done before it heard of a stop"),
        pytest.param({"code": 0, "verdict": blamed(None)}, True, False, 80, id="done, and another was lost"),
        pytest.param({"code": 0, "verdict": blamed(1)}, True, False, 80, id="done, and another one failed"),
        pytest.param({"code": 75}, False, False, 75, id="saved"),
        pytest.param({"code": 75}, False, True, 130, id="saved, because somebody stopped the run"),
        pytest.param({"signal": 9}, True, True, 130, id="killed, because it was slow to stop"),
        pytest.param({"code": 2}, False, False, 2, id="a wrong request is wrong on every pod"),
        pytest.param(
            {"code": 1, "verdict": blamed(1)}, True, False, 80, id="a program error, which the policy judges"
        ),
        pytest.param({"code": 69, "verdict": blamed(69)}, True, False, 69, id="a bucket was away"),
        pytest.param({"code": 69}, False, False, 69, id="a bucket was away from another pod"),
        pytest.param({"code": 1}, False, False, 80, id="another pod failed, or lost one and cannot tell"),
        pytest.param(
            {"signal": 9, "order": ORDER, "verdict": blamed(1)},
            True,
            False,
            76,
            id="it was another one's failure",
        ),
        pytest.param(
            {"signal": 9, "order": ORDER, "verdict": blamed(2)},
            True,
            False,
            2,
            id="another one's wrong request",
        ),
        pytest.param(
            {"code": 1, "verdict": blamed(None)}, True, False, 80, id="it failed because another was lost"
        ),
        pytest.param({"signal": 9, "order": ORDER, "verdict": blamed(None)}, True, False, 76, id="lost"),
        pytest.param({"signal": 9, "order": ORDER}, False, False, 76, id="lost, seen by another pod"),
        pytest.param({"code": 76, "verdict": blamed(76)}, True, False, 76, id="lost, by its own account"),
        pytest.param(
            {"signal": 9, "order": HANGS, "verdict": blamed(None, "hung")}, True, False, 79, id="hung"
        ),
        pytest.param({"signal": 9, "order": HANGS}, False, False, 79, id="hung, seen by another pod"),
        pytest.param({"signal": 11, "verdict": blamed(None)}, True, False, 139, id="crashed"),
        pytest.param({"code": 137, "verdict": blamed(137)}, True, False, 137, id="a rank was killed"),
        pytest.param({"code": 137}, False, False, 137, id="a rank of another pod was killed"),
        pytest.param({"code": 128, "verdict": blamed(128)}, True, False, 80, id="failed, as git does"),
        pytest.param({"code": 255, "verdict": blamed(255)}, True, False, 80, id="failed, as ssh does"),
        pytest.param({"code": 255}, False, False, 80, id="another pod failed, as ssh does"),
        pytest.param({"signal": 15}, False, False, 143, id="ended before it could save"),
        pytest.param({"code": 1}, True, False, 80, id="nobody to say more"),
    ],
)
def test_the_code_of_a_pod_says_what_is_to_follow(
    ended: dict[str, Any], is_first: bool, was_asked: bool, code: int
) -> None:
    nothing = {"code": None, "signal": None, "order": None, "verdict": None}
    assert exit_code({**nothing, **ended}, is_first=is_first, was_asked=was_asked) == code


@pytest.mark.parametrize(
    ("age_s", "has_ended", "alive"),
    [(None, False, True), (400.0, False, True), (500.0, False, False), (500.0, True, True)],
)
def test_a_supervisor_that_leaves_a_silent_process_alone_is_not_alive(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    age_s: float | None,
    has_ended: bool,
    alive: bool,
) -> None:
    told = {**TOLD, "start": {**TOLD["start"], "root": str(tmp_path)}}
    monkeypatch.setenv("TPU_STACK_POD", json.dumps(told))
    folder = tmp_path / "runs" / "r" / "3-2"
    if age_s is not None:
        folder.mkdir(parents=True)
        (folder / "heartbeat.json").write_text(json.dumps({"time": time.time() - age_s}))
    if has_ended:
        (folder / "exit.json").write_text("{}")
    assert is_alive() is alive
