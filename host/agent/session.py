"""A session: requests come in on lines, each with its verb, and every one is answered by a line, in order.

A launcher that vanishes in the middle of a request leaves it to be carried out, as far as its verb goes.
"""

from __future__ import annotations

import json
import os
import signal

from .verbs import refusal, respond

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO, TextIO

LONGEST_LINE = 1 << 28


def serve(first: bytes, requests: BinaryIO, answers: TextIO, idle_limit_s: int) -> int:
    """Answer `first` and what follows it, until the input ends or nothing has come for the limit.

    A line without its end is a request that its sender could not finish; it is not carried out.
    """
    line = first
    while line.endswith(b"\n") or len(line) == LONGEST_LINE:
        signal.alarm(0)
        if line.endswith(b"\n"):
            answer, _ = respond(None, line)
        else:
            answer = refusal(f"a request is longer than {LONGEST_LINE} bytes", "send less at once")
            while line and not line.endswith(b"\n"):
                line = requests.readline(LONGEST_LINE)
        try:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        except BrokenPipeError:
            os._exit(0)  # nobody reads; at its end the interpreter would try once more and complain
        signal.alarm(idle_limit_s)
        line = requests.readline(LONGEST_LINE)
    return 0
