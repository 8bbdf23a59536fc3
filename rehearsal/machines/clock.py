"""A clock that is off, for what ssh starts: libfaketime, preloaded by variables of every session."""

from __future__ import annotations

import re

LIBRARY = "/opt/tpu-stack/libfaketime.so"
# The monotonic clock stays as it is: a computer that is set wrong measures durations all the same.
_VARIABLES = f'"LD_PRELOAD={LIBRARY}" "FAKETIME_DONT_FAKE_MONOTONIC=1" "FAKETIME=%+.3f"'
_SHIFT = re.compile(re.escape(_VARIABLES).replace(re.escape("%+.3f"), r"[+-][\d.]+"))


def shifted(settings: str, seconds: float) -> str:
    """A machine's lines for sshd with the clock so much ahead, and ahead by nothing else; 0.0: as it is. Pure."""
    found = _SHIFT.sub("", settings).removeprefix("SetEnv").strip()
    words = [found] if found else []
    if seconds != 0.0:
        words.append(_VARIABLES % seconds)
    return f"SetEnv {' '.join(words)}\n" if words else ""
