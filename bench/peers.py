"""Programs that step in turn, each a process that is asked (`mlm_peers/turns.py` is its side of it), and what all of
them read: weights, configuration, batches, and the optimizer's numbers.

Other people's programs run in environments of their own, each from its own hashed lock, which lie under the cache
folder, named by the lock's content, and are made when first asked for: PyTorch's takes 5 GiB, since the registry's
build for Linux does not import without its CUDA libraries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from backends.local.environments import make
from jobs.flax_mlm import data, input_pipeline
from jobs.flax_mlm import step as steps
from jobs.flax_mlm.config import Config, dimensions
from jobs.flax_mlm.data import Tokens
from jobs.flax_mlm.hugging_face import hugging_face_config, hugging_face_tensors
from jobs.flax_mlm.model import Mlm
from jobs.flax_mlm.step import Masked, step_flops
from jobs.runtime.storage.cache import user_cache_dir
from launch.plan import tunables_on_cpu

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).resolve().with_name("mlm_peers")
ANSWER_LIMIT_S = 600.0
FLAX, PYTORCH, PYTORCH_BFLOAT16 = "FlaxRobertaForMaskedLM", "PyTorch, float32", "PyTorch, bfloat16"
PEERS = {
    FLAX: ("flax", "flax_step.py"),
    PYTORCH: ("pytorch", "torch_step.py", "--dtype", "float32"),
    PYTORCH_BFLOAT16: ("pytorch", "torch_step.py", "--dtype", "bfloat16"),
}
"""By name: whose environment (bench/locks), which program, and what it is told. The last is PyTorch at its best."""

LOCKS = Path(__file__).resolve().with_name("locks")

CASES: dict[str, dict[str, Any]] = {
    "small": {"model": "small", "sequence_length": 128, "batch_size": 32},
    "long": {"model": "small", "sequence_length": 512, "batch_size": 8},
    "base": {"model": "base", "sequence_length": 128, "batch_size": 8},
}
BATCHES = 64
NO_CLIP = 1e9
SCHEDULE_STEPS = 1000
"""Of the learning rate, where only some first steps are taken."""

Command = tuple[Sequence[str], Mapping[str, str]]
"""Arguments and environment of a process."""


@dataclasses.dataclass(kw_only=True)
class Program:
    """One of those that step in turn, and what was measured of it; seconds are of one step, one entry a turn."""

    name: str
    process: subprocess.Popen[str]
    limit_s: float = ANSWER_LIMIT_S
    first_loss: float = float("nan")
    wall_s: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)
    last: dict[str, Any] = dataclasses.field(default_factory=dict)
    machine_flops_per_s: float = 0.0

    def compile(self) -> None:
        """Let it take its first step; returns when it is ready for timed ones."""
        self.first_loss = self._ask({"do": "compile"})["loss"]

    def turn(self, steps: int) -> None:
        """Let it take so many steps."""
        measured = self._ask({"do": "step", "steps": steps})
        self.wall_s.append(measured["wall_s"])
        self.cpu_s.append(measured["cpu_s"])
        self.last = measured

    def wake(self) -> None:
        """Let it take a step that is not measured: from a program that waits for its turn the system may take memory,
        and hand it over again in the next step. One that trains does not meet that."""
        self._ask({"do": "step", "steps": 1})

    def multiply(self) -> None:
        """Let it measure what the machine's own product comes to, in its dtype; the best of all is kept."""
        measured = self._ask({"do": "multiply"})["machine_flops_per_s"]
        self.machine_flops_per_s = max(self.machine_flops_per_s, measured or 0.0)

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        too_late = threading.Event()

        def end() -> None:
            too_late.set()
            self.process.kill()

        timer = threading.Timer(self.limit_s, end)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # the empty answer below says more
                self.process.stdin.write(json.dumps(request) + "\n")
                self.process.stdin.flush()
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            ending = f"ended with {self.process.wait()}"
            if too_late.is_set():
                ending = f"did not answer within {self.limit_s:g} s"
            raise SystemExit(f"{self.name} {ending}, asked {json.dumps(request)}; what it said is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def running(commands: Mapping[str, Command]) -> Iterator[list[Program]]:
    """A program for each name, ended at the end."""
    programs: list[Program] = []
    try:
        for name, (command, environ) in commands.items():
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            programs.append(Program(name=name, process=process))
        yield programs
    finally:
        for program in programs:
            program.process.kill()
            program.process.communicate()


def ours_and_peers(folder: Path, dtypes: Sequence[str]) -> dict[str, Command]:
    """flax_mlm's own step in a job's environment, once for each of `dtypes`; then all of PEERS, each in its own."""
    module = [sys.executable, "-m", "bench.mlm_peers.ours_step", str(folder), "--options"]
    commands: dict[str, Command] = {
        f"flax_mlm, {dtype}": (
            [*module, json.dumps({"dtype": dtype})],
            {**tunables_on_cpu("jax"), **os.environ},
        )
        for dtype in dtypes
    }
    for name, (lock, script, *options) in PEERS.items():
        command = [str(peer_python(lock)), "-s", str(PROGRAMS / script), str(folder), *options]
        commands[name] = command, environment_of_peer(os.environ)
    return commands


def added_bytes(measured: Mapping[str, Any]) -> int | None:
    """What stepping adds to what was resident once the frameworks were loaded; None where the system does not say."""
    imported, stepping = measured["imported_bytes"], measured["stepping_peak_bytes"]
    return None if imported is None or stepping is None else stepping - imported


def compile_all(programs: Sequence[Program]) -> None:
    """One after another, so that they do not compile at the same time."""
    for program in programs:
        program.compile()
        print(f"{program.name} is ready", file=sys.stderr, flush=True)


def peer_python(peer: str) -> Path:
    """The interpreter that has what `bench/locks/<peer>.txt` pins; its environment is made where it is missing.

    Raises:
        RequestError: it could not be installed; the message has what uv said.
    """
    lock = LOCKS / f"{peer}.txt"
    name = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:12]
    home = user_cache_dir() / "peers" / f"{peer}-{name}"
    make(home, lock)
    return home / "bin" / "python"


def environment_of_peer(inherited: Mapping[str, str]) -> dict[str, str]:
    """`inherited` without what would lead the peer's Python to this checkout, and without a network."""
    environment = {name: value for name, value in inherited.items() if not name.startswith("PYTHON")}
    return {**environment, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "USE_TF": "0"}


def run_in_peer(peer: str, script: Path, arguments: Sequence[str], *, limit_s: float) -> str:
    """What `script` prints in the peer's environment, which sees nothing of this checkout or of any hub.

    Raises:
        RuntimeError: it failed; the message ends with what it said.
    """
    command = [str(peer_python(peer)), "-s", str(script), *arguments]
    environ = environment_of_peer(os.environ)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{json.dumps(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def case_config(case: str, *, dropout: float) -> Config:
    """15 % hidden, as in `transformers`' script, which does not clip the gradient either.

    The model has room for its size's whole vocabulary, even where the text is too short to fill it.
    """
    common: dict[str, Any] = {"mask_share": 0.15, "learning_rate": 2e-4, "clip_norm": NO_CLIP}
    config = Config(**CASES[case], **common, steps=SCHEDULE_STEPS, dropout=dropout, dtype="float32")
    trained = data.prepare(config, user_cache_dir(), lambda _: None).tokenizer
    return dataclasses.replace(config, tokenizer=str(trained.path), vocab_size=config.size("vocab_size"))


def prepare(folder: Path, config: Config) -> dict[str, Any]:
    """Write the files into `folder`; returns tokens and flops of a step."""
    tokens = data.prepare(config, user_cache_dir(), lambda _: None)
    dims, length = dimensions(config, tokens.tokenizer), config.sequence_length
    rule = steps.mask_rule(tokens.tokenizer, config.mask_share, length)
    model = Mlm(dims, jnp.dtype("float32"), nnx.Rngs(config.seed))
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))

    np.savez(folder / "batches.npz", **_training(config, tokens))
    (folder / "config.json").write_text(json.dumps(hugging_face_config(dims, tokens.tokenizer)))
    save_file(hugging_face_tensors(params, dims), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "params.msgpack").write_bytes(flax.serialization.to_bytes(params))
    schedule = steps.learning_rate(config)
    optimizer = {
        "rates": [float(schedule(step)) for step in range(config.steps)],
        "weight_decay": config.weight_decay,
    }
    (folder / "optimizer.json").write_text(json.dumps(optimizer))
    (folder / "case.json").write_text(json.dumps(dataclasses.asdict(config)))
    flops = step_flops(dims, batch_size=config.batch_size, length=length, slots=rule.slots)
    return {"tokens": config.batch_size * length, "flops": flops}


def _training(config: Config, tokens: Tokens) -> dict[str, Any]:
    """Tokens, the same with hidden ones, as flax_mlm's own step hides them, and labels, which are -100 where nothing is
    asked, as in `transformers`: (BATCHES, B, S) each."""
    length, size = config.sequence_length, config.batch_size
    rule = steps.mask_rule(tokens.tokenizer, config.mask_share, length)

    @jax.jit
    def hidden(step: jax.Array, tokens_BS: jax.Array) -> Masked:
        return steps.mask_of_step(rule, config.seed, step, tokens_BS, jnp.arange(size))

    arrays: dict[str, list[np.ndarray]] = {"tokens": [], "inputs": [], "labels": []}
    sequences = tokens.sequences("train", length)
    for step in range(BATCHES):
        indices_B = input_pipeline.step_indices(step, seed=config.seed, sequences=sequences, batch_size=size)
        tokens_BS = tokens.rows("train", indices_B, length)
        masked = jax.tree.map(np.asarray, hidden(jnp.int32(step), jnp.asarray(tokens_BS)))
        labels_BS = np.full(tokens_BS.shape, -100, np.int32)
        asked_BM = np.where(masked.weights_BM > 0, masked.targets_BM, -100)
        np.put_along_axis(labels_BS, masked.positions_BM, asked_BM, axis=1)
        for name, values in (("tokens", tokens_BS), ("inputs", masked.inputs_BS), ("labels", labels_BS)):
            arrays[name].append(values)
    return {name: np.stack(values) for name, values in arrays.items()}
