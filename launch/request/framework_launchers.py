"""Commands that begin with a framework's own launcher (torchrun, accelerate launch), for which tpu-stack stands in."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from contracts.errors import RequestError
from launch.plan import PER_CHIP

TORCHRUN = (
    ("torchrun",),
    ("python", "-m", "torch.distributed.run"),
    ("python", "-m", "torch.distributed.launch"),
    ("python3", "-m", "torch.distributed.run"),
    ("python3", "-m", "torch.distributed.launch"),
)
ACCELERATE = (
    ("accelerate", "launch"),
    ("python", "-m", "accelerate.commands.launch"),
    ("python3", "-m", "accelerate.commands.launch"),
)
PLACE_OPTIONS = frozenset(
    {
        *("nnodes", "node-rank", "master-addr", "master-port", "rdzv-backend", "rdzv-endpoint", "rdzv-id"),
        *("num-machines", "machine-rank", "main-process-ip", "main-process-port"),
    }
)
"""Options that say where the hosts are, which tpu-stack knows itself; they are dropped."""
PLACE_FLAGS = frozenset({"standalone", "use-env", "multi-gpu", "cpu", "tpu"})
PRECISION = "mixed-precision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unwrapped:
    """A command without its launcher.

    launcher: its name. processes_per_host: as `launch.plan.processes_per_host` takes it; None: the launcher was not
    told. env: what the launcher would have set of its own options.
    """

    launcher: str
    arguments: tuple[str, ...]
    processes_per_host: str | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


def unwrap(arguments: Sequence[str]) -> Unwrapped | None:
    """Return a command without the launcher that it begins with; None: it begins with none.

    Raises:
        RequestError: the launcher is given an option that tpu-stack cannot stand in for, or no script.
    """
    for launcher, beginnings in (("torchrun", TORCHRUN), ("accelerate launch", ACCELERATE)):
        for beginning in beginnings:
            if tuple(arguments[: len(beginning)]) == beginning:
                return _unwrap(launcher, arguments[len(beginning) :])
    return None


def _unwrap(launcher: str, arguments: Sequence[str]) -> Unwrapped:
    is_module, has_python, count, env, left = False, True, None, dict[str, str](), [*arguments]
    while left and left[0].startswith("-"):
        word, equals, value = left.pop(0).partition("=")
        name = word.lstrip("-").replace("_", "-")
        if name in ("m", "module"):
            is_module = True
        elif name == "no-python":
            has_python = False
        elif name in PLACE_FLAGS and not equals:
            continue
        elif name in PLACE_OPTIONS or name in ("nproc-per-node", "num-processes", PRECISION):
            if not equals and left:
                value = left.pop(0)
            if name == PRECISION:
                env["ACCELERATE_MIXED_PRECISION"] = value
            elif name not in PLACE_OPTIONS:
                count = _count(launcher, name, value)
        else:
            raise RequestError(
                f"-- {launcher} {word}: tpu-stack starts the ranks itself and has no such option; leave it out, or "
                f"write the script without its launcher, as in: --processes-per-host 1 -- python {_script(left)}"
            )
    if not left:
        raise RequestError(f"-- {launcher}: names no script; write the command as in: -- python train.py")
    python = ["python", *(["-m"] if is_module else [])] if has_python else []
    return Unwrapped(launcher=launcher, arguments=(*python, *left), processes_per_host=count, env=env)


def _script(left: Sequence[str]) -> str:
    first = next((index for index, word in enumerate(left) if word.endswith(".py")), None)
    return "train.py" if first is None else shlex.join(left[first:])


def _count(launcher: str, name: str, value: str) -> str:
    if name == "num-processes":
        raise RequestError(
            f"-- {launcher} --num_processes {value}: counts the processes of all hosts; leave it out, and write "
            "--processes-per-host N for those of each"
        )
    return {"gpu": PER_CHIP, "auto": PER_CHIP, "xpu": PER_CHIP, "cpu": "1"}.get(value, value)
