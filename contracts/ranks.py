"""The ranks that a host runs, of a command or of a job, and the variables that each framework's own launcher would set.

A rank is one process. The launcher numbers them, `jobs.runtime.ranks.rank_supervisor` starts them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

from contracts.process_environment import ProcessEnvironment

LAYER_STAMP = "tpu-stack-layer.json"
"""In a command's environment: what it was made for. It is written last."""
FROM_LOG = "log"
"""As `Spec.progress`: whatever the command prints is progress."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
    """How the processes of a run are numbered: `per_host` on each host, counted through the hosts.

    hosts: internal addresses, in worker order. ports: of each host a free port for each of its ranks. topology: of a
    TPU slice, its chips along each axis ("2x4"); None elsewhere. is_single: whether the only rank is not told
    that it is one, which many programs take for a sign that there are others.
    """

    hosts: tuple[str, ...]
    ports: tuple[tuple[int, ...], ...]
    per_host: int = 1
    topology: str | None = None
    is_single: bool = False

    @property
    def size(self) -> int:
        """The number of ranks on all hosts."""
        return len(self.hosts) * self.per_host

    def addresses(self) -> list[str]:
        """host:port of every rank, in order."""
        return [
            f"{host}:{port}" for host, ports in zip(self.hosts, self.ports, strict=True) for port in ports
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """What one host runs for a rank group.

    words: the command. folder: the user's folder as it was sent, whose name is its hash; None: the ranks are a job's,
    which write their own heartbeat and result. work: the copy of it that the command runs in, which stays from one
    attempt to the next. python: the interpreter that "python" means; None: the one on PATH. layer: the folder of the
    environment over that interpreter's which the command gets (`jobs.runtime.ranks.command_environment`), as lasting as
    the copy; None: it gets none. packages: a folder of packages that come before the framework's in it; None: none do.
    progress: FROM_LOG, or a file whose growth is progress; None: the command is never taken
    for hung. secrets: name → the secret of Secret Manager that the host reads.
    """

    words: tuple[str, ...]
    ranks: Ranks
    folder: str | None = None
    work: str | None = None
    python: str | None = None
    layer: str | None = None
    packages: str | None = None
    progress: str | None = None
    secrets: dict[str, str] = dataclasses.field(default_factory=dict)

    def encoded(self) -> str:
        """The value as one command-line argument, which `decoded` reads."""
        return json.dumps(dataclasses.asdict(self))


def decoded(text: str) -> Spec:
    fields = json.loads(text)
    return Spec(**{**fields, "words": tuple(fields["words"]), "ranks": ranks_from_json(fields["ranks"])})


def ranks_from_json(encoded: dict[str, Any]) -> Ranks:
    """Read ranks that `dataclasses.asdict` has turned into JSON."""
    return Ranks(
        **{**encoded, "hosts": tuple(encoded["hosts"]), "ports": tuple(map(tuple, encoded["ports"]))}
    )


TORCH_TPU_FIRST_PORT = 8070
"""torch_tpu's own choice (`torch_tpu/_internal/distributed/distributed.py`, 0.2.0)."""
LIBTPU_FIRST_PORT = 8476
"""PyTorch/XLA's own choice (`torch_xla/_internal/tpu.py`, 2.9.0)."""
_BLOCKS = {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1)}
"""Chips of a rank → how they lie, as JAX's own tests start several processes on a TPU host
(`jax/_src/test_multiprocess.py`)."""


def ranks_that_share(chips: int, framework: str) -> tuple[int, ...]:
    """Return how many ranks can share so many chips of a TPU host, as far as those sources say."""
    if framework == "pytorch":  # torch_tpu: each rank has one
        return (1, chips) if chips > 1 else (1,)
    chips_per_rank = {4: (4, 2, 1), 8: (8, 4, 1)}.get(chips, (chips, 1))
    return tuple(dict.fromkeys(chips // chips_each for chips_each in chips_per_rank))


def rank_variables(host: ProcessEnvironment, ranks: Ranks, local_rank: int) -> dict[str, str]:
    """The environment variables of one rank: RUN_* with the rank's own number, and what its framework's launcher sets.

    host: the process environment of the rank's host, whose process_id is the host's index.

    Sources: torchrun's documentation (RANK …), `accelerate/utils/launch.py` (ACCELERATE_USE_CPU),
    `tf.distribute.cluster_resolver.TFConfigClusterResolver` (TF_CONFIG), `torch_xla/_internal/tpu.py` (TPU_*),
    `torch_tpu/_internal/distributed/distributed.py` (TORCH_TPU_*). JAX has no variables of its own for the number of
    processes; `jax.distributed.initialize()` reads those of Open MPI (`jax/_src/clusters/ompi_cluster.py`), on a TPU
    those of the machine.
    """
    rank = host.process_id * ranks.per_host + local_rank
    address, _, port = host.coordinator.rpartition(":")
    is_tpu, shares_host = host.platform == "tpu", ranks.per_host > 1
    variables: dict[str, Any] = {
        **dataclasses.replace(
            host,
            num_processes=ranks.size,
            process_id=rank,
            local_rank=local_rank,
            ranks_per_host=ranks.per_host,
        ).variables()
    }
    if not ranks.is_single:
        variables |= {
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "RANK": rank,
            "WORLD_SIZE": ranks.size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": ranks.per_host,
            "GROUP_RANK": host.process_id,
            "NODE_RANK": host.process_id,
        }
    if host.platform == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
        variables["ACCELERATE_USE_CPU"] = "true"  # without it accelerate on a CPU looks for no peers
    if host.framework == "jax":
        variables["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu,cpu"}[host.platform]
        variables["JAX_COORDINATOR_ADDRESS"] = host.coordinator
        if not is_tpu:
            variables.update(
                OMPI_MCA_orte_hnp_uri=f"0.0;tcp://{host.coordinator}",
                OMPI_COMM_WORLD_SIZE=ranks.size,
                OMPI_COMM_WORLD_RANK=rank,
                OMPI_COMM_WORLD_LOCAL_RANK=local_rank,
            )
    elif host.framework == "tensorflow" and not is_tpu:
        # Without it tensorflow-tpu waits minutes for the metadata of a TPU machine.
        variables["TPU_SKIP_MDS_QUERY"] = 1
        if ranks.size > 1:
            task = {"type": "worker", "index": rank}
            variables["TF_CONFIG"] = json.dumps({"cluster": {"worker": ranks.addresses()}, "task": task})
    elif host.framework == "pytorch_xla":
        variables["PJRT_DEVICE"] = {"cpu": "CPU", "gpu": "CUDA", "tpu": "TPU"}[host.platform]
    elif host.framework == "pytorch" and is_tpu and shares_host:
        variables["TORCH_TPU_SLICEBUILDER_ADDRESSES"] = _each_rank(ranks, TORCH_TPU_FIRST_PORT)
        variables["TORCH_TPU_TOPOLOGY"] = _listed(_axes(ranks.topology))
    if is_tpu and shares_host and host.framework != "pytorch":
        variables |= _chip_variables(ranks, local_rank, rank)
    return {name: str(value) for name, value in variables.items()}


def _chip_variables(ranks: Ranks, local_rank: int, rank: int) -> dict[str, Any]:
    """The variables by which libtpu gives a process its share of the chips of a host."""
    axes = _axes(ranks.topology)
    chips_per_rank = max(1, math.prod(axes) // ranks.size)
    block = _BLOCKS[chips_per_rank]
    return {
        "TPU_VISIBLE_CHIPS": _listed(range(local_rank * chips_per_rank, (local_rank + 1) * chips_per_rank)),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _listed(block),
        "TPU_PROCESS_BOUNDS": _listed(chips // own for chips, own in zip(axes, block, strict=True)),
        "TPU_PROCESS_ADDRESSES": _each_rank(ranks, LIBTPU_FIRST_PORT),
        "TPU_PROCESS_PORT": LIBTPU_FIRST_PORT + local_rank,
        "CLOUD_TPU_TASK_ID": rank,
    }


def _each_rank(ranks: Ranks, first_port: int) -> str:
    return ",".join(f"{host}:{first_port + index}" for host in ranks.hosts for index in range(ranks.per_host))


def _axes(topology: str | None) -> tuple[int, ...]:
    """(2, 4, 1) for the topology "2x4": TPU runtimes count along three axes."""
    axes = map(int, (topology or "1").split("x"))
    return (*axes, 1, 1)[:3]


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
