"""The agent as a program: one verb, its request on stdin, its response on stdout.

Exit status: 0 done, 1 could not be carried out, 2 the request was wrong.
"""

from __future__ import annotations

import json
import sys


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "_supervise":
        from .supervise import supervise

        return supervise(arguments[1])
    from .verbs import respond

    verb = arguments[0] if len(arguments) == 1 else " ".join(arguments)
    response, status_code = respond(verb, sys.stdin.buffer.read())
    sys.stdout.write(json.dumps(response) + "\n")
    sys.stdout.flush()
    return status_code
