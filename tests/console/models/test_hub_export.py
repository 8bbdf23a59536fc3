"""`fab export`: what the card says, where the copy goes, and that half of one is not taken for a whole."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from console.models import hub_export as exporting
from contracts.errors import RequestError
from contracts.run_directory import RunDirectory
from jobs.runtime.storage.bucket_files import BucketFiles
from launch.remote_files import Buckets
from launch.runs import Run
from launch.targets import Target
from tests.launch.slices import WriteRun, here

RESULT = {
    "outcome": "done", "steps": 100, "wall_s": 3600.0, "eval_loss": 2.5, "eval_accuracy": 0.5, "unigram_entropy": 6.25,
    "tokens_per_s": 9000.0, "pseudo_perplexity": 12.0,
}  # fmt: skip
CONFIG = {"data": "texts/a|b.txt", "init_from": None, "steps": 100, "learning_rate": None}
PLACE = {"zone": "us-central1-a", "capacity": "spot", "count": 2}
SLICE = {"name": "main", "accelerator_type": "v5litepod-16", **PLACE}


def exported(run: Run, **files: str) -> Run:
    run.directory.write_json("settings.json", {"learning_rate": 0.001})
    for name, text in {"config.json": "{}", "saved/weights": "w" * 1000, **files}.items():
        run.directory.write_text(f"export/{name}", text)
    return run


def export(wanted: str, to: object, *, force: bool = False, target: Target | None = None) -> int:
    return exporting.export(target or here(), wanted, str(to), force=force)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def parts(card: str) -> tuple[dict[str, Any], str]:
    """The front matter of a card, and its text."""
    empty, front, text = card.split("---\n", 2)
    assert empty == ""
    return yaml.safe_load(front), text


def test_the_card_says_what_the_run_directory_says_and_keeps_what_the_job_says_of_loading(
    write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = {"attempt": 0, "started": "2020-11-20T20:45:00Z", "processes": 4, "wall_s": 1800.0}
    code = {"git_commit": "c0ffee", "git_dirty": True}
    run = write_run(
        name="small", config=CONFIG, platform="tpu", stack="jax", slice=SLICE, code=code, versions={"jax": "0.12"},
        attempts=[first, {**first, "attempt": 1}], result={**RESULT, "attempt": 1},
    )  # fmt: skip
    exported(run, **{"README.md": "# A masked language model\n\nLoad it so.\n"})
    assert export("small", tmp_path / "new" / "model") == 0
    assert capsys.readouterr().out.endswith(f"hf upload ACCOUNT/NAME {tmp_path}/new/model\n")
    assert names(tmp_path / "new") == ["model"], "nothing beside it is left"
    assert names(tmp_path / "new" / "model") == ["README.md", "config.json", "saved"]
    front, text = parts((tmp_path / "new" / "model" / "README.md").read_text())
    index = front.pop("model-index")
    assert front == {
        "license": None,
        "datasets": None,
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": ["tpu-stack", "flax_mlm", "jax"],
    }
    (result,) = index[0]["results"]
    assert (index[0]["name"], result["task"]) == ("small", {"type": "fill-mask"})
    assert [(each["type"], each["value"]) for each in result["metrics"]] == [
        *(("eval_loss", 2.5), ("unigram_entropy", 6.25), ("eval_accuracy", 0.5), ("tokens_per_s", 9000.0)),
    ]
    lines = text.splitlines()
    for said in (
        "# small",
        "| data | `texts/a\\|b.txt` |",
        "| eval loss | 2.500 nats, 3.750 below the unigram baseline of 6.250 |",
        "| learning_rate | `0.001` |",
        "| hardware | 2 x v5litepod-16 |",
        "| hosts | 2, with 4 processes |",
        "| wall time | 1 h 30 min, 2 attempts |",
        "| git commit | c0ffee, with uncommitted changes |",
        "## A masked language model",
        "Load it so.",
    ):
        assert said in lines, said
    hourly = 2 * 3.9187  # v5litepod-16, spot: the README's preview
    (cost,) = [line for line in lines if line.startswith("| cost |")]
    listed = f"{1.5 * hourly:,.2f} USD at list prices, less what a grant covers"
    assert cost == f"| cost | {listed}, for the wall time (spot, us-central1-a) |"


def test_a_folder_that_is_not_empty_is_replaced_only_by_force_and_only_where_it_is_an_export(
    write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, there = exported(write_run(result=RESULT)), tmp_path / "model"
    there.mkdir()
    assert export(run.run_id, there) == 0, "an empty one is in nobody's way"
    (file := tmp_path / "file").touch()
    for place in (file, file / "below"):
        with pytest.raises(
            RequestError, match=f"--to {place}: no folder can be made there .*; name another place"
        ):
            export(run.run_id, place)
    with pytest.raises(RequestError, match="is not empty; name another place, or replace"):
        export(run.run_id, there)
    (there / "model.keras").write_text("of an earlier job")
    monkeypatch.setattr(exporting, "card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(run.run_id, there, force=True)
    assert names(tmp_path / "model") == ["README.md", "config.json", "model.keras", "saved"]
    assert not list(tmp_path.glob(".model*")), "what a failure leaves is removed"
    monkeypatch.undo()
    monkeypatch.setenv("TPU_STACK_RUNS", str(Path(run.directory.url).parent))
    assert export(run.run_id, there, force=True) == 0
    assert names(there) == ["README.md", "config.json", "saved"]
    (there / "README.md").write_text("# My thesis")
    (there / "thesis.tex").write_text("")
    with pytest.raises(RequestError, match="--force replaces an earlier export, and this is none"):
        export(run.run_id, there, force=True)


def test_a_copy_from_bucket_to_bucket_has_its_card_last_and_an_old_card_goes_first(
    write_run: WriteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contracts.files.STORES", ("memory",))
    run, root = exported(write_run(result=RESULT)), f"memory://export-{time.monotonic_ns()}"
    BucketFiles().put_folder(run.directory.url, f"{root}/runs/{run.run_id}")
    target = dataclasses.replace(here(), runs_url=f"{root}/runs", files=Buckets())
    copy = RunDirectory(f"{root}/models/small", BucketFiles())
    assert export(run.run_id, copy.url, target=target) == 0
    assert copy.list("") == ["README.md", "config.json", "saved"]
    assert parts(copy.read_text("README.md") or "")[0]["pipeline_tag"] == "fill-mask"
    assert copy.read_text("saved/weights") == "w" * 1000
    copy.write_text("old.bin", "of the export before")
    for name in ("put_folder", "write"):
        with monkeypatch.context() as broken:
            broken.setattr(BucketFiles, name, lambda *_: 1 / 0)
            with pytest.raises(Exception, match="division by zero"):
                export(run.run_id, copy.url, target=target, force=True)
        assert copy.read_text("README.md") is None, name
    assert export(run.run_id, copy.url, target=target, force=True) == 0
    assert copy.list("") == ["README.md", "config.json", "saved"]


def test_what_is_not_done_or_has_no_export_is_refused(write_run: WriteRun, tmp_path: Path) -> None:
    run = exported(write_run(result={**RESULT, "outcome": "stopped"}))
    with pytest.raises(RequestError, match="is not done, and its export may be half written"):
        export(run.run_id, tmp_path / "x")
    hello = write_run(
        "jax_hello-20261120-214500-abcd", job="jax_hello", result={"outcome": "done", "loss": 1}
    )
    with pytest.raises(RequestError, match="is done and has no export: jax_hello writes none"):
        export(hello.run_id, tmp_path / "x")
    assert not (tmp_path / "x").exists()
