"""The queue: what is submitted is what runs, nothing is started twice, a worker that is lost leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.local.backend import on_this_machine
from backends.targets import inventory_of
from contracts.errors import RequestError
from contracts.inventory import to_json
from contracts.run_directory import RUN_VERSION, RunDirectory
from fabfile.command_line import fab as run_fab
from infra.cloud_tpu.lifecycle import Lifecycle
from infra.documents import ABSENT, Documents, DocumentsError
from infra.lease import Lease, LeaseHeldError, LeaseLostError
from keeper import passes, queue_commands, store, sweep
from keeper.queue import MOST_ENDED, Entry, Queue
from keeper.queue_commands import opened
from keeper.queue_worker import FOREIGN_LIMIT_S, MOST_LOSSES, MOST_STARTS, Opened, Worker, work
from keeper.store import Stack
from launch import jobs, runs, targets
from launch import launch as launching
from launch.bundles import Bundle, tar
from launch.hosts import HostError, HostsError
from launch.runs import Look
from tests.keeper import test_idle as idle_lab
from tests.launch.test_costs import MAIN

lab = idle_lab.lab

SCRIPT = "import sys\nif '3' in sys.argv: sys.exit('no threes')\n"
Fab = Callable[..., tuple[int, str]]


def entry(number: int, **changed: Any) -> Entry:
    about = {"request": {"name": None}, "submitted": {"name": "jax_hello"}, "bundles": (), "where": {}}
    fixed = {"what": "jax_hello", "slices": ("local",), "by": "me", "added": "2026-11-23T09:00:00Z"}
    return Entry(number=number, **{**about, **fixed, **changed})


def numbers(queue: Queue) -> list[int]:
    return [each.number for each in queue.entries() if each.is_pending]


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue(Documents(str(tmp_path / "runs" / ".control")))


@pytest.fixture
def fab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fab:
    monkeypatch.delenv("TPU_STACK", raising=False)
    for variable, folder in (("XDG_CACHE_HOME", "cache"), ("TPU_STACK_RUNS", "runs")):
        monkeypatch.setenv(variable, str(tmp_path / folder))
    monkeypatch.setattr("keeper.queue_worker.POLL_S", 0.2)

    def run(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run_fab([*words])
        return int(end.value.code or 0), "".join(capsys.readouterr())

    return run


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return folder


def worker(queue: Queue, said: list[str]) -> Worker:
    @contextlib.contextmanager
    def hold(_name: str) -> Iterator[Callable[[], object]]:
        yield lambda: None

    return Worker(queue, lambda where: opened(targets.Wanted(hosts=where.get("hosts"))), hold, said.append)


def test_the_order_is_by_priority_then_as_submitted_or_moved(queue: Queue, fab: Fab) -> None:
    queue.add([entry(0), entry(0), entry(0, priority=1), entry(0, starts=1, priority=9)], [])
    assert numbers(queue) == [3, 1, 2, 4]
    for words, order in (
        (("2", "first"), [2, 3, 1, 4]),
        (("2", "before:1"), [3, 2, 1, 4]),
        (("3", "last"), [2, 1, 3, 4]),
        (("1", "--priority", "5"), [1, 2, 3, 4]),
        (("4", "first"), [4, 1, 2, 3]),
    ):
        assert fab("queue", "move", *words)[0] == 0
        assert numbers(queue) == order, words
    code, said = fab("queue", "move", "9", "first")
    assert (code, said) == (2, "error: 9: the queue has no such entry; `fab queue --all` lists them\n")
    assert fab("queue", "cancel", "4", "2")[0] == 0
    assert numbers(queue) == [1, 3]
    code, said = fab("queue", "move", "4", "first")
    assert (code, said) == (2, "error: 4: is cancelled; only entries that wait can be moved\n")


def test_of_many_that_claim_at_once_one_has_the_entry_and_a_slice_has_one(queue: Queue) -> None:
    queue.add([entry(0), entry(0)], [])
    claimed: list[Entry | None] = []
    threads = [
        threading.Thread(target=lambda n=n: claimed.append(queue.claim(1 + n % 2, "local", f"run-{n}")))
        for n in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    (won,) = [each for each in claimed if each is not None]
    assert [each for each in queue.entries() if each.state == "starting"] == [won]
    other = 3 - won.number
    assert queue.claim(other, "local", "x") is None
    assert queue.claim(other, "another", "x") is not None


def test_code_is_there_as_long_as_an_entry_that_waits_or_runs_needs_it(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles = [Bundle.of_archive(tar({"a": text})) for text in (b"1", b"2", b"3")]
    first, second, third = (f"bundles/{each.sha256}.json" for each in bundles)

    def of(*some: Bundle) -> Entry:
        return entry(0, bundles=tuple(each.sha256 for each in some))

    def end(number: int) -> None:
        queue.change(number, lambda now: dataclasses.replace(now, state="done"))

    queue.add([of(bundles[0]), of(*bundles[:2])], bundles[:2])
    queue.documents.write(third, {"archive": ""}, version=ABSENT)  # of a submission that was broken off
    assert queue.documents.names("bundles/") == sorted((first, second, third))
    end(1)
    assert queue.documents.names("bundles/") == sorted((first, second, third))
    end(2)
    assert queue.documents.names("bundles/") == []

    # Somebody submits the same code while it is being removed: after the removal looked, and before it removes.
    queue.add([of(bundles[0])], bundles[:1])
    delete, late = queue.documents.delete, Queue(Documents(queue.documents.url))

    def delete_later(name: str, *, version: int) -> None:
        monkeypatch.undo()
        late.add([of(bundles[0])], bundles[:1])
        delete(name, version=version)

    monkeypatch.setattr(queue.documents, "delete", delete_later)
    end(3)
    assert queue.documents.names("bundles/") == [first]


def test_the_oldest_ended_entries_go(queue: Queue) -> None:
    queue.add([entry(0, state="done") for _ in range(MOST_ENDED + 2)], [])
    assert [each.number for each in queue.entries()] == [*range(3, MOST_ENDED + 3)]


def test_a_run_is_what_was_submitted_whatever_the_checkout_holds_by_then(
    fab: Fab, queue: Queue, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fab("submit", "--job", "jax_hello", "--hang-limit", "77", "--", "--steps", "7")[0] == 0
    assert fab("submit", "--hosts", "1", "--workdir", str(script), "--", "python", "train.py")[0] == 0
    from jobs.jax_hello import config

    (script / "train.py").write_text("changed")
    before = {each.number: queue.request(each).submitted for each in queue.entries()}
    monkeypatch.setattr(
        config, "Config", dataclasses.make_dataclass("Config", [("other", int, 1)], frozen=True)
    )
    monkeypatch.setattr(jobs, "bundle", lambda _: pytest.fail("the checkout's code was read"))
    target = on_this_machine(hosts="2", platform="cpu")
    job, own = (queue.request(dataclasses.replace(each, run_id="x")) for each in queue.entries())
    planned = launching.work_out(job, target)
    assert (planned.plan.arguments, dataclasses.asdict(planned.config)["steps"]) == (("--steps", "7"), 7)
    assert (planned.plan.run_id, job.hang_floor_s) == ("x", 77.0)
    assert before[1] is not None and planned.bundles == before[1].bundles
    planned = launching.work_out(own, target)
    assert "train.py" in planned.bundles[1].names and planned.bundles[1].archive != b""
    assert planned.plan.command is not None
    assert planned.plan.command.folder_sha256 == queue.entries()[1].bundles[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("submit --job jax_hello -- --batch-size 3", "--batch-size 3: must be a multiple of the 2 devices"),
        ("sweep --job jax_hello", "--grid: say what the runs differ in"),
        ("sweep --job jax_hello --grid batch-size=2,3", "--batch-size 3: must be a multiple"),
        ("sweep --job jax_hello --grid steps=1 -- --steps 2", "--steps: is an option of the grid"),
        ("sweep --job jax_hello --seeds 2", "--seed 0: there is no such option"),
        ("sweep --job jax_hello --grid steps", "--grid steps: write it as OPTION=VALUE,VALUE"),
        ("compare --sweep none", "--sweep none: there is none"),
        ("queue cancel 4", "4: the queue has no such entry"),
    ],
)
def test_what_is_wrong_is_refused_at_once_and_nothing_is_queued(
    fab: Fab, queue: Queue, words: str, said: str
) -> None:
    code, told = fab(*words.split())
    assert (code, told.startswith(f"error: {said}")) == (2, True), told
    assert queue.entries() == []


@pytest.mark.timeout(120)
def test_a_sweep_whose_member_fails_goes_on_and_is_compared(fab: Fab, queue: Queue, script: Path) -> None:
    grid = ("--grid", "n=1,3", "--seeds", "2", "--name", "mine")
    own = ("--hosts", "1", "--workdir", str(script), "--", "python", "train.py")
    assert fab("sweep", *grid, *own)[0] == 0
    code, said = fab("sweep", *grid, *own)
    assert (code, "--name mine-1: entry 1 of the queue has it" in said or "is a sweep already" in said) == (
        2,
        True,
    )
    # A worker that was lost after it had taken the first, and then a pass of the keeper.
    assert queue.claim(1, "local", "command-20261123-000000-aaaa") is not None
    code, said = fab("keeper", "run")
    assert (code, "entry 1 (train.py) waiting: its worker was lost while it started the run" in said) == (
        0,
        True,
    )
    assert [each.state for each in queue.entries()].count("running") == 1
    code, said = fab("queue", "work")
    assert code == 1
    states = [(each.request["sweep"]["options"], each.state) for each in queue.entries()]
    assert sorted((options["n"], state) for options, state in states) == [
        ("1", "done"), ("1", "done"), ("3", "failed"), ("3", "failed"),
    ]  # fmt: skip
    assert len(list(Path(os.environ["TPU_STACK_RUNS"]).glob("command-*"))) == 4
    code, said = fab("compare", "--sweep", "mine", "--json")
    assert [(row["options"], row["states"]) for row in json.loads(said)["rows"]] == [
        ({"n": "1"}, {"done": 2}),
        ({"n": "3"}, {"failed": 2}),
    ]
    assert "n=3 seed=1 failed: " in fab("compare", "--sweep", "mine")[1]


def fails(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[str]:
    """Let every launch fail so; return the list of the runs that were tried."""
    tried: list[str] = []

    def launch(request: launching.Request, *_: Any) -> None:
        tried.append(str(request.run_id))
        raise error

    monkeypatch.setattr(launching, "launch", launch)
    return tried


def test_an_entry_whose_hosts_are_never_ready_lets_others_go_first_and_fails_in_the_end(
    fab: Fab, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert fab("submit", "--job", "jax_hello")[0] == 0
    tried = fails(monkeypatch, HostsError("preflight failed, nothing was started:", []))
    told: list[str] = []
    working = worker(queue, told)
    for _ in range(2 * MOST_STARTS):
        working.step()
    assert [each.state for each in queue.entries()] == ["failed", "failed"]
    assert len(tried) == 2 * MOST_STARTS and len({*tried}) == 2
    assert tried[0] != tried[1]
    assert queue.entries()[0].reason.startswith(f"given up after {MOST_STARTS} tries: preflight failed")


def test_hosts_that_somebody_else_uses_are_waited_for_and_take_no_try(
    fab: Fab, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fab("submit", "--job", "jax_hello")[0] == 0
    held = HostError(host="w-0", reason="/dev/accel0 is held by pid 7", is_in_use=True)
    for error in (HostsError("preflight failed:", [held]), runs.AtWorkError("the run is running")):
        tried = fails(monkeypatch, error)
        for _ in range(MOST_STARTS):
            worker(queue, []).step()
        (one,) = queue.entries()
        assert (one.state, one.starts, len(tried)) == ("waiting", 0, MOST_STARTS)
        assert one.reason == str(error)
    told: list[str] = []
    patient, tried = worker(queue, told), fails(monkeypatch, HostsError("preflight failed:", [held]))
    patient.step(), patient.step()
    assert len(tried) == 1 and len(told) == 2  # the same worker leaves them alone for a while
    alone = HostError(host="w-1", reason="the disk is full")
    fails(monkeypatch, HostsError("preflight failed:", [held, alone]))
    worker(queue, []).step()
    assert queue.entries()[0].starts == 1


def test_an_entry_whose_worker_has_lost_the_slice_is_left_to_whoever_has_it_now(
    fab: Fab, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise LeaseLostError("somebody else has taken over the lease")

    def launch(_: Any, target: targets.Target, *__: Any) -> None:
        with target.alone() as require:
            require()
        pytest.fail("it was started")

    assert fab("submit", "--job", "jax_hello")[0] == 0
    monkeypatch.setattr(launching, "launch", launch)
    told: list[str] = []
    where = lambda where: opened(targets.Wanted(hosts=where.get("hosts")))  # noqa: E731
    Worker(queue, where, lambda _: contextlib.nullcontext(lost), told.append).step()
    assert queue.entries()[0].state == "starting"
    assert told[-1] == "entry 1 (jax_hello): somebody else has taken over the lease"


def test_a_slice_whose_kept_run_is_between_two_attempts_is_not_taken_and_neither_is_a_kept_entry(
    fab: Fab, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fab("submit", "--job", "jax_hello")[0] == 0
    tried, told = fails(monkeypatch, runs.AtWorkError("the run is running")), list[str]()

    def step(**kept: Any) -> None:
        one = store.Wanted(run_id="mine", stack="local", runs_url="", **kept)
        store.change_wanted(queue.documents, "mine", lambda _: one)
        where = lambda where: opened(targets.Wanted(hosts=where.get("hosts")))  # noqa: E731
        one_worker = Worker(queue, where, lambda _: contextlib.nullcontext(lambda: None), told.append)
        one_worker.step(), one_worker.step()

    step(slice="local", state="recovering")
    assert told == ["local: the keeper has it for mine; it is waited for (`fab unkeep mine` frees it)"]
    queue.change(1, lambda now: dataclasses.replace(now, run_id="mine"))
    step(slice="another")
    assert tried == [] and queue.entries()[0].state == "waiting"
    step(slice="local", state="ended")
    assert {*tried} == {"mine"}


def test_a_worker_goes_on_after_an_outage_and_says_it_once(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keeper.queue_worker.POLL_S", 0.0)
    outcomes: list[Any] = [*[DocumentsError("the bucket does not answer")] * 2, []]

    def step(_: Worker) -> list[Entry]:
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return list(outcome)

    monkeypatch.setattr(Worker, "step", step)
    told: list[str] = []
    assert work(worker(queue, told), queue, told.append, stay=False) == 0
    assert told == ["the bucket does not answer", "the queue is empty"]


def test_hosts_that_do_not_answer_after_the_claim_give_the_entry_back(
    fab: Fab, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fab("submit", "--job", "jax_hello")[0] == 0

    def read(_: Any) -> None:
        raise HostError(host="w-0", reason="no answer")

    monkeypatch.setattr(runs, "read", read)
    worker(queue, []).step()
    (one,) = queue.entries()
    assert (one.state, one.starts) == ("waiting", 1)


def test_whoever_interrupts_a_worker_while_it_starts_a_run_gets_it_back_into_the_queue(
    fab: Fab, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fab("submit", "--job", "jax_hello")[0] == 0
    stopped: Any = dataclasses.make_dataclass("Stopped", [("run_id", str)])("x")
    fails(monkeypatch, launching.LaunchFailed(stopped, is_interrupted=True))
    with pytest.raises(KeyboardInterrupt):
        worker(queue, []).step()
    (one,) = queue.entries()
    assert (one.state, one.starts, one.run_id is not None) == ("waiting", 0, True)

    def cancelled_meanwhile(*_: Any) -> None:
        queue.change(1, lambda now: dataclasses.replace(now, state="stopping"))
        raise OSError("no more files")

    monkeypatch.setattr(launching, "launch", cancelled_meanwhile)
    with pytest.raises(OSError, match="no more files"):
        worker(queue, []).step()
    assert queue.entries()[0].state == "stopping"
    worker(queue, []).step()  # nothing had been started
    assert queue.entries()[0].state == "cancelled"


def test_what_is_cancelled_while_it_starts_is_stopped_by_whoever_has_the_lease_of_the_slice(
    fab: Fab, queue: Queue
) -> None:
    assert fab("submit", "--job", "jax_hello")[0] == 0
    assert queue.claim(1, "local", "jax_hello-20261123-000000-aaaa") is not None

    def taken(*_: Any, **__: Any) -> None:
        raise LeaseHeldError("its worker lives")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lease, "take", taken)
        code, said = fab("queue", "cancel", "1")
    assert (code, queue.entries()[0].state) == (1, "stopping")
    assert "entry 1 is not stopped yet: the keeper or the `fab queue work` that started it does so" in said
    assert fab("queue", "cancel", "1")[0] == 0
    assert [(each.state, each.reason[:3]) for each in queue.entries()] == [("cancelled", "by ")]


class Foreign:
    """A run that another user has started: its directory, and hosts that have no record of it."""

    def __init__(self, queue: Queue, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.run_id = "jax_hello-20261123-000000-aaaa"
        self.directory = RunDirectory(str(folder / self.run_id))
        self.queue, self.ahead_s = queue, 0.0
        name = on_this_machine(hosts="2", platform="cpu").hosts[0].name
        hosts = [{"index": 0, "name": name, "address": "127.0.0.1"}]
        attempt = {"attempt": 0, "processes": 1, "started": "2026-11-23T00:00:00Z"}
        described = {"version": RUN_VERSION, "run_id": self.run_id, "job": "jax_hello", "attempts": [attempt]}
        more = {
            "hosts": hosts,
            "slice": {"name": "local"},
            "name": None,
            "args": [],
            "config": {},
            "created": attempt["started"],
            "cache_dir": str(folder),
        }
        self.described: dict[str, Any] = {**described, **more}
        self.directory.write_json("run.json", self.described)
        patch.setattr(runs, "look", lambda *_: Look(processes=(), errors=()))
        patch.setattr(Documents, "now_s", lambda _: time.time() + self.ahead_s)

    def beats(self, state: str, age_s: float) -> None:
        """By the clock of the hosts, which is the documents' too."""
        beat = {
            "state": state,
            "rank": 0,
            "attempt": 0,
            "step": 5,
            "time": time.time() + self.ahead_s - age_s,
        }
        self.directory.write_json("heartbeats/host-0.json", beat)

    def after_a_step(self, state: str, age_s: float, **more: Any) -> str:
        self.beats("stepping" if state == "running" else "starting", age_s)
        at_work = entry(0, state=state, slice="local", run_id=self.run_id, **more)
        self.queue.change_all(lambda _: [dataclasses.replace(at_work, number=1)])
        worker(self.queue, []).step()
        return self.queue.entries()[0].state


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, -3600.0])
def test_a_run_of_another_user_is_lost_after_minutes_without_a_heartbeat_by_the_clock_of_the_documents(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    run = Foreign(queue, tmp_path / "runs", monkeypatch)
    monkeypatch.setenv("TPU_STACK_RUNS", str(tmp_path / "runs"))
    run.ahead_s = ahead_s
    assert run.after_a_step("running", 10.0) == "running"
    assert run.after_a_step("running", FOREIGN_LIMIT_S - 10.0) == "running"
    assert run.after_a_step("running", FOREIGN_LIMIT_S + 10.0) == "lost"
    assert (
        run.after_a_step("starting", 10.0) == "starting"
    )  # its own worker is gone, and its processes may join
    assert run.after_a_step("starting", FOREIGN_LIMIT_S + 10.0) == "waiting"
    run.directory.write_json("result.json", {"attempt": 0, "outcome": "failed"})
    assert run.after_a_step("starting", 10.0) == "running"  # it was started, and is judged at the next step
    assert run.after_a_step("starting", 10.0, judged=0) == "waiting"  # its next attempt was not started


def test_an_entry_whose_slice_left_the_stack_goes_on_on_another_or_ends_with_the_reason(queue: Queue) -> None:
    def step(*there: str) -> Entry:
        stack = Opened(slices=frozenset(there), targets=[])
        Worker(queue, lambda _: stack, lambda _: contextlib.nullcontext(lambda: None), print).step()
        return queue.entries()[0]

    several = entry(0, state="running", slice="a", slices=("a", "b"), run_id="x")
    queue.add([several], [])
    assert step("a", "b").state == "running"
    assert (step("b").state, step("b").reason) == ("waiting", "the stack has no slice a any more")
    assert step("c").state == "failed"
    assert queue.entries()[0].reason == "the stack has no slice a or b any more; submit it again"
    queue.change(1, lambda _: dataclasses.replace(several, number=1, slices=("a",)))
    assert step("c").state == "lost"
    queue.change(1, lambda _: dataclasses.replace(several, number=1, state="stopping", reason="by me"))
    assert (step("c").state, step("c").reason) == ("cancelled", "by me")


def test_a_run_that_lost_its_hosts_goes_on_without_a_restart_but_not_for_ever(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its processes say of it: they lose each other before they are lost."""
    run = Foreign(queue, tmp_path / "runs", monkeypatch)
    monkeypatch.setenv("TPU_STACK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(runs, "look", lambda *_: Look(processes=(), errors=(), knowing=1))
    gone = {"index": 0, "name": "gone", "address": "127.0.0.1"}
    run.directory.write_json("run.json", {**run.described, "hosts": [gone]})
    run.directory.write_json("result.json", {"outcome": "failed", "attempt": 0, "error": "a peer was lost"})
    queue.add([entry(0, state="running", slice="local", run_id=run.run_id)], [])
    for _ in range(MOST_LOSSES):
        worker(queue, []).step()
        assert queue.entries()[0].state == "waiting"
        queue.change(1, lambda now: dataclasses.replace(now, state="running"))
    worker(queue, []).step()
    assert queue.entries()[0].state == "failed"


@pytest.fixture
def bucket_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A stack whose slice has no hosts, and whose documents are in a folder in place of its bucket."""
    one = dataclasses.replace(MAIN, hosts=())
    here = on_this_machine(hosts="1", platform="cpu").inventory
    storage = dataclasses.replace(here.storage, bucket_url="gs://b", bucket_region="us-central1")
    inventory = dataclasses.replace(here, stack="dev", project="grant", storage=storage, slices=(one,))
    (tmp_path / "dev.json").write_text(to_json(inventory))
    monkeypatch.setattr("keeper.store.Documents", lambda _: Documents(str(tmp_path / "runs" / ".control")))
    monkeypatch.setattr("launch.remote_files.reach", lambda *_, **__: None)
    yield str(tmp_path / "dev.json")


def test_the_queue_of_a_stack_without_hosts_takes_entries_and_gives_them_back(
    fab: Fab, queue: Queue, bucket_stack: str
) -> None:
    where = ("--stack", bucket_stack)
    code, said = fab("submit", *where, "--platform", "cpu", "--job", "jax_hello", "--", "--batch-size", "3")
    assert code == 2 and "must be a multiple of the 4 devices" in said
    for _ in range(2):
        code, said = fab("submit", *where, "--platform", "cpu", "--job", "jax_hello")
        assert (
            code == 0 and "main has no hosts now; `pulumi up --refresh` or its keeper asks for them" in said
        )
    assert fab("queue", "move", "2", "first", *where)[0] == 0
    assert numbers(queue) == [2, 1]
    assert fab("queue", *where)[0] == 0
    assert fab("queue", "cancel", "all", *where)[0] == 0
    assert numbers(queue) == []


def test_the_slices_that_entries_need_are_where_they_run_and_one_for_those_that_wait(
    bucket_stack: str,
) -> None:
    inventory = inventory_of(targets.Wanted(stack=bucket_stack))
    gone, there = inventory.slices[0], dataclasses.replace(MAIN, name="there")
    direct = dataclasses.replace(MAIN, name="direct")
    both = Stack(
        project="p",
        owner="o",
        slices={"main": {}, "there": {}},
        inventory=dataclasses.replace(inventory, slices=(gone, there, direct)),
    )
    for several, needed in (
        ([entry(1, slices=("main", "there"))], {"there"}),
        ([entry(1, slices=("main",))], {"main"}),
        ([entry(1, slices=("direct",))], set()),
        ([entry(1, state="running", slice="main"), entry(2, slices=("main", "there"))], {"main"}),
        ([entry(1, state="stopping", slice="there"), entry(2, slices=("main",))], {"there", "main"}),
    ):
        assert queue_commands.slices_needed(several, both) == needed, several


class Prepared(idle_lab.Hosts):
    """Hosts that answer once they are there."""

    def signs(self, wanted: Any) -> dict[str, Any]:
        assert all(each.for_queue for each in wanted)
        return {}

    def without_hosts(self, _: Any) -> None:
        return None

    def target(self, *_: Any) -> None: ...

    def silent(self, _: Any) -> list[Any]:
        return []

    def prepare(self, *_: Any) -> None: ...


def test_a_lost_slice_that_entries_need_is_had_again_and_given_up_with_the_last_of_them(
    lab: idle_lab.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was refused is not asked for again before somebody has brought it back."""
    hosts: Any = Prepared(lab.hosts.folder)
    means, queue = dataclasses.replace(lab.means, hosts=hosts), Queue(lab.means.documents)
    monkeypatch.setattr(Worker, "step", lambda _: [])

    def wanted() -> list[tuple[str, str]]:
        found = store.read_wanted(means.documents).values()
        return [(each.slice, each.state) for each in found]

    def keeper() -> None:
        one = dataclasses.replace(means)
        passes.run_pass(one, lambda: queue_commands.attend(one))

    def vanish() -> None:
        for kind in ("queuedResources", "nodes"):
            for each in lab.api.control.alive()[kind]:
                lab.api.control.vanish(each["name"])

    keeper()
    assert wanted() == []
    queue.add([entry(0, slices=("main",), slice="main", state="running")], [])
    keeper()
    assert wanted() == [("main", "watched")]
    vanish()
    assert not lab.is_there()
    lab.clock_s += 60.0
    keeper()
    assert lab.is_there() and wanted() == [("main", "watched")]

    def end(now: store.Wanted | None) -> store.Wanted:
        assert now is not None
        return dataclasses.replace(now, state="ended", reason="it would be refused again")

    vanish()
    store.change_wanted(means.documents, "queue/main", end)
    for _ in range(2):
        keeper()
    assert not lab.is_there() and wanted() == [("main", "ended")]
    prepared: list[int] = []
    monkeypatch.setattr(hosts, "prepare", lambda *_: prepared.append(1))
    with contextlib.closing(means.client()) as client:
        Lifecycle(client, means.backoff).create(store.read_stack(means.documents).slices["main"])
        for _ in range(2):
            keeper()
    assert wanted() == [("main", "watched")] and prepared == [1]
    queue.change(1, lambda now: dataclasses.replace(now, state="done"))
    keeper()
    assert wanted() == []


def test_the_grid_of_a_sweep_is_every_combination_and_its_rows_are_means_over_seeds() -> None:
    found = sweep.members(["--learning_rate=1,2", "x=a"], 2)
    assert found == [
        {"learning-rate": rate, "x": "a", "seed": seed} for rate in ("1", "2") for seed in ("0", "1")
    ]
    for grid, seeds in ([f"a={','.join(map(str, range(1000)))}"], 2), ([], 999_999_999):
        with pytest.raises(RequestError, match=r"makes (2000|999999999) runs"):
            sweep.members(grid, seeds)
    from jobs.jax_hello import METRICS

    metric = METRICS.get(METRICS.headline)
    values = {"1": (4.0, 6.0), "2": (1.0, 2.0)}

    def member(rate: str, seed: int, state: str = "done") -> sweep.Found:
        said = {"metrics": {metric.name: values[rate][seed]}, "wall_s": 1.0, "run": f"r{rate}{seed}"}
        return sweep.Found(options={"rate": rate, "seed": str(seed)}, state=state, overview=said)

    several = [member("1", 0), member("1", 1), member("2", 0), member("2", 1), member("2", 0, "failed")]
    rows = sweep.rows(several, metric)
    assert [(row.options["rate"], row.mean, row.best) for row in rows] == [
        ("2", 1.5, "r20"),
        ("1", 5.0, "r10"),
    ]
    assert rows[0].states == {"done": 2, "failed": 1}
    assert rows[0].deviation == pytest.approx(0.7071, abs=1e-4)
