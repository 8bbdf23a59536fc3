"""`fab fill-mask`: the export is found where the run has it, and what cannot be asked is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import RequestError
from launch import targets
from launch.commands import fill_mask as filling
from launch.hosts import HostError
from launch.runs import Run
from launch.targets import Target

WriteRun = Callable[..., Run]
BEST = [{"token": "cat", "probability": 0.875}, {"token": "\\n", "probability": 0.1}]


def here() -> Target:
    return targets.on_this_machine(hosts=None, platform="cpu")


def exported(run: Run) -> Run:
    for name in filling.FILES:
        run.directory.write_text(f"export/{name}", name)
    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The exports that were asked, by whom each text of two masks is filled with BEST."""
    exports: list[str] = []

    def ask(_job: str, export: str, _text: str) -> list[list[dict[str, Any]]]:
        exports.append(export)
        return [BEST, BEST]

    monkeypatch.setattr(filling, "ask", ask)
    monkeypatch.setenv("COLUMNS", "200")
    return exports


def test_each_mask_has_a_table_of_its_own_headed_by_its_place(
    write_run: WriteRun, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = exported(write_run())
    assert filling.fill_mask(here(), run.run_id, "a <mask> and [a] <mask>.") == 0
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    table = ["87.5 %  cat", "10.0 %  \\n"]
    assert said == ["a [1] and [a] <mask>.", *table, "a <mask> and [a] [2].", *table]
    assert asked == [run.directory.path("export")]


def test_from_a_share_the_export_is_copied_once_and_again_when_the_run_has_gone_on(
    write_run: WriteRun, asked: list[str]
) -> None:
    run = exported(write_run(result={"outcome": "done", "attempt": 0, "time": 5.0}))
    elsewhere = dataclasses.replace(here(), name="dev")
    filling.fill_mask(elsewhere, run.run_id, "<mask>")
    run.directory.write_text("export/config.json", "changed behind its back")
    filling.fill_mask(elsewhere, run.run_id, "<mask>")
    assert asked[0] == asked[1] != run.directory.path("export")
    assert sorted(path.name for path in Path(asked[0]).iterdir()) == sorted(filling.FILES)
    assert (Path(asked[0]) / "config.json").read_text() == "config.json"
    run.directory.write_json("result.json", {"outcome": "done", "attempt": 0, "time": 9.0})
    filling.fill_mask(elsewhere, run.run_id, "<mask>")
    assert (Path(asked[2]) / "config.json").read_text() == "changed behind its back"


@pytest.mark.parametrize(
    ("text", "wanted", "said"),
    [
        ("no such word", "abcd", '"no such word" has no <mask>; write <mask> where'),
        ("<mask>", "abcd", "has no export yet: it is written when the last step has been taken"),
        ("<mask>", "zzzz", '"zzzz" is not a run in'),
        ("<mask>", "hello", "is a run of jax_hello, whose models fill no masks; name one of flax_mlm"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_reason(
    write_run: WriteRun, asked: list[str], text: str, wanted: str, said: str
) -> None:
    write_run()
    hello = write_run("jax_hello-20261120-214500-eeee", name="hello")
    hello.directory.write_json("run.json", {**hello.described, "job": "jax_hello"})
    with pytest.raises(RequestError) as error:
        filling.fill_mask(here(), wanted, text)
    assert said in str(error.value)
    assert asked == []


def test_the_latest_run_is_the_latest_that_fills_masks(write_run: WriteRun, asked: list[str]) -> None:
    run = exported(write_run())
    later = write_run("command-20261121-214500-eeee")
    later.directory.write_json("run.json", {**later.described, "job": "command"})
    assert filling.fill_mask(here(), "latest", "<mask>") == 0
    assert asked == [run.directory.path("export")]


def test_a_module_that_refuses_is_quoted_and_one_that_breaks_is_told_with_its_last_line(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "CHECKOUT", tmp_path)
    module = tmp_path / "jobs/own/predict.py"
    module.parent.mkdir(parents=True)
    (tmp_path / "jobs/__init__.py").touch()
    module.write_text("import sys; print('error: no such folder', file=sys.stderr); sys.exit(2)")
    with pytest.raises(RequestError, match="^no such folder$"):
        filling.ask("own", "export", "<mask>")
    module.write_text("import json, sys; print(json.dumps({'masks': [sys.argv[1:], sys.stdin.read()]}))")
    answer: list[Any] = filling.ask("own", "export", "<mask>")
    assert answer == [["export", str(tmp_path / "cache/tpu-stack")], "<mask>"]
    module.unlink()
    with pytest.raises(HostError, match=r"export cannot be used: .*No module named jobs.own.predict"):
        filling.ask("own", "export", "<mask>")
