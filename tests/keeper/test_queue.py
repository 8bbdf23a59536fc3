"""The queue: what is submitted is what runs, nothing is started twice, a worker that is lost leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import RequestError
from fabfile.command_line import fab as run_fab
from infra.documents import ABSENT, Documents
from keeper import sweep
from keeper.queue import MOST_ENDED, Entry, Queue
from keeper.queue_commands import opened
from keeper.queue_worker import MOST_STARTS, Worker
from launch import jobs, targets
from launch import launch as launching
from launch.hosts import HostsError
from launch.jobs import Bundle, tar

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
    return Queue(Documents(str(tmp_path / "runs" / ".keeper")))


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
    def hold(_name: str) -> Iterator[bool]:
        yield True

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
    target = targets.on_this_machine(hosts="2", platform="cpu")
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
        ("sweep --job jax_hello --seeds 2", "jax_hello does not take --seed 0"),
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


def test_an_entry_whose_hosts_are_never_ready_lets_others_go_first_and_fails_in_the_end(
    fab: Fab, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert fab("submit", "--job", "jax_hello")[0] == 0
    tried: list[str] = []

    def launch(request: launching.Request, *_: Any) -> None:
        tried.append(str(request.run_id))
        raise HostsError("preflight failed, nothing was started:", [])

    monkeypatch.setattr(launching, "launch", launch)
    told: list[str] = []
    working = worker(queue, told)
    for _ in range(2 * MOST_STARTS):
        working.step()
    assert [each.state for each in queue.entries()] == ["failed", "failed"]
    assert len(tried) == 2 * MOST_STARTS and len({*tried}) == 2
    assert tried[0] != tried[1]
    assert queue.entries()[0].reason.startswith(f"given up after {MOST_STARTS} tries: preflight failed")


def test_the_grid_of_a_sweep_is_every_combination_and_its_rows_are_means_over_seeds() -> None:
    found = sweep.members(["--learning_rate=1,2", "x=a"], 2)
    assert found == [
        {"learning-rate": rate, "x": "a", "seed": seed} for rate in ("1", "2") for seed in ("0", "1")
    ]
    with pytest.raises(RequestError, match="makes 2000 runs"):
        sweep.members([f"a={','.join(map(str, range(1000)))}"], 2)
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
