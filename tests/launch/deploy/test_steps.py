"""The steps themselves, in a real shell: they find what is there, make what is not, and name who holds things up."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.deploy import deploy, steps
from launch.deploy.steps import Step

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
