"""Files on a host's disk, or on a share that it mounts, read and written through its agent."""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Sequence
from typing import Any

from contracts.files import beginning
from launch.agents import Agent
from launch.errors import HostError

CHUNK_BYTES = 4 * 2**20
"""Of each file, in one answer."""


@dataclasses.dataclass(frozen=True)
class HostFiles:
    """`contracts.files.Files` of hosts that share them: the first that answers is asked.

    Text only: what a run's directory holds for its readers is text.

    Raises (on any call):
        HostError: no host answers, or the first that does refuses.
    """

    agents: tuple[Agent, ...]

    def read(self, paths: Sequence[str]) -> builtins.list[bytes | None]:
        if not paths:
            return []
        answer = self._ask("read", {"paths": [*paths], "offsets": None, "limit_bytes": CHUNK_BYTES})
        return [self._rest(path, file) for path, file in zip(paths, answer["files"], strict=True)]

    def _rest(self, path: str, file: dict[str, Any]) -> bytes | None:
        """A whole file, the first piece of which has been read."""
        if file["text"] is None:
            return None
        pieces = [file["text"].encode()]
        while file["next_offset"] < file["size"]:
            file = self._piece(path, file["next_offset"])
            if not file["text"]:
                break
            pieces.append(file["text"].encode())
        return b"".join(pieces)

    def read_from(self, path: str, offset: int) -> tuple[bytes, int] | None:
        file = self._piece(path, offset)
        if file["text"] is not None and offset > file["size"]:
            file = self._piece(path, beginning(offset, file["size"]))
        return None if file["text"] is None else (file["text"].encode(), int(file["offset"]))

    def write(self, path: str, data: bytes) -> None:
        self._ask("write", {"path": path, "text": data.decode()})

    def remove(self, path: str) -> None:
        self._ask("remove", {"path": path})

    def list(self, path: str) -> builtins.list[str]:
        return [str(name) for name in self._ask("list", {"path": path})["names"]]

    def _ask(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        first: HostError | None = None
        for agent in self.agents:
            try:
                return agent.ask(verb, request)
            except HostError as error:
                first = first or error
        raise first or HostError(host="", reason="there is no host to ask")

    def _piece(self, path: str, offset: int) -> dict[str, Any]:
        answer = self._ask("read", {"paths": [path], "offsets": [offset], "limit_bytes": CHUNK_BYTES})
        found: dict[str, Any] = answer["files"][0]
        return found
