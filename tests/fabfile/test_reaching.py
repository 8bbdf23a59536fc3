"""`fab run`, `put`, `get`, `ssh` as a person types them, on this machine as two hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.jobs import CHECKOUT

FAB = [sys.executable, "-c", "from fabfile.program import main; main()"]
Fab = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A home of the test's own."""
    own = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return {**{key: value for key, value in os.environ.items() if key != "TPU_STACK"}, **own}


@pytest.fixture
def fab(environment: dict[str, str]) -> Fab:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*FAB, *arguments],
            cwd=CHECKOUT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_words_arrive_on_every_host_as_they_were_typed(fab: Fab) -> None:
    typed = ["a b", "$HOME", "'", "*", "", "--", "-H"]
    done = fab("run", "--group", "--", "printf", "<%s>", *typed)
    assert (done.stdout, done.stderr, done.returncode) == (
        "[0-1] " + "".join(f"<{word}>" for word in typed) + "\n",
        "",
        0,
    )


@pytest.mark.parametrize("arguments", [["--", "cd / && pwd; exit 3"], ["--command", "cd / && pwd; exit 3"]])
def test_one_word_is_a_line_of_shell_and_its_exit_code_is_told(fab: Fab, arguments: list[str]) -> None:
    done = fab("run", *arguments)
    assert sorted(done.stdout.splitlines()) == ["[0] /", "[1] /"]
    assert (done.stderr, done.returncode) == ("exit codes: [0-1] 3\n", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "error: say one command: "),
        (["run", "--command", "ls", "--", "ls"], "error: say one command: "),
        (["run", "--timeout", "0", "--", "ls"], "error: --timeout 0: must be a whole number of at least 1"),
        (["status", "--", "ls"], "error: -- ls: only `fab train` and `fab run` take words after --"),
        (["put", "/no/such", "/tmp"], "error: /no/such: there is no such file on this machine"),
        (["get", "..", "/tmp"], "error: ..: name the folder itself"),
        (["ssh"], "error: the hosts are this machine, which needs no SSH; say --stack as well"),
        (["ssh", "--host", "x"], "error: --host x: must be a whole number of at least 0"),
        (["ssh-config"], "error: the hosts are this machine, which needs no SSH; say --stack as well"),
        (["jupyter", "--module", "no_such_lab"], "error: "),
    ],
)
def test_a_mistake_is_a_message_and_exit_code_2(fab: Fab, arguments: list[str], said: str) -> None:
    done = fab(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert "Traceback" not in done.stderr


def test_a_folder_is_put_and_got(fab: Fab, tmp_path: Path) -> None:
    (tmp_path / "a dir").mkdir()
    (tmp_path / "a dir/$file").write_text("x")
    assert fab("put", str(tmp_path / "a dir"), str(tmp_path / "there/new")).returncode == 0
    assert fab("get", "~/there/new", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back/$file").read_text() == "x"
    again = fab("put", str(tmp_path / "a dir"), str(tmp_path / "there/"))
    assert again.returncode == 0
    refused = fab("put", str(tmp_path / "a dir"), str(tmp_path / "there/"))
    assert (refused.returncode, "--force replaces the whole folder" in refused.stderr) == (2, True)
    assert fab("put", "--force", str(tmp_path / "a dir"), str(tmp_path / "there/")).returncode == 0


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_ctrl_c_ends_the_command_on_every_host(tmp_path: Path, environment: dict[str, str]) -> None:
    line = f"echo $$ >> {tmp_path}/pids; echo begun; exec sleep 600"
    with subprocess.Popen(
        [*FAB, "run", "--", line], cwd=CHECKOUT, env=environment, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert [running.stdout.readline()[4:] for _ in range(2)] == ["begun\n"] * 2
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
    assert len(pids) == 2
    # Killed they are; whoever they are left to has yet to take note of it.
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if is_alive(pid)]:
        for pid in alive if time.monotonic() > deadline else ():
            os.kill(pid, signal.SIGKILL)
            pytest.fail(f"{pid} was still there")
        time.sleep(0.02)
