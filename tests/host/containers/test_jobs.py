"""A job in a container starts, is stopped, and ends as a bare one does, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.host.containers.conftest import docker

pytestmark = pytest.mark.slow
SAVES = """
def save(*_):
    say("saving %s" % os.path.exists(os.environ["RUN_CONTROL_DIR"] + "/stop-requested"))
    open(run_dir + "/checkpoint", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
say("up")
live()
"""
STUBBORN = 'signal.signal(signal.SIGTERM, signal.SIG_IGN); say("up"); live()'
WITH_A_CHILD = (
    'import subprocess; subprocess.Popen(["sleep", "600"], start_new_session=True); say("up"); live()'
)


def test_a_job_ends_with_its_own_exit_code_and_nothing_is_left_of_it(boxed: Any) -> None:
    boxed.start('say("step 1"); sys.exit(7)')
    ended = boxed.ended()
    assert (ended["code"], ended["signal"], ended["reason"]) == (7, None, "exit code 7")
    assert boxed.log() == "step 1\n"
    assert boxed.heartbeat()["message"] == "exit code 7: step 1"
    assert boxed.containers() == []


def test_a_job_is_the_agent_s_user_and_has_no_more_of_the_host_than_it_needs(boxed: Any) -> None:
    boxed.start_and_hear(
        'say("%d %d" % (os.getuid(), os.getgid())); live()', cpus=[0], boxed={"shm_bytes": 1 << 27}
    )
    assert boxed.log().split() == [str(os.getuid()), str(os.getgid())]
    given = boxed.of_container(".HostConfig")
    assert given["Privileged"] is False
    assert (given["NetworkMode"], given["CapDrop"], given["CapAdd"]) == ("host", ["ALL"], None)
    assert given["SecurityOpt"] == ["no-new-privileges"]
    assert given["Devices"] in (None, [])
    assert (given["ShmSize"], given["CpusetCpus"]) == (1 << 27, "0")
    assert given["LogConfig"]["Type"] == "none"


def test_a_privileged_job_may_all_that_root_may_on_the_host_and_ends_as_any_other(
    boxed: Any, until: Any
) -> None:
    if docker("run", "--rm", "--privileged", boxed.image, "echo", "ran", check=False) != "ran":
        pytest.skip("Docker itself has not all capabilities on this machine")
    shows = '[line.split()[1] for line in open("/proc/self/status") if line.startswith(("Uid", "CapEff"))]'
    boxed.start_and_hear(SAVES.replace('"up"', f'" ".join({shows})'), boxed={"access": "privileged"})
    until(lambda: boxed.log().count("\n") == 2)  # the agent's own word comes first
    user, capabilities = boxed.log().splitlines()[-1].split()
    bounds = next(line for line in Path("/proc/1/status").read_text().splitlines() if "CapBnd" in line)
    assert (user, int(capabilities, 16)) == ("0", int(bounds.split()[1], 16))
    assert boxed.log().startswith("tpu-stack: the container is privileged and runs as the host's root")
    assert (boxed.of_container(".HostConfig.Privileged"), boxed.of_container(".HostConfig.CapDrop")) == (
        True,
        None,
    )
    assert boxed.stop()["code"] == 75
    assert boxed.containers() == []


def test_values_of_the_environment_are_in_no_command_line(boxed: Any, until: Any) -> None:
    secret = "s3cret-value"
    script = 'say(os.environ["RUN_TOKEN"]); live()'
    request = boxed.start_request(script)
    request["env"]["RUN_TOKEN"] = secret
    boxed("start", **request)
    until(lambda: Path(request["log_path"]).exists() and secret in boxed.log())
    shown = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in shown if secret.encode() in line]


def test_sigterm_leads_to_a_checkpoint_and_exit_75(boxed: Any) -> None:
    boxed.start_and_hear(SAVES)
    stopped = boxed.stop()
    assert (stopped["how"], stopped["code"], stopped["signal"]) == ("exited by itself", 75, None)
    assert boxed.log() == "up\nsaving True\n"
    assert (boxed.run_dir / "checkpoint").exists()
    assert boxed.containers() == []


def test_a_signal_to_docker_s_client_reaches_the_job_as_at_a_shutdown_of_the_host(boxed: Any) -> None:
    started = boxed.start_and_hear(SAVES)
    os.kill(started["pid"], signal.SIGTERM)
    assert boxed.ended()["code"] == 75


def test_a_stop_right_after_the_start_is_not_lost(boxed: Any) -> None:
    boxed.start('say("up"); live()')
    stopped = boxed.stop()
    assert stopped["how"] in ("terminated", "exited by itself"), stopped
    assert boxed.containers() == []


def test_a_job_that_ignores_the_stop_is_killed_with_all_that_it_has_started(boxed: Any) -> None:
    boxed.start_and_hear(
        "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)\n" + STUBBORN
    )
    pids = [int(line.split()[1]) for line in docker("top", boxed.name()).splitlines()[1:]]
    assert len(pids) == 3
    stopped = boxed.stop(grace_s=0.5)
    assert (stopped["how"], stopped["signal"]) == ("killed", 9)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert boxed.containers() == []


def test_a_killed_client_takes_its_container_with_it(boxed: Any) -> None:
    started = boxed.start_and_hear(WITH_A_CHILD)
    os.kill(started["pid"], signal.SIGKILL)
    ended = boxed.ended()
    assert (ended["code"], ended["signal"]) == (None, 9)
    assert boxed.containers() == []


def test_a_container_outlives_its_supervisor_and_can_still_be_stopped(boxed: Any, until: Any) -> None:
    boxed.start_and_hear(SAVES)
    os.kill(boxed.record()["supervisor_pid"], signal.SIGKILL)
    until(lambda: not boxed.status()["supervised"])
    assert boxed.status()["state"] == "running"
    boxed.stop()
    assert (boxed.run_dir / "checkpoint").exists()
    assert boxed.containers() == []


def test_a_stop_finds_the_container_that_has_lost_supervisor_and_client(boxed: Any, until: Any) -> None:
    started = boxed.start_and_hear(WITH_A_CHILD)
    os.kill(boxed.record()["supervisor_pid"], signal.SIGKILL)
    until(lambda: not boxed.status()["supervised"])
    os.kill(started["pid"], signal.SIGKILL)
    until(lambda: boxed.status()["state"] == "lost")
    assert boxed.containers() == [boxed.name()]
    assert boxed.stop()["how"] == "killed"
    assert boxed.containers() == []


def test_a_guard_ends_the_container_when_the_supervisor_of_a_run_is_killed(
    boxed: Any, until: Any, free_port: int
) -> None:
    hub = {"hub_host": "127.0.0.1", "hub_port": free_port, "hub_token": "token"}
    boxed.start_and_hear(WITH_A_CHILD, num_processes=1, **hub)
    os.kill(boxed.record()["supervisor_pid"], signal.SIGKILL)
    until(lambda: boxed.status()["state"] == "exited")
    until(lambda: boxed.containers() == [])


def test_stacks_are_the_job_s_own(boxed: Any) -> None:
    answers = """
import faulthandler
file = open(os.environ["RUN_CONTROL_DIR"] + "/stacks.txt", "a")
faulthandler.register(signal.SIGUSR1, file=file)
def waits_for_a_step():
    say("up")
    live()
waits_for_a_step()
"""
    boxed.start_and_hear(answers)
    text = boxed("stacks", run_id=boxed.run_id, attempt=0, process_id=0, timeout_s=10)["text"]
    assert "in waits_for_a_step" in text


def test_a_job_without_a_handler_is_not_killed_by_asking_for_its_stacks(boxed: Any) -> None:
    boxed.start_and_hear('say("up"); live()')
    asked = {"run_id": boxed.run_id, "attempt": 0, "process_id": 0, "timeout_s": 5}
    assert "has no SIGUSR1 handler" in boxed.refusal("stacks", **asked)[1]
    assert boxed.status()["state"] == "running"


def test_a_killed_job_is_told_as_killed_by_that_signal(boxed: Any) -> None:
    boxed.start_and_hear('say("up"); os.kill(os.getpid(), signal.SIGSEGV)')
    assert boxed.ended()["reason"] == "killed by signal 11 (SIGSEGV)"


def test_a_second_start_starts_nothing(boxed: Any) -> None:
    first = boxed.start_and_hear('say("up"); live()')
    assert boxed.start('say("up"); live()') == {**first, "already": True}
    assert boxed.containers() == [boxed.name()]


def test_directories_of_the_run_are_made_by_the_agent_s_user_not_by_docker(boxed: Any) -> None:
    cache = boxed.root / "cache"
    request = boxed.start_request("sys.exit(0)", boxed={"mounts": [str(boxed.scripts), str(cache)]})
    boxed("start", **request)
    assert boxed.ended()["code"] == 0
    assert cache.stat().st_uid == os.getuid()


def test_what_a_job_finds_of_the_host_s_environment_is_what_it_needs(
    boxed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("HOST_SECRET", "x")
    boxed.start("say(json.dumps(dict(os.environ)))")
    boxed.ended()
    found = json.loads(boxed.log())
    assert found["STORAGE_EMULATOR_HOST"] == "http://127.0.0.1:9"
    assert (found["JAX_ENABLE_X64"], found["HOME"]) == ("1", "/tmp")
    assert found["RUN_CONTROL_DIR"] == str(boxed.state_dir())
    assert "HOST_SECRET" not in found and "DOCKER_HOST" not in found
