"""What a command says on many hosts, as a user reads it: each line behind its host's index, or equal hosts once."""

from __future__ import annotations

import collections
import hashlib
import sys
import threading
from collections.abc import Sequence
from typing import TextIO

from launch.printable import Lines
from launch.transport import Show, Stream

KEPT_CHARACTERS = 2**20
"""Of each host's output, where it is grouped."""


def ranges(indices: Sequence[int]) -> str:
    """Indices of hosts as --hosts takes them: "0-3,5"."""
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
    """Each line as it comes, behind "[3] "; of a single host as it is."""

    def __init__(self, hosts: Sequence[int], terminal: Terminal) -> None:
        self._terminal = terminal
        self._prefix = {host: f"[{host}] " if len(hosts) > 1 else "" for host in hosts}
        self._cuts: dict[tuple[int, Stream], Lines] = collections.defaultdict(Lines)

    def show(self, host: int) -> Show:
        """What takes the output of one host."""

        def show(stream: Stream, data: bytes) -> None:
            if lines := self._cuts[host, stream].feed(data):
                self._terminal.write(stream, self._prefix[host], lines)

        return show

    def end(self) -> None:
        """Nothing more comes: write what had no newline."""
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
    """At the end, hosts that said the same once: "[0-3,5] …"."""

    def __init__(self, hosts: Sequence[int], terminal: Terminal) -> None:
        self._terminal = terminal
        self._kept = {host: _Kept() for host in hosts}

    def show(self, host: int) -> Show:
        """What takes the output of one host."""
        return self._kept[host].take

    def end(self) -> None:
        """Nothing more comes: write it all."""
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
