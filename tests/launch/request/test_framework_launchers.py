"""Commands that are typed with a framework's own launcher."""

from pathlib import Path
from typing import Any

import pytest

from contracts.errors import RequestError
from launch.request.framework_launchers import Unwrapped, unwrap
from launch.request.run_request import command_from_options

OPTIONS: dict[str, Any] = {"framework": "", "processes_per_host": "", "progress": "", "python": ""}


@pytest.mark.parametrize(
    ("typed", "words", "per_host", "env"),
    [
        ("torchrun train.py --lr 1", "python train.py --lr 1", None, {}),
        ("torchrun --standalone --nproc_per_node=4 train.py", "python train.py", "4", {}),
        ("torchrun --nnodes 2 --node_rank=1 --master_addr h --nproc-per-node gpu -m pkg.train -x",
         "python -m pkg.train -x", "per-chip", {}),
        ("torchrun --no-python ./run.sh", "./run.sh", None, {}),
        ("python -m torch.distributed.run --nproc_per_node 2 train.py", "python train.py", "2", {}),
        ("accelerate launch --mixed_precision bf16 --multi_gpu train.py --a", "python train.py --a", None,
         {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    ],
)  # fmt: skip
def test_a_launcher_is_taken_off_a_command(
    typed: str, words: str, per_host: str | None, env: dict[str, str]
) -> None:
    unwrapped = unwrap(typed.split())
    assert isinstance(unwrapped, Unwrapped)
    assert (" ".join(unwrapped.arguments), unwrapped.processes_per_host, unwrapped.env) == (
        words,
        per_host,
        env,
    )


@pytest.mark.parametrize(
    "typed", ["python train.py", "python -m torch.utils.bottleneck train.py", "accelerate config", "sh -c x"]
)
def test_other_commands_stay_as_they_are(typed: str) -> None:
    assert unwrap(typed.split()) is None


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("torchrun --max-restarts 3 train.py", "torchrun --max-restarts: .* -- python train.py"),
        ("torchrun --nproc_per_node 2", "names no script"),
        (
            "accelerate launch --num_processes 8 train.py",
            "--num_processes 8: counts the processes of all hosts",
        ),
        (
            "accelerate launch --config_file x.yaml train.py",
            "--config_file: tpu-stack starts the ranks itself",
        ),
    ],
)
def test_what_a_launcher_does_and_tpu_stack_does_not_is_refused_with_what_to_type(
    typed: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        unwrap(typed.split())


def test_a_launchers_processes_are_those_of_each_host_and_it_needs_pytorch(tmp_path: Path) -> None:
    typed = ["torchrun", "--nproc_per_node", "2", "train.py"]
    command = command_from_options(typed, workdir=str(tmp_path), **OPTIONS)
    assert (command.config.words, command.config.processes_per_host) == (("python", "train.py"), "2")
    assert command.framework == "pytorch"
    assert command.note == "torchrun: its ranks are started as python train.py, 2 on each host"
    with pytest.raises(RequestError, match="--processes-per-host 4: torchrun says 2; leave one out"):
        command_from_options(typed, workdir=str(tmp_path), **{**OPTIONS, "processes_per_host": "4"})
