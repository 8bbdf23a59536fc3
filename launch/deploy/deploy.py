"""`fab deploy`: the steps of a target's hosts, carried out on all of them at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from launch import container
from launch.deploy import docker_engine, docker_login, locks, python_environment, report
from launch.deploy.answers import Answer, Outcome
from launch.deploy.deployment import Deployment
from launch.deploy.locks import Locks
from launch.deploy.python_environment import Lock
from launch.deploy.reach import reach
from launch.deploy.steps import Step, certificates, comforts, first_boot, folders, huge_pages, share
from launch.display import say, terminal
from launch.errors import HostError
from launch.jobs import CHECKOUT
from launch.plan import MODULES_OF_STACK
from launch.target import Target

Say = Callable[[str], None]


def deploy(target: Target, *, with_comforts: bool, runtime: str | None = None, stack: str = "jax") -> int:
    """Prepare every host and say what changed; 0 where all are ready.

    runtime: as `launch.container.choose` takes it: hosts whose runs are in containers need Docker, others a Python.

    Raises:
        RequestError: this checkout has no lock for the target's platform, or there is no such runtime or no image.
        HostsError: no host could be reached.
    """
    console = terminal()
    contained = container.choose(target, stack, runtime, container.built_here) is not None
    needed = None if contained else locks.needed(target, CHECKOUT)
    reached = reach(target, say(console))
    lock = needed.lock if needed else None
    wanted = steps(target, stack, with_comforts=with_comforts, contained=contained, lock=lock)
    outcomes = _carry_out(target, wanted, needed, reached, say(console))
    console.print(report.table(outcomes))
    say(console)(report.verdict(outcomes))
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def steps(
    target: Target, stack: str, *, with_comforts: bool, contained: bool, lock: Lock | None
) -> tuple[Step, ...]:
    """What each host of a target needs, in the order in which it is looked at. contained: runs are in containers."""
    modules = MODULES_OF_STACK[stack]
    own = [target.agent_root, target.cache_dir]
    if target.is_local:
        return (
            folders([*own, target.runs_url]),
            python_environment.found(target.python, modules, "`make install`"),
        )
    mounted = target.mount is not None
    needs = ("share",) if mounted else ()
    places = [*own, target.runs_url] if target.runs_on_share else own
    return (
        first_boot(),
        certificates(),
        *((share(target.mount, target.inventory.storage.nfs_source),) if target.mount is not None else ()),
        folders(places, needs),
        *((huge_pages(),) if target.platform == "tpu" else ()),
        *((docker_engine.step(),) if contained else ()),
        *docker_login.steps(docker_login.registries(target.inventory.images.values())),
        *(() if contained else (_python(target, modules, lock),)),
        *((comforts(),) if with_comforts else ()),
    )


def _python(target: Target, modules: Sequence[str], lock: Lock | None) -> Step:
    if lock is not None:
        return python_environment.made(modules, lock)
    remedy = "install what jobs need there, or leave --python out to have it made"
    return python_environment.found(target.python, modules, remedy)


def _carry_out(
    target: Target,
    wanted: Sequence[Step],
    needed: Locks | None,
    reached: Sequence[HostError | None],
    tell: Say,
) -> list[Outcome]:
    # The local target's hosts are one machine.
    errors = locks.install(target.agents, needed, reached)[: 1 if target.is_local else None]
    lock = threading.Lock()

    def begin(index: int, error: HostError | None) -> Deployment:
        name = target.hosts[index].name

        def show(answer: Answer) -> None:
            if answer.state in ("doing", "changed", "warned", "failed"):
                with lock:
                    tell(f"[{name}] {answer.step}: {answer.message}")

        return Deployment(name, wanted, show, error).begin(target.transports[index])

    begun = [begin(index, error) for index, error in enumerate(errors)]
    try:
        return [each.outcome() for each in begun]
    finally:
        for each in begun:
            each.end()
