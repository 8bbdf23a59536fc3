"""A job in a container starts, is stopped, and ends as a bare one does, and leaves nothing behind."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.host.conftest import cut_off
from tests.host.containers.conftest import docker
from tests.processes import is_alive
from tests.waiting import until

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
UP = 'say("up"); live()'
STUBBORN = 'signal.signal(signal.SIGTERM, signal.SIG_IGN); say("up"); live()'
WITH_A_CHILD = (
    'import subprocess; subprocess.Popen(["sleep", "600"], start_new_session=True); say("up"); live()'
)


@pytest.mark.parametrize(
    ("script", "more", "code", "reason", "message"),
    [
        # 125 is Docker's own code too.
        ('say("mine"); sys.exit(125)', {}, 125, "exit code 125", "exit code 125: mine"),
        ("", {"argv": ["no-such-program"]}, 127, "exit code 127", "no-such-program"),
        (
            'say("up"); os.kill(os.getpid(), 11)',
            {},
            None,
            "killed by signal 11 (SIGSEGV)",
            "killed by signal 11",
        ),
    ],
)
def test_a_job_ends_with_its_own_exit_code_and_nothing_is_left_of_it(
    boxed: Any, script: str, more: dict[str, Any], code: int | None, reason: str, message: str
) -> None:
    docker("create", "--name", boxed.name(), "--label", "tpu-stack.run=earlier", boxed.image, "true")
    boxed.start(script, **more)  # the old container of that name makes way
    ended = boxed.ended()
    assert (ended["code"], ended["reason"]) == (code, reason)
    assert message in boxed.heartbeat()["message"]
    assert boxed.containers() == []


@pytest.mark.parametrize("how", ["a stop", "a shutdown of the host"])
def test_sigterm_leads_to_a_checkpoint_and_exit_75(boxed: Any, how: str) -> None:
    started = boxed.start_and_hear(SAVES)
    if how == "a stop":
        stopped = boxed.stop()
        assert (stopped["how"], stopped["code"], stopped["signal"]) == ("exited by itself", 75, None)
    else:
        os.kill(started["pid"], signal.SIGTERM)  # Docker's client, as every process of the host gets it
        assert boxed.ended()["code"] == 75
    assert boxed.log() == f"up\nsaving {how == 'a stop'}\n"
    assert (boxed.run_dir / "checkpoint").exists()
    assert boxed.containers() == []


def test_a_job_has_no_more_of_the_host_than_it_needs(boxed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("HOST_SECRET", "x")
    cache = boxed.root / "cache"
    look = "say(json.dumps([dict(os.environ), os.getuid(), os.getgid()])); live()"
    mounts = {"mounts": [str(boxed.scripts), str(cache)], "shm_bytes": 1 << 27}
    request = boxed.start_request(look, boxed=mounts, cpus=[0])
    request["env"]["RUN_TOKEN"] = secret = "s3cret-value"
    boxed("start", **request, secrets={"MINE": "t0p-secret"})
    until(lambda: Path(request["log_path"]).exists() and secret in boxed.log())
    assert "t0p-secret" not in json.dumps(boxed.of_container("."))  # docker inspect
    shown = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in shown if secret.encode() in line]
    found, user, group = json.loads(boxed.log())
    assert (user, group) == (os.getuid(), os.getgid())
    assert found["STORAGE_EMULATOR_HOST"] == "http://127.0.0.1:9"
    assert (found["JAX_ENABLE_X64"], found["HOME"]) == ("1", "/tmp")
    assert found["RUN_CONTROL_DIR"] == str(boxed.state_dir())
    assert "HOST_SECRET" not in found and "DOCKER_HOST" not in found
    assert cache.stat().st_uid == os.getuid()  # made by the agent, not by Docker
    given = boxed.of_container(".HostConfig")
    assert given["Privileged"] is False
    assert (given["NetworkMode"], given["CapDrop"], given["CapAdd"]) == ("host", ["ALL"], None)
    assert given["SecurityOpt"] == ["no-new-privileges"]
    assert given["Devices"] in (None, [])
    assert (given["ShmSize"], given["CpusetCpus"]) == (1 << 27, "0")
    assert given["LogConfig"]["Type"] == "none"


def test_stacks_are_the_job_s_own_and_without_a_handler_it_is_not_asked(boxed: Any) -> None:
    answers = """
import faulthandler
file = open(os.environ["RUN_CONTROL_DIR"] + "/stacks.txt", "a")
def waits_for_a_step():
    say("up")
    time.sleep(1)
    faulthandler.register(signal.SIGUSR1, file=file)
    live()
waits_for_a_step()
"""
    boxed.start_and_hear(answers)
    asked = {"run_id": boxed.run_id, "attempt": 0, "process_id": 0, "timeout_s": 10}
    first = boxed.ask("stacks", **asked)
    assert first["ok"] or "has no SIGUSR1 handler" in first["error"]["message"]
    until(lambda: boxed.ask("stacks", **asked)["ok"])
    assert "in waits_for_a_step" in boxed("stacks", **asked)["text"]


def test_a_wrong_request_is_refused_and_nothing_is_made_or_fetched(boxed: Any, tmp_path: Path) -> None:
    missing = tmp_path / "elsewhere" / "share"
    for wrong in ("sha256:" + "a" * 64, "registry.invalid/jax@sha256:" + "b" * 64):
        answer = boxed.ask("start", **boxed.start_request(UP, boxed={"image": wrong}))
        assert f"no such image: {wrong[:30]}" in answer["error"]["message"].lower()
        assert "pull it" in answer["error"]["remedy"]
    for mounts in ({"mounts": [str(tmp_path), "/no/share"]}, {"read_only_mounts": [str(missing)]}):
        assert "does not exist on this host" in boxed.refusal(
            "start", **boxed.start_request(UP, boxed=mounts)
        )
    assert "in none of the container's mounts" in boxed.refusal(
        "start", **boxed.start_request(UP, cwd="/usr")
    )
    request = boxed.start_request(UP)
    request["env"].update(DOCKER_HOST="tcp://elsewhere", PATH="/x")
    assert "env DOCKER_HOST, PATH is the image's to set" in boxed.refusal("start", **request)
    assert not missing.exists() and not Path("/no/share").exists()
    assert boxed("status", run_id=boxed.run_id)["processes"] == []
    assert boxed.containers() == []
    first = boxed.start_and_hear(UP)
    assert first["already"] is False
    assert boxed.start(UP) == {**first, "already": True}
    assert boxed.containers() == [boxed.name()]


def test_a_privileged_job_may_all_that_root_may_on_the_host_and_ends_as_any_other(boxed: Any) -> None:
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


@pytest.mark.parametrize("killed", ["pid", "supervisor_pid"])
def test_a_killed_client_or_supervisor_takes_the_container_with_it(boxed: Any, killed: str) -> None:
    boxed.start_and_hear(WITH_A_CHILD)
    os.kill(boxed.record()[killed], signal.SIGKILL)
    until(lambda: boxed.status()["state"] == "exited")
    until(lambda: boxed.containers() == [])
    assert killed == "supervisor_pid" or boxed.ended()["signal"] == 9


@pytest.mark.parametrize("client_lives", [True, False])
def test_a_stop_finds_the_container_that_has_lost_its_supervisor(boxed: Any, client_lives: bool) -> None:
    started = boxed.start_and_hear(SAVES if client_lives else WITH_A_CHILD)
    cut_off(boxed)
    if not client_lives:
        os.kill(started["pid"], signal.SIGKILL)
        until(lambda: boxed.status()["state"] == "lost")
    assert boxed.containers() == [boxed.name()]
    assert boxed.stop()["how"] == ("terminated" if client_lives else "killed")
    assert (boxed.run_dir / "checkpoint").exists() == client_lives
    assert boxed.containers() == []


def test_an_image_that_is_none_of_ours_is_told_by_its_missing_init(boxed: Any, base: str) -> None:
    plain = docker("image", "inspect", "--format", "{{.Id}}", base)
    boxed.start(UP, boxed={"image": plain})
    ended = boxed.ended()
    assert ended["code"] == 125
    assert "Docker could not start the container" in ended["reason"] and "tini" in ended["reason"]
    assert boxed.heartbeat()["message"] == ended["reason"]
    assert boxed.containers() == []


def test_a_running_container_of_somebody_else_is_named_and_left_alone(boxed: Any) -> None:
    command = ["run", "--detach", "--network", "none", "--name", boxed.name()]
    number = docker(*command, "--label", "tpu-stack.run=other", boxed.image, "sleep", "600")
    try:
        message = boxed.refusal("start", **boxed.start_request(UP))
        assert f"the name {boxed.name()} is taken by the container {number[:12]}, which runs" in message
        assert docker("inspect", "--format", "{{.State.Running}}", number) == "true"
    finally:
        docker("rm", "--force", number)


def test_what_a_killed_start_or_an_unwatched_end_left_is_cleared_by_the_next(boxed: Any) -> None:
    boxed.start_and_hear(UP)
    cut_off(boxed)
    for name in ("process.json", "container.id"):
        (boxed.state_dir() / name).unlink()  # as if neither had been written yet
    first = boxed.of_container(".Id")
    started = boxed.start_and_hear(UP)
    assert started["already"] is False
    assert boxed.of_container(".Id") != first
    cut_off(boxed)
    os.kill(started["pid"], signal.SIGKILL)
    until(lambda: boxed.status()["state"] == "lost")
    docker("kill", boxed.name())
    assert boxed.containers() == [boxed.name()]
    boxed.start_and_hear(UP, attempt=1)
    assert boxed.containers() == [f"tpu-stack-{boxed.run_id}-1-0"]


def test_paths_may_hold_commas_quotes_and_blanks(boxed: Any, tmp_path: Path) -> None:
    odd = tmp_path / 'a, "b" c'
    odd.mkdir()
    (odd / "file").write_text("seen")
    look = f"""
say(open({str(odd / "file")!r}).read())
try:
    open({str(odd / "new")!r}, "w")
except OSError as error:
    say(error.errno)
"""
    mounts = {"mounts": [str(boxed.run_dir), str(boxed.root)], "read_only_mounts": [str(tmp_path)]}
    boxed.start(look, boxed=mounts)
    boxed.ended()
    assert boxed.log().split() == ["seen", "30"]


def test_a_frozen_daemon_hinders_no_stop_and_a_killed_one_ends_the_job(
    engine: subprocess.Popen[bytes], boxed: Any
) -> None:
    def start(attempt: int) -> list[int]:
        boxed.start_and_hear(UP, attempt=attempt)
        top = docker("top", f"tpu-stack-{boxed.run_id}-{attempt}-0")
        pids = [int(line.split()[1]) for line in top.splitlines()[1:]]
        assert pids and all(map(is_alive, pids))
        return pids

    pids = start(0)
    engine.send_signal(signal.SIGSTOP)
    try:
        stopped = boxed.stop(grace_s=0.5)
    finally:
        engine.send_signal(signal.SIGCONT)
    assert not any(map(is_alive, pids))
    assert "Docker still has its container" in str(stopped["note"])
    pids = start(1)
    engine.kill()
    ended = boxed.ended(attempt=1)
    assert ended["code"] == 125
    assert "Docker went away while the job ran" in ended["reason"]
    until(lambda: not any(map(is_alive, pids)))
    message = boxed.refusal("start", **boxed.start_request(UP, attempt=2))
    assert "Docker could not make the container: Cannot connect" in message


# Stands for jobs.runtime.storage.deliver, whose libraries the small image lacks: says to a socket what it was
# given and sees.
DELIVER = """
import json, os, socket, sys
asked = json.load(sys.stdin)
log = [open(each["path"]).read() for each in asked["files"] if "path" in each]
said = {"url": sys.argv[1], "files": [each["name"] for each in asked["files"]], "log": log,
        "token": os.environ["RUN_TOKEN"], "controlled": "RUN_CONTROL_DIR" in os.environ}
with socket.create_connection(("127.0.0.1", int(os.environ["RUN_PORT"]))) as to:
    to.sendall(json.dumps(said).encode())
"""


def test_the_end_of_a_run_in_a_bucket_is_delivered_from_a_container(boxed: Any, tmp_path: Path) -> None:
    storage = tmp_path / "code/jobs/runtime/storage"
    storage.mkdir(parents=True)
    (storage / "deliver.py").write_text(DELIVER)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        places = {"mounts": [str(tmp_path)], "read_only_mounts": [str(tmp_path / "code")]}
        own = {"run_dir": None, "log_path": str(tmp_path / "logs" / "host-0.log"), "boxed": places}
        request = boxed.start_request('say("up"); sys.exit(3)', **own)
        port = str(server.getsockname()[1])
        request["env"].update(RUN_TOKEN="token", RUN_PORT=port, PYTHONPATH=str(tmp_path / "code"))
        request["env"]["RUN_DIR"] = "gs://bucket/run"
        # The job itself writes to a directory: the bucket is the supervisor's alone here.
        boxed("start", **request)
        connection, _ = server.accept()
        with connection, connection.makefile() as told:
            said = json.load(told)
    assert said["url"] == "gs://bucket/run"
    assert "heartbeats/host-0.json" in said["files"] and said["log"] == ["up\n"]
    assert (said["token"], said["controlled"]) == ("token", False)
    boxed.ended()
    assert boxed.containers() == []
