"""The steps themselves, in a real shell: they find what is there, make what is not, and name who holds things up."""

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.vm import credential_helper, steps
from backends.vm.steps import Step
from tests.backends.vm.conftest import oldest_python
from tests.servers import Handler, serving

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
    # Where nobody may turn them on that is a warning, and the host is ready.
    setting.write_text("always [madvise] never\n")
    (answer,) = carry_out([dataclasses.replace(step, change=f"echo always >/proc/no/{setting.name}")])
    assert answer["state"] == "warned" and "starts and stops slowly" in answer["remedy"]


def test_a_folder_that_cannot_be_made_or_written_is_named(carry_out: CarryOut, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    state, message = result(carry_out([steps.folders([str(tmp_path / "file" / "folder")])]))
    assert state == "failed" and "Not a directory" in message
    step = steps.folders(["/tmp"])
    # /dev/full is the full disk that every machine has.
    check = step.check.replace('>"$trial" ||', ">/dev/full 2>&- ||")
    full = dataclasses.replace(step, check=check, change="", limit_s=0.0)
    assert result(carry_out([full])) == ("failed", "/tmp cannot be written: is the disk full?")


@pytest.fixture
def host(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """A PATH with programs that answer as a test says, before this machine's own."""

    def make(**programs: str) -> dict[str, str]:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, text in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        return {"PATH": f"{folder}:{os.environ['PATH']}", "DONE": str(tmp_path / "done")}

    return make


Host = Callable[..., dict[str, str]]


def test_a_share_that_is_mounted_is_left_alone_and_one_that_no_service_mounts_is_no_silence(
    carry_out: CarryOut, tmp_path: Path, host: Host
) -> None:
    assert result(carry_out([steps.share("/proc", "10.0.0.9:/share")])) == ("ok", "mounted at /proc")
    step = dataclasses.replace(steps.share(str(tmp_path), "10.0.0.9:/share"), root=False)
    (answer,) = carry_out([step], environ=host(systemctl="exit 1"))
    said = f"nothing is mounted at {tmp_path}, and this host has no tpu-stack-share.service"
    assert (answer["state"], answer["message"]) == ("failed", said)
    assert "10.0.0.9:/share" in answer["remedy"] and "journalctl" in answer["remedy"]


def test_only_what_is_missing_is_installed_and_a_broken_dpkg_is_mended_first(
    carry_out: CarryOut, tmp_path: Path, host: Host
) -> None:
    log = tmp_path / "log"
    query = f'case "$*" in *mosh*) grep -q install {log} 2>/dev/null || exit 1 ;; esac\necho "install ok installed"'
    noted = {name: f"echo {name} $* >>{log}" for name in ("apt-get", "dpkg")}
    environ = host(**noted, **{"dpkg-query": query})
    step = dataclasses.replace(steps.shell_tools(), root=False)
    answers = carry_out([step], environ=environ, under_way=True)
    assert answers[0]["message"] == "not installed: mosh"
    assert answers[-1]["state"] == "changed"
    lines = log.read_text().splitlines()
    assert lines[0] == "dpkg --configure -a"
    assert lines[1].endswith(" update") and "install zsh byobu mosh" in lines[2]
    # Who has everything is not asked for the package lists.
    assert result(carry_out([step], environ=environ)) == ("ok", "installed: zsh byobu mosh")
    assert len(log.read_text().splitlines()) == 3
    bare = tmp_path / "bare"
    bare.mkdir()
    for program in ("sh", "timeout"):
        (bare / program).symlink_to(f"/usr/bin/{program}")
    skipped = ("skipped", "this host has no apt")
    assert result(carry_out([steps.shell_tools()], environ={"PATH": str(bare)})) == skipped


@pytest.mark.parametrize(
    ("said", "boot", "state", "message"),
    [
        *((said, "", "ok", "cloud-init is through") for said in ("done", "error", "degraded done")),
        ("running", "", "failed", "cloud-init is at: running (waited 0.1 s)"),
        ("not run", "running", "warned", "cloud-init was not run on this host"),
        ("not started", "degraded", "warned", "cloud-init was not run on this host"),
        ("not run", "starting", "failed", "cloud-init is at: not run, and the boot is under way"),
    ],
)
def test_cloud_init_is_waited_for_only_while_it_runs(
    carry_out: CarryOut, host: Host, said: str, boot: str, state: str, message: str
) -> None:
    environ = host(**{"cloud-init": f"echo 'status: {said}'; exit 2", "systemctl": f"echo {boot}"})
    found = result(carry_out([dataclasses.replace(steps.first_boot(), limit_s=0.1)], environ=environ))
    assert found[0] == state and found[1].startswith(message)


def looked_at(carry_out: CarryOut, environ: dict[str, str], change: str = "") -> dict[str, Any]:
    step = dataclasses.replace(
        steps.docker(), needs=(), root=False, change=change, limit_s=5 if change else 0
    )
    (answer,) = carry_out([step], environ=environ)
    return answer


@pytest.mark.parametrize(
    ("docker", "sg", "state", "part"),
    [
        ("echo 28.1.0", "exit 1", "ok", "Docker 28.1.0"),
        # Who has just joined the group counts as one who may.
        ("echo 'permission denied'; exit 1", "echo 28.1.0", "ok", "Docker 28.1.0"),
        ("echo permission denied >&2; exit 1", "exit 1", "failed", "may not use Docker"),
        ("echo no daemon >&2; exit 1", "exit 1", "failed", "Docker does not answer: no daemon"),
    ],
)
def test_a_docker_is_named_by_its_version_or_says_why_it_does_not_answer(
    carry_out: CarryOut, host: Host, docker: str, sg: str, state: str, part: str
) -> None:
    answer = looked_at(carry_out, host(docker=docker, sg=sg))
    assert answer["state"] == state and part in answer["message"]


def test_a_user_who_may_not_is_put_into_the_group(carry_out: CarryOut, host: Host) -> None:
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

    def moved(step: Step) -> Step:
        check, change = (text.replace("/usr/local/bin", folder) for text in (step.check, step.change))
        return dataclasses.replace(step, when="", root=False, check=check, change=change)

    return [moved(step) for step in steps.docker_login([REGISTRY])]


def test_only_googles_registries_are_logged_in_to_each_once() -> None:
    images = [f"{REGISTRY}/p/r/jax@sha256:00", f"{REGISTRY}/p/r/tf@sha256:01", "gcr.io/p/x", "docker.io/x/y"]
    assert steps.registries([*images, "evil-docker.pkg.dev.example.org/x"]) == (REGISTRY, "gcr.io")
    assert steps.docker_login([]) == ()


def test_what_others_wrote_in_dockers_configuration_stays(
    carry_out: CarryOut, log_in: list[Step], home: Path
) -> None:
    path = home / ".docker" / "config.json"
    path.parent.mkdir()
    for text in ("{", "[]", '{"credHelpers": []}'):  # one that cannot be read is left as it is
        path.write_text(text)
        assert carry_out(log_in)[1]["state"] == "failed"
        assert path.read_text() == text
    (home.parent / "docker-credential-tpu-stack").unlink()
    path.write_text(json.dumps({"auths": {"x": {}}, "credHelpers": {"gcr.io": "gcloud"}}))
    assert [answer["state"] for answer in carry_out(log_in)] == ["changed", "changed"]
    settings = json.loads(path.read_text())
    assert settings == {"auths": {"x": {}}, "credHelpers": {"gcr.io": "gcloud", REGISTRY: "tpu-stack"}}
    assert path.stat().st_mode & 0o777 == 0o600
    assert [answer["state"] for answer in carry_out(log_in)] == ["ok", "ok"]


@pytest.fixture
def metadata() -> Iterator[str]:
    """A metadata server: host:port."""

    class Metadata(Handler):
        def do_GET(self) -> None:
            if self.headers["Metadata-Flavor"] != "Google" or not self.path.endswith("/default/token"):
                self.send_error(403)
            else:
                self.reply({"access_token": TOKEN, "expires_in": 3000})

    with serving(Metadata) as address:
        yield address


def ask(helper: Path, registry: str, metadata: str) -> subprocess.CompletedProcess[str]:
    command, environ = [oldest_python(), "-S", "-E", str(helper), "get"], {"http_proxy": "http://127.0.0.1:9"}
    return subprocess.run(
        command, input=registry, env={"GCE_METADATA_HOST": metadata, **environ}, capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip


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


def test_no_other_registry_ever_gets_a_token_and_a_host_without_metadata_server_has_none() -> None:
    for registry in ("docker.io", "https://x-docker.pkg.dev.example.org", "a-docker.pkg.dev@evil", ""):
        with pytest.raises(ValueError, match="no Google registry"):
            credential_helper.get(registry)
    done = ask(steps.HELPER_TEXT, REGISTRY, "127.0.0.1:9")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("no token from the metadata server")
