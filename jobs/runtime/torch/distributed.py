"""The PyTorch group of a run's processes, on the platform that was asked for and no other.

Tensors on the host are exchanged by gloo whatever the platform is, tensors on a device by the backend of the device.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from contracts.device_nodes import required
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.process import Platform, ProcessEnvironment
from jobs.runtime.preemption import watch
from jobs.runtime.torch.device import Device, find

JOIN_LIMIT_S: dict[Platform, int] = {"cpu": 300, "gpu": 300, "tpu": 600}
SILENCE_LIMIT_S = 3600
"""For an exchange to which a process does not come. One that dies closes its connections, and is noticed at once."""
AGREE_LIMIT_S = 24 * 3600
"""For the slowest host to prepare a large corpus."""
SAY_PERIOD_S, LOOK_PERIOD_S = 60.0, 0.2
PEER_LOST_SIGNS = (
    "gloo",
    "Gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "TCPStore",
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
    """The group's key-value store, where its processes leave each other notes: see preemption.Board."""

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


def agree(name: str, fingerprint: str, say: Callable[[str], None]) -> None:
    """Make sure that every process holds the same `fingerprint` of `name`; waits for the slowest.

    Raises:
        RequestError: they differ, so training would silently mix different data or settings.
    """
    store, keys = _Group.store, [f"agree/{name}/{index}" for index in range(size())]
    store.set(keys[rank()], fingerprint)
    began_s = said_s = time.monotonic()
    while not store.check(keys):
        if time.monotonic() - began_s > AGREE_LIMIT_S:
            raise RuntimeError(f"TCPStore: not every process had {name} after {spoken(AGREE_LIMIT_S)}")
        if time.monotonic() - said_s > SAY_PERIOD_S:  # a process that says nothing counts as hung
            said_s = time.monotonic()
            say(f"another process is still at {name}, after {spoken(said_s - began_s)}")
        time.sleep(LOOK_PERIOD_S)
    prints = [store.get(key).decode() for key in keys]
    different = [index for index, found in enumerate(prints) if found != prints[0]]
    if different:
        raise RequestError(
            f"{name} is not the same in every process: {different} differ from 0; give every host the same files and "
            "the same software"
        )


def exchange_on_host(values: torch.Tensor) -> torch.Tensor:
    """Values of this process, (…), on the host, with those of all others: (processes, …), in the order of ranks."""
    found = [torch.empty_like(values) for _ in range(size())]
    dist.all_gather(found, values.contiguous())
    return torch.stack(found)


def everywhere(here: bool) -> bool:
    """Whether it holds for every process; all of them ask together."""
    return bool(exchange_on_host(torch.tensor(here)).all())


def leave() -> None:
    """Leave the group in order; all processes do so together."""
    everywhere(True)
    dist.destroy_process_group()
