"""A user's command on every host of a target, and what it came to."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from contracts.errors import RequestError
from launch.errors import HostError
from launch.output import Grouped, Prefixed, Terminal, ranges
from launch.printable import printable
from launch.target import Target
from launch.transport import Show, Stream, Transport

LOOK_S = 0.5
"""How often it is looked whether a host cannot be reached, while the others are at work."""

Ending = int | HostError | None
"""A command's exit code (None: its time was over), or why the host did not run it to its end."""


def argv_of(words: Sequence[str], line: str) -> tuple[str, ...]:
    """The command that a user means.

    Several words are a command and its arguments, and reach it as they are. A single word, or `line`, is a line for
    the host's sh: "cd /tmp && ls *.log".

    Raises:
        RequestError: there is no command, or two.
    """
    if bool(words) == bool(line):
        raise RequestError(
            "say one command: `fab run -- COMMAND ARGUMENT …`, or "
            "`fab run --command 'cd /tmp && ls *.log'` for a line of shell"
        )
    return tuple(words) if len(words) > 1 else ("sh", "-c", line or words[0])


def run(target: Target, argv: Sequence[str], *, grouped: bool, timeout_s: float | None) -> int:
    """Run a command on every host at once and print what it says; it ends when this is interrupted.

    The exit code for the user: 0 where all were 0, 2 where no host ran it, else 1.
    """
    hosts, terminal = [host.index for host in target.hosts], Terminal()
    output = (Grouped if grouped else Prefixed)(hosts, terminal)
    heard: set[int] = set()
    names = {host.index: host.name for host in target.hosts}
    futures: dict[int, Future[int | None]] = {}
    endings: dict[int, Ending] = {}
    try:
        # Within: whoever interrupts when some hosts have begun means those too.
        for host, transport in zip(hosts, target.transports, strict=True):
            futures[host] = _begin(transport, argv, _noting(host, heard, output.show(host)), timeout_s)
        while len(endings) < len(futures) and terminal.fault is None:
            concurrent.futures.wait(
                [future for host, future in futures.items() if host not in endings], timeout=LOOK_S
            )
            for host, future in futures.items():
                if host not in endings and future.done() and terminal.fault is None:
                    endings[host] = ending = _ending(names[host], future)
                    if isinstance(ending, HostError):
                        print(f"[{host}] {ending}", file=sys.stderr)
    finally:
        for future in futures.values():
            future.cancel()
        with contextlib.suppress(OSError):
            output.end()
    if terminal.fault is not None:
        raise terminal.fault
    for text in verdict(endings, timeout_s):
        print(text, file=sys.stderr)
    return exit_code(endings, heard)


def _begin(
    transport: Transport, argv: Sequence[str], show: Show, timeout_s: float | None
) -> Future[int | None]:
    try:
        return transport.stream(argv, show, timeout_s=timeout_s)
    except (OSError, HostError) as error:
        future: Future[int | None] = Future()
        future.set_exception(error)
        return future


def _noting(host: int, heard: set[int], show: Show) -> Show:
    def noting(stream: Stream, data: bytes) -> None:
        heard.add(host)
        show(stream, data)

    return noting


def _ending(name: str, future: Future[int | None]) -> Ending:
    try:
        return future.result()
    except HostError as error:
        return HostError(host=name, reason=printable(error.reason), remedy=printable(error.remedy))
    except OSError as error:
        return HostError(host=name, reason=printable(str(error)))


def exit_code(endings: Mapping[int, Ending], heard: set[int]) -> int:
    """0 where the command ended with 0 everywhere, 2 where it ran nowhere, else 1. heard: hosts that said something."""
    if all(isinstance(each, HostError) for each in endings.values()) and not heard:
        return 2
    return 0 if all(each == 0 for each in endings.values()) else 1


def verdict(endings: Mapping[int, Ending], timeout_s: float | None) -> list[str]:
    """What there is to say of how it ended on which hosts; nothing where all is well."""
    hosts_of: dict[str, list[int]] = collections.defaultdict(list)
    for host, ending in sorted(endings.items()):
        if not isinstance(ending, HostError):
            hosts_of[_said(ending, timeout_s)].append(host)
    gone = [host for host, ending in endings.items() if isinstance(ending, HostError)]
    lines = []
    if any(code != "0" for code in hosts_of):
        lines.append(
            "exit codes: " + "  ".join(f"[{ranges(hosts)}] {code}" for code, hosts in hosts_of.items())
        )
    if gone:
        lines.append(f"{len(gone)} of {len(endings)} hosts did not run it to its end: {ranges(gone)}")
    return lines


def _said(code: int | None, timeout_s: float | None) -> str:
    if code is None:
        return f"not done within {timeout_s:g} s, ended"
    if code >= 0:
        return str(code)
    known = {each.value: each.name for each in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"
