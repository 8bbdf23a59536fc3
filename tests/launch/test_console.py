"""What the commands print of runs that have been, with this machine's own agent asked and nothing started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import RequestError
from launch import targets
from launch.commands import console
from launch.runs import Run
from launch.target import Target

WriteRun = Callable[..., Run]
Beat = Callable[..., dict[str, Any]]
RUN_ID = "flax_mlm-20261120-214500-abcd"


def here() -> Target:
    return targets.on_this_machine(hosts=None, platform="cpu")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch, runs_dir: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_status_shows_what_hosts_say_letter_by_letter(
    write_run: WriteRun, beat: Beat, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(
        beats=[beat("failed", step=7, message="no file [/tmp/a] :x:"), None],
        metrics=[{"step": 5, "loss": 2.0}],
    )
    assert console.status(here(), None) == 0
    said = capsys.readouterr().out
    assert f"{RUN_ID}  failed  step 7/100  loss 2.000 nats  attempt 0" in said
    assert "no file [/tmp/a] :x:" in said
    assert f"resume with `fab train --resume {RUN_ID}`" in said


def test_runs_are_listed_with_their_names_as_they_were_given(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(name="[bold] try", result={"outcome": "done"}, metrics=[{"step": 5, "loss": None}])
    assert console.list_runs(here(), limit=20) == 0
    assert "[bold] try" in capsys.readouterr().out


def test_a_list_that_is_cut_says_how_many_more_there_are(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for letters in ("aaaa", "bbbb", "cccc"):
        write_run(f"flax_mlm-20261120-214500-{letters}", result={"outcome": "done"})
    console.list_runs(here(), limit=1)
    assert capsys.readouterr().out.endswith("2 older ones: `fab runs --all`\n")


def test_stopping_a_run_that_does_not_run_says_what_it_is_and_is_no_mistake(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(result={"outcome": "done"})
    assert console.stop(here(), "latest", grace_s=1) == 0
    assert capsys.readouterr().out == f"{RUN_ID} is not running: it is done\n"


def test_stopping_without_saying_which_needs_one_that_is_active(write_run: WriteRun) -> None:
    write_run(result={"outcome": "done"})
    with pytest.raises(RequestError, match="--run: no run is active; `fab runs` lists them all"):
        console.stop(here(), None, grace_s=1)


def test_a_host_that_the_run_does_not_have_is_refused_with_those_it_has(write_run: WriteRun) -> None:
    write_run()
    with pytest.raises(RequestError, match=f"--host 2: {RUN_ID} has the hosts 0 to 1"):
        console.logs(here(), "latest", host=2, keep_on=False, lines=40)


def test_logs_that_the_agent_does_not_know_are_an_error_that_names_the_host(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run()
    assert console.logs(here(), "latest", host=0, keep_on=False, lines=40) == 1
    assert capsys.readouterr().err.startswith("h/0: ")
