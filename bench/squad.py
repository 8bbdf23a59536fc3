"""tf_squad beside the same loop in PyTorch: the same windows, sizes and schedule, on this machine's CPU, by turns.

    python -m bench.squad                            every setting of both, on the default data
    python -m bench.squad --steps 40 --rounds 2 --model small

PyTorch trains RobertaForQuestionAnswering of `transformers`, with the configuration and the tokenizer of tf_squad's
own export: attention by scaled_dot_product_attention, fused AdamW, clipped gradients, as it is and by torch.compile.
Rates leave the first steps out, which compile. PyTorch's losses begin higher: it takes all tokens for possible places,
padding too, tf_squad those of the text.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from pathlib import Path

from bench import rounds
from contracts.run_directory import EXPORT
from jobs.tf_squad.config import Config, learning_rate

LOG_EVERY = 5
"""Steps, which tf_squad takes in one call; so many are left out too."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="small", choices=["tiny", "small", "base"])
    dtypes = ("float32", "bfloat16")
    rounds.main(
        parser,
        module="bench.squad",
        framework="pytorch",
        ours={f"tf_squad, {dtype}": functools.partial(_ours, dtype=dtype) for dtype in dtypes},
        theirs={
            f"PyTorch, {dtype}{', compiled' if is_compiled else ''}": functools.partial(
                _pytorch, dtype=dtype, is_compiled=is_compiled
            )
            for dtype in dtypes
            for is_compiled in (False, True)
        },
        columns={
            "rate": ("windows/s", ".1f"),
            "peak_mib": ("peak memory, MiB", ".0f"),
            "loss": ("mean loss of the second half", ".4f"),
        },
    )


def _ours(arguments: argparse.Namespace, folder: Path, *, dtype: str) -> rounds.Measured:
    options = {
        "model": arguments.model,
        "steps": arguments.steps,
        "dtype": dtype,
        "log_every": LOG_EVERY,
        "eval_every": arguments.steps,
        "checkpoint_every": arguments.steps,
    }
    lines, measured = rounds.run_job("tf_squad", "tensorflow", options, folder)
    lines = [line for line in lines if "windows_per_s" in line]
    return {
        "rate": rounds.rate(lines, "windows_per_s"),
        "loss": statistics.fmean(line["loss"] for line in lines[len(lines) // 2 :]),
        **measured,
    }


def _pytorch(
    arguments: argparse.Namespace, folder: Path, *, dtype: str, is_compiled: bool
) -> rounds.Measured:
    import numpy as np
    import torch
    import transformers

    from jobs.glue.tokenizer import open_tokenizer
    from jobs.tf_squad import data, windows

    export = next(folder.glob(f"{rounds.RUN}*/{EXPORT}"))
    config, dataset, tokenizer = Config(), data.read(Config()), open_tokenizer(export)
    train, held_out = (windows.encode(part, tokenizer, config) for part in (dataset.train, dataset.eval))
    length = windows.shared_length(train, held_out)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(config.seed)
    settings = transformers.AutoConfig.from_pretrained(export)
    model = transformers.RobertaForQuestionAnswering._from_config(settings, attn_implementation="sdpa")
    model.train()
    step_model = torch.compile(model) if is_compiled else model
    decayed, undecayed = (
        [part for part in model.parameters() if (part.ndim > 1) is is_matrix] for is_matrix in (True, False)
    )
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate(config, settings.hidden_size), fused=True)
    warmup = config.warmup_share * arguments.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda done: min((done + 1) / warmup, (arguments.steps - done) / (arguments.steps - warmup)),
    )
    order, ends_s, losses = np.random.default_rng(config.seed).permutation(len(train)), [], []
    for step in range(arguments.steps):
        rows_B = order.take(np.arange(config.batch_size) + step * config.batch_size, mode="wrap")
        batch = windows.Batch(*(torch.from_numpy(part).long() for part in train.take(rows_B, length)))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = step_model(
                input_ids=batch.ids_BS,
                attention_mask=(batch.ids_BS != settings.pad_token_id).long(),
                start_positions=batch.starts_B,
                end_positions=batch.ends_B,
            ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ends_s.append(time.perf_counter())
    seconds = ends_s[-1] - ends_s[LOG_EVERY - 1]
    return {
        "rate": (arguments.steps - LOG_EVERY) * config.batch_size / seconds,
        "loss": statistics.fmean(losses[len(losses) // 2 :]),
    }


if __name__ == "__main__":
    main()
