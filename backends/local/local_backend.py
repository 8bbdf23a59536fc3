"""This machine as the hosts of a target: processes beside each other, which share out its processors."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.host_backend import LOOPBACK, HostBackend
from backends.local.processes import LocalTransport, ProcessLink
from contracts.aliases import Say
from contracts.errors import RequestError
from contracts.files import DiskFiles, is_url, unwritable
from contracts.host_interface import DEVICE_GLOBS
from contracts.inventory import Host, Inventory, Slice, Storage
from jobs.runtime.storage.cache import user_cache_dir
from launch.hosts import Agent
from launch.jobs import CHECKOUT
from launch.targets import LOCAL, Capabilities, Sleep, Target

RUNS = "TPU_STACK_RUNS"
"""Names the folder of this machine's runs, or a URL, where it is not this checkout's runs/."""
DEFAULT_HOSTS = {"cpu": 2, "gpu": 1, "tpu": 1}
MOST_HOSTS = 64
NO_SSH = "the hosts are this machine, which needs no SSH; say --stack as well"
AGENT = CHECKOUT / "host" / "agent" / "__main__.py"


CAPABILITIES = Capabilities(
    shares_files=True,
    shares_host=True,
    is_billed=False,
    hosts_outlive_runs=True,
    hosts_follow_run=True,
    restarts_runs=False,
    stops_with_launcher=True,
    python_remedy="name one that has the job's packages, or leave --python out",
    checks=("hosts", "storage"),
    instead={
        "ssh": f"{NO_SSH}, or a RUN for a shell where it runs",
        "ssh-config": NO_SSH,
        "trust": "fab trust: the hosts are this machine, which has no host keys to trust; say --stack",
    },
)


class MachineEnvironments:
    """The images and environments of frameworks that were made on this machine."""

    def image(self, framework: str, platform: str) -> str:
        if platform == "gpu":
            raise RequestError(
                "--runtime docker: the images are for TPUs and CPUs; on a GPU leave --runtime out"
            )
        from images import local_images  # with it comes Docker's client, which few launches need

        return local_images.required(framework, platform).id

    def interpreter(self, framework: str, platform: str) -> str:
        if platform != "cpu":
            raise RequestError(
                f"--framework {framework}: on this machine its environment is for CPUs only; name an "
                f"interpreter that computes on the {platform.upper()} with --python"
            )
        from backends.local import environments  # few launches need one

        return str(environments.environment_python(framework))

    def make(self, framework: str, say: Say) -> None:
        from backends.local import environments

        environments.ensure(framework, say)


def _refuse_to_restore(_say: Say, _sleep: Sleep) -> None:
    raise RequestError("this machine's agent does not answer; the reason is above")


def _terminal(target: Target, _index: int | None, arguments: Sequence[str]) -> int:
    if not arguments:
        target.require("ssh")
    sys.stdout.flush()
    os.execv(arguments[0], [*arguments])


def on_this_machine(
    *, hosts: str | None, platform: str, python: str | None = None, runs: str | None = None
) -> Target:
    """Return this machine as so many hosts. runs: a folder or URL (default: $TPU_STACK_RUNS, else runs/ here).

    Raises:
        RequestError: it cannot be so many.
    """
    count = DEFAULT_HOSTS[platform] if hosts is None else _count(hosts)
    if platform != "cpu" and count > 1:
        raise RequestError(
            f"--hosts {count}: on this machine one process drives all its {platform.upper()}s; leave --hosts out"
        )
    target = local(count, platform, sorted(os.sched_getaffinity(0)), python)
    return target if runs is None else dataclasses.replace(target, **_place(runs, "--runs"))


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= MOST_HOSTS):
        raise RequestError(f"--hosts {text}: must be a whole number from 1 to {MOST_HOSTS} on this machine")
    return int(text)


def local(count: int, platform: str, processors: Sequence[int], python: str | None = None) -> Target:
    """Return this machine as `count` hosts, which share out `processors`."""
    cache_dir = user_cache_dir(os.environ)
    machine = socket.gethostname()
    hosts = tuple(
        Host(
            index=index,
            name=f"{machine}/{index}" if count > 1 else machine,
            internal_address=LOOPBACK,
            external_address=None,
            user=None,
            host_keys=(),
            reach="local",
        )
        for index in range(count)
    )
    one_slice = Slice(
        name=LOCAL,
        accelerator_type=platform,
        generation=platform,
        topology=str(count),
        zone=LOCAL,
        capacity="on-demand",
        origin=LOCAL,
        count=1,
        devices_per_host=gpus(os.environ, glob.glob(DEVICE_GLOBS["gpu"][0])) if platform == "gpu" else 1,
        hosts=hosts,
    )
    transports = (LocalTransport(),) * count
    agents = agents_here([host.name for host in hosts], cache_dir)
    storage = Storage(bucket_url=None, bucket_region=None, nfs_source=None, nfs_mount=None)
    return Target(
        name=LOCAL,
        pulumi_stack=None,
        inventory=Inventory(
            stack=LOCAL, project=None, storage=storage, images={}, gateway=None, slices=(one_slice,)
        ),
        slice=one_slice,
        hosts=hosts,
        platform=platform,
        transports=transports,
        agents=agents,
        python=python or sys.executable,
        python_is_given=python is not None,
        **_place(os.environ.get(RUNS) or str(CHECKOUT / "runs"), f"${RUNS}"),
        agent_root=str(cache_dir / "agent"),
        cache_dir=str(cache_dir),
        cpus=shares(processors, count) if platform == "cpu" else (None,) * count,
        coordinator_host=LOOPBACK,
        backend=HostBackend(
            capabilities=CAPABILITIES,
            environments=MachineEnvironments(),
            agents=agents,
            transports=transports,
            agents_for=agents_for,
            restore=_refuse_to_restore,
            deploy=lambda _target: True,  # it has what this checkout has
            hold=lambda: contextlib.nullcontext(lambda: None),
            terminal=_terminal,
        ),
    )


def gpus(environ: Mapping[str, str], nodes: Sequence[str]) -> int:
    """Return how many GPUs this machine lets its processes see; 1 where that is none, which the preflight finds."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    visible = len(nodes) if chosen is None else len([index for index in chosen.split(",") if index.strip()])
    return max(1, min(visible, len(nodes)))


def agents_for(described: Mapping[str, Any]) -> tuple[Agent, ...]:
    """Return the agents of a run on this machine, which has the hosts of every run that was started on it."""
    return agents_here([host["name"] for host in described["hosts"]], Path(described["cache_dir"]))


def _place(runs: str, option: str) -> dict[str, Any]:
    """Return where runs are kept, and how this machine reaches them.

    Raises:
        RequestError: it is a URL of a kind that runs are not kept at, or a path that is all but a URL.
    """
    if problem := unwritable(runs):
        raise RequestError(f"{option} {runs}: {problem}")
    runs = runs.removeprefix("file://")
    if is_url(runs):
        from launch.remote_files import Buckets

        return {"runs_url": runs.rstrip("/"), "files": Buckets()}
    return {"runs_url": os.path.abspath(os.path.expanduser(runs)), "files": DiskFiles()}


def agents_here(hosts: Sequence[str], cache_dir: Path) -> tuple[Agent, ...]:
    """Return the agents of hosts that are this machine: they share its one agent directory."""
    link = ProcessLink(LocalTransport(), (sys.executable, "-S", "-E", str(AGENT)))
    return tuple(Agent(host=host, link=link, root=str(cache_dir / "agent")) for host in hosts)


def shares(processors: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Share out processors to `count` hosts: all are used, and none twice while there are enough."""
    if count >= len(processors):
        return tuple((processors[index % len(processors)],) for index in range(count))
    bounds = [len(processors) * index // count for index in range(count + 1)]
    return tuple(tuple(processors[bounds[index] : bounds[index + 1]]) for index in range(count))
