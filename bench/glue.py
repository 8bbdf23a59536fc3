"""Fine-tuning by our jobs beside transformers' Trainer: the same rows, model, seed and steps, on this machine's CPU.

    python -m bench.glue                       every setting of both, by turns
    python -m bench.glue --steps 300 --rounds 2 --model small

Each turn is a process of PyTorch's environment. Rates leave the first steps out, which compile; memory is the peak of
the process. The losses of both are compared at the end: the rows come in another order, so they agree to noise.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARM_STEPS = 50
OURS = {"torch_glue": "no", "torch_glue, compiled": "yes", "keras_glue": ""}
TRAINER: dict[str, dict[str, Any]] = {
    "Trainer": {},
    "Trainer, grouped by length": {"train_sampling_strategy": "group_by_length"},
    "Trainer, grouped, compiled": {"train_sampling_strategy": "group_by_length", "torch_compile": True},
}
"""By name: what TrainingArguments is given besides bf16, or torch_glue's --compile."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", default="small", choices=["tiny", "small", "base"])
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn is not None:
        print(json.dumps(_turn(options.turn, options.model, options.steps)))
        return
    from launch import environments

    environments.ensure("pytorch", print)
    python = str(environments.python_of("pytorch"))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in (*OURS, *TRAINER)}
    for _ in range(options.rounds):
        for name, turns in found.items():
            interpreter = sys.executable if name == "keras_glue" else python
            turns.append(_ask(interpreter, name, options.model, options.steps))
            print(f"{name}: {turns[-1]['rows_per_s']:.1f} rows/s", file=sys.stderr, flush=True)
    print(f"model {options.model}, {options.steps} steps, medians of {options.rounds} rounds\n")
    print("| program | rows/s | peak memory, MiB | mean loss of the last 50 steps |\n|---|---|---|---|")
    for name, turns in found.items():
        rate, memory, loss = (
            statistics.median(turn[key] for turn in turns) for key in ("rows_per_s", "peak_mib", "loss")
        )
        print(f"| {name} | {rate:.1f} | {memory:.0f} | {loss:.4f} |")
    ours, theirs = (
        max(statistics.median(turn["rows_per_s"] for turn in found[name]) for name in names)
        for names in (tuple(OURS), tuple(TRAINER))
    )
    print(f"\nbest of ours to best of theirs: {ours / theirs:.2f}")


def _ask(python: str, name: str, model: str, steps: int) -> dict[str, Any]:
    words = [python, "-P", "-m", "bench.glue", "--turn", name, "--model", model, "--steps", str(steps)]
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # as `fab train` sets it, here for both
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(words, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _turn(name: str, model: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        if name in OURS:
            found = _ours(Path(folder), model, steps, OURS[name])
        else:
            found = _trainer(Path(folder), model, steps, TRAINER[name])
    return {**found, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def _config(model: Any, steps: int, job: str = "torch_glue", **more: Any) -> Any:
    return importlib.import_module(f"jobs.{job}.config").Config(
        model=model, steps=steps, dtype="bfloat16", dropout=0.1, **more
    )


def _ours(folder: Path, model: str, steps: int, compiled: Any) -> dict[str, Any]:
    from contracts.process import ProcessEnvironment
    from contracts.run_directory import RunDirectory
    from jobs.runtime.heartbeat import Heartbeat
    from jobs.runtime.process import Run

    job, framework, runtime = ("torch_glue", "pytorch", "torch") if compiled else ("keras_glue", "jax", "jax")
    distributed = importlib.import_module(f"jobs.runtime.{runtime}.distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    environment = ProcessEnvironment(
        run_id="bench",
        run_dir=str(folder),
        job=job,
        framework=framework,
        attempt=0,
        num_processes=1,
        process_id=0,
        coordinator=coordinator,
        platform="cpu",
        cache_dir=str(folder / "cache"),
        local_devices=None,
        peak_flops_per_s=None,
        control_dir=None,
    )
    distributed.start(environment)
    directory = RunDirectory(environment.run_dir)
    run = Run(environment=environment, directory=directory, heartbeat=Heartbeat(directory, environment))
    os.environ["KERAS_BACKEND"] = "jax"
    train = importlib.import_module(f"jobs.{job}.train").train
    more = {"compile": compiled} if compiled else {}
    train(run, _config(model, steps, job, log_every=1, checkpoint_every=steps, **more))
    lines = [line for line in directory.read_metrics() if "loss" in line]
    warm = [line["rows_per_s"] for line in lines[WARM_STEPS:]]
    return {"rows_per_s": statistics.harmonic_mean(warm), "loss": _last([line["loss"] for line in lines])}


def _trainer(folder: Path, model: str, steps: int, more: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers

    from jobs.glue import data
    from jobs.glue.batches import Encoded
    from jobs.glue.options import learning_rate
    from jobs.torch_glue.model import build, prepare

    config = _config(model, steps)
    dataset = data.read(config)
    beginning = prepare(config, dataset, folder, print)
    encoded = Encoded(
        dataset.train,
        beginning.tokenizer.backend_tokenizer,
        pad_id=beginning.tokenizer.pad_token_id,
        max_length=config.max_length,
        is_regression=False,
    )
    rows = [
        {"input_ids": list(ids), "labels": int(label)}
        for ids, label in zip(encoded._ids, encoded.labels_N, strict=True)
    ]
    ends: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    trainer = transformers.Trainer(
        model=build(beginning, config.seed),
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            bf16=True,
            max_steps=steps,
            per_device_train_batch_size=config.batch_size,
            learning_rate=learning_rate(config, beginning.settings.hidden_size),
            warmup_steps=round(config.warmup_share * steps),
            weight_decay=config.weight_decay,
            adam_beta2=0.98,
            adam_epsilon=1e-6,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=config.seed,
            **more,
        ),
        train_dataset=rows,
        data_collator=transformers.DataCollatorWithPadding(beginning.tokenizer, pad_to_multiple_of=8),
        callbacks=[Clock()],
    )
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):  # it prints every step
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    seconds = ends[-1] - ends[WARM_STEPS - 1]
    return {"rows_per_s": (steps - WARM_STEPS) * config.batch_size / seconds, "loss": _last(losses)}


def _last(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-50:])


if __name__ == "__main__":
    main()
