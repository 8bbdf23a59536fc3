"""What state a run is in, which run a word means, and what a run is called: from its directory alone."""

import datetime
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.local.local_backend import on_this_machine
from contracts import run_directory
from contracts.errors import RequestError
from contracts.files import DiskFiles
from launch import runs
from launch.hosts import Agent, GoneLink
from tests.launch.slices import Beat, WriteRun, ssh_backend

STARTED_S = 1605908700.0
LONG_AFTER_S = STARTED_S + 3600


def folder(path: Path) -> runs.RunsFolder:
    return runs.RunsFolder(url=str(path), files=DiskFiles())


def process(state: str, ended_s: float | None = None) -> dict[str, Any]:
    return {"state": state, "ended": ended_s}


RUNNING, STARTING = process("running"), process("starting")
EXITED = process("exited", LONG_AFTER_S - 100)


@pytest.mark.parametrize(
    ("beats", "processes", "result", "state"),
    [
        # A result says how it ended, but only when nothing is left alive.
        (["done", "done"], [EXITED, EXITED], "done", "done"),
        (["done", "done"], [RUNNING, EXITED], "done", "running"),
        (["failed", "stepping"], [EXITED, EXITED], "failed", "failed"),
        (["preempted", "preempted"], [EXITED, EXITED], "preempted", "preempted"),
        (["stopped", "stopped"], [EXITED, EXITED], "stopped", "stopped"),
        (["stepping", "stepping"], [EXITED, EXITED], "hung", "hung"),
        (["stepping", "stepping"], [EXITED, EXITED], "something else", "failed"),
        (["done", "done"], [], "done", "done"),
        # One that failed is a failure of all, whatever the others still do.
        (["failed", "stepping"], [EXITED, RUNNING], None, "failed"),
        (["failed", None], [EXITED, STARTING], None, "failed"),
        # Alive: as far as the last of them has come.
        ([None, None], [STARTING, STARTING], None, "starting"),
        (["stepping", None], [RUNNING, STARTING], None, "starting"),
        (["joined", "stepping"], [RUNNING, RUNNING], None, "starting"),
        (["stepping", "stepping"], [RUNNING, RUNNING], None, "running"),
        (["saving", "stepping"], [RUNNING, RUNNING], None, "saving"),
        (["saving", "joined"], [RUNNING, RUNNING], None, "saving"),
        (["done", "stepping"], [EXITED, RUNNING], None, "running"),
        # Nothing alive and no result: the machine was restarted, or everything was killed at once.
        (["stepping", "stepping"], [EXITED, EXITED], None, "lost"),
        (["stepping", "stepping"], [], None, "lost"),
        ([None, None], [], None, "lost"),
        (["stopped", "stopped"], [EXITED, EXITED], None, "stopped"),
    ],
)
def test_the_state_of_a_run_follows_from_its_directory_and_its_processes(
    write_run: WriteRun,
    beat: Beat,
    beats: list[str | None],
    processes: list[dict[str, Any]],
    result: str | None,
    state: str,
) -> None:
    run = write_run(
        beats=[beat(text) if text else None for text in beats], result={"outcome": result} if result else None
    )
    assert runs.state(run, processes, now_s=LONG_AFTER_S) == state


def test_a_result_may_still_be_on_its_way_for_a_moment_after_the_processes_ended(
    write_run: WriteRun, beat: Beat
) -> None:
    run, limit_s = write_run(beats=[beat("stepping"), beat("stepping")]), run_directory.FINISHING_LIMIT_S
    found = [
        runs.state(run, [EXITED], now_s=EXITED["ended"] + after_s) for after_s in (0, limit_s - 0.1, limit_s)
    ]
    assert found == ["saving", "saving", "lost"]
    # As long as a supervisor is there, it is about to say what happened.
    assert runs.state(run, [{**EXITED, "supervised": True}, EXITED], now_s=LONG_AFTER_S) == "saving"
    fresh = write_run("flax_mlm-20261120-214500-bbbb", beats=[None, None])
    assert runs.state(fresh, [], now_s=STARTED_S + 1) == "starting"


def test_results_and_heartbeats_of_an_earlier_attempt_say_nothing_of_this_one(
    write_run: WriteRun, beat: Beat
) -> None:
    attempts = [
        {"attempt": number, "started": "2020-11-20T21:45:00Z", "processes": 2, "outcome": None}
        for number in (0, 1)
    ]
    run = write_run(attempts=attempts, beats=[beat("failed"), beat("failed")], result={"outcome": "failed"})
    assert (run.attempt, run.current(), run.current_result()) == (1, [None, None], None)
    assert runs.state(run, [STARTING, STARTING], now_s=LONG_AFTER_S) == "starting"


@given(st.integers(0, 2**32), st.integers())
def test_a_run_id_sorts_by_utc_time_and_is_known_as_one(moment_s: int, seed: int) -> None:
    rng = random.Random(seed)
    east = datetime.datetime.fromtimestamp(moment_s, datetime.timezone(datetime.timedelta(hours=9)))
    later = east + datetime.timedelta(seconds=1)
    ids = [runs.new_run_id("flax_mlm", when, rng) for when in (east, later)]
    assert ids == sorted(ids)
    assert all(runs.RUN_ID.match(run_id) for run_id in ids)
    assert f"{east.astimezone(datetime.UTC):%Y%m%d-%H%M%S}" in ids[0]


@pytest.fixture
def three(write_run: WriteRun, runs_dir: Path) -> Path:
    for number, (letters, name) in enumerate((("aaaa", "first"), ("abab", None), ("cccc", "same"))):
        write_run(
            f"flax_mlm-2026112{number}-214500-{letters}", created=f"2026-11-2{number}T21:45:00Z", name=name
        )
    (runs_dir / "notes").mkdir()
    (runs_dir / "flax_mlm-20261123-214500-dddd").mkdir()  # a preflight made it and nothing was started
    (runs_dir / "flax_mlm-20261124-214500-eeee").write_text("a file")
    return runs_dir


def test_runs_are_listed_newest_first_without_what_is_no_run_or_one_of_a_later_version(three: Path) -> None:
    newest, *_ = listed = runs.list_runs(folder(three))
    assert [run.run_id[-4:] for run in listed] == ["cccc", "abab", "aaaa"]
    assert runs.age(newest, runs.parse_time("2026-11-24T22:45:00Z")) == "2 d"
    later = newest.run_id.replace("cccc", "wxyz")
    newest.directory.write_json(f"../{later}/run.json", {**newest.described, "run_id": later, "version": 9})
    assert len(runs.list_runs(folder(three))) == 3
    with pytest.raises(
        RequestError, match=f"{later}/run.json: has version 9, and this tpu-stack reads version 1"
    ):
        runs.find(folder(three), later)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("latest", "cccc"),
        ("flax_mlm-20261120-214500-aaaa", "aaaa"),
        ("first", "aaaa"),
        ("abab", "abab"),
        ("flax_mlm-20261122", "cccc"),
        ("zzzz", '"zzzz" is not a run in .*; the newest are flax_mlm-20261122-214500-cccc, '),
        ("flax_mlm", '"flax_mlm" fits 3 runs: flax_mlm-20261122-214500-cccc, '),
        ("", '"" is not a run in '),
    ],
)
def test_a_run_is_found_by_its_id_a_part_of_it_its_name_or_as_the_latest(
    three: Path, wanted: str, found: str
) -> None:
    if len(found) == 4:
        assert runs.find(folder(three), wanted).run_id.endswith(found)
        return
    with pytest.raises(RequestError, match=found):
        runs.find(folder(three), wanted)
    with pytest.raises(
        RequestError, match="there is no run in .*; start one with `fab train --job flax_mlm`"
    ):
        runs.find(folder(three / "notes"), "latest")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("latest", "--name latest: means the run that was started last"),
        ("a/b", "letters, digits"),
        ("../x", "letters, digits"),
        (" x", "letters, digits"),
        ("-x", "letters, digits"),
        ("x" * 101, "letters, digits"),
        ("flax_mlm-20261120-214500-abcd", "looks like the id of a run"),
        ("taken", "flax_mlm-20261121-214500-bbbb has this name already; .*`fab train --resume taken`"),
    ],
)
def test_a_name_that_would_not_mean_one_run_is_refused(
    write_run: WriteRun, runs_dir: Path, name: str, said: str
) -> None:
    write_run("flax_mlm-20261121-214500-bbbb", name="taken")
    with pytest.raises(RequestError, match=said):
        runs.check_name(folder(runs_dir), name)
    runs.check_name(folder(runs_dir), "taken", own="flax_mlm-20261121-214500-bbbb")
    for free in ("first try", "v1.2_small-3", "x", "größer", None):
        runs.check_name(folder(runs_dir), free)


@pytest.mark.parametrize("unanswered", [0, 1])
@pytest.mark.parametrize(
    ("age_s", "beats", "state"),
    [
        (5, ["stepping", "stepping"], "running"),
        (5, ["saving", "stepping"], "saving"),
        (run_directory.SILENCE_LIMIT_S + 1, ["stepping", "stepping"], "lost"),
        (5, ["done", "done"], "lost"),
        (5, [None, None], "lost"),
    ],
)
def test_what_no_agent_knows_of_is_believed_to_run_as_long_as_its_heartbeat_is_fresh(
    write_run: WriteRun, beat: Beat, age_s: float, beats: list[str | None], state: str, unanswered: int
) -> None:
    """A host cannot be asked; or another user has started the run, such as the keeper, whose agent has the record."""
    run = write_run(beats=[word and beat(word, time=LONG_AFTER_S - age_s) for word in beats])
    assert runs.state(run, [], unanswered=unanswered, now_s=LONG_AFTER_S) == state
    # A process that is known to have ended has ended, whatever it said last.
    assert runs.state(run, [EXITED], now_s=LONG_AFTER_S) == "lost"
    # On a host that is no more nothing runs, and on this machine nothing that its one user has no record of.
    gone = Agent(host="w", link=GoneLink("", ""), root="/")
    for backend in (ssh_backend([gone, gone]), on_this_machine(hosts=None, platform="cpu").backend):
        known = backend.status([run])
        assert runs.state(run, known.processes, knowing=known.knowing, now_s=LONG_AFTER_S) == "lost"


def test_an_option_may_name_the_latest_run_of_a_job_that_is_done_or_a_run_by_its_id(
    runs_dir: Path, write_run: WriteRun
) -> None:
    done = write_run("flax_mlm-20261120-214500-aaaa", result={"outcome": "done"})
    write_run("flax_mlm-20261121-214500-bbbb", result={"outcome": "failed"})
    here = folder(runs_dir)
    Path(done.directory.path("export")).mkdir()
    Path(done.directory.path("export/config.json")).touch()
    assert runs.find_export(here, "latest:flax_mlm") == done.directory.path("export")
    assert runs.find_export(here, done.run_id) == done.directory.path("export")
    assert runs.find_export(here, "gs://bucket/model") is None
    with pytest.raises(RequestError, match="no export"):
        runs.find_export(here, "flax_mlm-20261121-214500-bbbb")
    with pytest.raises(RequestError, match="no run of jax_hello"):
        runs.find_export(here, "latest:jax_hello")
    for word, meant in (("flax-mlm", "; did you mean flax_mlm"), ("", "one of flax_mlm, ")):
        with pytest.raises(RequestError, match=f'latest:{word}: "{word}" is not a job; choose .*{meant}'):
            runs.find_export(here, f"latest:{word}")
