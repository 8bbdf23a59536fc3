"""Hosts, slices and inventories of a stack, for tests whose hosts answer as they say."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backends.host_backend import HostBackend
from backends.local.local_backend import on_this_machine
from backends.vm.ssh_backend import make_backend
from contracts.inventory import Host, Inventory, Slice, Storage
from launch.hosts import Agent, Transport
from launch.runs import Run
from launch.targets import Plan, Target

# What the fixtures write_run, make_agent, beat and program give.
WriteRun = Callable[..., Run]
MakeAgent = Callable[..., Agent]
Beat = Callable[..., dict[str, Any]]
Program = Callable[[str, str], Path]

PYTHON = "~/.local/share/tpu-stack/venv/bin/python"
IMAGES = {"jax": "europe-west4-docker.pkg.dev/p/r/jax@sha256:00"}
NFS = Storage(
    bucket_url="file:///proc/no/bucket",
    bucket_region="europe-west4",
    nfs_source="10.0.0.9:/s",
    nfs_mount="/share",
)
NO_STORAGE = Storage(bucket_url=None, bucket_region=None, nfs_source=None, nfs_mount=None)


def make_host(index: int, **changed: Any) -> Host:
    given: dict[str, Any] = {
        "name": f"w-{index}",
        "internal_address": f"10.0.0.{index}",
        "external_address": None,
        "user": None,
        "host_keys": ("ssh-ed25519 AAAA",),
        "reach": "iap",
    }
    return Host(index=index, **{**given, **changed})


def make_slice(hosts: Sequence[Host], **changed: Any) -> Slice:
    given: dict[str, Any] = {
        "name": "s",
        "accelerator_type": "v5litepod-16",
        "generation": "v5e",
        "topology": "4x4",
        "zone": "europe-west4-b",
        "capacity": "spot",
        "origin": "queued-resource q",
        "count": 1,
        "devices_per_host": 4,
    }
    return Slice(hosts=tuple(hosts), **{**given, **changed})


def make_inventory(*slices: Slice, **changed: Any) -> Inventory:
    given: dict[str, Any] = {
        "stack": "dev",
        "project": "p",
        "storage": NFS,
        "images": IMAGES,
        "gateway": None,
    }
    return Inventory(slices=slices, **{**given, **changed})


def make_plan(target: Target, **changed: Any) -> Plan:
    given: dict[str, Any] = {
        "run_id": "flax_mlm-20261120-214500-abcd",
        "job": "flax_mlm",
        "framework": "jax",
        "run_dir": "/runs/one",
        "cwd": "/",
        "bundle_sha256": "ab" * 32,
    }
    return Plan(target=target, **{**given, **changed})


def here(hosts: str | None = None) -> Target:
    return on_this_machine(hosts=hosts, platform="cpu")


def ssh_backend(
    agents: Sequence[Agent] = (), transports: Sequence[Transport] = (), **changed: Any
) -> HostBackend:
    """The backend of a slice that is reached over SSH and has no lease; each run is on all its hosts."""
    made = make_backend(make_inventory(), "dev", make_slice([]), tuple(agents), tuple(transports))
    given: dict[str, Any] = {
        "agents_for": lambda _described: tuple(agents),
        "hold": lambda: contextlib.nullcontext(lambda: None),
    }
    return dataclasses.replace(made, **{**given, **changed})


def make_target(agents: Sequence[Agent], transports: Sequence[Transport] = (), **changed: Any) -> Target:
    """A slice that is reached over SSH, of as many hosts as there are agents."""
    one = make_slice([make_host(index) for index in range(len(agents))])
    given: dict[str, Any] = {
        "name": "dev",
        "pulumi_stack": "dev",
        "inventory": make_inventory(one),
        "slice": one,
        "hosts": one.hosts,
        "platform": "tpu",
        "transports": tuple(transports),
        "agents": tuple(agents),
        "python": PYTHON,
        "runs_url": "/share/runs",
        "files": None,
        "agent_root": "~/.cache/tpu-stack/agent",
        "cache_dir": "~/.cache/tpu-stack",
        "cpus": (None,) * len(agents),
        "coordinator_host": "10.0.0.0",
        "backend": ssh_backend(agents, transports),
    }
    return Target(**{**given, **changed})
