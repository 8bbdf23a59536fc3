"""The agent as it is sent to hosts: what begins it, and one archive that is named by its hash."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import shlex
import zipfile
from base64 import b64encode
from pathlib import Path

HOST = Path(__file__).resolve().parents[2] / "host"
PACKAGE = "agent"
# The oldest that a zip knows: the same code is the same archive on every day.
LONG_AGO = (1980, 1, 1, 0, 0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentCode:
    """loader: the program that a host begins with. answer: the line that brings the archive."""

    loader: str
    sha256: str
    answer: bytes

    def command_line(self, python: str, root: str) -> str:
        """What a host's login shell is told, so that it begins a session. Any shell reads the loader's digits alike."""
        begin = "import sys; exec(bytes.fromhex(sys.argv.pop(1)))"
        return shlex.join([python, "-S", "-E", "-c", begin, self.loader.encode().hex(), root, self.sha256])


@functools.cache
def agent_code(host: Path = HOST) -> AgentCode:
    """The agent of this checkout."""
    packed = archive({path.name: path.read_bytes() for path in (host / PACKAGE).glob("*.py")})
    return AgentCode(
        loader=(host / "loader.py").read_text(encoding="utf-8"),
        sha256=hashlib.sha256(packed).hexdigest(),
        answer=json.dumps({"archive_base64": b64encode(packed).decode()}).encode() + b"\n",
    )


def archive(files: dict[str, bytes]) -> bytes:
    """The same files give the same bytes, in whatever order and at whatever time."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as writer:
        for name in sorted(files):
            entry = zipfile.ZipInfo(f"{PACKAGE}/{name}", LONG_AGO)
            entry.external_attr = 0o100644 << 16
            writer.writestr(entry, files[name], zipfile.ZIP_DEFLATED, 9)
    return packed.getvalue()
