"""`python3 -S -E host/agent/__main__.py`: how a supervisor is started, a lock file is looked at as root, a shell is
begun in the place of a process, a pod is run, and one verb is carried out.

A verb's request is on stdin and its answer goes to stdout. Exit status: 0 done, 1 could not be carried out, 2 the
request was wrong.
"""

from __future__ import annotations

import json
import os
import sys


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "_supervise":
        from .supervisor import supervise

        return supervise(arguments[1])
    if len(arguments) == 2 and arguments[0] == "_lockfile":
        from .preflight import check_lockfile

        print(json.dumps(check_lockfile(arguments[1])))
        return 0
    if len(arguments) == 5 and arguments[0] == "_shell":
        from .shell import enter

        enter(*arguments[1:])
    if arguments == ["_pod"]:
        from .pod import run

        return run()
    if arguments == ["_alive"]:
        from .pod import is_alive

        return 0 if is_alive() else 1
    from .protocol import respond

    verb = arguments[0] if len(arguments) == 1 else " ".join(arguments)
    response, status = respond(verb, sys.stdin.buffer.read())
    sys.stdout.write(json.dumps(response) + "\n")
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    __package__ = "host.agent"
    sys.exit(main(sys.argv[1:]))
