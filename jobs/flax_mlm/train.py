"""The training loop, read from top to bottom: the data, the state, then step after step."""

from __future__ import annotations

import functools
from collections import deque
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from contracts.errors import JobFailed, RequestError
from jobs.flax_mlm import closer_look, data, pretrained, sharding
from jobs.flax_mlm import step as steps
from jobs.flax_mlm.config import Config, problems, settings
from jobs.flax_mlm.evaluate import Evaluation, evaluate
from jobs.flax_mlm.export import export
from jobs.flax_mlm.feed import Feed
from jobs.flax_mlm.flops import step_flops
from jobs.flax_mlm.guess import make_sharded_guess
from jobs.flax_mlm.tokens import unigram_entropy
from jobs.flax_mlm.watch import MOST_KEPT, MOST_WRITTEN, Outlier, Watch, batch_file, save_batch
from jobs.runtime import distributed, preemption
from jobs.runtime.checkpoints import Checkpoints
from jobs.runtime.executables import Executables
from jobs.runtime.metrics import Metrics
from jobs.runtime.process import Final, Run
from jobs.runtime.profile import Profile, read_steps
from jobs.runtime.rates import Rates

IN_FLIGHT = 2
"""Steps whose results the host does not wait for, so that the devices always have the next one at hand."""


def train(run: Run, config: Config) -> Final:
    """Train to the end; returns the final metrics of result.json.

    Raises:
        RequestError: the options cannot work here, or the data is missing, too small or not the same on all hosts.
        Preempted: a host got SIGTERM; the state is saved.
        JobFailed: the numbers say that training on is of no use; the batch is saved.
    """
    config, begun_from = pretrained.adopt(config, Path(run.environment.cache_dir), run.prepare)
    wrong = problems(config, devices=jax.device_count())
    if wrong:
        raise RequestError("; ".join(wrong))
    if begun_from is not None:
        distributed.agree(f"--init-from {begun_from.source}", begun_from.fingerprint)
    length, batch_size = config.sequence_length, config.batch_size
    prepare = functools.partial(data.prepare, config, Path(run.environment.cache_dir), run.prepare)
    if config.remote_cache is None:
        tokens = prepare()
    else:
        tokens = distributed.first_then_others(prepare, what=f"--data {config.data}", say=run.prepare)
    distributed.agree(f"--data {config.data}", tokens.fingerprint)
    config = steps.decided(config)
    run.decide(settings(config, vocab_size=tokens.tokenizer.vocab_size))
    for text in tokens.warnings:
        run.warn(text)
    baseline = unigram_entropy(tokens.eval, tokens.tokenizer.special_ids)
    mesh = sharding.make_mesh(config.fsdp)
    feed = Feed(tokens, config, mesh)

    run.heartbeat.say("compiling the first step")
    optimizer = steps.make_optimizer(config)
    compiled = Executables(run.environment.cache_dir, mesh.devices.flat).of
    graph, state = steps.create(config, tokens.tokenizer, optimizer, mesh, compiled)
    train_rule = steps.mask_rule(tokens.tokenizer, config.mask_share, length)
    eval_rule = steps.mask_rule(tokens.tokenizer, steps.EVAL_MASK_SHARE, length)
    train_step = compiled(steps.make_train_step(graph, optimizer, train_rule, config, mesh, state))
    eval_step = compiled(steps.make_eval_step(graph, eval_rule, mesh, state, parts=config.accumulate))
    run.say(
        f"{sum(leaf.size for leaf in jax.tree.leaves(state['params'])):,} parameters on {jax.device_count()} devices "
        f"of {jax.process_count()} processes, in {config.dtype}; {feed.sequences('train'):,} sequences of {length} "
        f"tokens to learn from, {feed.sequences('eval'):,} held out; their unigram entropy is {baseline:.3f} nats"
    )

    checkpoints = Checkpoints(run.directory, keep_last=config.keep_checkpoints)
    restored = checkpoints.restore_latest(state)
    first, state = restored if restored is not None else (0, state)
    if first:
        run.say(f"resumed after step {first}")
    if begun_from is not None:
        begun_from.check_began(run.directory, step=first, writes=run.environment.is_first)
        if not first:
            state = steps.with_params(state, begun_from.params())
    metrics = Metrics(run.directory, first) if run.environment.is_first else None
    rows_B = feed.place(np.arange(batch_size, dtype=np.int32))
    rates = Rates(
        run.time,
        name="tokens_per_s",
        per_step=batch_size * length,
        flops_per_step=step_flops(
            steps.dimensions(config, tokens.tokenizer),
            batch_size=batch_size,
            length=length,
            slots=train_rule.slots,
        ),
        peak_flops_per_s=run.environment.peak_flops_per_s,
    )
    watch = Watch.from_notes(checkpoints.notes)
    in_flight: deque[tuple[int, dict[str, jax.Array]]] = deque()

    def busy() -> bool:
        """Whether the devices still have a step to compute."""
        return bool(in_flight) and not in_flight[-1][1]["loss"].is_ready()  # type: ignore[attr-defined]

    def in_trouble(step: int, outlier: Outlier) -> None:
        """Rank 0 keeps the batch of an outlier that is the first of several, and of the one too many, which ends the
        run unless that is not wanted."""
        said = f"step {step}: {outlier}"
        is_end = outlier.ends and config.on_trouble == "stop"
        if is_end or (outlier.row == 1 and watch.series <= MOST_KEPT):
            said += f"; its batch is in {run.directory.path(batch_file(step))}"
            if metrics is not None:
                save_batch(run.directory, step, str(outlier), tokens, feed.step_on_host(step))
        if outlier.row == 1 and not is_end:
            run.warn(said)
        if not is_end:
            return
        if metrics is not None:
            metrics.close()
        checkpoints.wait()
        multihost_utils.sync_global_devices("the batch is saved")  # or whoever ends first takes rank 0 along
        profile.close()
        raise JobFailed(f"{said}. To go on all the same: --on-trouble warn")

    def settle(in_flight_after: int) -> None:
        """Wait for the steps that were begun, all but the last `in_flight_after`, and log those that are due."""
        while len(in_flight) > in_flight_after:
            step, results = in_flight.popleft()
            values = {name: float(value) for name, value in results.items()}
            rates.step_done()
            run.heartbeat.step(step)
            before = watch.row
            outlier = watch.look(values)
            is_due = step % config.log_every == 0 or step == config.steps
            is_told = outlier is not None and (outlier.ends or watch.outliers <= MOST_WRITTEN)
            if metrics is not None and (is_due or is_told):
                with run.time.part("logging"):
                    counted = {"outliers": watch.outliers} if outlier else {}
                    metrics.write(step, {**values, **(rates.take() if is_due else {}), **counted})
            if outlier is not None:
                in_trouble(step, outlier)
            elif before:
                run.say(f"step {step}: the loss is {values['loss']:.4g}, as usual, after {before} outliers")

    @run.time.part("evaluation")
    def evaluated(step: int, limit: int) -> Evaluation:
        run.heartbeat.say("evaluating")
        result = evaluate(
            eval_step,
            state["params"],
            feed.held_out,
            feed.place,
            sequences=min(limit, feed.sequences("eval")),
            batch_size=batch_size,
            tick=run.heartbeat.tick,
        )
        if metrics is not None:
            metrics.write(step, {"eval_loss": result.loss, "eval_accuracy": result.accuracy})
        run.say(f"step {step}: eval loss {result.loss:.4f}, accuracy {result.accuracy:.3f}")
        return result

    wanted = read_steps(config.profile, steps=config.steps)
    profile = Profile(run, wanted, done=first, settle=lambda: settle(0))
    if begun_from is not None and not first:
        evaluated(0, feed.sequences("eval"))

    is_held_back = False
    for step in range(first + 1, config.steps + 1):
        with profile.step(step):
            with rates.input(busy):
                tokens_BS = feed.step(step)
            state, results = train_step(state, tokens_BS, rows_B)
            in_flight.append((step, results))
        if step == first + 1:
            settle(0)
            run.heartbeat.state("stepping")
            rates.start()
        settle(IN_FLIGHT)
        if step == config.steps:
            break

        leaving = preemption.notified(step)
        evaluating = step % config.eval_every == 0 and not leaving
        saving = step % config.checkpoint_every == 0 or leaving or (is_held_back and not watch.row)
        if evaluating or saving:
            settle(0)
            # Among outliers only who leaves saves: the newest checkpoint is to be from before a trouble that stays.
            is_held_back = bool(watch.row) and not leaving
            if not is_held_back:
                with run.time.part("checkpoint"):
                    run.heartbeat.state("saving")
                    checkpoints.save(step, state, notes=watch.notes())
                    run.heartbeat.tick()
            if leaving:
                with run.time.part("checkpoint"):
                    checkpoints.wait()
                if metrics is not None:
                    metrics.close()
                profile.close()
                raise preemption.Preempted(step)
            run.heartbeat.state("stepping")
            if evaluating:
                checkpoints.evaluated(step, evaluated(step, config.eval_sequences).loss)
                run.heartbeat.say(None)

    settle(0)
    run.time.enter("finish")
    run.heartbeat.state("saving")
    with run.time.part("checkpoint"):
        checkpoints.save(config.steps, state, notes=watch.notes())
    run.heartbeat.tick()
    final = evaluated(config.steps, feed.sequences("eval"))
    with run.time.part("checkpoint"):
        checkpoints.close()
    run.heartbeat.say("taking a closer look")
    closer = closer_look.sample(
        sequences=feed.sequences("eval"), length=length, trained_rows=config.steps * batch_size
    )
    seen = closer_look.look(
        compiled(
            jax.jit(make_sharded_guess(graph, mesh, state["params"]), out_shardings=sharding.whole(mesh))
        ),
        state["params"],
        tokens.rows("eval", closer, length),
        tokens.tokenizer,
        feed.place,
        batch_size=batch_size,
        tick=run.heartbeat.tick,
    )
    params = sharding.to_host(state["params"], mesh)
    if run.environment.is_first:
        export(run.directory, config, params, tokens)
    if metrics is not None:
        metrics.close()
    return {
        "steps": config.steps,
        "tokens_per_s": rates.overall(),
        "eval_loss": final.loss,
        "eval_accuracy": final.accuracy,
        "unigram_entropy": baseline,
        "outliers": watch.outliers,
        "skipped_updates": watch.skipped,
        **seen,
    }
