"""One host's part of an own command, with real ranks: what they find, and how each of its ends is told."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.process_environment import ProcessEnvironment
from contracts.ranks import FROM_LOG, Ranks, Spec
from contracts.run_directory import RunDirectory
from jobs.runtime.ranks.rank_supervisor import event_files
from tests.jobs.groups import free_address
from tests.processes import run_program
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0
RANK = "import os, sys, time, signal, json; rank = int(os.environ['RANK']); "
SLEEP = "print('up', rank, flush=True); time.sleep(60)"
METRICS = "open(os.environ['RUN_DIR'] + '/metrics.jsonl', 'a').write(json.dumps({'step': 7, 'loss': 0.5}) + '\\n'); "


@dataclasses.dataclass(frozen=True)
class Host:
    """A supervisor that runs, and what it leaves."""

    process: subprocess.Popen[str]
    run: Path
    work: Path

    def ended(self) -> tuple[int, str]:
        said, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, said

    def beat(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "heartbeats/host-0.json").read_text())
        return found

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "result.json").read_text())
        return found

    def wait_for(self, holds: Callable[[], bool]) -> None:
        until(holds, LIMIT_S)


Start = Callable[..., Host]


@pytest.fixture
def start(tmp_path: Path, environment: ProcessEnvironment) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def make(
        *words: str,
        per_host: int = 2,
        hosts: int = 1,
        is_job: bool = False,
        coordinator: str = "127.0.0.1:4000",
        log: str | None = None,
        **more: Any,
    ) -> Host:
        folder, run, control = tmp_path / "abc", tmp_path / "run", tmp_path / "control"
        places: dict[str, Any] = {} if is_job else {"folder": str(folder), "work": str(tmp_path / "work")}
        for path in (folder, run, control):
            path.mkdir(exist_ok=True)
        (folder / "data.txt").write_text("sent")
        ranks = Ranks(
            hosts=("127.0.0.1",) * hosts, ports=(tuple(range(1, per_host + 1)),) * hosts, per_host=per_host
        )
        spec = Spec(words=words, ranks=ranks, **places, **more)
        told = dataclasses.replace(
            environment,
            num_processes=hosts,
            process_id=0,
            control_dir=str(control),
            coordinator=coordinator,
        )
        output = None if log is None else open(log, "w")  # noqa: SIM115 - the process has it
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jobs.runtime.ranks.rank_supervisor", spec.encoded()],
            env={**os.environ, **told.variables(), "PYTHONPATH": str(ROOT)},
            stdout=output or subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if output is not None:
            output.close()
        started.append(process)
        return Host(process, run, tmp_path / "work")

    yield make
    for process in started:
        process.kill()
        process.communicate()


def test_ranks_run_in_a_copy_of_the_folder_and_their_last_metrics_are_the_result(start: Start) -> None:
    words = (
        RANK
        + "print(open('data.txt').read(), rank, 'PYTHONPATH' in os.environ, os.environ['RUN_PROCESS_ID'])"
    )
    host = start("python", "-c", words + "; rank or " + METRICS.replace("; ", ""), python=sys.executable)
    code, said = host.ended()
    assert (code, sorted(said.splitlines())) == (0, ["[0] sent 0 False 0", "[1] sent 1 False 1"])
    assert {name: host.result()[name] for name in ("outcome", "steps", "loss")} == {
        "outcome": "done",
        "steps": 7,
        "loss": 0.5,
    }
    assert (host.beat()["state"], host.beat()["step"]) == ("done", 7)


def test_what_an_attempt_leaves_in_its_folder_is_there_for_the_next_one(start: Start) -> None:
    first = start("sh", "-c", "echo $RANK >> seen; echo changed > data.txt", per_host=1)
    assert first.ended() == (0, "")
    second = start("sh", "-c", "cat seen data.txt", per_host=1)
    assert second.ended() == (0, "0\nchanged\n")


@pytest.mark.parametrize("left", ['{"step": 8, "lo', '{"step": 8, "loss": 1}'])
def test_a_line_of_metrics_that_a_killed_attempt_began_does_not_swallow_the_next_one(
    start: Start, left: str
) -> None:
    write = "echo '{}' >> $RUN_DIR/metrics.jsonl"
    host = start("sh", "-c", f"printf '%s' '{left}' >> $RUN_DIR/metrics.jsonl", per_host=1)
    assert host.ended() == (0, "")
    host = start("sh", "-c", write.format('{"step": 5, "loss": 2}'), per_host=1)
    assert host.ended() == (0, "")
    assert [line["step"] for line in RunDirectory(str(host.run)).read_metrics()][-1] == 5
    assert (host.result()["steps"], host.result()["loss"]) == (5, 2)


SHOW = "python -c 'import google.protobuf, importlib.metadata as m, sys; print(m.version(\"protobuf\"), sys.prefix)'"


def test_what_a_command_installs_goes_into_its_own_environment_which_the_next_attempt_finds(
    start: Start, tmp_path: Path
) -> None:
    layer, wheel = tmp_path / "layer", tmp_path / "abc" / "protobuf-0.1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("google/protobuf/__init__.py", "")
        file.writestr(
            "protobuf-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: protobuf\nVersion: 0.1\n"
        )
        file.writestr(
            "protobuf-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr("protobuf-0.1.dist-info/RECORD", "")
    before, more = importlib.metadata.version("protobuf"), {"per_host": 1, "layer": str(layer)}

    def said(line: str) -> list[str]:
        code, text = start("sh", "-c", line, **more).ended()
        assert code == 0, text
        return text.splitlines()

    quiet = "--quiet --no-index --no-deps"
    assert said(SHOW) == [f"{before} {layer}"]
    assert said(f"pip install {quiet} --no-warn-conflicts *.whl; {SHOW}") == [f"0.1 {layer}"]
    assert said(f"python3 -m pip uninstall -q -y numpy protobuf 2>/dev/null; {SHOW}") == [f"{before} {layer}"]
    assert said(f"uv pip install {quiet} *.whl; {SHOW}") == [f"0.1 {layer}"]
    assert said(SHOW) == [f"0.1 {layer}"]
    assert said("head -n 1 $(command -v tensorboard)") == [f"#!{layer}/bin/python"]
    assert importlib.metadata.version("protobuf") == before and importlib.util.find_spec("numpy") is not None


@pytest.mark.parametrize(
    ("end", "code", "how", "stubborn"),
    [
        ("sys.exit(3)", 3, "rank 1 ended with exit code 3",
         "signal.signal(signal.SIGTERM, signal.SIG_IGN) if rank == 2 else None; "),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "rank 1 was killed by SIGSEGV", ""),
    ],
)  # fmt: skip
def test_a_rank_that_fails_takes_its_siblings_along_and_is_named(
    start: Start, end: str, code: int, how: str, stubborn: str
) -> None:
    host = start(
        sys.executable, "-c", f"{RANK}{stubborn}\nif rank == 1: time.sleep(1); {end}\n{SLEEP}", per_host=3
    )
    began_s = time.monotonic()
    assert host.ended()[0] == code
    assert time.monotonic() - began_s < LIMIT_S / 2
    assert (host.beat()["state"], host.beat()["message"]) == ("failed", how)
    assert not (host.run / "result.json").exists(), "the agents say which host was the first to fail"


LOST = "RuntimeError: Gloo AllReduce failed: Connection closed by peer [127.0.0.1]:43210"


def test_a_rank_that_says_its_peer_is_gone_is_not_blamed_where_another_ends_by_itself_in_the_next_moment(
    start: Start,
) -> None:
    ends = f"sys.exit({LOST!r}) if rank == 0 else (time.sleep(0.5), sys.exit(3))"
    host = start(sys.executable, "-c", RANK + ends)
    assert host.ended()[0] == 3
    assert host.beat()["message"] == "rank 1 ended with exit code 3"


def test_a_rank_that_says_its_peer_is_gone_is_blamed_where_no_other_ends(start: Start) -> None:
    host = start(sys.executable, "-c", f"{RANK}\nif rank == 0: sys.exit({LOST!r})\n{SLEEP}")
    assert host.ended()[0] == 1
    assert host.beat()["message"] == "rank 0 ended with exit code 1"


def test_a_rank_that_failed_before_the_stop_of_its_host_has_failed(start: Start) -> None:
    """The order to stop comes from a host that lost this one: it would be blamed for that."""
    ends = "if rank == 0: sys.exit(3)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)"
    host = start(sys.executable, "-c", f"{RANK}\n{ends}\nopen('up', 'w')\n{SLEEP}")
    host.wait_for(lambda: (host.work / "up").exists())
    time.sleep(1)
    host.process.send_signal(signal.SIGTERM)
    assert host.ended()[0] == 3
    assert (host.beat()["state"], host.beat()["message"]) == ("failed", "rank 0 ended with exit code 3")


def test_a_rank_that_the_machine_stops_itself_and_that_ends_with_an_error_is_resumed(start: Start) -> None:
    """systemd sends SIGTERM to every process of a session."""
    ends = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\nopen('pid', 'w').write(str(os.getpid()))"
    host = start(sys.executable, "-c", f"{RANK}\n{ends}\n{SLEEP}", per_host=1)
    host.wait_for(lambda: (host.work / "pid").exists() and (host.work / "pid").read_text() != "")
    host.process.send_signal(signal.SIGTERM)
    os.kill(int((host.work / "pid").read_text()), signal.SIGTERM)
    assert host.ended()[0] == 75
    assert host.result()["outcome"] == "preempted"


def test_of_a_host_with_one_rank_it_is_the_command_that_failed(start: Start) -> None:
    host = start("sh", "-c", "exit 3", per_host=1)
    assert host.ended()[0] == 3
    assert host.beat()["message"] == "the command ended with exit code 3"


CONNECTS = (
    "import socket, sys, time; s = socket.create_connection((sys.argv[1], int(sys.argv[2]))); time.sleep(60)"
)
MEETS = (
    RANK + "import socket, subprocess; address = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
    "if rank == 0: server = socket.create_server(address)\n"
    # A process that the rank has started joins in its place.
    f"if rank == 1: time.sleep(1); subprocess.Popen([sys.executable, '-c', {CONNECTS!r}, *map(str, address)])\n"
)
GIVES_UP = (
    "print('absl::Status: DEADLINE_EXCEEDED', flush=True); print('RPC: /Service/RegisterTask', flush=True); "
)


def test_a_rank_that_its_siblings_waited_for_in_vain_is_named_and_so_is_what_they_waited_in(
    start: Start,
) -> None:
    waits = f"{MEETS}if rank == 0: time.sleep(4); {GIVES_UP}os.abort()\n{SLEEP}"
    host = start(sys.executable, "-c", waits, per_host=4, coordinator=free_address())
    host.wait_for(
        lambda: (host.run / "heartbeats/host-0.json").exists() and host.beat().get("joined") == [0, 1]
    )
    assert host.ended()[0] == 134
    found = re.fullmatch(
        r"rank 0 was killed by SIGABRT: ranks 2, 3 had not joined when jax.distributed.initialize gave up, "
        r"after [3-9] s \(initialization_timeout=…, 300 s by default\); let every .*",
        host.beat()["message"],
    )
    assert found, host.beat()
    assert host.beat()["says_all"], "nobody wants to see the stack trace of a library"


def test_where_rank_0_is_late_it_is_named_by_whoever_waited_for_it(start: Start) -> None:
    waits = f"{RANK}\nif rank == 1: time.sleep(1); {GIVES_UP}os.abort()\n{SLEEP}"
    host = start(sys.executable, "-c", waits, per_host=3, coordinator="127.0.0.1:1")
    assert host.ended()[0] == 134
    late = (
        "rank 1 was killed by SIGABRT: rank 0 was not yet at 127.0.0.1:1, where the ranks meet, when jax.dist"
    )
    assert host.beat()["message"].startswith(late)


def test_a_disk_that_could_not_take_the_log_is_named_as_the_cause_of_the_end(start: Start) -> None:
    host = start(sys.executable, "-c", RANK + "print('lost'); sys.exit(rank)", log="/dev/full")
    assert host.ended()[0] == 1
    message = host.beat()["message"]
    assert message.startswith(f"rank 1 ended with exit code 1: the disk is full: {host.run} has "), message


@pytest.mark.parametrize("outcome", ["stopped", "preempted"])
def test_sigterm_reaches_all_ranks_and_the_run_can_be_resumed_however_they_end(
    start: Start, outcome: str, tmp_path: Path
) -> None:
    save = "signal.signal(signal.SIGTERM, lambda *_: (open(f'saved-{rank}', 'w'), sys.exit(0))) if rank else None; "
    host = start(sys.executable, "-c", RANK + METRICS + save + SLEEP)
    host.wait_for(lambda: (host.run / "heartbeats/host-0.json").exists() and host.beat()["step"] == 7)
    if outcome == "stopped":
        (tmp_path / "control" / "stop-requested").touch()
    host.process.send_signal(signal.SIGTERM)
    assert host.ended()[0] == 75
    assert (host.result()["outcome"], host.beat()["state"]) == (outcome, outcome)
    assert (host.work / "saved-1").exists()


def test_a_rank_that_ends_with_75_asks_to_be_resumed(start: Start) -> None:
    host = start(sys.executable, "-c", f"{RANK}\nif rank == 0: sys.exit(75)\n{SLEEP}")
    assert host.ended()[0] == 75
    assert host.result()["outcome"] == "preempted"


def test_the_first_host_says_done_when_the_others_have(start: Start) -> None:
    host = start("true", hosts=2, per_host=1)
    host.wait_for(
        lambda: (host.run / "heartbeats/host-0.json").exists() and host.beat()["state"] == "stepping"
    )
    time.sleep(1)
    assert host.process.poll() is None
    assert not (host.run / "result.json").exists()
    (host.run / "heartbeats/host-1.json").write_text(json.dumps({"state": "done", "attempt": 3}))
    assert host.ended()[0] == 0
    assert host.result()["outcome"] == "done"


@pytest.mark.parametrize(("progress", "moves"), [(None, True), (FROM_LOG, False), ("data.txt", False)])
def test_standing_still_shows_only_where_progress_is_named(
    start: Start, progress: str | None, moves: bool
) -> None:
    host = start("sleep", "60", progress=progress)
    host.wait_for(
        lambda: (host.run / "heartbeats/host-0.json").exists() and host.beat()["state"] == "stepping"
    )
    host.wait_for(lambda: host.beat()["time"] - host.beat()["step_time"] < 3)
    time.sleep(5)  # the last heartbeat is up to a second old
    beat = host.beat()
    assert (beat["time"] - beat["step_time"] < 3) == moves
    assert beat.get("hangs_at_floor", False) == (not moves)


def test_event_files_of_tensorboard_are_found_wherever_a_script_writes_them(start: Start) -> None:
    words = "import os; run = os.environ['RUN_DIR'] + '/out/runs/'; os.makedirs(run + 'a'); os.makedirs(run + 'b/c'); "
    words += "hosts = '../../tensorboard/hosts/0'; os.makedirs(run + hosts); "  # the sampler's own
    words += "[open(run + name + '/events.out.tfevents.1.vm', 'w') for name in ('a', 'b/c', hosts)]"
    host = start(sys.executable, "-c", words, per_host=1)
    assert host.ended() == (0, "")
    assert host.result()["tensorboard"] == "out/runs"
    assert event_files("gs://bucket/run") is None


def test_a_folder_that_cannot_be_laid_out_is_told_by_the_first_file_that_could_not(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "abc" / "sub").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "sub").write_text("in the way")
    host = start("true", per_host=1)
    assert host.ended()[0] == 1
    assert re.fullmatch(r"/\S+/work/sub: \[Errno 17\] File exists: \S+", host.beat()["message"])


def test_a_program_that_is_not_there_is_named(start: Start) -> None:
    host = start("no-such-program")
    assert host.ended()[0] == 1
    assert host.beat()["message"] == "no-such-program: No such file or directory"


OF_JOB = (
    "import os, sys, time, signal; from contracts import process_environment as told; "
    "from contracts.run_directory import RunDirectory; "
    "from jobs.runtime import process; from jobs.runtime.monitoring.heartbeat import Heartbeat; "
    "assert os.environ['PYTHONPATH']; e = told.read(os.environ); d = RunDirectory(e.run_dir); "
    "run = process.Run(environment=e, directory=d, heartbeat=Heartbeat(d, e)); "
    "run.heartbeat.start(); process.answer_sigusr1(e.control_dir); "
)
AT_SIGTERM = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print('up', e.process_id, flush=True); "
SLEEPS = AT_SIGTERM + "time.sleep(60)"


@pytest.mark.parametrize(
    ("first", "second", "code", "said"),
    [
        # The first loses the second, and says so sooner than the second has ended.
        (
            "time.sleep(.5); process.end_as_failed(run, 'lost'); sys.exit(76)",
            "process.end_as_failed(run, 'no such column', says_all=True); time.sleep(1); sys.exit(2)",
            2,
            ("rank 1: no such column", True),
        ),
        (SLEEPS, "os.kill(os.getpid(), signal.SIGSEGV)", 139, ("rank 1 was killed by SIGSEGV", False)),
        ("process.end_as_failed(run, 'lost'); sys.exit(76)", SLEEPS, 76, ("rank 0: lost", False)),
        (SLEEPS, AT_SIGTERM + "sys.exit(75)", 75, None),
    ],
)
def test_a_rank_of_a_job_that_fails_takes_its_siblings_along_and_has_the_host_s_last_words(
    start: Start, first: str, second: str, code: int, said: tuple[str, bool] | None
) -> None:
    program = OF_JOB + f"exec({first!r} if e.is_first else {second!r})"
    host = start("python", "-P", "-c", program, is_job=True, python=sys.executable)
    assert host.ended()[0] == code
    last_words = host.run.parent / "control/heartbeat.json"  # none where the first rank had not begun
    beat = json.loads(last_words.read_text()) if last_words.exists() else {}
    found = (beat["message"], beat["says_all"]) if beat.get("state") == "failed" else None
    assert found == said
    assert not (host.run / "result.json").exists(), "a job's ranks write it"


def test_the_ranks_of_a_job_are_told_to_stop_and_asked_for_their_stacks(start: Start) -> None:
    program = OF_JOB + SLEEPS
    host = start("python", "-P", "-c", program, is_job=True, python=sys.executable)
    stacks = host.run.parent / "control/stacks.txt"
    host.wait_for(lambda: stacks.exists() and (host.run / "heartbeats/host-0.json").exists())
    assert host.process.stdout is not None
    assert {host.process.stdout.readline() for _ in range(2)} == {"[0] up 0\n", "[1] up 1\n"}
    host.process.send_signal(signal.SIGUSR1)
    host.wait_for(lambda: stacks.read_text().count("most recent call first") >= 2)
    host.process.send_signal(signal.SIGTERM)
    assert host.ended()[0] == 75
    assert sorted(path.name for path in (host.run / "heartbeats").glob("*.json")) == ["host-0.json"]


ENDS = """
import atexit, contextlib, sys, time, types
jax = sys.modules["jax"] = types.ModuleType("jax")
jax.distributed = types.SimpleNamespace(is_initialized=lambda: True)
from jobs.runtime.ranks import uncaught_exceptions
uncaught_exceptions.LIMIT_S = 0.1
atexit.register(lambda: (time.sleep(1), print("its own end", flush=True)))

def end():
    try:
        sys.exit(STATUS)
    finally:
        time.sleep(0)

HOW
"""


@pytest.mark.parametrize(
    ("how", "status", "code", "is_waited_for"),
    [
        ("end()", 3, 3, False),
        ("end()", "'no data'", 1, False),
        ("try: end()\nexcept SystemExit: raise", 3, 3, False),
        ("end()", 0, 0, True),
        ("end()", 75, 75, True),
        ("end()", None, 0, True),
        ("try: end()\nexcept SystemExit as error: kept = error", 3, 0, True),
        ("with contextlib.suppress(SystemExit): end()", 3, 0, True),
        ("import threading; threading.Thread(target=end).start()", 3, 0, True),
        (
            "import pickle\ntry: end()\nexcept SystemExit as error: assert pickle.loads(pickle.dumps(error)).code == 3",
            3,
            0,
            True,
        ),
        ("raise ValueError", None, 1, False),
    ],
)
def test_the_exit_handlers_of_a_rank_of_jax_are_waited_for_unless_it_has_failed(
    how: str, status: object, code: int, is_waited_for: bool
) -> None:
    program = ENDS.replace("STATUS", str(status)).replace("HOW", how)
    done = run_program([sys.executable, "-c", program], dict(os.environ), cwd=ROOT)
    assert (done.returncode, "its own end" in done.stdout) == (code, is_waited_for), done
