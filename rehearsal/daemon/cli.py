"""What a person types behind `fab rehearsal`: up, down, status, env, acts, or a fault.

`up` starts the daemon in the background and follows it until it is ready; `down` takes everything down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import filelock

from contracts.aliases import Say
from rehearsal import state
from rehearsal.daemon.control_socket import ask
from rehearsal.daemon.fault_commands import COMMANDS, FaultRequest
from rehearsal.engine import MARK, end_marked
from rehearsal.machines.docker_engine import MachinesError, connect
from rehearsal.machines.guardian import commands_of, rehearsals, remove_everything
from rehearsal.machines.host_image import HostKind
from rehearsal.state import RehearsalError, State

OWNER_VARIABLE = "TPU_STACK_REHEARSAL_OWNER"
LOG = "log"
PROBLEM = "error: "  # how the daemon's last word begins where it has to give up
SOCKET_FOLDER = "tpu-stack-rehearsal-"
READY_LIMIT_S = 3600.0  # the first time Pulumi's command line and the hosts' image are built
DESTROY_LIMIT_S = 300.0
END_LIMIT_S = 120.0
LOOK_AGAIN_S = 0.1

READY = (
    "the rehearsal is up. Now: fab deploy --stack rehearsal; fab train --job flax_mlm --stack rehearsal; and play: "
    "fab rehearsal acts. It goes by itself after a day; fab rehearsal down ends it"
)
READY_FOR_IMAGES = (
    "the rehearsal is up, with an image registry. Now: fab build --framework jax --platform cpu; fab push --stack"
    ' rehearsal --framework jax --platform cpu; eval "$(fab rehearsal env)"; pulumi up --yes; fab deploy; fab train'
    " --job flax_mlm; and play: fab rehearsal acts. It goes by itself after a day; fab rehearsal down ends it"
)
READY_AS_CLUSTER = (
    "the rehearsal is up, as a cluster. Now: fab train --job flax_mlm --stack rehearsal; and play: fab rehearsal acts."
    " It goes by itself after a day; fab rehearsal down ends it"
)
READY_WORDS: Mapping[HostKind, str] = {
    "plain": READY,
    "docker": READY_FOR_IMAGES,
    "kubernetes": READY_AS_CLUSTER,
}


Provisioning = Literal["queued", "compute"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpRequest:
    """The options of `up`. hosts: of all slices together. kind: of the hosts. keeper: whether the stack has one, and a
    gateway that starts it. slices, queue: of a cluster; queue: the name of a Kueue queue, empty for none.
    provisioning: how the slice of hosts is made: queued (by the Cloud TPU API) or compute (by Compute Engine)."""

    hosts: int = 1
    kind: HostKind = "plain"
    keeper: bool = False
    slices: int = 1
    queue: str = ""
    provisioning: Provisioning = "queued"


def carry_out(
    action: str, environ: Mapping[str, str], say: Say, *, request: UpRequest, fault: FaultRequest
) -> None:
    """request: of `up`. fault: what a fault takes. Raises RehearsalError."""
    folder = state.rehearsal_folder(environ)
    if action == "up":
        owner = environ.get(OWNER_VARIABLE)
        up(folder, request, say, owner=int(owner) if owner else None)
        say(READY_WORDS[request.kind])
    elif action == "down":
        if down(folder, say):
            say("the rehearsal is down")
        else:
            say(f"no rehearsal is up in {folder}, and nothing of it is left")
            for line in others(folder):
                say(line)
    elif action in LISTINGS:
        for line in LISTINGS[action](folder):
            say(line)
    elif action in COMMANDS or state.is_alive(folder):  # which knows whether it can do so
        socket_path = state.require(folder).socket
        say(str(ask(socket_path, "act", {"name": action, "asked": dataclasses.asdict(fault)})))
    else:
        raise RehearsalError(
            f'"{action}" is nothing that a rehearsal can do; choose one of '
            + ", ".join(dict.fromkeys(["up", "down", *LISTINGS, *COMMANDS, *_cluster_commands()]))
        )


def status(folder: Path) -> Iterator[str]:
    """The state of a rehearsal, in lines. Raises RehearsalError if none is up."""
    current = state.read(folder)
    if current is None or not state.is_alive(folder):
        state.require(folder)
        return
    report: Mapping[str, Any] = ask(current.socket, "status", {})
    yield f"rehearsal: {report['phase']}, {report['accelerator']} in {report['zone']}"
    yield f"  daemon: process {current.pid}, log {folder / LOG}"
    if report["registry"]:
        yield f"  image registry: {report['registry']}, here and on every host"
    for node in report["nodes"]:
        yield f"  slice {node['name'].rpartition('/')[2]}: {node['state']}"
    for index, host in enumerate(report["hosts"]):
        yield f"  host {index}: {host['name']} {host['address']} {host['is']}"
    if report["cluster"] is not None:
        yield from _cluster_lines(report["cluster"])
        return
    for name, reason in report["failed"].items():
        yield f"  {name}: {reason}; `fab rehearsal restart --host {name}` tries again"
    if report["phase"] == "ready" and not report["nodes"]:
        yield "  no slice now; `fab recover`, or `pulumi up --refresh`, makes it again"


def _cluster_lines(cluster_status: Mapping[str, Any]) -> Iterator[str]:
    for node in cluster_status["nodes"]:
        yield f"  {node['name']}: {node['is']}"
    for pod in cluster_status["pods"]:
        yield f"  pod {pod['name']} on {pod['node']}: {pod['is']}"
    if cluster_status["problem"]:
        yield f"  {cluster_status['problem']}"


def _cluster_commands() -> Mapping[str, Any]:
    """Imported where they are asked for: the client of Kubernetes takes a second."""
    from rehearsal.daemon.cluster_faults import CLUSTER_COMMANDS

    return CLUSTER_COMMANDS


def acts(_folder: Path) -> Iterator[str]:
    """Every fault, with what it does and which options it needs."""
    cluster_commands = _cluster_commands()
    wide = max(map(len, [*COMMANDS, *cluster_commands]))
    for title, commands in (("of hosts:", COMMANDS), ("of a cluster:", cluster_commands)):
        yield title
        for name, act in commands.items():
            needs = "".join(f" --{need}" for need in act.needs)
            yield f"  {name:<{wide}}  {act.help}{f'  [{needs.strip()}]' if needs else ''}"


def exports(folder: Path) -> Iterator[str]:
    """Exports for a shell, so that its `gcloud` and `pulumi` are the rehearsal's. Raises RehearsalError."""
    opened = state.open_rehearsal({**os.environ, state.FOLDER_VARIABLE: str(folder)})
    for name, value in {**opened.environment, "TPU_STACK": state.STACK}.items():
        yield f"export {name}={shlex.quote(value)}"


LISTINGS: Mapping[str, Callable[[Path], Iterator[str]]] = {"status": status, "env": exports, "acts": acts}


# --- up and down ----------------------------------------------------------------------------------------------------


def up(folder: Path, request: UpRequest, say: Say, *, owner: int | None = None) -> State:
    """Start a rehearsal, and return its state once it is ready. say: gets every step. owner: ends it by ending.

    Raises:
        RehearsalError: one is up already, or it could not be started.
        KeyboardInterrupt: after taking down what had been started.
    """
    with _exclusive(folder):
        if state.is_alive(folder):
            raise RehearsalError(
                f"a rehearsal is up already ({folder}); `fab rehearsal status` shows it, `fab rehearsal down` ends it"
            )
        clear(folder, say)
        return _started(folder, request, owner, say)


def _started(folder: Path, request: UpRequest, owner: int | None, say: Say) -> State:
    folder.mkdir(mode=0o700, parents=True)
    arguments = [str(folder), json.dumps(dataclasses.asdict(request)), *([str(owner)] if owner else [])]
    with (folder / LOG).open("wb") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "rehearsal.daemon.daemon", *arguments],
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return _until_ready(folder, daemon, say)
    except KeyboardInterrupt:
        say("interrupted: taking down what had been started …")
        _end(daemon.pid, lambda: daemon.poll() is not None)
        clear(folder, say)
        raise


def _until_ready(folder: Path, daemon: subprocess.Popen[bytes], say: Say) -> State:
    deadline = time.monotonic() + READY_LIMIT_S
    problem: list[str] = []  # the daemon's last words
    with (folder / LOG).open(encoding="utf-8", errors="replace") as log:
        while True:
            code = daemon.poll()
            for line in _lines(log):
                if problem or line.startswith(PROBLEM):
                    problem.append(line)
                else:
                    say(line)
            if code is not None:
                clear(folder, lambda _line: None)
                raise RehearsalError(
                    "\n".join(problem).removeprefix(PROBLEM) or "its daemon ended; its output is above"
                )
            current = state.read(folder)
            if current is not None and current.phase == "ready":
                daemon.returncode = 0  # it outlives this process, which Popen would otherwise complain of
                return current
            if time.monotonic() > deadline:
                _end(daemon.pid, lambda: daemon.poll() is not None)
                raise RehearsalError(
                    f"it was not ready after {READY_LIMIT_S / 60:.0f} min; its log: {folder / LOG}"
                )
            time.sleep(LOOK_AGAIN_S)


def down(folder: Path, say: Say) -> bool:
    """Destroys the stack through the engine, ends the daemon, removes what is left. Whether there was anything.

    Raises:
        RehearsalError: something could not be removed.
    """
    with _exclusive(folder):
        return _ended(folder, say)


def _ended(folder: Path, say: Say) -> bool:
    current = None
    with contextlib.suppress(RehearsalError):  # of another version: what it made is removed all the same
        current = state.read(folder)
    if current is not None and state.is_alive(folder):
        if current.phase == "ready":
            try:
                ask(current.socket, "destroy", {}, say=say, limit_s=DESTROY_LIMIT_S)
            except RehearsalError as error:
                say(f"warning: {error}; everything is removed all the same")
        _end(current.pid, lambda: not state.is_alive(folder))
    return clear(folder, say) or current is not None


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of a rehearsal: two that start or end it at once would remove each other's machines."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(f"{folder}.lock", timeout=0):
            yield
    except filelock.Timeout:
        raise RehearsalError(
            "another `fab rehearsal up` or `down` is under way; wait for it, or end it with Ctrl-C"
        ) from None


def others(folder: Path) -> Iterator[str]:
    """How each rehearsal that this Docker has is ended, but for the one in the folder."""
    try:
        client = connect()
    except MachinesError:
        return
    daemons = [Path(words[1]) for words in commands_of("rehearsal.daemon.daemon")]
    folders = {state.rehearsal_name(place): place for place in daemons}
    try:
        for name, is_watched in rehearsals(client).items():
            if name in folders:
                yield f"another is up: `{state.FOLDER_VARIABLE}={folders[name]} fab rehearsal down` ends it"
            elif is_watched:
                yield f"another program has {name}, and ends it"
            elif name != state.rehearsal_name(folder):
                remedy = f"{sys.executable} -m rehearsal.machines.guardian {name} < /dev/null"
                yield f"{name}: no process of this machine watches it; if it is nobody else's, `{remedy}` removes it"
    finally:
        client.close()


def clear(folder: Path, say: Say) -> bool:
    """Remove what an ended rehearsal has left, also one whose daemon was killed or whose folder somebody removed.
    Returns whether there was anything.

    Raises:
        RehearsalError: Docker cannot remove something.
    """
    is_there = folder.is_dir()
    end_marked(MARK, str(folder / "engine"))
    with contextlib.suppress(RehearsalError):
        current = state.read(folder)
        if current is not None and Path(current.socket).parent.name.startswith(SOCKET_FOLDER):
            shutil.rmtree(Path(current.socket).parent, ignore_errors=True)
    try:
        client = connect()
    except MachinesError as error:
        if not is_there:
            return False  # without Docker no rehearsal was here
        raise RehearsalError(str(error)) from None
    try:
        removed = remove_everything(state.rehearsal_name(folder), client)
    except MachinesError as error:
        raise RehearsalError(str(error)) from None
    finally:
        client.close()
    for line in removed:
        say(f"removed {line}")
    if is_there:
        shutil.rmtree(folder)
    return is_there or bool(removed)


def _end(process_id: int, ended: Callable[[], bool]) -> None:
    """SIGTERM, and SIGKILL where that does not help; a guardian then removes the machines."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, number)
        deadline = time.monotonic() + END_LIMIT_S
        while time.monotonic() < deadline:
            if ended():
                return
            time.sleep(LOOK_AGAIN_S)
    raise RehearsalError(f"process {process_id} does not end, even killed; see what it waits for")


def _lines(log: Any) -> Iterator[str]:
    """The new complete lines."""
    while True:
        start = log.tell()
        line = log.readline()
        if not line.endswith("\n"):
            log.seek(start)
            return
        yield line.rstrip("\n")
