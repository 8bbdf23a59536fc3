"""A command of the user's own before it runs: what is refused, what of its folder is sent, what the hosts are told."""

import base64
import dataclasses
import functools
import http.server
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.host_backend import HostLauncher
from backends.local import environments
from backends.local.local_backend import on_this_machine
from console import dry_run
from contracts.errors import RequestError
from contracts.files import DiskFiles
from contracts.process_environment import read as read_environment
from contracts.ranks import decoded, rank_variables
from contracts.run_directory import FOLDER, RunDirectory
from host.agent.storage.staged_bundles import unpack
from launch import plan
from launch.code import bundles
from launch.code.bundles import bundle_folder, keep
from launch.hosts import Agent, GoneLink
from launch.request.run_request import Command, Planned, command_from_options, problems, recorded_command
from launch.runs import Run
from launch.targets import Container, Plan, Target
from tests.launch.slices import make_plan, make_target

OPTIONS: dict[str, Any] = {
    "workdir": "",
    "framework": "",
    "processes_per_host": "",
    "progress": "",
    "python": "",
}
STACK = make_target([Agent(host="w", link=GoneLink("", ""), root="/")] * 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script, a program, and what git is told to ignore."""
    made = tmp_path / "project"
    (made / "sub").mkdir(parents=True)
    for name in ("train.py", "sub/part.py", "secret.py", "run.sh", "plain.sh"):
        (made / name).write_text(f"# {name}\n")
    (made / "run.sh").chmod(0o755)
    (made / ".gitignore").write_text("secret.py\ndata/\n")
    (made / "data").mkdir()
    (made / "data" / "large.bin").write_bytes(bytes(100))
    return made


def command(folder: Path, *words: str, **options: str) -> Command:
    return command_from_options(words, **{**OPTIONS, "workdir": str(folder), **options})


@pytest.mark.parametrize("is_checkout", [False, True])
def test_the_folder_is_sent_without_what_git_ignores_and_programs_stay_programs(
    folder: Path, tmp_path: Path, is_checkout: bool
) -> None:
    if is_checkout:
        subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "train.pyc").touch()
    sent = bundle_folder(folder)
    assert sent.names == {".gitignore", "train.py", "sub/part.py", "run.sh", "plain.sh"}
    (tmp_path / "archive").write_bytes(sent.archive)
    unpack(str(tmp_path / "archive"), str(tmp_path / "there"))
    assert [os.access(tmp_path / "there" / name, os.X_OK) for name in ("run.sh", "plain.sh")] == [True, False]
    os.utime(folder / "train.py", (0, 0))
    assert bundle_folder(folder).sha256 == sent.sha256
    (folder / "train.py").write_text("other")
    assert bundle_folder(folder).sha256 != sent.sha256


def test_a_folder_whose_files_git_cannot_list_is_refused(folder: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    (folder / ".git" / "index").write_bytes(b"torn")
    with pytest.raises(RequestError, match="git cannot list its files; `git -C .* ls-files` says why"):
        bundle_folder(folder)


def test_a_folder_that_is_too_large_is_refused_with_its_largest_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "LARGEST_BYTES", 2**20)
    for name, size in (("small", 1), ("large", 2**21), ("middle", 2**20)):
        (folder / name).write_bytes(bytes(size))
    with pytest.raises(
        RequestError, match=r"3 MiB, more than the 1 MiB .* are large \(2 MiB\), middle \(1 MiB\)"
    ):
        bundle_folder(folder)


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        ("python train.py", {"workdir": ""}, "-- python train.py: say in which folder it runs with --workdir"),
        ("", {}, "say what to run there"),
        ("python train.py", {"framework": "torch"}, '--framework: "torch" is not a framework; choose one of jax'),
        ("python train.py", {"processes_per_host": "0"}, "--processes-per-host 0: must be a whole number from 1"),
        ("python train.py", {"processes_per_host": "per-chip"}, "a cpu host has no chips"),
        ("python other.py", {}, "-- other.py: there is no such file in"),
        ("python -u secret.py", {}, "-- secret.py: is in .*, but git ignores it"),
        ("./plain.sh", {}, "-- ./plain.sh: may not be executed"),
        ("pyhton train.py", {}, "-- pyhton: there is no such program on this machine"),
        ("train.py --epochs 3", {}, "is a file of the folder, and no program; write python train.py --epochs 3"),
        ("run.sh", {}, r"is a file of the folder, and no program; write \./run.sh"),
        ("cd sub", {}, "-- cd: is for a shell; write -- sh -c 'cd sub'"),
        ("N=1 python train.py", {}, "-- N=1: is for a shell; write -- sh -c 'N=1 python train.py'"),
        ("--epochs 3", {}, "is an option, and no program"),
        ("python train.py", {"workdir": __file__}, "is a file; name its folder, and the file after --"),
    ],
)  # fmt: skip
def test_a_command_that_cannot_run_is_refused(
    folder: Path, words: str, options: dict[str, str], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        wanted = command(folder, *words.split(), **options)
        here = on_this_machine(hosts="2", platform="cpu")
        plan.processes_per_host(wanted.config.processes_per_host or "1", here, wanted.framework)
        wanted.planned(here, wanted.folder(), sys.executable, in_container=False)


def test_programs_of_the_frameworks_environment_and_pip_are_there_wherever_fab_was_called_from(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    here = on_this_machine(hosts="1", platform="cpu")
    for words in (["tensorboard"], ["pip", "install", "x"]):
        wanted = command(folder, *words)
        assert wanted.planned(here, wanted.folder(), sys.executable, in_container=False).has_layer


def test_ranks_share_the_chips_of_a_host_evenly_or_are_refused() -> None:
    found = [plan.processes_per_host(text, STACK, "jax") for text in ("1", "2", "4", "per-chip")]
    assert found == [1, 2, 4, 4]
    assert [plan.processes_per_host(text, STACK, "pytorch") for text in ("1", "per-chip")] == [1, 4]
    with pytest.raises(
        RequestError, match="a host of s has 4 chips, which 1, 2, 4 processes of jax can share"
    ):
        plan.processes_per_host("3", STACK, "jax")
    with pytest.raises(RequestError, match="which 1, 4 processes of pytorch can share"):
        plan.processes_per_host("2", STACK, "pytorch")


def test_a_framework_that_the_hosts_do_not_have_is_refused_with_the_way_to_it() -> None:
    with pytest.raises(
        RequestError, match="the stack .* has no image of it; `fab build --framework pytorch`"
    ):
        STACK.interpreter("pytorch", in_container=False)
    with pytest.raises(
        RequestError, match=r"its environment is for CPUs only; name an interpreter .* the GPU"
    ):
        on_this_machine(hosts="1", platform="gpu").interpreter("pytorch", in_container=False)


def test_a_script_that_says_what_it_needs_is_all_that_is_sent(folder: Path) -> None:
    script = folder / "train.py"
    script.write_text('# /// script\n# dependencies = ["torch"]\n# ///\n')
    alone = command_from_options([str(script), "--lr", "3"], **OPTIONS)
    assert (alone.config.words, alone.config.workdir) == (("python", "train.py", "--lr", "3"), str(folder))
    assert alone.config.framework == "pytorch"
    assert alone.folder().names == {"train.py"}
    chosen = command_from_options([str(script)], **{**OPTIONS, "framework": "jax"}, installs=False)
    assert (chosen.config.framework, chosen.source) == ("jax", None)
    (folder / "asks.py").touch()
    (folder / "requirements.txt").write_text("jax\n")  # which is not sent
    for words, message in (
        (
            [str(folder / "sub" / "part.py"), "-v"],
            "does not say what it needs (PEP 723); name the folder that it needs",
        ),
        ([str(folder / "none.py")], "none.py: there is no such script here"),
        ([str(folder / "asks.py")], "asks.py: does not say what it needs"),
    ):
        with pytest.raises(RequestError, match=re.escape(message)):
            command_from_options(words, **OPTIONS)


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("3.12", "(0123456789ab) are neither on this machine nor beside the run"),
        ("3.9", "are for Python 3.9"),
    ],
)
def test_packages_that_are_gone_or_for_another_python_are_not_left_out_of_a_resume(
    folder: Path, python: str, message: str
) -> None:
    record = {"source": "requirements.txt", "python": python, "sha256": "0123456789ab" + "0" * 52}
    config = dataclasses.asdict(command(folder, "python", "train.py").config) | {"packages": record}
    with pytest.raises(RequestError, match=re.escape(message)):
        recorded_command(config).with_packages(STACK, None, pytest.fail, in_container=True)


def test_a_resumed_command_goes_on_with_its_own_words_or_with_those_that_it_is_given(folder: Path) -> None:
    first = command(folder, "python", "train.py")
    config = dataclasses.asdict(first.config)
    again = recorded_command({**config, "words": list(config["words"])})
    assert again.config == first.config
    assert again.with_words(()) is again.with_words(("python", "train.py")) is again
    other = again.with_words(("torchrun", "--nproc_per_node=1", "train.py", "--init_from=resume"))
    assert other.config == replace(again.config, words=("python", "train.py", "--init_from=resume"))
    assert (
        other.note == "the command is python train.py --init_from=resume from now on, and was python train.py"
    )


def test_a_resumed_run_is_sent_the_folder_as_it_is_now_or_as_it_was_last_sent(
    folder: Path, tmp_path: Path
) -> None:
    wanted = command(folder, "./run.sh")
    sent = wanted.folder()
    large = replace(wanted.planned(STACK, sent, "python", in_container=False), folder_is_large=True)
    of_large = replace(planned(wanted, STACK), run_dir=str(tmp_path / "run"), command=large)
    place = of_large.stored_at(sent.sha256)
    run = Run(
        directory=RunDirectory(str(tmp_path / "run")),
        described={"run_id": "one", "code": {"folder": sent.sha256}},
        result=None,
        heartbeats=(),
    )
    run.directory.write_text(FOLDER, base64.b64encode(sent.archive).decode())
    assert wanted.folder_again(run) == (sent, None)
    (folder / "train.py").write_text("mended")
    changed, said = wanted.folder_again(run)
    assert changed == wanted.folder() != sent
    assert said == f"{folder} has changed: its files replace those of the copies on the hosts"
    shutil.rmtree(folder)
    kept, said = wanted.folder_again(run)
    assert kept == sent
    assert said == f"{folder} is not there: the command goes on with the folder as it was last sent"
    assert problems(wanted.config, kept, STACK, "python", in_container=False) == []
    run.directory.write_text(FOLDER, "torn")
    assert place == f"{tmp_path}/.packages/{sent.sha256}.tar.gz.base64"
    keep(kept, place, DiskFiles())
    assert stat.S_IMODE(os.stat(place).st_mode) == 0o600
    assert wanted.folder_again(run) == (sent, said)
    os.unlink(place)
    with pytest.raises(RequestError, match="does not have it; make the folder again, or start a new run"):
        wanted.folder_again(run)


def planned(wanted: Command, target: Target, container: Container | None = None) -> Plan:
    return make_plan(
        target,
        run_id="command-20261120-214500-abcd",
        job=wanted.name,
        framework=wanted.framework,
        arguments=wanted.config.words,
        container=container,
        ranks_per_host=plan.processes_per_host(
            wanted.config.processes_per_host or "1", target, wanted.framework
        ),
        command=wanted.planned(
            target, wanted.folder(), "/env/bin/python", in_container=container is not None
        ),
    )


def test_each_host_is_told_the_same_ranks_and_its_own_folder(folder: Path) -> None:
    wanted = command(folder, "python", "train.py", processes_per_host="per-chip", framework="pytorch")
    made = planned(wanted, STACK, Container(image="sha256:" + "0" * 64))
    assert plan.preflight(made, 1, now_s=1.0)["free_ports"] == 2 + 4
    ports = [list(range(first, first + 6)) for first in (100, 200)]
    facts = [{"free_ports": free, "home": f"/home/{free[0]}"} for free in ports]
    made = plan.settled(made, facts, token="t")
    told: list[dict[str, Any]] = [plan.start(made, index) for index in (0, 1)]
    specs = [decoded(each["argv"][-1]) for each in told]
    assert specs[0].ranks == specs[1].ranks
    assert specs[1].ranks.ports == ((102, 103, 104, 105), (202, 203, 204, 205))
    assert (specs[1].work or "").endswith("/runs/command-20261120-214500-abcd/work-1")
    assert specs[1].python is None, "an image has its own"
    box = told[1]["container"]
    assert {specs[1].folder, specs[1].work} <= {
        made.at_home(1, path) for path in [*box["mounts"], *box["read_only_mounts"]]
    }
    assert "GLIBC_TUNABLES" not in told[1]["env"]


def test_a_dry_run_shows_what_each_rank_finds_what_is_sent_and_what_it_costs(folder: Path) -> None:
    wanted = command(folder, "python", "train.py", processes_per_host="per-chip", framework="pytorch")
    made = planned(wanted, STACK, Container(image="sha256:" + "0" * 64))
    sent = wanted.folder()
    given = Planned(
        plan=made, launcher=HostLauncher(), config=wanted.config, bundles=(sent, sent),
        directory=RunDirectory("/nowhere"),
    )  # fmt: skip
    shown = list(dry_run.lines(given, STACK))
    assert shown.count("  runs  python train.py") == 2
    assert "    RANK=7" in shown
    assert "    MASTER_PORT=PORT" in shown
    assert f"image sha256:{'0' * 64}" in shown
    assert any(line.startswith("your folder: 5 files, ") for line in shown)
    assert any(
        re.fullmatch(r"cost: [\d.]+ USD an hour at list prices, less what a grant covers \(spot, .*", line)
        for line in shown
    )


def test_an_environment_is_made_once_and_a_step_that_fails_leaves_none(tmp_path: Path) -> None:
    lock, home = tmp_path / "lock.txt", tmp_path / "environments" / "none"
    lock.write_text("")
    with pytest.raises(RequestError, match=r"the environment could not be made:\nno compiler"):
        environments.make(home, lock, [["sh", "-c", "echo no compiler; exit 1"]])
    assert not (home / environments.COMPLETE).exists()
    environments.make(home, lock, [["sh", "-c", f"echo once >> {tmp_path}/made"]])
    environments.make(home, lock, [["sh", "-c", f"echo once >> {tmp_path}/made"]])
    assert (tmp_path / "made").read_text() == "once\n"
    version = [str(home / "bin" / "python"), "-c", "import sys; print(sys.version_info[:2])"]
    said = subprocess.run(version, capture_output=True, text=True, check=True).stdout
    assert said.strip() == str(tuple(sys.version_info[:2]))


def test_an_index_of_the_user_s_has_the_wheel_or_not_or_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv(environments.TORCH_BACKEND, "cu126")  # of the user's other projects
    (tmp_path / "index" / "torch").mkdir(parents=True)
    wheel = tmp_path / "index" / "torch" / "torch-9.9+cpu-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("torch.py", "")
        packed.writestr(
            "torch-9.9+cpu.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 9.9+cpu\n"
        )
        packed.writestr("torch-9.9+cpu.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        packed.writestr("torch-9.9+cpu.dist-info/RECORD", "")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(environments.TORCH_INDEX, f"http://127.0.0.1:{server.server_port}/")
        words = environments.cpu_wheel("torch==9.9+cpu")
        home, lock = tmp_path / "environments" / "torch", tmp_path / "lock.txt"
        lock.write_text("")
        environments.make(home, lock, [[*environments._pip(home), *words]])
        with pytest.raises(RequestError, match=r"TORCH_CPU_INDEX http://.+/: torch==9\.8\+cpu is not there"):
            environments.cpu_wheel("torch==9.8+cpu")
        server.shutdown()
    assert [*home.glob("lib/*/site-packages/torch.py")]
    assert environments.cpu_wheel("torch==9.7+cpu") == []


def test_environments_that_nobody_has_used_for_a_month_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = environments.environment_python("pytorch").parents[1]
    ages = {
        own.name: 40,
        "pytorch-old": 31,
        "pytorch-recent": 29,
        "pytorch-loaded": 31,
        "pytorch_xla-old": 31,
    }
    for name, days in ages.items():
        whole = own.parent / name / environments.COMPLETE
        whole.parent.mkdir(parents=True)
        whole.write_text("x")
        os.utime(whole, (0, time.time() - days * 86400))
    half_made = own.parent / "pytorch-half"
    half_made.mkdir()
    said: list[str] = []
    program = (
        "import mmap, sys; file = open(sys.argv[1], 'r+'); held = mmap.mmap(file.fileno(), 0); "
        "print(flush=True); input()"
    )
    loaded = str(own.parent / "pytorch-loaded" / environments.COMPLETE)
    with subprocess.Popen(
        [sys.executable, "-c", program, loaded], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        environments.ensure("pytorch", said.append)
        holder.communicate(b"\n")
    assert said == [f"removed {own.parent / 'pytorch-old'}, which has not been used for 30 days"]
    assert {path.name for path in own.parent.glob("*/")} == {*ages, "pytorch-half"} - {"pytorch-old"}

    os.utime(half_made, (0, 0))  # what a killed installer has left
    environments.ensure("pytorch", said.append)
    assert not half_made.exists() and not Path(loaded).exists()
    assert own.exists()


@pytest.mark.parametrize(
    ("hosts", "per_host", "is_told"), [("1", "", False), ("1", "1", True), ("2", "", True)]
)
def test_the_only_process_is_told_no_rank_unless_that_is_asked_for(
    folder: Path, hosts: str, per_host: str, is_told: bool
) -> None:
    wanted = command(folder, "python", "train.py", processes_per_host=per_host)
    made = planned(wanted, on_this_machine(hosts=hosts, platform="cpu"))
    count = plan.preflight(made, 0, now_s=1.0)["free_ports"]
    facts = [{"free_ports": list(range(100, 100 + count)), "home": "/root"}] * int(hosts)
    start = plan.start(plan.settled(made, facts, token="t"), 0)
    spec = decoded(start["argv"][-1])
    variables = rank_variables(read_environment(start["env"]), spec.ranks, 0)
    assert ({"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= variables.keys()) is is_told
    assert "RUN_PROCESS_ID" in variables and "JAX_COORDINATOR_ADDRESS" in variables
