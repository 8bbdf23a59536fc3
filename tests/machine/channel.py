"""How a machine under QEMU is spoken to: one JSON object a line, over a socket of this machine."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

ANSWER_S = 60


class GuestError(RuntimeError):
    """The machine did not do what it was told within the time, with the end of its console."""


class Channel:
    """One JSON object a line, an answer to each command: the guest agent's protocol and that of QEMU itself."""

    def __init__(self, path: Path, limit_s: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(limit_s)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise
        self._lines = self._socket.makefile("rb")

    def ask(self, command: str, **arguments: object) -> Any:
        request = {"execute": command, "arguments": arguments}
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        while True:
            line = self._lines.readline()
            if not line:
                raise ConnectionError(f"{command}: QEMU has ended")
            answer = json.loads(line)
            if "error" in answer:
                raise GuestError(f"{command}: {answer['error']}")
            if "return" in answer:
                return answer["return"]

    def find_agent(self) -> None:
        """What an earlier channel left unread is skipped: the answer to look for carries our own number."""
        number = int.from_bytes(os.urandom(4))
        # 0xFF ends whatever the agent has half read; it is documented to begin its next answer with one too.
        self._socket.sendall(
            b"\xff" + json.dumps({"execute": "guest-sync-delimited", "arguments": {"id": number}}).encode()
        )
        while True:
            line = self._lines.readline()
            if not line:
                raise ConnectionError("QEMU has ended")
            if line.lstrip(b"\xff").strip() == json.dumps({"return": number}).encode():
                # Found at once or not at all; but on a busy machine an answer to a command may take its time.
                self._socket.settimeout(ANSWER_S)
                return

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
