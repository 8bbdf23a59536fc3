"""The visit as a whole: from near to far, on after every failure, short for many hosts, and complete as JSON."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.local.local_backend import local
from console.doctor import doctor
from console.doctor.check import Check, Finding, State, carry_out, ok, warn
from contracts.errors import RequestError
from launch.hosts import HostError, HostsError
from launch.targets import Target
from tests.console.doctor.test_workstation import machine
from tests.launch.slices import MakeAgent, make_target


def finding(name: str, state: State, message: str, host: str | None = None, remedy: str = "") -> Finding:
    return Finding(area="hosts", name=name, state=state, message=message, host=host, remedy=remedy)


def shown(found: list[Finding]) -> list[str]:
    return [line for each in doctor.grouped(found) for line in doctor.lines(each)]


def test_what_holds_of_all_hosts_is_said_once_and_what_is_wrong_with_each_of_them() -> None:
    fine = [finding("clock", "ok", f"off by {index} ms", f"w-{index}") for index in range(3)]
    same = [finding("python", "ok", "Python 3.12", f"w-{index}") for index in range(3)]
    wrong = [finding("disk", "fail", f"{index} MiB free", f"w-{index}", "make room") for index in (0, 1)]
    assert shown([*fine, *same, *wrong, finding("x", "warn", "m")]) == [
        "  ✓ clock: w-0 … w-2 (3 hosts): such as off by 0 ms",
        "  ✓ python: w-0 … w-2 (3 hosts): Python 3.12",
        "  ✗ disk: w-0: 0 MiB free",
        "      → make room",
        "  ✗ disk: w-1: 1 MiB free",
        "      → make room",
        "  ! x: m",
    ]
    assert (
        doctor.verdict([*fine, *wrong, finding("x", "warn", "m")]) == "2 failed, 1 to look at, of 6 looked at"
    )
    assert doctor.verdict(fine) == "all well, 3 looked at"
    many = [finding("disk", "fail", "no room", f"w-{index}", "make room") for index in range(40)]
    assert shown(many) == ["  ✗ disk: w-0 … w-39 (40 hosts): no room", "      → make room"]


def test_a_stack_that_cannot_be_read_is_a_finding_and_this_machine_is_looked_at_all_the_same() -> None:
    def refuse() -> Target:
        raise RequestError("--stack dev: `pulumi` is not on PATH")

    found = list(doctor.findings(machine(), refuse, wants_stack=True))
    assert ("inventory", "fail") in [(each.name, each.state) for each in found]
    wanted = {"python", "packages", "pulumi", "pulumi login", "gcloud", "ssh keys", "os login"}
    assert wanted <= {each.name for each in found}


def test_areas_come_from_near_to_far_and_a_first_host_that_is_lost_hides_no_other(
    make_agent: MakeAgent,
) -> None:
    def lost(verb: str, request: object) -> dict[str, object]:
        return {"ok": False, "error": {"message": "no route", "remedy": "r"}}

    def fine(verb: str, request: object) -> dict[str, object]:
        checks = [{"name": "python", "ok": True, "message": "Python 3.12", "remedy": None}]
        return {"names": [], "processes": [], "checks": checks, "facts": {}}

    agents = [make_agent(lost, host="w-0"), make_agent(fine, host="w-1")]
    target = make_target(agents, [None, None], runs_url="gs://none/runs")  # type: ignore[list-item]
    found = list(doctor.findings(machine(), lambda: target, wants_stack=True))
    assert [(each.host, each.state) for each in found if each.area == "network"] == [
        ("w-0", "fail"),
        ("w-1", "ok"),
    ]
    assert [each.host for each in found if each.name == "python" and each.area == "hosts"] == ["w-1"]
    assert not [each for each in found if each.area == "hosts" and each.host == "w-0"]
    areas = list(dict.fromkeys(each.area for each in found))
    assert areas == ["this machine", "stack", "network", "hosts", "storage"]
    assert [each.name for each in found if each.area == "storage"] == ["runs", "bucket", "bucket from a host"]


def test_as_json_every_finding_is_there_and_one_failure_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = [finding("a", "ok", "m", "w-0"), finding("b", "fail", "m", remedy="r")]
    monkeypatch.setattr(doctor, "findings", lambda *arguments, **options: iter(everything))
    assert doctor.doctor(lambda: make_target([]), wants_stack=True, as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False and [each["name"] for each in said["findings"]] == ["a", "b"]
    everything.pop()
    assert doctor.doctor(lambda: make_target([]), wants_stack=True, as_json=True) == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("as ada@example.org in my-project-7", "as E-MAIL in PROJECT"),
        ("/home/ada_l/.cache", "/home/USER/.cache"),
        ("Bearer ya29.a0Af-x_y.z", "Bearer (left out)"),
        ("GITHUB_TOKEN=abc db_password: x y", "GITHUB_TOKEN=(left out) db_password: (left out) y"),
        ("crw-rw---- 0:44 /dev/vfio/0", "crw-rw---- 0:44 /dev/vfio/0"),
        ("-----BEGIN OPENSSH PRIVATE KEY----- b3Bl", "(left out)"),
    ],
)
def test_nobody_and_no_credential_is_in_the_text_of_the_first_day(text: str, told: str) -> None:
    assert doctor.without_names(text, {"my-project-7": "PROJECT", "ada_l": "USER"}) == told


@pytest.mark.slow
def test_the_text_of_the_first_day_has_both_numbers_of_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TPU_STACK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert doctor.first_day(local(2, "cpu", sorted(os.sched_getaffinity(0)))) == 0
    text = capsys.readouterr().out
    assert "RUN_PROCESS_ID and jax.process_index(): 0 and 0 (1 of 2 devices), 1 and 1" in text
    assert text.startswith("```\ntpu-stack ") and "\nids: user" in text
    assert not list((tmp_path / "runs").rglob("*.json"))


def raising(error: BaseException) -> Callable[[], Finding]:
    def look() -> Finding:
        raise error

    return look


@pytest.mark.parametrize(
    ("error", "message", "host"),
    [
        (HostError(host="w-0", reason="refused", remedy="r"), "refused", "w-0"),
        (HostsError("all", [HostError(host="w-0", reason="refused")]), "refused", "w-0"),
        (RequestError("--slice: no"), "--slice: no", None),
        (OSError(13, "Permission denied", "/x"), "/x: Permission denied", None),
        (KeyError("name"), "could not be looked at: KeyError: 'name'", None),
    ],
)
def test_a_check_that_breaks_is_a_failure_and_the_next_one_is_carried_out(
    error: Exception, message: str, host: str | None
) -> None:
    broken, fine = carry_out([Check("a", "x", raising(error)), Check("a", "y", lambda: ok("fine"))])
    assert (broken.state, broken.message, broken.host) == ("fail", message, host)
    assert (fine.name, fine.state) == ("y", "ok")


def test_what_hosts_say_cannot_break_the_terminal_and_an_interrupt_is_no_finding() -> None:
    (finding,) = carry_out([Check("a", "x", lambda: warn("\x1b]0;owned\x07", "\x1b[2J"))])
    assert "\x1b" not in finding.message + finding.remedy
    with pytest.raises(KeyboardInterrupt):
        list(carry_out([Check("a", "x", raising(KeyboardInterrupt()))]))
