"""Why a process ended, recognised in the last lines that it printed: one sentence with what to do.

What frameworks print of a port that is taken, of a group that does not form, of a disk or a memory that is full, seldom
says which one, and is followed by a stack trace. The agent, the rank supervisor and a job's own process ask here.
"""

from __future__ import annotations

import os
import re
import shutil

TYPE_CHECKING = False  # the agent starts on every host for every launch, and `typing` is a fifth of its start
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NEARLY_FULL_BYTES = 64 << 20

ADDRESS_IN_USE = re.compile(
    r"(?:address '\S*:(?P<bound>\d+)': )?Address already in use|EADDRINUSE|(?i:Failed to start RPC server)"
    r"|Could not start gRPC server"
)
PORT = re.compile(r"\bport: (\d+)")
DISK_FULL = re.compile(r"No space left on device(?:: '(?P<path>/[^']*)')?|Disk quota exceeded")
# torch.distributed (2.9 to 2.15), of the rank that waits for all others, and of one that waits for that
STORE_WAITED = re.compile(
    r"Timed out after (?P<s>\d+) seconds waiting for clients\. (?P<came>\d+)/(?P<all>\d+)"
)
STORE_AWAY = re.compile(r"client socket has timed out after (?P<ms>\d+)ms while trying to connect")
# XLA's coordination service (jaxlib 0.12), which JAX and TensorFlow have
NOT_REGISTERED = re.compile(
    r"DEADLINE_EXCEEDED[\s\S]*(?:RegisterTask|Barrier timed out)|Barrier timed out[\s\S]*Wait_for_all_tasks_to_register"
)
NO_MODULE = re.compile(r"^(?:\[\d+\] )?ModuleNotFoundError: No module named '(?P<name>[^']+)'", re.MULTILINE)
JAX = ("jax.distributed.initialize", "initialization_timeout=…, 300 s by default")
TORCH = ("init_process_group", "timeout=…")
NCCL_ON_CPU = re.compile(
    r"nccl\w* requires at least one CUDA device|ProcessGroupNCCL is only supported with GPUs"
)
# tensorflow-tpu, which Keras 3 has compile a model's step by XLA on a CPU too
XLA_OFF_CPU = re.compile(r"could not find registered transfer manager for platform Host")
# Keras 3 (3.15), whose fit takes a batch of all replicas for a tensor
KERAS_FIT = re.compile(r"tensorflow\.python\.distribute\.values\.PerReplica'>\) to a Tensor")
# gloo (JAX on CPUs, PyTorch), NCCL, XLA's coordination service and TensorFlow, of a rank that has lost another
PEER_GONE = re.compile(
    r"Connection (?:closed|reset) by peer|recvValue failed|remote process exited|Collective ops is aborted|Broken pipe"
    r"|Socket closed|[Hh]eartbeat timeout|stopped sending heartbeats|Failed to recv|Connection was likely closed"
    r"|caused pair closure"
)
NO_MEMORY = re.compile(
    r"^(?:\[\d+\] )?MemoryError|std::bad_alloc|Cannot allocate memory|CUDA out of memory|OOM when allocating"
    r"|RESOURCE_EXHAUSTED: Out of memory",
    re.MULTILINE,
)


def cause(
    printed: str,
    *,
    coordinator: str,
    places: Sequence[str],
    absent: str = "",
    waited: str = "",
) -> str | None:
    """The cause of an end and its remedy in one sentence; None where nothing in `printed` is known.

    coordinator: host:port where the ranks meet. places: of the run, on this host's disks. absent: which ranks had not
    joined. waited: how long for them. Both in words, where they are known.
    """
    kinds: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
        (DISK_FULL, lambda match: _disk_full([match["path"]] if match["path"] else places)),
        (ADDRESS_IN_USE, lambda match: _port_taken(match["bound"], printed, coordinator)),
        (
            STORE_WAITED,
            lambda match: _not_joined(
                absent or f"{match['came']} of {match['all']} ranks had joined", *TORCH, f"{match['s']} s"
            ),
        ),
        (
            STORE_AWAY,
            lambda match: _not_joined(
                absent or f"nobody answered at {coordinator}, where rank 0 listens,",
                *TORCH,
                f"{int(match['ms']) / 1000:g} s",
            ),
        ),
        (NOT_REGISTERED, lambda _match: _not_joined(absent or "not every rank had joined", *JAX, waited)),
        (
            NO_MODULE,
            lambda match: (
                f"the module {match['name']} is not there; where it is a package, name that in requirements.txt of the "
                "folder or in the script's block (docs/scripts.md)"
            ),
        ),
        (
            NCCL_ON_CPU,
            lambda _match: (
                "its ranks meet over NCCL, which needs GPUs, and this host has none; meet over gloo, or start one "
                "process (--hosts 1)"
            ),
        ),
        (
            XLA_OFF_CPU,
            lambda _match: (
                "this TensorFlow, which is the one for TPUs, cannot compile by XLA on a CPU, as Keras 3 asks it to; "
                "call model.compile(…, jit_compile=False), or run it on a TPU"
            ),
        ),
        (
            KERAS_FIT,
            lambda _match: (
                "Keras 3 cannot fit a model under MultiWorkerMirroredStrategy; use tf_keras, or write "
                "the loop of steps with strategy.run"
            ),
        ),
        (NO_MEMORY, lambda _match: "it ran out of memory; a smaller batch or model needs less"),
    )
    return next((sentence(match) for pattern, sentence in kinds if (match := pattern.search(printed))), None)


def may_have_lost_a_peer(printed: str) -> bool:
    """Whether a process that failed says that another rank was gone. That one, or nobody, is to blame: a library of the
    process's own may have lost a connection that is none of the run's."""
    return PEER_GONE.search(printed) is not None


def lines_before(exit_code: int) -> int:
    """How many of the last lines of a log may be about the end of its process: after a signal, the stack traces of all
    threads follow. exit_code: negative for a signal's number."""
    return 400 if exit_code < 0 else 20


def _port_taken(bound: str | None, printed: str, coordinator: str) -> str:
    named = PORT.search(printed)
    meeting = coordinator.rpartition(":")[2]
    port = bound or (named.group(1) if named else meeting)
    if port != meeting:
        return f"port {port} is taken on this host; end the process that has it, or use another port"
    return (
        f"port {port}, at which the ranks meet ({coordinator}), was taken by another process after the preflight; "
        "start the run again: it gets another port"
    )


def _not_joined(absent: str, function: str, limit: str, waited: str) -> str:
    after = f", after {waited}" if waited else ""
    return f"{absent} when {function} gave up{after} ({limit}); let every rank call it sooner, or raise the limit"


def _disk_full(places: Sequence[str]) -> str:
    return f"the disk is full: {free_space(places)}; free some space, then resume the run"


def free_space(places: Sequence[str]) -> str:
    """The disks of these places with what is free on them: those that are nearly full, or all where none is."""
    disks: dict[int, tuple[int, str]] = {}
    for place in places:
        folder = place
        while not os.path.exists(folder) and folder not in ("", "/"):
            folder = os.path.dirname(folder)
        try:
            device, usage = os.stat(folder).st_dev, shutil.disk_usage(folder)
        except OSError:  # a URL, or not to be seen from here
            continue
        free_mib, total_mib = usage.free / 2**20, usage.total / 2**20
        disks.setdefault(
            device, (usage.free, f"{place} has {free_mib:,.0f} MiB free of {total_mib:,.0f} MiB")
        )
    nearly_full = [text for free, text in disks.values() if free < NEARLY_FULL_BYTES]
    return "; ".join(nearly_full or [text for _, text in disks.values()]) or ", ".join(places)
