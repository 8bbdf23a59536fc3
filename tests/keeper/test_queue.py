"""The queue: what is submitted is what runs, nothing is started twice, a worker that is lost leaves nothing behind."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.host_backend import HostBackend
from backends.local.local_backend import on_this_machine
from contracts.errors import RequestError, Unreachable
from contracts.inventory import to_json
from contracts.run_directory import RUN_VERSION, RunDirectory
from fabfile.command_line import fab as run_fab
from infra.documents import ABSENT, Documents
from keeper import submissions, sweep
from keeper.queue_commands import queue_state
from keeper.world import FOREIGN_LIMIT_S, World
from launch import jobs, launching, policy, runs
from launch.code.bundles import Bundle, tar
from launch.control.control_documents import Attempt, End, Run, Submission
from launch.control.store import Store
from launch.hosts import HostError, HostsError
from launch.policy import Presence
from launch.reconcile import NotStartedError
from launch.request.run_request import work_out
from launch.runs import Look
from tests.launch.code.package_index import add_wheel
from tests.launch.test_pricing import MAIN

SCRIPT = "import sys\nif '3' in sys.argv: sys.exit('no threes')\n"
Fab = Callable[..., tuple[int, str]]


def entry(number: int, bundles: tuple[str, ...] = (), **changed: Any) -> Run:
    submission = Submission(
        number=0, what="jax_hello", request={"name": None}, submitted={"name": "jax_hello"}, bundles=bundles, where={},
        by="me", added="2026-11-23T09:00:00Z",
    )  # fmt: skip
    run = Run(run_id=f"run-{number}", stack="local", runs_url="", slices=("local",), submission=submission)
    return dataclasses.replace(run, **changed)


def numbers(store: Store) -> list[int]:
    return [
        run.submission.number
        for run in policy.in_order(submissions.pending(store.read().runs.values()))
        if run.submission
    ]


def states(store: Store) -> dict[str, str]:
    return {run.name or run.run_id: queue_state(run) for run in store.read().runs.values()}


def number_of(store: Store, number: int) -> Run:
    several = store.read().runs.values()
    return next(run for run in several if run.submission and run.submission.number == number)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Documents(str(tmp_path / "runs" / ".control")))


@pytest.fixture
def fab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Fab]:
    monkeypatch.delenv("TPU_STACK", raising=False)
    for variable, folder in (("XDG_CACHE_HOME", "cache"), ("TPU_STACK_RUNS", "runs")):
        monkeypatch.setenv(variable, str(tmp_path / folder))
    monkeypatch.setattr("keeper.queue_commands.POLL_S", 0.2)

    def run(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run_fab([*words])
        return int(end.value.code or 0), "".join(capsys.readouterr())

    yield run
    for described in (tmp_path / "runs").glob("*/run.json"):  # a test that failed may leave some at work
        if not described.with_name("result.json").exists():
            run("stop", described.parent.name, "--grace", "1")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return folder


def test_the_order_is_by_priority_then_as_submitted_or_moved(store: Store, fab: Fab) -> None:
    store.add_runs([entry(1), entry(2), entry(3, priority=1), entry(4, failed_starts=1, priority=9)])
    assert numbers(store) == [3, 1, 2, 4]
    for words, order in (
        (("2", "first"), [2, 3, 1, 4]),
        (("2", "before:1"), [3, 2, 1, 4]),
        (("3", "last"), [2, 1, 3, 4]),
        (("1", "--priority", "5"), [1, 2, 3, 4]),
        (("4", "first"), [4, 1, 2, 3]),
    ):
        assert fab("queue", "move", *words)[0] == 0
        assert numbers(store) == order, words
    code, said = fab("queue", "move", "9", "first")
    assert (code, said) == (2, "error: 9: the queue has no such entry; `fab queue --all` lists them\n")
    store.edit_run(
        "run-4", lambda now: now and dataclasses.replace(now, end=End(outcome="done", reason="", at_s=1.0))
    )
    assert numbers(store) == [1, 2, 3]
    code, said = fab("queue", "move", "4", "first")
    assert (code, said) == (2, "error: 4: is done; only entries that wait can be moved\n")


def test_code_is_there_as_long_as_an_entry_that_waits_or_runs_needs_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles = [Bundle.from_archive(tar({"a": text})) for text in (b"1", b"2", b"3")]
    first, second, third = (f"bundles/{each.sha256}.json" for each in bundles)
    documents = store.documents

    def add(number: int, *some: Bundle) -> None:
        submissions.keep_code(Documents(documents.url), some)
        Store(Documents(documents.url)).add_runs([entry(number, tuple(each.sha256 for each in some))])
        submissions.keep_code(Documents(documents.url), some)

    def end(number: int) -> None:
        done = End(outcome="done", reason="", at_s=1.0)
        store.edit_run(f"run-{number}", lambda now: now and dataclasses.replace(now, end=done))
        submissions.remove_code(store)

    add(1, bundles[0])
    add(2, *bundles[:2])
    documents.write(third, {"archive": ""}, version=ABSENT)  # of a submission that was broken off
    documents.write(
        "executables/a.json", {}, version=ABSENT
    )  # of a step that was compiled for one that waits
    end(1)
    assert documents.names("bundles/") == sorted((first, second))
    assert documents.names("executables/") == ["executables/a.json"]
    end(2)
    assert documents.names("bundles/") == documents.names("executables/") == []

    # Somebody submits the same code while it is being removed: after the removal looked, and before it removes.
    add(3, bundles[0])
    delete = documents.delete

    def delete_later(name: str, *, version: int) -> None:
        monkeypatch.undo()
        add(4, bundles[0])
        delete(name, version=version)

    monkeypatch.setattr(documents, "delete", delete_later)
    end(3)
    assert documents.names("bundles/") == [first]


def test_a_run_is_what_was_submitted_whatever_the_checkout_holds_by_then(
    fab: Fab, store: Store, script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    add_wheel(tmp_path / "index", "greet", "1.0")
    (script / "requirements.txt").write_text("greet\n")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    assert fab("submit", "--job", "jax_hello", "--hang-limit", "77", "--", "--steps", "7")[0] == 0
    assert fab("submit", "--hosts", "1", "--workdir", str(script), "--", "python", "train.py")[0] == 0
    from jobs.jax_hello import config

    (script / "train.py").write_text("changed")
    (script / "requirements.txt").write_text("greet==2\n")
    entries = [number_of(store, 1), number_of(store, 2)]
    monkeypatch.setattr(
        config, "Config", dataclasses.make_dataclass("Config", [("other", int, 1)], frozen=True)
    )
    monkeypatch.setattr(jobs, "bundle", lambda _: pytest.fail("the checkout's code was read"))
    target = on_this_machine(hosts="2", platform="cpu")
    job, own = (submissions.request(store.documents, each) for each in entries)
    planned = work_out(job, target)
    assert (planned.plan.arguments, dataclasses.asdict(planned.config)["steps"]) == (("--steps", "7"), 7)
    assert (planned.plan.run_id, job.hang_floor_s) == (entries[0].run_id, 77.0)
    planned = work_out(own, target)
    assert "train.py" in planned.bundles[1].names and planned.bundles[1].archive != b""
    assert planned.plan.command is not None and entries[1].submission is not None
    assert planned.plan.command.bundles == entries[1].submission.bundles[1:]
    assert planned.config.packages["requirements"] == ["greet==1.0"]


def test_a_folder_that_is_too_large_for_a_keeper_is_refused_before_anything_of_it_is_kept(
    fab: Fab, store: Store, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ("submit", "--hosts", "1", "--workdir", str(script), "--", "python", "train.py")
    (script / "weights.bin").write_bytes(os.urandom(3 << 20))
    monkeypatch.setattr(submissions, "LARGEST_BYTES", 2 << 20)
    code, said = fab(*own)
    assert (code, store.documents.names("bundles/"), [*store.read().runs]) == (2, [], [])
    assert "are 3 MiB compressed, and the queue keeps at most 2 MiB of a run" in said
    (script / ".fabignore").write_text("*.bin")
    assert fab(*own)[0] == 0


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
    fab: Fab, store: Store, words: str, said: str
) -> None:
    code, told = fab(*words.split())
    assert (code, told.startswith(f"error: {said}")) == (2, True), told
    assert store.read().runs == {}


@pytest.mark.timeout(180)
def test_a_sweep_whose_member_fails_goes_on_and_is_compared_and_two_workers_start_each_run_once(
    fab: Fab, store: Store, script: Path
) -> None:
    grid = ("--grid", "n=1,3", "--seeds", "2", "--name", "mine")
    own = ("--hosts", "1", "--workdir", str(script), "--", "python", "train.py")
    assert fab("sweep", *grid, *own)[0] == 0
    code, said = fab("sweep", *grid, *own)
    assert (code, "is a sweep already" in said) == (2, True), said
    other = subprocess.Popen(
        [Path(sys.executable).with_name("fab"), "queue", "work"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    with other:
        code, said = fab("queue", "work")
        assert other.stdout is not None
        text = other.stdout.read()
    assert (code, other.returncode) == (1, 1), said + text
    assert states(store) == {"mine-1": "done", "mine-2": "done", "mine-3": "failed", "mine-4": "failed"}
    folders = [*Path(os.environ["TPU_STACK_RUNS"]).glob("command-*")]
    assert len(folders) == 4
    assert [len(json.loads((folder / "run.json").read_text())["attempts"]) for folder in folders] == [1] * 4
    code, said = fab("compare", "--sweep", "mine", "--json")
    assert [(row["options"], row["states"]) for row in json.loads(said)["rows"]] == [
        ({"n": "1"}, {"done": 2}),
        ({"n": "3"}, {"failed": 2}),
    ]
    assert "n=3 seed=1 failed: " in fab("compare", "--sweep", "mine")[1]


WAITS_OR_FAILS = """
import os, pathlib, sys, time
before = pathlib.Path(os.environ["RUN_DIR"], "before")
if "fails" in sys.argv and not before.exists():
    before.touch()
    raise SystemExit("the first attempt fails")
while "waits" in sys.argv:
    time.sleep(0.1)
"""


@pytest.mark.timeout(240)
def test_a_killed_worker_a_cancelled_run_and_a_restart(
    fab: Fab, store: Store, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", 0.0)
    (script / "train.py").write_text(WAITS_OR_FAILS)

    def submit(name: str, *words: str) -> None:
        own = f"--hosts 1 --workdir {script} --name {name}".split()
        assert fab("submit", *own, *words, "--", "python", "train.py", name)[0] == 0

    submit("fails", "--max-restarts", "1")
    submit("waits", "--priority", "2")
    submit("never")
    assert fab("queue", "cancel", "never")[0] == 0
    assert number_of(store, 3).end is not None
    assert {state for name, state in states(store).items() if name != "never"} == {"waiting"}
    worker = subprocess.Popen(
        [Path(sys.executable).with_name("fab"), "queue", "work"], stdout=subprocess.DEVNULL
    )
    with worker:
        try:
            deadline = time.monotonic() + 60.0
            while states(store)["waits"] != "running":
                assert time.monotonic() < deadline, states(store)
                time.sleep(0.2)
        finally:
            worker.kill()
    # Its lease would be stale in a minute.
    store.documents.change("leases/local.json", lambda now: {**now, "token": ""})
    assert states(store) == {"fails": "waiting", "waits": "running", "never": "cancelled"}
    assert fab("keeper", "run")[0] == 0
    assert states(store)["waits"] == "running", "a run that has started needs no worker"
    code, said = fab("queue", "cancel", "waits", "--grace", "20")
    assert code == 0 and states(store)["waits"] == "stopped" and "cancelled:" not in said, said
    assert fab("queue", "work")[0] == 0
    assert states(store)["fails"] == "done"
    run = number_of(store, 1)
    assert run.limits.restarts == 0
    described = json.loads((Path(os.environ["TPU_STACK_RUNS"]) / run.run_id / "run.json").read_text())
    assert len(described["attempts"]) == 2


# --- what the world makes of a launch, and of another user's run ----------------------------------------------------

HELD = HostError(host="w-0", reason="/dev/accel0 is held by pid 7", is_in_use=True)
FULL = HostError(host="w-1", reason="the disk is full")


@pytest.mark.parametrize(
    ("error", "flags"),
    [
        (HostsError("preflight failed:", [HELD]), {"is_in_use"}),
        (runs.AtWorkError("the run is running"), {"is_in_use"}),
        (HostsError("preflight failed:", [HELD, FULL]), set()),
        (HostError(host="w-0", reason="no answer"), set()),
        (Unreachable("the registry does not answer"), {"is_outage"}),
        (launching.LaunchFailed(dataclasses.make_dataclass("Stopped", [("run_id", str)])("x")), {"has_result"}),
    ],
)  # fmt: skip
def test_a_launch_that_fails_says_whose_fault_it_is(
    fab: Fab, store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception, flags: set[str]
) -> None:
    assert fab("submit", "--job", "jax_hello", "--hosts", "1")[0] == 0

    def launch(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(launching, "launch", launch)
    run = dataclasses.replace(number_of(store, 1), slice="local", attempt=Attempt(number=0))
    with pytest.raises(NotStartedError) as failed:
        World(store.documents, print, program="a test").start(run, lambda: None)
    assert {name for name, value in vars(failed.value).items() if value is True} == flags


def test_whoever_interrupts_a_worker_while_it_starts_a_run_gets_it_back_into_the_queue(
    fab: Fab, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fab("submit", "--job", "jax_hello", "--hosts", "1")[0] == 0
    stopped: Any = dataclasses.make_dataclass("Stopped", [("run_id", str)])("x")

    def launch(*_: Any, **__: Any) -> None:
        raise launching.LaunchFailed(stopped, is_interrupted=True)

    monkeypatch.setattr(launching, "launch", launch)
    assert fab("queue", "work")[0] == 0
    run = number_of(store, 1)
    assert (queue_state(run), run.slice, run.attempt, run.failed_starts) == ("waiting", None, None, 0)


def test_a_worker_goes_on_after_an_outage_and_says_it_once(
    fab: Fab, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[Exception | None] = [Unreachable("the bucket does not answer")] * 2 + [None]

    def reconcile(*_: Any) -> None:
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    monkeypatch.setattr("keeper.queue_commands.reconcile", reconcile)
    code, said = fab("queue", "work")
    assert (code, said.count("the bucket does not answer"), "the queue is empty" in said) == (0, 1, True)


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, -3600.0])
def test_a_run_of_another_user_is_lost_after_minutes_without_a_heartbeat_by_the_clock_of_the_documents(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """Its hosts have no record of it."""
    run_id = "jax_hello-20261123-000000-aaaa"
    directory = RunDirectory(str(tmp_path / "runs" / run_id))
    name = on_this_machine(hosts="2", platform="cpu").hosts[0].name
    started = "2026-11-23T00:00:00Z"
    directory.write_json(
        "run.json",
        {
            "version": RUN_VERSION, "run_id": run_id, "job": "jax_hello", "name": None, "args": [], "config": {},
            "attempts": [{"attempt": 0, "processes": 1, "started": started}], "created": started,
            "hosts": [{"index": 0, "name": name, "address": "127.0.0.1"}], "slice": {"name": "local"},
            "cache_dir": str(tmp_path), "platform": "cpu",
        },
    )  # fmt: skip
    monkeypatch.setattr(HostBackend, "status", lambda *_: Look(processes=(), errors=()))
    monkeypatch.setattr(Documents, "now_s", lambda _: time.time() + ahead_s)
    run = entry(1, run_id=run_id, runs_url=str(tmp_path / "runs"), slice="local", attempt=Attempt(number=0))
    world = World(store.documents, print, program="a test")

    def living(age_s: float) -> Presence:
        """By the clock of the hosts, which is the documents' too."""
        time_s = time.time() + ahead_s - age_s
        beat = {"state": "stepping", "rank": 0, "attempt": 0, "step": 5, "time": time_s}
        directory.write_json("heartbeats/host-0.json", beat)
        found = world.examine(run, store.read(), has_hosts=True)
        assert found is not None
        return found.living

    assert living(10.0) == "present"
    assert living(FOREIGN_LIMIT_S - 10.0) == "present"
    assert living(FOREIGN_LIMIT_S + 10.0) == "absent"


@pytest.fixture
def bucket_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A stack whose slice has no hosts, and whose documents are in a folder in place of its bucket."""
    one = dataclasses.replace(MAIN, hosts=())
    here = on_this_machine(hosts="1", platform="cpu").inventory
    storage = dataclasses.replace(here.storage, bucket_url="gs://b", bucket_region="us-central1")
    inventory = dataclasses.replace(here, stack="dev", project="grant", storage=storage, slices=(one,))
    (tmp_path / "dev.json").write_text(to_json(inventory))
    monkeypatch.setattr(
        "keeper.stack_store.Documents", lambda _: Documents(str(tmp_path / "runs" / ".control"))
    )
    monkeypatch.setattr("launch.remote_files.reach", lambda *_, **__: None)
    monkeypatch.setattr("launch.inventories.renewed", lambda read: read)
    yield str(tmp_path / "dev.json")


def test_the_queue_of_a_stack_without_hosts_takes_entries_and_gives_them_back(
    fab: Fab, store: Store, bucket_stack: str
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
    assert numbers(store) == [2, 1]
    assert fab("queue", *where)[0] == 0
    assert fab("queue", "cancel", "all", *where)[0] == 0
    assert numbers(store) == []


def test_what_is_cancelled_while_another_starts_it_is_stopped_by_that_one(
    fab: Fab, store: Store, tmp_path: Path
) -> None:
    starting = Attempt(number=0, starting_until_s=time.time() + 900.0)
    (one,) = store.add_runs([entry(1, runs_url=str(tmp_path / "runs"), slice="local", attempt=starting)])
    code, said = fab("queue", "cancel", "1")
    assert (code, queue_state(number_of(store, 1))) == (1, "stopping")
    assert "entry 1 is not stopped yet: the keeper or the `fab queue work` that started it does so" in said
    store.edit_run(one.run_id, lambda now: now and dataclasses.replace(now, attempt=Attempt(number=0)))
    assert fab("queue", "cancel", "1")[0] == 0
    assert queue_state(number_of(store, 1)) == "cancelled"


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

    def member(rate: str, seed: int, state: str = "done") -> sweep.MemberResult:
        said = {"metrics": {metric.name: values[rate][seed]}, "wall_s": 1.0, "run": f"r{rate}{seed}"}
        return sweep.MemberResult(options={"rate": rate, "seed": str(seed)}, state=state, overview=said)

    several = [member("1", 0), member("1", 1), member("2", 0), member("2", 1), member("2", 0, "failed")]
    rows = sweep.rows(several, metric)
    assert [(row.options["rate"], row.mean, row.best) for row in rows] == [
        ("2", 1.5, "r20"),
        ("1", 5.0, "r10"),
    ]
    assert rows[0].states == {"done": 2, "failed": 1}
    assert rows[0].deviation == pytest.approx(0.7071, abs=1e-4)
