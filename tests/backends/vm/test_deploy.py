"""`fab deploy`: what each target needs, and that it fits into one command."""

import dataclasses
import io
import json
import shlex
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from backends.local.local_backend import local
from backends.local.processes import LocalTransport
from backends.vm import deploy, login
from backends.vm.access import Access
from backends.vm.deploy import LONGEST_LINE, Answer, Deployment, Outcome, Reader, State, parse
from backends.vm.python_environment import Lock
from backends.vm.steps import Step, to_json
from launch.hosts import Agent, HostError, Show
from launch.targets import Target
from tests.launch.slices import NO_STORAGE, MakeAgent, make_target
from tests.processes import all_end

LOCK = Lock(name="tpu", files={}, sha256="00" * 32, folder="~/l")


@pytest.fixture
def agents(make_agent: MakeAgent) -> list[Agent]:
    return [make_agent(lambda verb, request: {"names": []}, host=f"w-{index}") for index in range(2)]


def names(target: Target, **options: Any) -> list[str]:
    given = {"with_comforts": False, "contained": False, "bare": True, "lock": LOCK, **options}
    return [step.name for step in deploy.steps(target, **given)]


def test_each_target_gets_the_steps_that_it_needs(agents: list[Agent]) -> None:
    target = make_target(agents)
    before, after = (
        ["first boot", "certificates", "share", "folders"],
        ["docker helper", "docker log-in", "python"],
    )
    always = [*before, "huge pages", *after]
    assert names(target) == always
    assert names(dataclasses.replace(target, platform="cpu")) == [*before, *after]
    assert names(target, with_comforts=True) == [*always, "comforts"]
    bare = dataclasses.replace(target.inventory, storage=NO_STORAGE, images={})
    in_bucket = dataclasses.replace(target, inventory=bare, runs_url="gs://b/runs")
    assert names(in_bucket) == ["first boot", "certificates", "folders", "huge pages", "python"]
    # Runs in containers take Docker and no Python.
    contained = [*before, "huge pages", "docker", "docker helper", "docker log-in"]
    assert names(target, contained=True, bare=False, lock=None) == contained


@pytest.mark.parametrize(
    ("images", "runtime", "ways"),
    [
        ((), None, (False, True)),
        (("jax", "pytorch"), None, (True, False)),
        (("pytorch",), None, (True, True)),  # jobs of JAX run bare there
        (("pytorch",), "docker", (True, False)),
        (("jax", "pytorch"), "bare", (False, True)),
    ],
)
def test_the_image_of_any_framework_needs_docker_and_without_one_of_jax_its_jobs_need_a_python(
    agents: list[Agent], images: tuple[str, ...], runtime: str | None, ways: tuple[bool, bool]
) -> None:
    target = make_target(agents)
    stack = dataclasses.replace(target.inventory, images={name: f"r/{name}@sha256:0" for name in images})
    assert deploy.ways_of_running(dataclasses.replace(target, inventory=stack), runtime) == ways


def test_on_this_machine_nothing_is_installed_and_nothing_needs_root(agents: list[Agent]) -> None:
    here = local(1, "cpu", [0]).backend
    target = make_target(agents, name="local", backend=here, python="/venv/bin/python", runs_url="/runs")
    found = deploy.steps(target, with_comforts=True, contained=False, bare=True, lock=None)
    assert [step.name for step in found] == ["folders", "python"]
    assert not any(step.root for step in found) and found[1].change == ""


def test_folders_wait_for_the_share_and_all_steps_fit_in_one_argument_of_a_shell(agents: list[Agent]) -> None:
    """sshd hands the whole command to a shell as one argument."""
    every = deploy.steps(make_target(agents), with_comforts=True, contained=False, bare=True, lock=LOCK)
    argv = [deploy.PYTHON, "-S", "-E", "-c", deploy.RUNNER.read_text(), to_json(every)]
    assert len(shlex.join(argv).encode()) < 100_000
    (folders,) = [step for step in every if step.name == "folders"]
    assert folders.needs == ("share",) and "/share/runs" in folders.check


def test_steps_of_a_host_are_told_as_they_end(tmp_path: Path) -> None:
    told: list[Answer] = []
    make = Step(name="file", check=f"test -e {tmp_path}/f", change=f"touch {tmp_path}/f", limit_s=10)
    outcome = Deployment("w-0", [make], told.append).begin(LocalTransport()).outcome()
    assert [answer.state for answer in told] == ["doing", "changed"]
    assert outcome.changed and not outcome.failed
    assert not Deployment("w-0", [make], told.append).begin(LocalTransport()).outcome().changed


class Broken:
    """A host that ends before its time, after some lines."""

    def __init__(self, data: bytes, end: int | Exception | None) -> None:
        self.data, self.end = data, end

    def stream(self, argv: Sequence[str], show: Show, *, timeout_s: float | None) -> Future[int | None]:
        future: Future[int | None] = Future()
        show("out", self.data)
        if isinstance(self.end, Exception):
            future.set_exception(self.end)
        else:
            future.set_result(self.end)
        return future


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (HostError(host="w-0", reason="connection lost"), "connection lost"),
        (OSError("broken pipe"), "broken pipe"),
        (None, "was not done within 5 s, it ended after a"),
        (127, "ended after a with exit code 127: what is this"),
    ],
)
def test_a_host_that_ends_before_its_time_has_failed_and_says_where(
    end: int | Exception | None, reason: str
) -> None:
    line = {"step": "a", "state": "ok", "message": "m", "remedy": "", "took_s": 0}
    broken: Any = Broken(json.dumps(line).encode() + b"\nwhat is this\n", end)
    steps = [Step(name="a", check="true"), Step(name="b", check="true")]
    outcome = Deployment("w-0", steps, lambda answer: None, limit_s=5).begin(broken).outcome()
    assert outcome.failed and len(outcome.answers) == 1
    assert outcome.error is not None and outcome.error.reason == reason
    # Nothing is begun on a host that has an error before.
    known, nothing = HostError(host="w-0", reason="not reached"), cast(Any, None)
    assert Deployment("w-0", [], lambda answer: None, known).begin(nothing).outcome().error is known


def test_breaking_off_ends_what_is_under_way_on_the_host(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    started = threading.Event()
    endless = Step(name="a", check="false", change=f"echo $$ >{pid}; say on; sleep 300", limit_s=300)

    def show(answer: Answer) -> None:
        if answer.message == "on":
            started.set()

    deployment = Deployment("w-0", [endless], show).begin(LocalTransport())
    assert started.wait(30)
    deployment.end()
    assert all_end([int(pid.read_text())])


LINE = json.dumps({"step": "s", "state": "ok", "message": "m", "remedy": "", "took_s": 1}).encode()


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 7, 1e999, "text", [], [[]], {}, {"state": []}),
        *({**json.loads(LINE), field: None} for field in ("step", "state", "message", "remedy", "took_s")),
    ],
)
def test_what_only_looks_like_an_answer_is_none(value: object) -> None:
    assert parse(json.dumps(value).encode()) is None


def test_last_words_are_kept_and_an_endless_line_takes_no_more_memory_than_a_long_one() -> None:
    reader, piece = Reader(), b"x" * 65536
    assert list(reader.take("err", b"bash: python3: command not found\n")) == []
    assert reader.last_words == "bash: python3: command not found"
    for _ in range(500):
        list(reader.take("out", piece))
    assert len(reader._pending) <= LONGEST_LINE


def outcome(host: str, *steps: tuple[str, State, str], error: HostError | None = None) -> Outcome:
    answers = tuple(Answer(step=step, state=state, message=message) for step, state, message in steps)
    return Outcome(host=host, answers=answers, error=error)


def printed(outcomes: list[Outcome]) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=100, markup=False).print(deploy.table(outcomes))
    return [" ".join(line.split()) for line in file.getvalue().splitlines()]


def test_hosts_are_told_of_together_where_the_same_happened_and_one_that_failed_with_its_remedy() -> None:
    alike = [outcome(f"w-{index}", ("a", "ok", "there"), ("b", "changed", "made")) for index in range(4)]
    lost = HostError(host="w-5", reason="connection lost", remedy="again")
    failed = Answer(step="a", state="failed", message="no disk", remedy="buy one")
    others = [
        Outcome(host="w-4", answers=(failed,)),
        outcome("w-5", ("a", "ok", "there"), error=lost),
        outcome("w-6", error=lost),
    ]
    assert printed([*alike, *others])[1:] == [
        "w-0 … w-3 (4 hosts) b changed made",
        "w-4 a FAILED no disk → buy one",
        "w-5 LOST connection lost → again",
        "w-6 NOT REACHED connection lost → again",
    ]
    assert deploy.verdict([*alike, *others]) == "3 of 7 hosts are not ready"
    assert deploy.verdict(alike) == "4 hosts ready, 4 changed"


# --- hosts that boot are waited for, and what waiting does not mend is not ------------------------------------------


ACCESS = Access(name="w-0", address="10.0.0.2", user="u", os_login=True, host_keys=(), made_by_pulumi=True)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ACCESS.host_key_unknown(), False),
        (ACCESS.host_key_changed(["SHA256:a"], "SHA256:b"), False),
        (ACCESS.host_key_unreadable("x", "y"), False),
        (ACCESS.proxy_missing("gcloud"), False),
        (ACCESS.no_connection(socket.gaierror(-2, "unknown")), False),
        (ACCESS.no_connection(ConnectionRefusedError()), True),
        (ACCESS.no_connection(TimeoutError()), True),
        (ACCESS.closed_at_once(), True),
        (ACCESS.proxy_ended(1, "4003: failed to connect to backend"), True),
        # The account of a person reaches a fresh host some time after its sshd does.
        (ACCESS.permission_denied("u", ["k"], []), True),
    ],
)
def test_only_what_a_booting_host_does_is_waited_for(error: HostError, passes: bool) -> None:
    assert deploy.may_pass(error) is passes
    with pytest.raises(HostError) as no_user:  # nor is a machine that cannot log in anywhere
        login.user_of_profile("{}")
    assert not deploy.may_pass(no_user.value)
