"""`fab predict`: the export is found where the run has it, and what cannot be asked is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from backends.local import environments
from console.models import answers as predicting
from contracts.errors import RequestError
from launch import jobs
from launch.hosts import HostError
from launch.jobs import Job
from launch.runs import Run
from launch.targets import Target
from tests.launch.slices import WriteRun, here, ssh_backend

BEST = [
    {"text": "cat", "probability": 0.875},
    {"text": ",", "probability": 0.1},
    {"text": "4.25", "probability": None},
]
TABLE = ["87.5 %  cat", "10.0 %  “,”", "        4.25"]
FILES = jobs.find("flax_mlm").predicts_from


def exported(run: Run) -> Run:
    for name in (*FILES, "params.msgpack"):
        run.directory.write_text(f"export/{name}", name)
    return run


def predict(
    target: Target, wanted: str, *inputs: str, second: str | None = None, as_json: bool = False
) -> int:
    return predicting.predict(target, wanted, inputs, second=second, as_json=as_json)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The exports that were asked and what they were asked, by whom each input is answered with BEST."""
    found: list[tuple[str, dict[str, Any]]] = []

    def ask(_job: Job, export: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        found.append((export, request))
        return [{"input": text, "heading": f"[{text}]\x1b", "best": BEST} for text in request["inputs"]]

    monkeypatch.setattr(predicting, "ask", ask)
    monkeypatch.setenv("COLUMNS", "200")
    return found


def test_each_answer_has_a_table_below_its_heading_and_a_program_gets_the_answers_as_they_are(
    write_run: WriteRun, asked: list[tuple[str, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = exported(write_run())
    assert predict(here(), run.run_id, "a", "b") == 0
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert said == ["[a]␛", *TABLE, "[b]␛", *TABLE]
    assert asked == [(run.directory.path("export"), {"inputs": ["a", "b"], "second": None})]
    assert predict(here(), run.run_id, "a", as_json=True) == 0
    told = capsys.readouterr().out
    assert json.loads(told) == {"answers": [{"input": "a", "heading": "[a]\x1b", "best": BEST}]}


def test_a_file_after_an_at_sign_has_an_input_on_each_line_or_the_second_text(
    write_run: WriteRun, asked: list[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    run = exported(write_run())
    (tmp_path / "lines").write_text("one\n\n two \n")
    (tmp_path / "latin").write_bytes(b"\xe9")
    (tmp_path / "none").write_text("\n")
    predict(here(), run.run_id, f"@{tmp_path}/lines", "@@me", second=f"@{tmp_path}/lines")
    assert asked[0][1] == {"inputs": ["one", " two ", "@me"], "second": "one\n\n two \n"}
    for name, why in (("gone", "No such file"), ("latin", "is not UTF-8"), ("none", "has no line with text")):
        with pytest.raises(RequestError, match=f"^@{tmp_path}/{name}: .*{why}"):
            predict(here(), run.run_id, f"@{tmp_path}/{name}")


def test_from_a_share_the_export_is_copied_once_and_again_when_the_run_has_gone_on(
    write_run: WriteRun, asked: list[tuple[str, dict[str, Any]]]
) -> None:
    run = exported(write_run(result={"outcome": "done", "attempt": 0, "time": 5.0}))
    elsewhere = dataclasses.replace(here(), name="dev", backend=ssh_backend())
    predict(elsewhere, run.run_id, "a")
    run.directory.write_text("export/config.json", "changed behind its back")
    predict(elsewhere, run.run_id, "a")
    exports = [Path(export) for export, _ in asked]
    assert exports[0] == exports[1] != Path(run.directory.path("export"))
    assert sorted(path.name for path in exports[0].iterdir()) == sorted(FILES)
    assert (exports[0] / "config.json").read_text() == "config.json"
    run.directory.write_json("result.json", {"outcome": "done", "attempt": 0, "time": 9.0})
    predict(elsewhere, run.run_id, "a")
    assert (Path(asked[2][0]) / "config.json").read_text() == "changed behind its back"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("abcd", "has no export yet: it is written when the last step has been taken"),
        ("zzzz", '"zzzz" is not a run in'),
        ("hello", "is a run of jax_hello, which cannot predict; name a run of flax_mlm"),
        ("own", "is a run of train.py, which cannot predict; name a run of flax_mlm"),
        ("latest:flax_mlm", "latest:flax_mlm: no run of flax_mlm in "),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_reason(
    write_run: WriteRun, asked: list[tuple[str, dict[str, Any]]], wanted: str, said: str
) -> None:
    write_run()
    write_run("jax_hello-20261120-214500-eeee", name="hello", job="jax_hello")
    write_run("command-20261120-214500-ffff", name="own", job="command", args=["python", "train.py"])
    with pytest.raises(RequestError) as error:
        predict(here(), wanted, "a")
    assert said in str(error.value)
    assert asked == []


def test_the_latest_run_is_the_latest_that_can_predict_and_of_a_job_the_latest_that_is_done(
    write_run: WriteRun, asked: list[tuple[str, dict[str, Any]]]
) -> None:
    first = exported(write_run(result={"outcome": "done", "time": 5.0}))
    second = exported(write_run("flax_mlm-20261120-214500-bcde"))
    write_run("jax_hello-20261121-214500-eeee", job="jax_hello")
    for wanted in ("latest", "latest:flax_mlm"):
        assert predict(here(), wanted, "a") == 0
    assert [export for export, _ in asked] == [run.directory.path("export") for run in (second, first)]


def test_a_module_that_refuses_is_quoted_and_one_that_breaks_is_told_with_its_last_line(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "CHECKOUT", tmp_path)
    own = dataclasses.replace(jobs.find("flax_mlm"), name="own")
    asked = {"inputs": ["a"], "second": None}
    module = tmp_path / "jobs/runtime/prediction.py"
    module.parent.mkdir(parents=True)
    (tmp_path / "jobs/__init__.py").touch()
    module.write_text("import sys; print('noise\\nerror: no such folder', file=sys.stderr); sys.exit(2)")
    with pytest.raises(RequestError, match="^no such folder$"):
        predicting.ask(own, "export", asked)
    module.write_text(
        "import json, os, sys; print('noise'); "
        "print(json.dumps({'answers': [sys.argv[1:], json.load(sys.stdin), os.environ['JAX_PLATFORMS']]}))"
    )
    answer: list[Any] = predicting.ask(own, "export", asked)
    assert answer == [["own", "export", str(tmp_path / "cache/tpu-stack")], asked, "cpu"]
    module.unlink()
    with pytest.raises(HostError, match=r"export cannot be used: .*No module named jobs.runtime.prediction"):
        predicting.ask(own, "export", asked)
