"""The PyTorch group of a run's processes, on the platform that was asked for and no other.

Tensors on the host are exchanged by gloo whatever the platform is, tensors on a device by the backend of the device.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist

from contracts.host_interface import required
from contracts.process_environment import Platform, ProcessEnvironment
from jobs.runtime import group
from jobs.runtime.preemption import watch
from jobs.runtime.torch.device import Device, find

JOIN_LIMIT_S: dict[Platform, int] = {"cpu": 300, "gpu": 300, "tpu": 600}
SILENCE_LIMIT_S = 3600
"""For an exchange to which a process does not come. One that dies closes its connections, and is noticed at once."""
PEER_LOST_SIGNS = (
    "gloo",
    "Gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "TCPStore",
    "coordination service",
    "recvValue failed",
    "NCCL",
)
"""What errors of torch.distributed (2.9 to 2.15) say when another process of the group is gone."""


class _Group:
    """What `start` has made, for this process."""

    store: dist.Store
    device: Device


def start(environment: ProcessEnvironment) -> None:
    """Join the group and make sure that the device is what RUN_PLATFORM says.

    Raises:
        RequestError: this host has no such device, or torch found none: a run never falls back to the CPU.
        RuntimeError: the others did not come within JOIN_LIMIT_S.
    """
    required(environment.platform)
    device = find(environment)
    limit = datetime.timedelta(seconds=JOIN_LIMIT_S[environment.platform])
    host, _, port = environment.coordinator.rpartition(":")
    listening = None
    if host in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if environment.is_first:  # by itself the store would listen on every address of this machine
            listening = socket.create_server((host, int(port)), reuse_port=False).detach()
    store = dist.TCPStore(
        host,
        int(port),
        environment.num_processes,
        is_master=environment.is_first,
        timeout=limit,
        **({} if listening is None else {"master_listen_fd": listening}),
    )
    dist.init_process_group(
        device.backend,
        store=dist.PrefixStore("group", store),
        rank=environment.process_id,
        world_size=environment.num_processes,
        timeout=datetime.timedelta(seconds=SILENCE_LIMIT_S),
    )
    exchange_on_host(torch.zeros(1))
    # Another connection: a thread asks while the main thread waits in the first one.
    watch.formed(Notes(store.clone()))
    _Group.store, _Group.device = store, device
    watch.listen_again()


class Notes:
    """The group's key-value store: see group.Board."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def put(self, name: str, text: str) -> None:
        self._store.set(f"tpu-stack/{name}", text)

    def get(self, name: str) -> str | None:
        name = f"tpu-stack/{name}"
        return self._store.get(name).decode() if self._store.check([name]) else None


def device() -> Device:
    """This process's device."""
    return _Group.device


def rank() -> int:
    return int(dist.get_rank())


def size() -> int:
    """Processes in the group."""
    return int(dist.get_world_size())


def agree(name: str, fingerprint: str, report: Callable[[str], None] = print) -> None:
    """See `group.agree`."""
    group.agree(Notes(_Group.store), rank(), size(), name, fingerprint, report)


def exchange_on_host(values: torch.Tensor) -> torch.Tensor:
    """Values of this process, (…), on the host, with those of all others: (processes, …), in the order of ranks."""
    gathered = [torch.empty_like(values) for _ in range(size())]
    dist.all_gather(gathered, values.contiguous())
    return torch.stack(gathered)


def all_processes(condition: bool) -> bool:
    """Whether it holds for every process; all of them ask together."""
    return bool(exchange_on_host(torch.tensor(condition)).all())


def leave() -> None:
    """Leave the group in order; all processes do so together."""
    all_processes(True)
    dist.destroy_process_group()
