"""A program whose standard input and output are a connection: `gcloud … start-iap-tunnel --listen-on-stdin`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Sequence

LINES_KEPT = 20
LONGEST_LINE_BYTES = 4096
END_S = 2.0


class Proxy:
    """The running program. `socket` is our end; the program has the other one itself, so no byte goes through here."""

    def __init__(self, process: asyncio.subprocess.Process, ours: socket.socket) -> None:
        self.socket = ours
        self._process = process
        self._said: deque[str] = deque(maxlen=LINES_KEPT)
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, argv: Sequence[str]) -> Proxy:
        """Raises OSError: there is no such program."""
        ours, its = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=its.fileno(),
                stdout=its.fileno(),
                stderr=asyncio.subprocess.PIPE,
                limit=LONGEST_LINE_BYTES,
                start_new_session=True,  # Ctrl-C in the launcher's terminal is not meant for a connection
            )
        except BaseException:
            ours.close()
            raise
        finally:
            its.close()
        ours.setblocking(False)
        return cls(process, ours)

    async def ended(self) -> tuple[int, str] | None:
        """Exit code and last words, where it has ended or does so in a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                code = await self._process.wait()
                await asyncio.shield(self._listening)
                return code, self._said[-1] if self._said else ""
        return None

    async def stop(self) -> None:
        """End the program, where it still runs."""
        self.socket.close()
        try:
            if await self.ended() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(
                        self._process.pid, signal.SIGKILL
                    )  # gcloud is a shell that starts another program
                await self._process.wait()
        finally:
            self._listening.cancel()

    async def _listen(self) -> None:
        """Its messages are kept, not shown: a warning of it is no news for a user."""
        assert self._process.stderr is not None
        while piece := await self._process.stderr.read(LONGEST_LINE_BYTES):
            self._said.extend(line for line in piece.decode(errors="replace").splitlines() if line.strip())
