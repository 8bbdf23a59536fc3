"""`fab run`: runs a command on every host of a target and prints each line behind its host's index, or equal output
once."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from contracts.errors import RequestError
from launch.hosts import HostError, Show, Stream, Transport
from launch.output import Lines
from launch.targets import Target

POLL_S = 0.5
"""How often hosts that cannot be reached are reported while the others work."""

Ending = int | HostError | None
"""A command's exit code (None: the time limit was reached), or why the host did not complete it."""


def parse_command(arguments: Sequence[str], line: str) -> tuple[str, ...]:
    """Return the command that the user typed.

    Several words are a command and its arguments, and reach it unchanged. A single word, or `line`, is a line for
    the host's sh: "cd /tmp && ls *.log".

    Raises:
        RequestError: there is no command, or two.
    """
    if bool(arguments) == bool(line):
        raise RequestError(
            "say one command: `fab run -- COMMAND ARGUMENT …`, or "
            "`fab run --command 'cd /tmp && ls *.log'` for a line of shell"
        )
    return tuple(arguments) if len(arguments) > 1 else ("sh", "-c", line or arguments[0])


def run(target: Target, argv: Sequence[str], *, grouped: bool, timeout_s: float | None) -> int:
    """Run a command on all hosts at once and print its output; an interrupt ends it on the hosts.

    The exit code for the user: 0 if all were 0, 2 if no host ran it, else 1.
    """
    output = Output([host.index for host in target.hosts], grouped=grouped)
    futures: dict[int, Future[int | None]] = {}
    endings: dict[int, Ending] = {}
    try:
        # Inside, so that an interrupt while hosts start ends the command on those that have started.
        for host, transport in zip(target.hosts, target.transports, strict=True):
            futures[host.index] = _start(transport, argv, output.show(host.index), timeout_s)
        names = {host.index: host.name for host in target.hosts}
        while len(endings) < len(futures) and output.error is None:
            pending = {index: future for index, future in futures.items() if index not in endings}
            concurrent.futures.wait(pending.values(), timeout=POLL_S)
            for index, future in pending.items():
                if future.done() and output.error is None:
                    endings[index] = ending = _ending(names[index], future)
                    if isinstance(ending, HostError):
                        print(f"[{index}] {ending}", file=sys.stderr)
    finally:
        for future in futures.values():
            future.cancel()
        with contextlib.suppress(OSError):
            output.end()
    if output.error is not None:
        raise output.error
    for text in verdict(endings, timeout_s):
        print(text, file=sys.stderr)
    return exit_code(endings, output.active)


def _start(
    transport: Transport, argv: Sequence[str], show: Show, timeout_s: float | None
) -> Future[int | None]:
    try:
        return transport.stream(argv, show, timeout_s=timeout_s)
    except (OSError, HostError) as error:
        future: Future[int | None] = Future()
        future.set_exception(error)
        return future


def _ending(name: str, future: Future[int | None]) -> Ending:
    try:
        return future.result()
    except (HostError, OSError) as error:
        return HostError.from_error(name, error)


def exit_code(endings: Mapping[int, Ending], active: set[int]) -> int:
    """Return 0 if the command ended with 0 everywhere, 2 if it ran nowhere, else 1. active: hosts with output."""
    if all(isinstance(ending, HostError) for ending in endings.values()) and not active:
        return 2
    return 0 if all(ending == 0 for ending in endings.values()) else 1


def verdict(endings: Mapping[int, Ending], timeout_s: float | None) -> list[str]:
    """Return lines about hosts on which the command did not end with 0."""
    hosts_by_code: dict[str, list[int]] = collections.defaultdict(list)
    for host, ending in sorted(endings.items()):
        if not isinstance(ending, HostError):
            hosts_by_code[_code_text(ending, timeout_s)].append(host)
    incomplete = [host for host, ending in endings.items() if isinstance(ending, HostError)]
    lines = []
    if any(code != "0" for code in hosts_by_code):
        codes = "  ".join(f"[{ranges(hosts)}] {code}" for code, hosts in hosts_by_code.items())
        lines.append(f"exit codes: {codes}")
    if incomplete:
        count = f"{len(incomplete)} of {len(endings)}"
        lines.append(f"{count} hosts did not run it to its end: {ranges(incomplete)}")
    return lines


def _code_text(code: int | None, timeout_s: float | None) -> str:
    if code is None:
        return f"not done within {timeout_s:g} s, ended"
    if code >= 0:
        return str(code)
    names = {member.value: member.name for member in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


def ranges(indices: Sequence[int]) -> str:
    """Return indices of hosts as --hosts takes them: "0-3,5"."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], index]
        else:
            runs.append([index])
    return ",".join("-".join(map(str, run)) for run in runs)


class Output:
    """Prints whole lines of several hosts, which deliver them in threads of their own.

    Each line is printed as it comes, behind "[3] " (of a single host without that); grouped: all at the end, and equal
    output once, behind "[0-3,5] ". active: the hosts that have printed something. error: why this process cannot print
    any more, such as a pipe whose reader has gone.
    """

    def __init__(self, hosts: Sequence[int], *, grouped: bool = False) -> None:
        self.active: set[int] = set()
        self.error: OSError | None = None
        self._lock = threading.Lock()
        self._prefixes = {host: f"[{host}] " if len(hosts) > 1 else "" for host in hosts}
        self._cuts: dict[tuple[int, Stream], Lines] = collections.defaultdict(Lines)
        self._lines: dict[int, dict[Stream, list[str]]] | None = (
            {host: {"out": [], "err": []} for host in hosts} if grouped else None
        )

    def show(self, host: int) -> Show:
        """Return the function that takes the output of one host."""

        def show(stream: Stream, data: bytes) -> None:
            self.active.add(host)
            self._take(host, stream, self._cuts[host, stream].feed(data))

        return show

    def _take(self, host: int, stream: Stream, lines: Sequence[str]) -> None:
        if self._lines is not None:
            self._lines[host][stream] += lines
        elif lines:
            self._print(stream, self._prefixes[host], lines)

    def end(self) -> None:
        """Print what had no newline, and all that is grouped. Raises OSError: it cannot be printed."""
        for (host, stream), cut in list(self._cuts.items()):
            self._take(host, stream, cut.end())
        groups: list[tuple[list[int], dict[Stream, list[str]]]] = []
        for host, streams in (self._lines or {}).items():
            equal = next((hosts for hosts, same in groups if same == streams), None)
            if equal is None:
                groups.append(([host], streams))
            else:
                equal.append(host)
        for hosts, streams in groups:
            for stream, lines in streams.items():
                self._print(stream, f"[{ranges(hosts)}] ", lines)

    def _print(self, stream: Stream, prefix: str, lines: Sequence[str]) -> None:
        with self._lock:
            if self.error is not None:
                raise self.error
            file = sys.stdout if stream == "out" else sys.stderr
            try:
                file.write("".join(f"{prefix}{line}\n" for line in lines))
                file.flush()
            except OSError as error:
                self.error = error
                raise
