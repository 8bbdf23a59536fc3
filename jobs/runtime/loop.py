"""The loop of a training, the same in every framework: resume, step, evaluate, save, leave at a preemption, finish.

    loop = Loop(run=run, checkpoints=checkpoints, steps=1000, unit="rows", per_step=32, checkpoint_every=100)
    loop.resume()
    for step in loop:
        with loop.input():
            batch = batch_of(step)
        loop.record(take_step(batch))
    return loop.finish()

Between two rounds of `for` the loop does what is due after the step, in all processes alike. Where the framework has
the loop (`fit` of Keras), it calls the loop's `callback`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

from contracts.errors import JobFailed
from jobs.runtime import preemption
from jobs.runtime.monitoring.metrics import Metrics, Rates
from jobs.runtime.monitoring.profile import Profile, Tracer, read_steps
from jobs.runtime.process import Run

type Results = Mapping[str, Any]
"""What a step returns by name; `Loop.read` makes numbers of it."""


class Checkpoints(Protocol):
    """The checkpoints of a state, by its framework. All processes make the same calls."""

    best: int | None

    def save(self, step: int, notes: Mapping[str, Any]) -> None: ...

    def restore_latest(self) -> tuple[int, dict[str, Any]] | None: ...

    def restore_model(self, step: int) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...


class Guard(Protocol):
    """Judges the numbers of every step. notes: saved with a state, for `restore`."""

    def notes(self) -> dict[str, Any]: ...

    def restore(self, notes: Mapping[str, Any]) -> None: ...

    @property
    def holds_back(self) -> bool:
        """Whether the state is doubtful: then only a process that leaves saves it."""
        ...

    def judge(self, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
        """More numbers to record; with any, the step is recorded out of turn."""
        ...

    def respond(self, step: int, values: Mapping[str, float]) -> None:
        """Called after they are recorded. Raises JobFailed: training has to end."""
        ...


def numbers(_step: int, results: Results) -> dict[str, float]:
    """The results of a step as they are; waits until they are computed."""
    return {name: float(value) for name, value in results.items()}


@dataclasses.dataclass(kw_only=True)
class Loop:
    """One process's loop over the steps of a training, which are counted from 1.

    steps: the last step. unit, per_step: what is counted, and its number in a step over all hosts. flops_per_step: of
    the model, over all hosts. log_every, checkpoint_every, eval_every: steps between two lines of metrics, checkpoints
    and evaluations. read: makes numbers of a step's results; called in all processes for steps that are recorded.
    wait: until the devices have computed everything. notes: JSON values that each checkpoint keeps. in_flight: steps
    whose results (jax.Arrays) the host does not wait for, so that the devices always have the next step.
    score: evaluates the state after a step. headline: its score that compares states; better: in which direction.
    patience: evaluations in a row without a better one, after which training ends. profile: the steps to trace, as A:B,
    by the framework's `tracer`.

    done: the last step that was taken. best_step: the one with the best evaluation so far; 0 before the first.
    exported_step: the one whose model `finish` has left in place.
    """

    run: Run
    checkpoints: Checkpoints
    steps: int
    unit: str
    per_step: int
    flops_per_step: int | None = None
    checkpoint_every: int
    log_every: int = 1
    score: Callable[[int], dict[str, float]] | None = None
    headline: str = ""
    better: Literal["lower", "higher"] = "higher"
    eval_every: int = 0
    patience: int | None = None
    profile: str | None = None
    tracer: Tracer | None = None
    wait: Callable[[], object] = lambda: None
    read: Callable[[int, Results], dict[str, float]] = numbers
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    guard: Guard | None = None
    in_flight: int = 0

    def __post_init__(self) -> None:
        self.rates = Rates(
            self.run.time,
            name=f"{self.unit}_per_s",
            per_step=self.per_step,
            flops_per_step=self.flops_per_step,
            peak_flops_per_s=self.run.environment.peak_flops_per_s,
        )
        self.done = self.best_step = self.exported_step = self._resumed_step = self._saved_step = 0
        self._best_score, self._worse = -math.inf, 0
        self._latest: tuple[int, dict[str, float]] | None = None
        self._is_held_back = False
        self._metrics: Metrics | None = None
        self._profile: Profile | None = None
        self._call: tuple[range, Results] = (range(0), {})
        self._pending: deque[tuple[range, Results]] = deque()
        self._tracing = contextlib.ExitStack()

    def resume(self) -> dict[str, Any]:
        """Restore the newest checkpoint; the notes in it, none where there is no checkpoint.

        Raises:
            RequestError: there are checkpoints and none can be read.
        """
        with self.run.time.part("restore"):
            restored = self.checkpoints.restore_latest()
        if restored is None:
            return {}
        step, notes = restored
        self.done = self._resumed_step = self._saved_step = step
        # The notes of older code may say nothing of evaluations.
        self.checkpoints.best = self.best_step = notes.get("best_step", 0)
        self._worse = notes.get("worse", 0)
        if notes.get("best_score") is not None:
            self._best_score = notes["best_score"]
        if self.guard is not None:
            self.guard.restore(notes)
        self.run.say(f"resumed after step {step}")
        return notes

    def __iter__(self) -> Iterator[int]:
        """The steps that are left, one after the other."""
        return (steps[-1] for steps in self.calls(1))

    def calls(self, limit: int) -> Iterator[range]:
        """The same, for devices that take up to `limit` steps in a call. A call ends where something is due, and a
        traced step has its own."""
        self.start()
        while not self.is_over:
            yield self.begin(self._steps_until_due(limit))
            self.end()

    @property
    def is_over(self) -> bool:
        """Whether no step is left, or `patience` has run out."""
        return self.done >= self.steps or self._is_out_of_patience()

    def start(self) -> None:
        """Open the metrics and the trace, and evaluate the restored state if that is due.

        A state is saved before it is evaluated, so a run that ended in between has no evaluation of it. The other
        methods call this.
        """
        if self._profile is not None:
            return
        self.run.heartbeat.went_on_from(self.done)
        if self.run.environment.is_first:
            self._metrics = Metrics(self.run.directory, self.done)
        traced = read_steps(self.profile, steps=self.steps)
        self._profile = Profile(self.run, traced, self.tracer, done=self.done, settle=self._settle_all)
        if 0 < self.done < self.steps and self._is_evaluation_due():
            self.evaluate()

    def input(self) -> contextlib.AbstractContextManager[None]:
        """What happens inside makes the batch of a step."""
        return self.rates.input(self._is_busy)

    def record(self, results: Results) -> None:
        """What the devices return of the last step of this call."""
        self._call = self._call[0], results

    def begin(self, count: int) -> range:
        """Before `count` steps are given to the devices; returns their numbers."""
        assert self._profile is not None, "start() comes before begin()"
        if self.done == self._resumed_step:
            self.run.time.enter("compile")
        steps = range(self.done + 1, min(self.done + count, self.steps) + 1)
        self._call = steps, {}
        self._tracing.enter_context(self._profile.step(steps))
        return steps

    def end(self) -> None:
        """Do what is due after the steps of `begin`.

        Raises:
            Preempted: a host got SIGTERM; the state is saved.
            JobFailed: the guard ends the run.
        """
        self._pending.append(self._call)
        self._tracing.close()
        is_first, step = self.done == self._resumed_step, self._call[0][-1]
        self.done = step
        if is_first:
            self._settle_all()
            self.run.heartbeat.state("stepping")
            self.rates.start()
        self._settle(but=self.in_flight)
        if step == self.steps:
            self._settle()
            return
        leaving = preemption.notified(step)
        evaluating = self._is_evaluation_due()
        was_held_back = self._is_held_back and not self._is_doubtful()
        if not (leaving or evaluating or was_held_back or step % self.checkpoint_every == 0):
            return
        self._settle()
        # While the state is doubtful only who leaves saves: the newest checkpoint is to be from before a trouble.
        self._is_held_back = self._is_doubtful() and not leaving
        if not self._is_held_back:
            self._save()
        if leaving:
            with self.run.time.part("checkpoint"):
                self.checkpoints.wait()
            self._close()
            raise preemption.Preempted(step)
        self.run.heartbeat.state("stepping")
        if evaluating:
            self.evaluate()
            self.run.heartbeat.say(None)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the state after the last step and record the scores; empty without `score`. A state is not evaluated
        twice."""
        self.start()
        if self.score is None:
            return {}
        if self._latest is not None and self._latest[0] == self.done:
            return self._latest[1]
        with self.run.time.part("evaluation"):
            self.run.heartbeat.say("evaluating")
            scores = self.score(self.done)
            if self._saved_step == self.done:  # only such a state can be brought back
                self._compare(scores[self.headline])
            if self._metrics is not None:
                self._metrics.write(self.done, scores)
            values = (f"{name.replace('_', ' ')} {value:.4f}" for name, value in scores.items())
            self.run.say(f"step {self.done}: {', '.join(values)}")
            if self._is_out_of_patience():
                self.run.say(
                    f"step {self.done}: {self.headline} is no better than at step {self.best_step}; training ends "
                    f"(--patience {self.patience})"
                )
        self._latest = self.done, scores
        return scores

    def finish(self, *, best: bool = False) -> dict[str, Any]:
        """Save the last state and evaluate it, and where `best` is true put the model of the best evaluation in its
        place; returns what result.json says of it."""
        self.start()
        self.run.time.enter("finish")
        self._save()
        final = self.evaluate()
        self.exported_step = self.done
        if best and self.score is not None and self.best_step != self.done:
            self.exported_step = self.best_step
            self.checkpoints.restore_model(self.exported_step)
            final = self.score(self.exported_step)
        with self.run.time.part("checkpoint"):
            self.checkpoints.close()
        self._close()
        self.run.heartbeat.say("export")
        return {"steps": self.done, self.rates.name: self.rates.overall(), **final}

    def _compare(self, score: float) -> None:
        score = score if self.better == "higher" else -score
        if score > self._best_score:
            self._best_score, self._worse = score, 0
            self.checkpoints.best = self.best_step = self.done
        else:
            self._worse += 1

    def _is_out_of_patience(self) -> bool:
        return self.patience is not None and self._worse >= self.patience

    def _steps_until_due(self, limit: int) -> int:
        assert self._profile is not None
        periods = filter(None, (self.log_every, self.checkpoint_every, self.eval_every))
        due = [period - self.done % period for period in periods]
        return self._profile.steps_together(self.done, min(limit, *due))

    def _is_evaluation_due(self) -> bool:
        return self.eval_every > 0 and self.done % self.eval_every == 0

    def _is_doubtful(self) -> bool:
        return self.guard is not None and self.guard.holds_back

    def _is_busy(self) -> bool:
        """Whether the devices still have a step to compute."""
        return bool(self._pending) and not all(value.is_ready() for value in self._pending[-1][1].values())

    def _settle_all(self) -> None:
        self._settle()
        self.wait()

    def _settle(self, but: int = 0) -> None:
        """Wait for all calls but the last `but`, and record the steps that are due."""
        while len(self._pending) > but:
            steps, results = self._pending.popleft()
            step = steps[-1]
            is_due = step % self.log_every == 0 or step == self.steps
            values = self.read(step, results) if is_due or self.guard is not None else {}
            self.run.heartbeat.step(step)
            for _ in steps:
                self.rates.step_done()
            besides = self.guard.judge(step, values) if self.guard is not None else {}
            if self._metrics is not None and (is_due or besides):
                with self.run.time.part("logging"):
                    rates = self.rates.take() if is_due else {}
                    self._metrics.write(step, {**values, **rates, **besides})
            if self.guard is not None:
                self._respond(self.guard, step, values)

    def _respond(self, guard: Guard, step: int, values: Mapping[str, float]) -> None:
        try:
            guard.respond(step, values)
        except JobFailed:
            self.checkpoints.wait()
            self._close()
            raise

    def _save(self) -> None:
        with self.run.time.part("checkpoint"):
            self.run.begin_saving()
            best = self._best_score if math.isfinite(self._best_score) else None  # JSON has no infinity
            evaluated = {"best_score": best, "best_step": self.best_step, "worse": self._worse}
            guarded = self.guard.notes() if self.guard is not None else {}
            self.checkpoints.save(self.done, {**self.notes, **evaluated, **guarded})
            self._saved_step = self.done
            self.run.heartbeat.saved(self.done)

    def _close(self) -> None:
        """Complete the metrics and the trace."""
        for record in (self._metrics, self._profile):
            if record is not None:
                record.close()


def callback(keras: Any, loop: Loop, steps_per_execution: int) -> Any:
    """The loop as a callback of `fit`, after `loop.start()`. keras: Keras 3 or tf_keras."""

    class Callback(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras gives them
            loop.begin(steps_per_execution)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            loop.record(logs)
            loop.end()
            self.model.stop_training = loop.is_over

    return Callback()
