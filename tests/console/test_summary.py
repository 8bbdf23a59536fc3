"""How a run ended, in a person's words and as an exit code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from console.overview import overview
from console.summary import exit_code, summary
from contracts.run_directory import State
from launch.launching import finalize
from tests.launch.slices import WriteRun

RUN_ID = "flax_mlm-20261120-214500-abcd"


RESUME = f"resume with `fab train --resume {RUN_ID}`"
FROM_START = f"{RESUME} (no checkpoint yet: from the start)"
KILLED = {"outcome": "failed", "error": "host 1 was killed\nlast line", "failed_host": 1}
KILLED_LINES = ("  host 1 was killed", "  last line", "  log: LOG")


@pytest.mark.parametrize(
    ("state", "result", "code", "said"),
    [
        ("done", {"outcome": "done"}, 0, None),
        ("failed", KILLED, 1, [f"{RUN_ID} failed", *KILLED_LINES, f"  {FROM_START}"]),
        ("failed", {"outcome": "failed", "request": True, "error": "too small"}, 2, [f"{RUN_ID}: too small"]),
        ("failed", None, 1, [f"{RUN_ID} failed", f"  {FROM_START}"]),
        ("failed", {"outcome": "failed", "exit_code": 69, "error": "the bucket was away"}, 69, None),
        ("stopped", {"outcome": "stopped"}, 130, [f"{RUN_ID} was stopped; {FROM_START}"]),
        ("preempted", {"outcome": "preempted"}, 130, [f"{RUN_ID} was preempted; {FROM_START}"]),
        ("hung", {"outcome": "hung"}, 1, [f"{RUN_ID} hung", f"  {FROM_START}"]),
        ("lost", None, 1, [
            f"{RUN_ID} was lost: its processes are gone and left no result (was the machine restarted?)",
            f"  {FROM_START}",
        ]),
    ],
)  # fmt: skip
def test_how_a_run_ended_is_an_exit_code_and_a_few_lines(
    write_run: WriteRun, state: State, result: dict[str, Any] | None, code: int, said: list[str] | None
) -> None:
    run = write_run(result=result)
    assert exit_code(run, state) == code
    if said is None:
        return
    log = f"{run.directory.url}/logs/0/host-1.log"
    assert summary(run, state) == [line.replace("LOG", log) for line in said]
    for name in ("9", "10", "11.orbax-checkpoint-tmp", "notes"):
        run.directory.write_text(f"checkpoints/{name}/state", "x")
    assert run.directory.checkpoint_steps() == [9, 10]
    if code != 2:  # a request that was wrong is not to be resumed
        assert summary(run, state)[-1].endswith(f"{RESUME} (from step 10)")


def test_a_run_that_is_done_says_what_it_learned_and_where_it_lies(write_run: WriteRun) -> None:
    measured = {"tokens_per_s": 51234.5, "eval_loss": 2.5, "eval_accuracy": 0.4321, "unigram_entropy": 5.75}
    run = write_run(
        result={"outcome": "done", "steps": 100, "wall_s": 75.4, "tensorboard": "out/runs", **measured}
    )
    for step in (50, 100):
        run.directory.write_text(f"checkpoints/{step}/state", "x")
    run.directory.write_text("export/config.json", "{}")
    place = run.directory.url
    assert summary(run, "done") == [
        f"{RUN_ID} is done",
        "  eval loss    2.500 nats, 3.250 below the unigram baseline of 5.750",
        "  accuracy     43.2% of the masked tokens",
        "  speed        51,234 tokens/s",
        "  wall time    1:15 for 100 steps",
        f"  checkpoint   {place}/checkpoints/100",
        f"  export       {place}/export",
        f"  curves       tensorboard --logdir {place}/out/runs",
        f"  report       {place}/report.html",
    ]


@pytest.mark.parametrize(
    ("earlier", "text"), [({"wall_s": 60.0}, "2:15 for 100 steps"), ({}, "1:15 in the last attempt")]
)
def test_the_wall_time_of_a_resumed_run_is_that_of_all_its_attempts(
    write_run: WriteRun, earlier: dict[str, float], text: str
) -> None:
    run = write_run()
    (attempt,) = run.described["attempts"]
    attempts = [{**attempt, **earlier}, {**attempt, "attempt": 1}]
    run = write_run(attempts=attempts, result={"outcome": "done", "attempt": 1, "steps": 100, "wall_s": 75.0})
    assert f"  wall time    {text}" in summary(run, "done")
    assert overview(run, "done")["wall_s"] == (135.0 if earlier else None)


@pytest.mark.parametrize(
    ("result", "rows"),
    [
        ({"eval_loss": None, "unigram_entropy": 5.0}, []),
        ({"warnings": ["a", "b"]}, ["warnings     2; the report has them"]),
        # Of the time, the categories that took more than a hundredth of it.
        (
            {"wall_s": 200.0, "time_s": {"start": 9.0, "compute": 180.0, "input_wait": 0.5, "finish": 10.5}},
            ["goodput      90% of 3 min 20 s; finishing 5%, starting 4%"],
        ),
        *(({"time_s": nothing}, []) for nothing in ({"start": 0.0}, {}, None, [1], {"start": "long"})),
    ],
)
def test_the_rows_of_a_done_run_are_what_it_has_measured(
    write_run: WriteRun, result: dict[str, Any], rows: list[str]
) -> None:
    run = write_run(result={"outcome": "done", "steps": 3, "wall_s": 1.0, **result})
    lines = summary(run, "done")[1:]
    assert [line.strip() for line in lines if not line.startswith(("  wall time", "  report"))] == rows


@pytest.mark.parametrize(
    ("module", "files", "text"),
    [
        ("torch", (), "torch is a package of pytorch; start a new run with `--framework pytorch`"),
        ("mingpt", ("mingpt/model.py",),
         "mingpt is in FOLDER, where Python does not look; start a new run with `--env PYTHONPATH=.`"),
        ("nets", ("src/nets.py",),
         "nets is in FOLDER/src, where Python does not look; start a new run with `--env PYTHONPATH=src`"),
        ("einops", ("einops/notes.txt",), None),
        ("flax", (), None),
    ],
)  # fmt: skip
def test_of_a_module_that_a_command_could_not_import_the_remedy_is_named(
    write_run: WriteRun, tmp_path: Path, module: str, files: tuple[str, ...], text: str | None
) -> None:
    folder = tmp_path / "project"
    for name in ("train.py", *files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    error = f"host 0: the command ended with exit code 1\nModuleNotFoundError: No module named '{module}'"
    run = write_run(result={"outcome": "failed", "error": error}, job="command", args=["python", "train.py"],
                    stack="jax", config={"workdir": str(folder)})  # fmt: skip
    lines = [line for line in summary(run, "failed") if "start a new run with" in line]
    assert lines == ([] if text is None else [f"  {text.replace('FOLDER', str(folder))}"])


def test_the_launcher_writes_a_result_only_where_no_job_and_no_agent_did(
    write_run: WriteRun, beat: Callable[..., Any]
) -> None:
    run = finalize(write_run(result={"outcome": "preempted", "steps": 7}), "failed", "the launcher's view")
    assert run.current_result() == {"attempt": 0, "outcome": "preempted", "steps": 7}
    other = write_run(f"{RUN_ID[:-4]}bbbb", beats=[beat("stepping", step=8), None])
    result = finalize(other, "failed", "w-1 did not join").current_result()
    assert result is not None
    assert (result["outcome"], result["steps"], result["error"]) == ("failed", 8, "w-1 did not join")
    assert other.directory.read_text("report.html")
