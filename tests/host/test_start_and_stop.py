"""A process is started once with what it was promised, is waited for, and is stopped with time for a checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from host.agent import proc
from tests.host.conftest import AGENT, ONE, cut_off
from tests.processes import is_alive
from tests.servers import Handler, serving
from tests.waiting import until

LIVES = 'say("up"); live()'
SAVES = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
def save(*_):
    say("saving %s" % os.path.exists(os.environ["RUN_CONTROL_DIR"] + "/stop-requested"))
    time.sleep(0.5)
    say("saved, and its child ended with %s" % child.poll())
    say(child.pid)
    os._exit(75)
signal.signal(signal.SIGTERM, save)
say("up")
live()
"""
STUBBORN = 'signal.signal(signal.SIGTERM, signal.SIG_IGN); say("up"); live()'


def test_starts_at_once_and_later_ones_start_one_process(agent: Any) -> None:
    request = agent.start_request('say("once")')
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: agent("start", **request), range(4)))
    assert len({answer["pid"] for answer in answers}) == 1
    assert sorted(answer["already"] for answer in answers) == [False, True, True, True]
    agent.ended()
    assert agent("start", **request) == {**answers[0], "already": True}
    assert agent.log() == "once\n"


def test_a_start_that_came_to_nothing_or_was_killed_half_way_can_be_tried_again(agent: Any) -> None:
    request = agent.start_request('say("up")')
    for wrong, said in (
        ({"argv": ["/nonexistent/program"]}, "no such executable: '/nonexistent/program'"),
        ({"argv": ["/"]}, "no such executable: '/'"),
        ({"cwd": "/nonexistent"}, "/nonexistent is not a directory"),
        ({"log_path": "/proc/no-log"}, "/proc/no-log cannot be written"),
        ({"cpus": [60000]}, "cpus [60000] are not all on this host"),
    ):
        assert said in agent.refusal("start", **{**request, **wrong})
        assert agent("status")["processes"] == []
    agent.state_dir().mkdir(parents=True)
    (agent.state_dir() / "process.json.half").touch()
    assert agent.status()["state"] == "lost"
    assert agent("start", **request)["already"] is False


@pytest.mark.parametrize("after_s", [0.05, 0.12])
def test_a_start_whose_agent_is_killed_has_started_one_process_or_none(agent: Any, after_s: float) -> None:
    request = agent.start_request(LIVES)
    agent.killed("start", request, after_s)
    until(lambda: all(one["state"] != "starting" for one in agent("status")["processes"]))
    pids = {one["pid"] for one in agent("status")["processes"] if one["state"] == "running"}
    again = agent("start", **request)
    assert pids in (set(), {again["pid"]})
    until(lambda: Path(request["log_path"]).exists() and agent.log() == "up\n")
    assert len(agent("stop", run_id="run-1", grace_s=5)["stopped"]) == 1
    assert agent.log() == "up\n"


def test_a_job_sees_what_it_was_promised_and_no_more(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_COORDINATOR", "of another run")
    monkeypatch.setenv("KEPT", "yes")
    cpu = max(os.sched_getaffinity(0))
    look = """
say(json.dumps([dict(os.environ), os.getsid(0), os.getpgid(0), sorted(os.listdir("/proc/self/fd")),
                sorted(os.sched_getaffinity(0))]))
"""
    request = agent.start_request(look, cpus=[cpu])
    request["env"]["TOKEN"] = "hunter2"
    started = agent("start", **request)
    on_disk = [path.read_bytes() for path in agent.root.rglob("*") if path.is_file()]
    assert on_disk and not any(b"hunter2" in content for content in on_disk)
    agent.ended()
    seen, session, group, descriptors, cpus = json.loads(agent.log())
    assert (seen["RUN_CONTROL_DIR"], seen["KEPT"]) == (str(agent.state_dir()), "yes")
    promised = {"RUN_CONTROL_DIR", "RUN_DIR", "RUN_PROCESS_ID", "RUN_ATTEMPT"}
    assert {name for name in seen if name.startswith("RUN_")} == promised
    assert session == group == started["pid"] == started["pgid"]
    assert descriptors == ["0", "1", "2", "3"]  # 3 is the listing's own
    assert cpus == [cpu]


@pytest.mark.parametrize(
    ("attributes", "place"),
    [({"agent-worker-number": "1"}, "None"), ({"startup-script": "x"}, "3"), (None, "3")],
)
def test_a_host_is_told_its_place_in_the_slice_only_where_it_does_not_know_it(
    agent: Any, monkeypatch: pytest.MonkeyPatch, attributes: dict[str, str] | None, place: str
) -> None:
    class Metadata(Handler):
        def do_GET(self) -> None:
            self.reply(attributes)

    with serving(Metadata) as address:
        monkeypatch.setenv("GCE_METADATA_HOST", address if attributes is not None else "127.0.0.1:9")
        agent.start('say(os.environ.get("TPU_WORKER_ID"))', worker_env={"TPU_WORKER_ID": "3"})
        agent.ended()
    assert agent.log().split() == [place]


def test_secrets_lie_in_memory_for_their_user_alone_and_go_with_the_process(agent: Any) -> None:
    script = """
import json, os
path = os.environ["RUN_SECRETS_FILE"]
is_whole = json.load(open(path)) == {"TOKEN": "zq4hunter"}
print(is_whole, oct(os.stat(path).st_mode), oct(os.stat(os.path.dirname(path)).st_mode), path)
"""
    agent.start(script, secrets={"TOKEN": "zq4hunter"})
    agent.ended()
    words = agent.log().split()
    assert words[:3] == ["True", "0o100600", "0o40700"]
    assert words[3].startswith("/dev/shm/")
    until(lambda: not Path(words[3]).parent.exists())
    assert not any(b"zq4hunter" in path.read_bytes() for path in agent.root.rglob("*") if path.is_file())


def test_a_caller_that_waits_for_the_end_of_the_output_is_not_kept(agent: Any) -> None:
    request = agent.start_request(LIVES)
    body = json.dumps({"version": 1, "root": str(agent.root), **request})
    command = f"{sys.executable} -S -E {AGENT} start | cat"
    done = subprocess.run(
        ["bash", "-c", command], input=body, capture_output=True, text=True, timeout=10, check=True
    )
    assert json.loads(done.stdout)["ok"]


def test_a_later_process_of_the_same_number_is_not_taken_for_the_job(agent: Any) -> None:
    agent.start_and_hear(LIVES)
    record = agent.record()
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        try:
            cut_off(agent)
            os.kill(record["pid"], signal.SIGKILL)
            forged = {**record, "pid": stranger.pid, "pgid": stranger.pid}
            (agent.state_dir() / "process.json").write_text(json.dumps(forged))
            assert agent.status()["state"] == "lost"
            agent("stop", run_id="run-1", grace_s=0)
            assert "is not running" in agent.refusal("stacks", **ONE, timeout_s=1)
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_what_the_kernel_says_of_a_process_is_read() -> None:
    text = "12 (a) R 1 (b) c) S 1 12 12 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 777 0"
    assert proc.parse_stat(text) == ("S", 777)
    assert proc.catches("Name:\tx\nSigCgt:\t0000000000000200\n", signal.SIGUSR1)
    assert not proc.catches("Name:\tx\nSigCgt:\t0000000000000100\n", signal.SIGUSR1)
    assert not proc.catches("", signal.SIGUSR1)


@pytest.mark.parametrize(
    ("script", "limit_s", "states", "process"),
    [
        ('beat("starting"); say("up"); time.sleep(0.5); beat("joined"); live()', 20, ("joined",), "running"),
        ('beat("stepping", 7); say("up"); live()', 20, ("stepping",), "running"),
        (LIVES, 0.3, ("starting",), "running"),
        # Who has ended, or says so, is waited for; its supervisor may have said already that it failed.
        ('beat("done"); say("up"); time.sleep(0.5)', 20, ("done",), (0, None)),
        ('beat("starting"); say("no TPU here"); sys.exit(3)', 60, ("starting", "failed"), (3, None)),
        ("os.kill(os.getpid(), 9)", 20, ("exited", "failed"), (None, 9)),
    ],
)
def test_a_wait_for_a_process_to_join_ends_as_soon_as_it_has_or_never_will(
    agent: Any, script: str, limit_s: float, states: tuple[str, ...], process: Any
) -> None:
    assert "was never started" in agent.refusal("join", **ONE, limit_s=60)
    agent.start(script)
    before = time.monotonic()
    answer = agent("join", **ONE, limit_s=limit_s)
    assert time.monotonic() - before < 30
    assert limit_s > 1 or time.monotonic() - before >= limit_s
    assert answer["state"] in states
    found = answer["process"]
    assert process == (found["state"] if found["state"] == "running" else (found["code"], found["signal"]))
    assert (found["tail"] == ["no TPU here"]) == ("no TPU here" in script)


def test_a_wait_that_nobody_listens_to_any_more_ends(agent: Any) -> None:
    agent.start_and_hear(LIVES)
    body = {"version": 1, "root": str(agent.root), **ONE, "limit_s": 100}
    with subprocess.Popen(
        [sys.executable, "-S", "-E", str(AGENT), "join"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as waiting:  # fmt: skip
        assert waiting.stdin is not None and waiting.stdout is not None
        waiting.stdin.write(json.dumps(body).encode())
        waiting.stdin.close()  # the end of the input is no reason to stop waiting
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.5)
        waiting.stdout.close()
        waiting.wait(10)


def test_stops_at_once_send_one_sigterm_and_leave_a_job_and_its_children_the_time_to_save(agent: Any) -> None:
    agent.start_and_hear(SAVES)
    with ThreadPoolExecutor(3) as pool:
        stopped = list(pool.map(lambda _: agent.stop(20), range(3)))
    assert {(one["how"], one["code"], one["signal"]) for one in stopped} >= {("exited by itself", 75, None)}
    assert {one["code"] for one in stopped} == {75}
    up, saving, saved, child = agent.log().splitlines()
    assert (up, saving, saved) == ("up", "saving True", "saved, and its child ended with None")
    until(lambda: not is_alive(int(child)))
    assert agent.stop(5)["how"] == "not running"
    assert agent("stop", run_id="run-9", grace_s=5)["stopped"] == []


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_job_that_does_not_stop_is_killed_and_that_is_no_failure(agent: Any, is_frozen: bool) -> None:
    started = agent.start_and_hear(LIVES if is_frozen else STUBBORN)
    if is_frozen:
        os.kill(started["pid"], signal.SIGSTOP)
        stat = Path(f"/proc/{started['pid']}/stat")
        until(lambda: proc.parse_stat(stat.read_text())[0] == "T")
    before = time.monotonic()
    stopped = agent.stop(0.5)
    assert 0.5 < time.monotonic() - before < 5
    assert (stopped["how"], stopped["signal"]) == ("killed", 9)
    assert not is_alive(started["pid"])
    agent.ended()
    assert agent.heartbeat()["state"] == "stopped"
    assert not (agent.run_dir / "result.json").exists()


def test_status_and_stop_mean_all_runs_or_the_attempts_that_are_asked_for(agent: Any) -> None:
    for rank in (0, 1):
        agent.start(LIVES, rank, num_processes=2)
    agent.start_and_hear(LIVES, 0, attempt=1)
    agent.start('say("up")', 0, run_id="run-2", attempt=3)
    told = [(one["run_id"], one["attempt"], one["process_id"]) for one in agent("status")["processes"]]
    assert told == [("run-1", 0, 0), ("run-1", 0, 1), ("run-1", 1, 0), ("run-2", 3, 0)]
    assert len(agent("status", run_id="run-1", process_id=1)["processes"]) == 1
    assert agent("status", run_id="run-9")["processes"] == []
    stopped = agent("stop", run_id="run-1", attempt=0, grace_s=5)["stopped"]
    assert [(one["process_id"], one["how"]) for one in stopped] == [(0, "terminated"), (1, "terminated")]
    assert agent.status(0, attempt=1)["state"] == "running"


def test_a_full_disk_keeps_no_job_from_being_stopped(agent: Any, small_disk: Path) -> None:
    agent.root = small_disk / "agent"
    agent.start_and_hear(SAVES)
    room = os.statvfs(small_disk)
    (small_disk / "rest").write_bytes(bytes(room.f_bfree * room.f_frsize))
    assert agent.status()["state"] == "running"
    stopped = agent.stop(20)
    assert (stopped["how"], stopped["code"]) == ("exited by itself", 75)
    assert agent.log().count("saving") == 1


def test_a_stop_that_cannot_be_written_down_is_sent_all_the_same(agent: Any) -> None:
    agent.start_and_hear(SAVES)
    (agent.state_dir() / "stop-requested").mkdir()  # stands for a disk on which nothing can be made any more
    assert agent.stop(20)["code"] == 75
