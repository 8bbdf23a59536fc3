"""The training loop, read from top to bottom: the data, the state, then step after step."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import numpy as np

from contracts.errors import RequestError
from jobs.flax_mlm import data, hugging_face, predict, sharding
from jobs.flax_mlm import step as steps
from jobs.flax_mlm.config import Config, dimensions, problems, settings
from jobs.flax_mlm.data import Tokens, unigram_entropy
from jobs.flax_mlm.input_pipeline import InputPipeline
from jobs.flax_mlm.loss_guard import Watch
from jobs.runtime.jax import distributed
from jobs.runtime.jax.checkpoints import Checkpoints, Tree
from jobs.runtime.jax.executables import Executables
from jobs.runtime.jax.tracer import Tracer
from jobs.runtime.loop import Loop
from jobs.runtime.process import Final, Run

IN_FLIGHT = 2
"""Steps whose results the host does not wait for, so that the devices always have the next one at hand."""


def train(run: Run, config: Config) -> Final:
    """Train to the end; returns the final metrics of result.json.

    Raises:
        RequestError: the options cannot work here, or the data is missing, too small or not the same on all hosts.
        Preempted: a host got SIGTERM; the state is saved.
        JobFailed: the numbers say that training on is of no use; the batch is saved.
    """
    config, begun_from = hugging_face.adopt(config, Path(run.environment.cache_dir), run.prepare)
    wrong = problems(config, devices=jax.device_count())
    if wrong:
        raise RequestError("; ".join(wrong))
    if begun_from is not None:
        distributed.agree(f"--init-from {begun_from.source}", begun_from.fingerprint, run.prepare)
    tokens = prepare_data(run, config)
    config = steps.decided(config, run.environment.platform)
    run.decide(settings(config, vocab_size=tokens.tokenizer.vocab_size))
    for text in tokens.warnings:
        run.warn(text)
    run.heartbeat.say("compiling the first step")
    environment, mesh = run.environment, sharding.make_mesh(config.fsdp)
    inputs = InputPipeline(tokens, config, mesh)
    compiled = Executables(environment.cache_dir, mesh.devices.flat, environment.shared_cache).cached
    graph, first, train_step, eval_step, slots = steps.make_steps(config, tokens.tokenizer, mesh, compiled)
    state = Tree(first)
    del first  # where a checkpoint is restored its memory has to become free
    baseline = unigram_entropy(tokens.eval, tokens.tokenizer.special_ids)
    held_out = inputs.sequences("eval")
    run.say(
        f"{sum(leaf.size for leaf in jax.tree.leaves(state.tree['params'])):,} parameters on "
        f"{jax.device_count()} devices of {jax.process_count()} processes, in {config.dtype}; "
        f"{inputs.sequences('train'):,} sequences of {config.sequence_length} tokens to learn from, "
        f"{held_out:,} held out; their unigram entropy is {baseline:.3f} nats"
    )

    def score(step: int) -> dict[str, float]:
        """The loss and the accuracy of held-out sequences; the same in all processes."""
        result = steps.evaluate(
            eval_step,
            state.tree["params"],
            inputs.held_out,
            inputs.place,
            sequences=held_out if step in (0, config.steps) else min(config.eval_sequences, held_out),
            batch_size=config.batch_size,
            tick=run.heartbeat.tick,
        )
        return {"eval_loss": result.loss, "eval_accuracy": result.accuracy}

    watch = Watch(run, config, tokens, inputs.step_on_host)
    loop = Loop(
        run=run,
        checkpoints=Checkpoints(run, state, keep_last=config.keep_checkpoints),
        steps=config.steps,
        unit="tokens",
        per_step=config.batch_size * config.sequence_length,
        flops_per_step=steps.step_flops(
            dimensions(config, tokens.tokenizer),
            batch_size=config.batch_size,
            length=config.sequence_length,
            slots=slots,
        ),
        checkpoint_every=config.checkpoint_every,
        log_every=config.log_every,
        score=score,
        headline="eval_loss",
        better="lower",
        eval_every=config.eval_every,
        profile=config.profile,
        tracer=Tracer(),
        guard=watch,
        in_flight=IN_FLIGHT,
    )
    loop.resume()
    if begun_from is not None:
        begun_from.check_began(run.directory, step=loop.done, writes=environment.is_first)
        if not loop.done:
            state.tree = steps.with_params(state.tree, begun_from.params())
            loop.evaluate()

    rows_B = inputs.place(np.arange(config.batch_size, dtype=np.int32))
    for step in loop:
        with loop.input():
            tokens_BS = inputs.step(step)
        state.tree, results = train_step(state.tree, tokens_BS, rows_B)
        loop.record(results)

    final = loop.finish()
    run.heartbeat.say("final evaluation")
    predict_step = jax.jit(
        predict.make_sharded_predict(graph, mesh, state.tree["params"]), out_shardings=sharding.whole(mesh)
    )
    sampled = predict.sample(
        sequences=held_out, length=config.sequence_length, trained_rows=config.steps * config.batch_size
    )
    predictions = predict.final_eval(
        compiled(predict_step),
        state.tree["params"],
        tokens.rows("eval", sampled, config.sequence_length),
        tokens.tokenizer,
        inputs.place,
        batch_size=config.batch_size,
        tick=run.heartbeat.tick,
    )
    params = sharding.to_host(state.tree["params"], mesh)
    if environment.is_first:
        hugging_face.export(run.directory, config, params, tokens.tokenizer)
    return {
        **final,
        "unigram_entropy": baseline,
        "outliers": watch.losses.outliers,
        "skipped_updates": watch.losses.skipped,
        **predictions,
    }


def prepare_data(run: Run, config: Config) -> Tokens:
    """Tokenise the corpus, or find it in the cache; it is the same on every host."""
    option, shared = f"--data {config.data}", run.environment.shared_cache
    prepare = functools.partial(data.prepare, config, Path(run.environment.cache_dir), run.prepare, shared)
    if config.remote_cache is None and shared is None:
        tokens = prepare()
    else:
        tokens = distributed.first_then_others(prepare, what=option, report=run.prepare)
    distributed.agree(option, tokens.fingerprint, run.prepare)
    return tokens
