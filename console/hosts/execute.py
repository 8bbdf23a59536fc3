"""`fab run`: a command on every host of a target, each line behind its host's index, or equal hosts once."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import hashlib
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TextIO

from contracts.errors import RequestError
from launch.hosts import HostError, Show, Stream, Transport
from launch.output import Lines
from launch.targets import Target

LOOK_S = 0.5
"""How often it is looked whether a host cannot be reached, while the others are at work."""

Ending = int | HostError | None
"""A command's exit code (None: its time was over), or why the host did not run it to its end."""


def argv_of(words: Sequence[str], line: str) -> tuple[str, ...]:
    """Return the command that the user typed.

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
    except (HostError, OSError) as error:
        return HostError.of(name, error)


def exit_code(endings: Mapping[int, Ending], heard: set[int]) -> int:
    """Return 0 if the command ended with 0 everywhere, 2 if it ran nowhere, else 1. heard: hosts with output."""
    if all(isinstance(each, HostError) for each in endings.values()) and not heard:
        return 2
    return 0 if all(each == 0 for each in endings.values()) else 1


def verdict(endings: Mapping[int, Ending], timeout_s: float | None) -> list[str]:
    """Return what there is to say of how the command ended, and where; nothing if all is well."""
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


KEPT_CHARACTERS = 2**20
"""Of each host's output, where it is grouped."""


def ranges(indices: Sequence[int]) -> str:
    """Return indices of hosts as --hosts takes them: "0-3,5"."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], index]
        else:
            runs.append([index])
    return ",".join("-".join(map(str, run)) for run in runs)


class Terminal:
    """Writes whole lines to this process's output and errors, for several threads.

    fault: why it cannot write any more, such as a pipe whose reader is gone.
    """

    def __init__(self) -> None:
        self.fault: OSError | None = None
        self._lock = threading.Lock()

    def write(self, stream: Stream, prefix: str, lines: Sequence[str]) -> None:
        """Raises OSError where it cannot be written, which `fault` then holds."""
        file = sys.stdout if stream == "out" else sys.stderr
        text = _encodable("".join(f"{prefix}{line}\n" for line in lines), file)
        with self._lock:
            if self.fault is not None:
                raise self.fault
            try:
                file.write(text)
                file.flush()
            except OSError as error:
                self.fault = error
                raise


def _encodable(text: str, file: TextIO) -> str:
    encoding = getattr(file, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class Prefixed:
    """Prints each line as it comes, behind "[3] "; of a single host as it is."""

    def __init__(self, hosts: Sequence[int], terminal: Terminal) -> None:
        self._terminal = terminal
        self._prefix = {host: f"[{host}] " if len(hosts) > 1 else "" for host in hosts}
        self._cuts: dict[tuple[int, Stream], Lines] = collections.defaultdict(Lines)

    def show(self, host: int) -> Show:
        """Return what takes the output of one host."""

        def show(stream: Stream, data: bytes) -> None:
            if lines := self._cuts[host, stream].feed(data):
                self._terminal.write(stream, self._prefix[host], lines)

        return show

    def end(self) -> None:
        """Write what had no newline; nothing more comes."""
        for (host, stream), cut in list(self._cuts.items()):
            if lines := cut.end():
                self._terminal.write(stream, self._prefix[host], lines)


class _Kept:
    """What one host said: all of it as a hash, and the beginning as it is."""

    def __init__(self) -> None:
        self._cuts: dict[Stream, Lines] = {"out": Lines(), "err": Lines()}
        self._hashes = {stream: hashlib.sha256() for stream in self._cuts}
        self.lines: dict[Stream, list[str]] = {"out": [], "err": []}
        self.left_out: dict[Stream, int] = {"out": 0, "err": 0}
        self._room = KEPT_CHARACTERS

    def take(self, stream: Stream, data: bytes) -> None:
        self._keep(stream, self._cuts[stream].feed(data))

    def end(self) -> None:
        for stream, cut in self._cuts.items():
            self._keep(stream, cut.end())

    def _keep(self, stream: Stream, lines: Sequence[str]) -> None:
        for line in lines:
            self._hashes[stream].update(f"{line}\n".encode(errors="surrogatepass"))
            if len(line) < self._room and not self.left_out[stream]:
                self._room -= len(line) + 1
                self.lines[stream].append(line)
            else:
                self.left_out[stream] += 1

    def sameness(self) -> tuple[bytes, ...]:
        """Equal for hosts that said the same, however much of it was kept."""
        return tuple(each.digest() for each in self._hashes.values())


class Grouped:
    """Prints all output at the end, and that of hosts that said the same only once: "[0-3,5] …"."""

    def __init__(self, hosts: Sequence[int], terminal: Terminal) -> None:
        self._terminal = terminal
        self._kept = {host: _Kept() for host in hosts}

    def show(self, host: int) -> Show:
        """Return what takes the output of one host."""
        return self._kept[host].take

    def end(self) -> None:
        """Write it all; nothing more comes."""
        groups: dict[tuple[bytes, ...], list[int]] = collections.defaultdict(list)
        for host, kept in self._kept.items():
            kept.end()
            groups[kept.sameness()].append(host)
        for hosts in groups.values():
            kept, prefix = self._kept[hosts[0]], f"[{ranges(hosts)}] "
            for stream in kept.lines:
                self._terminal.write(stream, prefix, kept.lines[stream])
                if left := kept.left_out[stream]:
                    kept_text = f"--group keeps {KEPT_CHARACTERS:,} characters of a host"
                    note = f"… {left:,} more lines were left out: {kept_text}"
                    self._terminal.write("err", prefix, [note])
