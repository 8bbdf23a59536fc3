"""Runs from Python: the example's cells, one after the other, as a notebook runs them."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import tpu_stack
from tests.runs.lab import Lab

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook" / "run.ipynb"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_cells_of_the_notebook_train_wait_read_and_predict(lab: Lab) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    with mock.patch.dict(os.environ, lab.environ):
        for cell in cells:
            exec("".join(cell["source"]), names)  # noqa: S102
        run, metrics = names["run"], names["metrics"]
        assert run.state == "done"
        assert [line["step"] for line in metrics if "eval_loss" in line] == [20, 40, 60]
        assert metrics[-1]["eval_loss"] == run.result["eval_loss"]
        assert names["answers"][0]["best"]
        assert tpu_stack.run("notebook").run_id == tpu_stack.runs()[0].run_id == run.run_id
        assert run.record["config"]["steps"] == 60
        with pytest.raises(tpu_stack.RequestError, match="--stepz"):
            tpu_stack.train("flax_mlm", "--stepz", "1")
        with pytest.raises(TypeError, match="stepz"):
            tpu_stack.train("flax_mlm", stepz="1")
        with pytest.raises(tpu_stack.RequestError, match="the run is done"):
            tpu_stack.train(resume=run.run_id)
