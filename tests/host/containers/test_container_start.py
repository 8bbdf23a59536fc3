"""What Docker is told, word for word; and how an end is read from what Docker says."""

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from contracts.host_interface import SHELL
from host.agent.containers import container_start as command
from host.agent.containers.container_start import Access, Node, access, as_user, nodes, privileged
from host.agent.containers.docker_command import Container, judged
from host.agent.protocol import Failed, is_container, is_image
from host.agent.shell import in_container
from tests.host.containers.conftest import docker
from tests.waiting import until

REF = "region-docker.pkg.dev/project/images/jax@sha256:" + "a" * 64


FIVE = Access(["--user", "5:6"], False, None, [])
OS_LOGIN_ID = 3721906406


def request(**fields: Any) -> dict[str, Any]:
    container = {"image": REF, "platform": "tpu", "mounts": ["/run"], "read_only_mounts": ["/code"]}
    return {
        "run_id": "run-1",
        "attempt": 2,
        "process_id": 3,
        "argv": ["python", "-m", "job"],
        "cwd": "/run",
        "cpus": [3, 1],
        "log_path": "/logs/log",
        "container": {**container, "shm_bytes": 64, **fields},
    }


def test_a_job_s_container_is_told_to_docker_in_these_words() -> None:
    own = command.label_arguments(request(), "/root/agent", "host-1")
    said = command.run_arguments(request(), "name", "/control", own, FIVE, ["RUN_ID", "A"])
    assert said == [
        *["run", "--name", "name", "--cidfile", "/control/container.id"],
        *["--label", "tpu-stack.run=run-1", "--label", "tpu-stack.attempt=2"],
        *["--label", "tpu-stack.process=3", "--label", "tpu-stack.root=/root/agent"],
        *["--label", "tpu-stack.host=host-1"],
        *["--network", "host", "--log-driver", "none", "--pull", "never", "--stop-timeout", "60"],
        *["--ulimit", "memlock=-1", "--user", "5:6", "--shm-size", "64", "--cpuset-cpus", "1,3"],
        *["--mount", "type=bind,source=/code,target=/code,readonly"],
        *["--mount", "type=bind,source=/control,target=/control"],
        *["--mount", "type=bind,source=/run,target=/run"],
        *["--workdir", "/run", "--env", "A", "--env", "RUN_ID"],
        *["--entrypoint", "tini", REF, "--", "python", "-m", "job"],
    ]


def test_a_shell_is_begun_in_a_container_in_these_words() -> None:
    container = Container("name", "/bin/docker")
    variables = {"PATH": "/layer/bin:/bin", "A": "kept by the client", "LD_PRELOAD": "x", "HOME": "/tmp"}
    assert in_container(container, variables, "/work", has_terminal=True) == [
        *["/bin/docker", "exec", "--interactive", "--tty", "--workdir", "/work", "--env", "A"],
        *["--env", "PATH=/layer/bin:/bin", "name", *SHELL],
    ]
    unknown = in_container(container, {}, None, has_terminal=False)
    assert unknown == ["/bin/docker", "exec", "--interactive", "name", *SHELL]


def test_what_is_not_asked_for_is_not_said_and_a_delivery_may_change_nothing() -> None:
    plain = {**request(shm_bytes=None, platform="cpu"), "cpus": None}
    said = command.run_arguments(plain, "name", "/control", [], FIVE, [])
    assert not {"--shm-size", "--cpuset-cpus", "--ulimit", "--privileged", "--device"} & set(said)
    said = command.deliver_arguments(request(), "name", 5, 6, ["python", "-m", "deliver"], ["A"])
    assert [said[place + 1] for place, word in enumerate(said) if word == "--mount"] == [
        "type=bind,source=/code,target=/code,readonly",
        "type=bind,source=/logs,target=/logs,readonly",
    ]
    assert said[:3] == ["run", "--rm", "--interactive"]
    # A path that is named twice is mounted once, to be written.
    container = {"mounts": ["/a/", "/b"], "read_only_mounts": ["/a", "/b/c"]}
    assert command.container_mounts(container, "/b") == {"/a": False, "/b": False, "/b/c": True}


def test_the_request_s_environment_goes_before_the_host_s() -> None:
    passed_on = {"TPU_NAME": "x", "https_proxy": "p"}
    host = {"JAX_PLATFORMS": "tpu", **passed_on, "SECRET": "s", "PATH": "/bin", "TF_": "no"}
    found = command.image_environment({"JAX_PLATFORMS": "cpu"}, host, "me")
    assert found == {"USER": "me", "LOGNAME": "me", "JAX_PLATFORMS": "cpu", **passed_on}
    with pytest.raises(Failed):
        command.image_environment({"HOME": "/home"}, {}, "me")


def node(mode: int, uid: int = 0, gid: int = 0, path: str = "/dev/accel0") -> Node:
    return Node(path, stat.S_IFCHR | mode, uid, gid)


@pytest.mark.parametrize(
    ("device", "user", "groups", "as_root"),
    [
        (node(0o666), "7:7", ["20"], False),
        (node(0o600, uid=7), "7:7", ["20"], False),
        (node(0o660, gid=20), "7:7", ["20"], False),
        (node(0o660, gid=44), "7:7", ["20", "44"], False),
        (node(0o600), "0:0", ["20"], True),
        (node(0o640, gid=44), "0:0", ["20"], True),
    ],
)
def test_a_device_is_opened_by_user_group_or_root(
    device: Node, user: str, groups: list[str], as_root: bool
) -> None:
    found = access("tpu", [device], 7, 7, [7, 20])
    said = found.arguments
    assert said[said.index("--user") + 1] == user
    assert [said[place + 1] for place, word in enumerate(said) if word == "--group-add"] == groups
    assert said[said.index("--device") + 1] == "/dev/accel0"
    assert (found.as_root, "--cap-add" in said, found.note is not None) == (as_root, as_root, as_root)


@pytest.mark.parametrize(
    ("uid", "gid", "groups", "user", "become"),
    [
        (7, 8, [9], "7:8", ""),
        (2**31 - 1, 2**31 - 1, [], f"{2**31 - 1}:{2**31 - 1}", ""),
        (2**31, 8, [], "0:0", f"setpriv --reuid {2**31} --regid 8 --clear-groups --"),
        (7, OS_LOGIN_ID, [9], "0:0", f"setpriv --reuid 7 --regid {OS_LOGIN_ID} --groups 9 --"),
        (7, 8, [9, OS_LOGIN_ID], "0:0", f"setpriv --reuid 7 --regid 8 --groups 9,{OS_LOGIN_ID} --"),
    ],
)
def test_large_ids_are_taken_on_in_the_container(
    uid: int, gid: int, groups: list[int], user: str, become: str
) -> None:
    """OS Login's ids are up to 2**32, Docker's `--user` and `--group-add` up to 2**31 - 1."""
    arguments, words = as_user(uid, gid, groups)
    assert (arguments[arguments.index("--user") + 1], " ".join(words)) == (user, become)
    added = [arguments[place + 1] for place, word in enumerate(arguments) if word == "--cap-add"]
    assert added == (["SETUID", "SETGID"] if become else [])
    assert not [word for word in arguments if word.isdigit() and int(word) >= 2**31]
    assert arguments[arguments.index("--cap-drop") + 1] == "ALL" and "no-new-privileges" in arguments
    if become:
        who = Access(arguments, False, None, words)
        run = " ".join(command.run_arguments(request(), "name", "/control", [], who, []))
        words_after = become.removeprefix("setpriv ")
        assert run.endswith(f"--entrypoint setpriv {REF} {words_after} tini -- python -m job")
        deliver = command.deliver_arguments(request(), "n", uid, max(gid, 2**31), [], [])
        assert "--user 0:0" in " ".join(deliver)


def test_root_opens_a_closed_device_without_a_large_group_and_cpus_get_none() -> None:
    found = access("tpu", [node(0o600)], OS_LOGIN_ID, OS_LOGIN_ID, [20, OS_LOGIN_ID - 1])
    said = found.arguments
    assert (said[said.index("--user") + 1], found.as_root, found.become) == ("0:0", True, [])
    assert [said[place + 1] for place, word in enumerate(said) if word == "--group-add"] == ["20"]
    assert "--device" not in access("cpu", [], 7, 7, []).arguments
    assert access("gpu", [], 7, 7, []).arguments[-2:] == ["--gpus", "all"]
    # Whatever is dropped here would be one more reason why a TPU does not initialise.
    assert privileged("tpu").arguments == ["--user", "0:0", "--privileged"]


@pytest.mark.slow
def test_a_container_of_a_large_id_keeps_nothing_of_root(image: str, tmp_path: Path) -> None:
    """A real engine: what it writes is the user's, it may remove what is the user's, and a stop reaches it."""
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run/old").touch()
    for path in (tmp_path / "run", tmp_path / "run/old"):
        os.chown(path, OS_LOGIN_ID, OS_LOGIN_ID - 1)
    program = (
        "import os, signal, sys, time\n"
        "os.remove('old'); open('new', 'w').close()\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "print(os.getresuid(), os.getresgid(), os.getgroups())\n"
        "print(status['CapEff'].strip(), status['NoNewPrivs'].strip())\n"
        "sys.stdout.flush()\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "open('up', 'w').close(); time.sleep(60)\n"
    )
    mounts = {"mounts": [str(tmp_path / "run")], "read_only_mounts": [], "shm_bytes": None}
    asked = {**request(image=image, platform="cpu", **mounts), "cpus": None, "cwd": str(tmp_path / "run")}
    asked["argv"] = ["python", "-c", program]
    name = f"tpu-stack-large-id-{os.getpid()}"
    who = access("cpu", [], OS_LOGIN_ID, OS_LOGIN_ID - 1, [OS_LOGIN_ID - 1, 20, OS_LOGIN_ID + 1])
    (tmp_path / "control").mkdir()
    argv = ["docker", *command.run_arguments(asked, name, str(tmp_path / "control"), [], who, [])]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
        try:
            until(lambda: (tmp_path / "run/up").exists() or client.poll() is not None, 60)
            docker("kill", "--signal", "SIGTERM", name, check=False)
            said, complaint = client.communicate(timeout=60)
        finally:
            docker("rm", "--force", name, check=False)
    large, group = OS_LOGIN_ID, OS_LOGIN_ID - 1
    who_it_was, what_it_could = said.splitlines() or (complaint, "")
    assert who_it_was == f"{(large,) * 3} {(group,) * 3} {[20, OS_LOGIN_ID + 1]}"
    assert what_it_could == "0000000000000000 1"
    assert client.returncode == 75
    made = (tmp_path / "run/new").stat()
    assert (made.st_uid, made.st_gid) == (large, group)


def test_what_is_no_device_node_is_not_passed_on(tmp_path: Path) -> None:
    (tmp_path / "accel0").touch()
    (tmp_path / "accel1").symlink_to("/dev/null")
    assert [each.path for each in nodes([str(tmp_path / "accel*")])] == [str(tmp_path / "accel1")]
    assert nodes(["/dev/null"])[0].uid == os.stat("/dev/null").st_uid


def state(**fields: Any) -> dict[str, Any]:
    began = "2026-01-01T00:00:00Z"
    return {"Running": False, "ExitCode": 0, "OOMKilled": False, "Error": "", "StartedAt": began, **fields}


@pytest.mark.parametrize(
    ("code", "signum", "found", "expected"),
    [
        (75, None, state(ExitCode=75), (75, None, None)),
        (143, None, state(ExitCode=143), (None, 15, None)),
        (137, None, state(ExitCode=137, OOMKilled=True), (None, 9, "for want of memory")),
        (125, None, state(ExitCode=125), (125, None, None)),
        (125, None, state(StartedAt="0001-01-01T00:00:00Z", Error="bad device"), (125, None, "bad device")),
        (127, None, state(StartedAt="0001-01-01T00:00:00Z", Error="no tini"), (125, None, "no tini")),
        (125, None, state(Running=True), (125, None, "lost the container: said")),
        (125, None, state(ExitCode=255), (125, None, "Docker went away")),
        (125, None, None, (125, None, "Docker went away while the job ran: said")),
        (75, None, None, (75, None, None)),
        (137, None, {}, (None, 9, None)),
        (None, 9, state(Running=True), (None, 9, None)),
    ],
)
def test_the_end_of_the_job_is_told_from_docker_s_own_failures(
    code: int | None, signum: int | None, found: Any, expected: tuple[Any, ...]
) -> None:
    end = judged(code, signum, found, "said")
    words = expected[2]
    assert (end["code"], end["signal"]) == expected[:2]
    assert ("words" in end) == (words is not None)
    assert words is None or words in end["words"]


def test_an_image_is_named_by_a_digest_and_never_by_a_tag() -> None:
    digest = "sha256:" + "a" * 64
    assert all(map(is_image, (REF, digest, f"127.0.0.1:5000/jax@{digest}")))
    for wrong in (
        "jax:latest",
        "region/jax",
        REF[:-1],
        "--privileged",
        "sha256:" + "A" * 64,
        "",
        None,
        f" {REF}",
    ):
        assert not is_image(wrong)
    good = request()["container"]
    assert is_container(good)
    wrong_fields = {"platform": "rocm", "mounts": ["relative"], "shm_bytes": 0, "read_only_mounts": None}
    for name, value in wrong_fields.items():
        assert not is_container({**good, name: value})
