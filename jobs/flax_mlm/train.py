"""The training loop, read from top to bottom: the data, the state, then step after step."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

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
from jobs.runtime.loop import Loop
from jobs.runtime.monitoring.tracers import JaxTracer
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
    training = set_up(run, config)
    loop = make_loop(training)
    resume(training, loop)

    config, inputs, state = training.config, training.inputs, training.state
    rows_B = inputs.place(np.arange(config.batch_size, dtype=np.int32))
    for step in loop:
        with loop.input():
            tokens_BS = inputs.step(step)
        state.tree, results = training.train_step(state.tree, tokens_BS, rows_B)
        loop.record(results)

    return finish(training, loop.finish())


def set_up(run: Run, config: Config) -> Training:
    """Prepare the tokens, open or draw the model, and record what was decided."""
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
    training = Training(run, config, tokens, begun_from)
    run.say(
        f"{sum(leaf.size for leaf in jax.tree.leaves(training.state.tree['params'])):,} parameters on "
        f"{jax.device_count()} devices of {jax.process_count()} processes, in {config.dtype}; "
        f"{training.inputs.sequences('train'):,} sequences of {config.sequence_length} tokens to learn from, "
        f"{training.held_out:,} held out; their unigram entropy is {training.baseline:.3f} nats"
    )
    return training


def make_loop(training: Training) -> Loop:
    """The loop over the steps, with the checkpoints of the training's state."""
    run, config = training.run, training.config
    return Loop(
        run=run,
        checkpoints=Checkpoints(run, training.state, keep_last=config.keep_checkpoints),
        steps=config.steps,
        unit="tokens",
        per_step=config.batch_size * config.sequence_length,
        flops_per_step=steps.step_flops(
            dimensions(config, training.tokens.tokenizer),
            batch_size=config.batch_size,
            length=config.sequence_length,
            slots=training.slots,
        ),
        checkpoint_every=config.checkpoint_every,
        log_every=config.log_every,
        score=training.score,
        headline="eval_loss",
        better="lower",
        eval_every=config.eval_every,
        profile=config.profile,
        tracer=JaxTracer(),
        guard=training.watch,
        in_flight=IN_FLIGHT,
    )


def resume(training: Training, loop: Loop) -> None:
    """Restore the newest checkpoint; where there is none, begin with the weights of --init-from."""
    loop.resume()
    if (begun_from := training.begun_from) is None:
        return
    run, state = training.run, training.state
    begun_from.check_began(run.directory, step=loop.done, writes=run.environment.is_first)
    if not loop.done:
        state.tree = steps.with_params(state.tree, begun_from.params())
        loop.evaluate()


def finish(training: Training, final: Final) -> Final:
    """Evaluate the guesses for single hidden tokens, and write the export."""
    run, losses = training.run, training.watch.losses
    run.heartbeat.say("final evaluation")
    predictions = training.predict()
    params = sharding.to_host(training.state.tree["params"], training.mesh)
    if run.environment.is_first:
        hugging_face.export(run.directory, training.config, params, training.tokens.tokenizer)
    return {
        **final,
        "unigram_entropy": training.baseline,
        "outliers": losses.outliers,
        "skipped_updates": losses.skipped,
        **predictions,
    }


class Training:
    """One process's part of a training: the tokens, the state, its compiled steps and its evaluation."""

    def __init__(
        self, run: Run, config: Config, tokens: Tokens, begun_from: hugging_face.Pretrained | None
    ) -> None:
        self.run, self.config, self.tokens, self.begun_from = run, config, tokens, begun_from
        environment, self.mesh = run.environment, sharding.make_mesh(config.fsdp)
        self.inputs = InputPipeline(tokens, config, self.mesh)
        self.compiled = Executables(
            environment.cache_dir, self.mesh.devices.flat, environment.shared_cache
        ).cached
        made = steps.make_steps(config, tokens.tokenizer, self.mesh, self.compiled)
        self.graph, self.train_step, self.eval_step, self.slots = (
            made.graph,
            made.train,
            made.evaluate,
            made.slots,
        )
        self.state = Tree(
            made.state
        )  # nothing else holds it: its memory is free once a checkpoint is restored
        self.watch = Watch(run, config, tokens, self.inputs.step_on_host)
        self.held_out = self.inputs.sequences("eval")
        self.baseline = unigram_entropy(tokens.eval, tokens.tokenizer.special_ids)

    def score(self, done: int) -> dict[str, float]:
        """The loss and the accuracy of held-out sequences; the same in all processes."""
        is_end = done in (0, self.config.steps)
        result = steps.evaluate(
            self.eval_step,
            self.state.tree["params"],
            self.inputs.held_out,
            self.inputs.place,
            sequences=self.held_out if is_end else min(self.config.eval_sequences, self.held_out),
            batch_size=self.config.batch_size,
            tick=self.run.heartbeat.tick,
        )
        return {"eval_loss": result.loss, "eval_accuracy": result.accuracy}

    def predict(self) -> dict[str, Any]:
        """What result.json says of guesses for single hidden tokens; the same in all processes."""
        config, params = self.config, self.state.tree["params"]
        predict_step = jax.jit(
            predict.make_sharded_predict(self.graph, self.mesh, params),
            out_shardings=sharding.replicated(self.mesh),
        )
        sampled = predict.sample(
            sequences=self.held_out,
            length=config.sequence_length,
            trained_rows=config.steps * config.batch_size,
        )
        return predict.final_eval(
            self.compiled(predict_step),
            params,
            self.tokens.rows("eval", sampled, config.sequence_length),
            self.tokens.tokenizer,
            self.inputs.place,
            batch_size=config.batch_size,
            tick=self.run.heartbeat.tick,
        )


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
