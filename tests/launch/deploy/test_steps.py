"""The steps themselves, in a real shell: they find what is there, make what is not, and name who holds things up."""

from __future__ import annotations

import dataclasses
import fcntl
import http.server
import json
import os
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.deploy import deploy, steps
from launch.deploy.steps import Step
from tests.launch.deploy.conftest import oldest_python

CarryOut = Callable[..., list[dict[str, Any]]]


def result(answers: list[dict[str, Any]]) -> tuple[str, str]:
    (answer,) = answers
    return answer["state"], answer["message"]


def test_folders_with_any_name_are_made_below_the_home_directory_and_elsewhere(
    carry_out: CarryOut, home: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / 'it\'s $(touch pwned) `x` "y"'
    step = steps.folders(["~/.cache/a b", str(elsewhere)])
    assert result(carry_out([step]))[0] == "changed"
    assert elsewhere.is_dir() and (home / ".cache/a b").is_dir()
    assert result(carry_out([step]))[0] == "ok"
    assert list(elsewhere.iterdir()) == []


def test_a_folder_that_cannot_be_made_or_written_is_named(carry_out: CarryOut, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    state, message = result(carry_out([steps.folders([str(tmp_path / "file" / "folder")])]))
    assert state == "failed" and "Not a directory" in message


def test_huge_pages_are_turned_on_now_and_for_every_boot_and_that_once(
    carry_out: CarryOut, tmp_path: Path
) -> None:
    setting, at_boot = tmp_path / "enabled", tmp_path / "tmpfiles.d" / "tpu-stack.conf"
    step = dataclasses.replace(steps.huge_pages(str(setting), str(at_boot)), root=False)
    assert result(carry_out([step])) == ("skipped", "this kernel has no transparent huge pages")
    setting.write_text("always [madvise] never\n")
    # The kernel shows what is chosen in brackets; a file keeps what was written.
    kernel = dataclasses.replace(
        step, change=f"{step.change}\nsed -i 's/.*/[always] madvise never/' {setting}"
    )
    assert result(carry_out([kernel])) == ("changed", "transparent huge pages are on")
    assert at_boot.read_text() == f"w {setting} - - - - always\n"
    assert result(carry_out([step])) == ("ok", "transparent huge pages are on")


def test_huge_pages_that_nobody_may_turn_on_are_a_warning_and_the_host_is_ready(
    carry_out: CarryOut, tmp_path: Path
) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    step = dataclasses.replace(steps.huge_pages(str(tmp_path / "enabled"), "/proc/no"), root=False)
    (answer,) = carry_out([step])
    assert answer["state"] == "warned" and "starts and stops slowly" in answer["remedy"]
    parsed = deploy.parse(json.dumps(answer).encode())
    assert parsed is not None and not deploy.Outcome(host="w-0", answers=(parsed,)).failed


def test_a_full_disk_shows_in_the_folders(carry_out: CarryOut) -> None:
    """/dev/full is the full disk that every machine has."""
    step = steps.folders(["/tmp"])
    check = step.check.replace('>"$trial" ||', ">/dev/full 2>&- ||")
    full = dataclasses.replace(step, check=check, change="", limit_s=0.0)
    assert result(carry_out([full])) == ("failed", "/tmp cannot be written: is the disk full?")


def test_a_share_that_is_mounted_is_left_alone(carry_out: CarryOut) -> None:
    assert result(carry_out([steps.share("/proc", "10.0.0.9:/share")])) == ("ok", "mounted at /proc")


def test_a_share_that_no_service_mounts_is_no_silence(carry_out: CarryOut, tmp_path: Path) -> None:
    step = dataclasses.replace(steps.share(str(tmp_path), "10.0.0.9:/share"), root=False)
    without_systemd = {"PATH": str(stand_ins(tmp_path, systemctl="exit 1"))}
    (answer,) = carry_out([step], environ=without_systemd)
    assert answer["state"] == "failed"
    assert (
        answer["message"] == f"nothing is mounted at {tmp_path}, and this host has no tpu-stack-share.service"
    )
    assert "10.0.0.9:/share" in answer["remedy"] and "journalctl" in answer["remedy"]


def stand_ins(tmp_path: Path, **programs: str) -> str:
    """A PATH on which some programs are what a test says."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_host_that_has_everything_is_not_asked_for_the_package_lists(
    carry_out: CarryOut, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    path = stand_ins(
        tmp_path, **{"apt-get": f"echo apt-get $* >>{log}", "dpkg-query": "echo 'install ok installed'"}
    )
    assert result(carry_out([steps.comforts()], environ={"PATH": path})) == (
        "ok",
        "installed: zsh byobu mosh",
    )
    assert not log.exists()


def test_only_what_is_missing_is_called_missing_and_a_broken_dpkg_is_mended_first(
    carry_out: CarryOut, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    path = stand_ins(
        tmp_path,
        **{
            "apt-get": f"echo apt-get $* >>{log}",
            "dpkg": f"echo dpkg $* >>{log}",
            "dpkg-query": f'case "$*" in *mosh*) grep -q install {log} 2>/dev/null || exit 1 ;; esac\n'
            "echo 'install ok installed'",
        },
    )
    step = dataclasses.replace(steps.comforts(), root=False)
    answers = carry_out([step], environ={"PATH": path}, under_way=True)
    assert answers[0]["message"] == "not installed: mosh"
    assert answers[-1]["state"] == "changed"
    lines = log.read_text().splitlines()
    assert lines[0] == "dpkg --configure -a"
    assert lines[1].endswith(" update") and "install zsh byobu mosh" in lines[2]


def test_a_host_without_apt_is_no_failure(carry_out: CarryOut, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for program in ("sh", "timeout"):
        (bare / program).symlink_to(f"/usr/bin/{program}")
    assert result(carry_out([steps.comforts()], environ={"PATH": str(bare)})) == (
        "skipped",
        "this host has no apt",
    )


def test_whoever_holds_apt_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "lock-frontend"
    text = steps.APT_IS_FREE.replace("/var/lib/dpkg/lock-frontend", str(lock))
    text = text.replace("/var/lib/dpkg/lock ", "").replace("/var/lib/apt/lists/lock", "")

    def holder() -> str:
        return subprocess.run(
            ["sh", "-c", f"{text}\napt_holder"], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()

    assert holder() == ""
    with open(lock, "w") as file:
        assert holder() == ""
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert holder().endswith(f"(pid {os.getpid()})")
    assert holder() == ""


def test_cloud_init_that_is_through_even_with_errors_is_not_waited_for(
    carry_out: CarryOut, tmp_path: Path
) -> None:
    for said, state in (
        ("done", "ok"),
        ("error", "ok"),
        ("disabled", "ok"),
        ("degraded done", "ok"),
        ("running", "failed"),
    ):
        folder = tmp_path / said
        folder.mkdir()
        path = stand_ins(folder, **{"cloud-init": f"echo 'status: {said}'; exit 2"})
        step = dataclasses.replace(steps.first_boot(), limit_s=0.1)
        found = result(carry_out([step], environ={"PATH": path}))
        assert (said, found[0]) == (said, state)
    assert found[1] == "cloud-init is at: running (waited 0.1 s)"


@pytest.mark.parametrize(
    ("said", "boot", "state", "message"),
    [
        ("not run", "running", "warned", "cloud-init was not run on this host"),
        ("not started", "degraded", "warned", "cloud-init was not run on this host"),
        ("not run", "starting", "failed", "cloud-init is at: not run, and the boot is under way"),
    ],
)
def test_cloud_init_that_an_image_does_not_run_is_a_warning_once_the_boot_is_over(
    carry_out: CarryOut, tmp_path: Path, said: str, boot: str, state: str, message: str
) -> None:
    path = stand_ins(tmp_path, **{"cloud-init": f"echo 'status: {said}'", "systemctl": f"echo {boot}"})
    found = result(carry_out([dataclasses.replace(steps.first_boot(), limit_s=0.1)], environ={"PATH": path}))
    assert found[0] == state and found[1].startswith(message)


def test_every_step_that_changes_something_has_a_limit_and_a_remedy() -> None:
    every: list[Step] = [
        steps.first_boot(),
        steps.certificates(),
        steps.comforts(),
        steps.share("/share", None),
        steps.folders(["/a"]),
    ]
    for step in every:
        assert step.limit_s > 0 and step.remedy


@pytest.fixture
def host(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """A PATH with programs that answer as a test says, before this machine's own."""

    def make(**programs: str) -> dict[str, str]:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, text in programs.items():
            path = folder / name
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return {"PATH": f"{folder}:{os.environ['PATH']}", "DONE": str(tmp_path / "done")}

    return make


def looked_at(carry_out: CarryOut, environ: dict[str, str], change: str = "") -> dict[str, Any]:
    step = dataclasses.replace(
        steps.docker(), needs=(), root=False, change=change, limit_s=5 if change else 0
    )
    (answer,) = carry_out([step], environ=environ)
    return answer


def test_a_docker_that_answers_is_named_by_its_version(
    carry_out: CarryOut, host: Callable[..., dict[str, str]]
) -> None:
    answer = looked_at(carry_out, host(docker="echo 28.1.0"))
    assert (answer["state"], answer["message"]) == ("ok", "Docker 28.1.0")


def test_a_user_who_has_just_joined_the_group_counts_as_one_who_may(
    carry_out: CarryOut, host: Callable[..., dict[str, str]]
) -> None:
    environ = host(docker="echo 'permission denied'; exit 1", sg="echo 28.1.0")
    assert looked_at(carry_out, environ)["message"] == "Docker 28.1.0"


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ("permission denied while trying to connect", "may not use Docker"),
        (
            "Cannot connect to the Docker daemon",
            "Docker does not answer: Cannot connect to the Docker daemon",
        ),
    ],
)
def test_a_docker_that_does_not_answer_says_why(
    carry_out: CarryOut, host: Callable[..., dict[str, str]], said: str, part: str
) -> None:
    answer = looked_at(carry_out, host(docker=f"echo '{said}' >&2; exit 1", sg="exit 1"))
    assert answer["state"] == "failed"
    assert part in answer["message"]


def test_a_user_who_may_not_is_put_into_the_group(
    carry_out: CarryOut, host: Callable[..., dict[str, str]]
) -> None:
    environ = host(
        docker='[ -e "$DONE" ] && echo 28.1.0 || { echo permission denied; exit 1; }',
        sg="exit 1",
        systemctl="exit 0",
        getent="exit 0",
        usermod='echo "$*" >"$DONE"',
        id='[ "$1" = -u ] && echo 1000 || echo me',
        sudo="exit 1",
    )
    answer = looked_at(carry_out, {**environ, "SUDO_USER": "me"}, steps.DOCKER_CHANGE)
    assert answer["state"] == "changed", answer
    assert Path(environ["DONE"]).read_text() == "--append --groups docker me\n"


REGISTRY = "europe-west4-docker.pkg.dev"
TOKEN = "ya29.secret"


@pytest.fixture
def log_in(tmp_path: Path) -> list[Step]:
    """The steps, with the helper in the test's own folder and without asking for docker and root."""
    folder = str(tmp_path)
    return [
        dataclasses.replace(
            step,
            when="",
            root=False,
            check=step.check.replace("/usr/local/bin", folder),
            change=step.change.replace("/usr/local/bin", folder),
        )
        for step in steps.docker_login([REGISTRY])
    ]


def test_only_googles_registries_are_logged_in_to_each_once() -> None:
    images = [f"{REGISTRY}/p/r/jax@sha256:00", f"{REGISTRY}/p/r/tf@sha256:01", "gcr.io/p/x", "docker.io/x/y"]
    assert steps.registries([*images, "evil-docker.pkg.dev.example.org/x"]) == (REGISTRY, "gcr.io")
    assert steps.docker_login([]) == ()


def test_what_others_wrote_in_dockers_configuration_stays(
    carry_out: CarryOut, log_in: list[Step], home: Path
) -> None:
    path = home / ".docker" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"auths": {"x": {}}, "credHelpers": {"gcr.io": "gcloud"}}))
    assert [answer["state"] for answer in carry_out(log_in)] == ["changed", "changed"]
    settings = json.loads(path.read_text())
    assert settings == {"auths": {"x": {}}, "credHelpers": {"gcr.io": "gcloud", REGISTRY: "tpu-stack"}}
    assert path.stat().st_mode & 0o777 == 0o600
    assert [answer["state"] for answer in carry_out(log_in)] == ["ok", "ok"]


@pytest.mark.parametrize("text", ["{", "[]", '{"credHelpers": []}'])
def test_a_configuration_that_cannot_be_read_is_left_as_it_is(
    carry_out: CarryOut, log_in: list[Step], home: Path, text: str
) -> None:
    path = home / ".docker" / "config.json"
    path.parent.mkdir()
    path.write_text(text)
    assert [answer["state"] for answer in carry_out(log_in)] == ["changed", "failed"]
    assert path.read_text() == text


@pytest.fixture
def metadata() -> Iterator[str]:
    """A metadata server: host:port."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers["Metadata-Flavor"] != "Google" or not self.path.endswith("/default/token"):
                self.send_error(403)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"access_token": TOKEN, "expires_in": 3000}).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(helper: Path, registry: str, metadata: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [oldest_python(), "-S", "-E", str(helper), "get"],
        input=registry,
        env={"GCE_METADATA_HOST": metadata, "http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_helper_gives_docker_a_token_of_the_service_account_and_keeps_none(
    carry_out: CarryOut, log_in: list[Step], home: Path, tmp_path: Path, metadata: str
) -> None:
    carry_out(log_in)
    done = ask(tmp_path / "docker-credential-tpu-stack", REGISTRY, metadata)
    assert json.loads(done.stdout) == {
        "ServerURL": REGISTRY,
        "Username": "oauth2accesstoken",
        "Secret": TOKEN,
    }
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN in path.read_text()]


@pytest.mark.parametrize(
    "registry", ["docker.io", "https://x-docker.pkg.dev.example.org", "a-docker.pkg.dev@evil", ""]
)
def test_no_other_registry_ever_gets_a_token(metadata: str, registry: str) -> None:
    done = ask(steps.HELPER_TEXT, registry, metadata)
    assert done.returncode == 1 and TOKEN not in done.stdout + done.stderr
    assert "no Google registry" in done.stdout


def test_a_host_without_metadata_server_is_a_message_and_no_traceback() -> None:
    done = ask(steps.HELPER_TEXT, REGISTRY, "127.0.0.1:9")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("no token from the metadata server")
