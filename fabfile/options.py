"""What every task has: the options about hosts, how their values are read, and how it ends."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import fabric.tasks

from contracts.errors import DONE, FAILED, INTERRUPTED, UNAVAILABLE, WRONG_REQUEST, RequestError, exit_code_of

if TYPE_CHECKING:
    from contracts.inventory import Inventory
    from launch.runs import Run
    from launch.targets import Given, Target, Wanted

STACK = "where: local (this machine), a Pulumi stack, an inventory file, or rehearsal (default: $TPU_STACK)"
SLICE = "a slice of the stack, by name (default: the only one)"
HOSTS = "which hosts, such as 0-3,5 (default: all; on this machine: how many)"
RUNTIME = "bare, or docker: in the framework's image (default: docker where the stack has one)"
ACCESS = "a container's access to its host: devices (only the TPU's nodes), or privileged"
SLICES = {"stack": STACK, "slice": SLICE}
WHERE = {**SLICES, "hosts": HOSTS}
REHEARSAL = "rehearsal"
STDOUT = 1

opened: contextvars.ContextVar[dict[str, Target]] = contextvars.ContextVar("opened")
"""The stacks that the task has been about so far, by name."""


def target(
    stack: str = "",
    slice: str = "",
    hosts: str = "",
    *,
    platform: str = "",
    python: str = "",
    runs: str = "",
    like: Run | None = None,
) -> Target:
    """Return the target that the options name; an empty option was not given. like: a run that is resumed there.

    Raises:
        RequestError: there is no such stack, slice or host, or no rehearsal is up.
    """
    from backends.targets import resolve

    found = resolve(wanted(stack, slice, hosts, platform=platform, python=python, runs=runs), like)
    if found.capabilities.is_billed and (stacks := opened.get(None)) is not None:
        stacks[found.name] = found
    if found.inventory.keeper is None:
        return found
    from keeper import store  # most stacks have none

    return dataclasses.replace(found, alone=functools.partial(store.alone, found))


def any_target(stack: str = "", slice: str = "", *, runs: str = "") -> Target:
    """Return the target of one of the slices that may be meant, for what concerns the whole stack."""
    from backends.targets import inventory_of, of_each, resolve

    asked = wanted(stack, slice, runs=runs)
    return next(iter(of_each(inventory_of(asked), asked)), None) or resolve(asked)


def wanted(
    stack: str = "", slice: str = "", hosts: str = "", *, platform: str = "", python: str = "", runs: str = ""
) -> Wanted:
    """Return what the options ask for, before anything is looked up. Raises RequestError: no rehearsal is up."""
    from launch.targets import Wanted

    chosen = stack or os.environ.get("TPU_STACK") or "local"
    return Wanted(
        stack=chosen,
        slice=slice or None,
        hosts=hosts or None,
        platform=platform or None,
        python=python or None,
        runs=runs or None,
        given=_rehearsal() if chosen == REHEARSAL else None,
    )


def inventory(stack: str = "") -> Inventory:
    """Return the inventory of a stack, whether it has hosts or not. Raises RequestError: there is no such stack."""
    from launch import inventories

    asked = wanted(stack)
    if asked.stack == "local":
        raise RequestError("this machine by itself has no inventory; say --stack as well")
    return asked.given.inventory if asked.given else inventories.read(asked.stack)


def after_dashes(c: Any) -> list[str]:
    """Return the words behind `--` on the command line, as they were typed."""
    return list(c.after_dashes)


def _rehearsal() -> Given:
    """Return the rehearsal that is up, and let its stand-ins replace Google's programs and bucket for this process."""
    from launch.inventories import parse
    from launch.targets import Given
    from rehearsal import state

    try:
        found = state.open_rehearsal()
    except state.RehearsalError as error:
        raise RequestError(f"--stack {REHEARSAL}: {error}") from None
    os.environ.update(found.environment)
    return Given(
        folder=state.folder_of(os.environ),
        inventory=parse(found.inventory_json, "the rehearsal"),
        platform=found.platform,
        python=found.python,
        stand_in_devices=tuple(found.device_globs),
    )


class Command(fabric.tasks.Task):  # type: ignore[misc]  # Fabric has no types
    """A task of which -h means --help, and not the first option with an h; a dash is no letter."""

    def arg_opts(self, name: str, default: str, taken_names: set[str]) -> dict[str, Any]:
        opts: dict[str, Any] = super().arg_opts(name, default, {*taken_names, "h", "-"})
        return opts


def with_options_of(
    body: Callable[..., Any], *, without: Collection[str]
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a task that takes `**given` the options of another one besides its own, so that they are said once."""

    def extended(own: Callable[..., int]) -> Callable[..., int]:
        _, *theirs = inspect.signature(body).parameters.values()
        mine = [
            each for each in inspect.signature(own).parameters.values() if each.kind is not each.VAR_KEYWORD
        ]
        left_out = {*without, *(each.name for each in mine)}
        added = [each for each in theirs if each.name not in left_out]
        own.__signature__ = inspect.Signature([*mine, *added])  # type: ignore[attr-defined]
        return own

    return extended


task = functools.partial(fabric.tasks.task, klass=Command)


def port(text: str) -> int | None:
    """Return the port in the text of --port, 0 for any that is free; None if the option was not given.

    Raises:
        RequestError: the text is no port.
    """
    if text and not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < 2**16):
        raise RequestError(f"--port {text}: must be a whole number from 0 to {2**16 - 1}")
    return int(text) if text else None


def whole(option: str, text: str, *, least: int) -> int | None:
    """Return the number in an option's text; None if the option was not given.

    Invoke would read numbers itself, but answers what is none with a traceback, and takes 0 for "not given".

    Raises:
        RequestError: the text is no whole number of at least `least`.
    """
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise RequestError(f"{option} {text}: must be a whole number of at least {least}")
    return int(text)


GO_ON = ("train", "recover")
"""The commands whose runs go on when they are ended, unless by Ctrl-C: docs/operations.md."""


@contextlib.contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """Take the signals of a service manager, `timeout` or a closed terminal as Ctrl-C within it, so that nothing is
    left behind. A signal that is ignored (nohup) stays so."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def reported[**P](body: Callable[P, int]) -> Callable[P, None]:
    """Wrap a task for Fabric: its return value becomes the exit code, its known errors become messages.

    Exit codes: 0 done; 1 the job failed; 2 the request was wrong, nothing was started; 69 something outside was away;
    130 interrupted.
    """

    @functools.wraps(body)
    def task(*args: P.args, **kwargs: P.kwargs) -> None:
        stacks: dict[str, Target] = {}
        opened.set(stacks)
        ended = contextlib.nullcontext() if body.__name__ in GO_ON else ended_as_interrupted()

        def carry_out() -> int:
            with ended:
                return body(*args, **kwargs)

        code = exit_code(carry_out)
        _name_idle_slices(stacks.values())
        if code:
            sys.exit(code)

    return task


def exit_code(carry_out: Callable[[], int]) -> int:
    """Carry something out, and return its exit code; a known error becomes a message, and its code."""
    try:
        from launch.hosts import HostError, HostsError

        code = carry_out()
        sys.stdout.flush()  # what cannot be written is found here, and not at the end of Python
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except RequestError as error:
        return _complain(f"error: {error}", exit_code_of(error))
    except (HostsError, HostError) as error:
        is_outage = isinstance(error, HostError) and error.is_outage
        return _complain(f"error: {error}", UNAVAILABLE if is_outage else WRONG_REQUEST)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # the reader of our output went away
        return DONE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"error: {where}{error.strerror or error}", FAILED)
    return code


def _complain(message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # where it cannot be written, the exit code says it
        print(message, file=sys.stderr, flush=True)
    return code


def _name_idle_slices(stacks: Iterable[Target]) -> None:
    """Say on standard error which slices of the stacks that the task was about cost and are not used."""
    for target in stacks:
        from console import idle

        with contextlib.suppress(OSError, KeyboardInterrupt):
            for line in idle.remarks(target):
                print(line, file=sys.stderr)
