"""The rehearsal's `pulumi`: passes the command to the daemon, which has the real engine, and prints the answer."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import NoReturn

FOLDER_VARIABLE = "TPU_STACK_REHEARSAL"
# Of the command line, not of the operation: `up` may wait for capacity for as long as its stack is told to.
SILENCE_LIMIT_S = 3600.0


def main(arguments: list[str]) -> int:
    folder = os.environ.get(FOLDER_VARIABLE, "")
    try:
        with open(os.path.join(folder, "state.json"), encoding="utf-8") as file:
            path = json.load(file)["socket"]
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
    except (OSError, ValueError, KeyError):
        fail(f"no rehearsal is up in {folder or '$' + FOLDER_VARIABLE}; `fab rehearsal up` starts one")
    connection.settimeout(SILENCE_LIMIT_S)
    request = {"do": "pulumi", "with": {"arguments": arguments}}
    connection.sendall(json.dumps(request).encode() + b"\n")
    for line in connection.makefile(encoding="utf-8"):
        message = json.loads(line)
        if "say" in message:
            print(message["say"], flush=True)
        if "error" in message:
            fail(message["error"])
        if "end" in message:
            sys.stdout.write(message["answer"]["stdout"])
            return int(message["answer"]["code"])
    return fail("the rehearsal ended meanwhile")


def fail(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(255)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
