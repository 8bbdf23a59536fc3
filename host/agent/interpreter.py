"""The interpreter that a job is to run with: there, new enough, and with the modules that the job needs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess

from .checks import check
from .files import tail
from .process import plain_environment
from .waiting import wait_until

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .protocol import Json

LOOK_PAUSE_S = 0.005
REMEDY = "install the requirements on this host, or name the interpreter that has them"
PROBE = """
import json, sys
def lacks(name):
    try:
        return importlib.util.find_spec(name) is None
    except Exception:
        return True
if sys.version_info >= (3, 4):
    import importlib.util
    missing = [name for name in sys.argv[1:] if lacks(name)]
else:
    missing = []
print(json.dumps([list(sys.version_info[:3]), missing]))
"""


def check_python(
    python: str, modules: list[str], remedy: str = REMEDY, timeout_s: float = 20.0
) -> Callable[[], Json]:
    """Begin to ask the interpreter, which takes a while; what comes back waits for the finding."""
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        return lambda: check("python", f"{python}: no such interpreter on this host", remedy)
    try:
        asked = subprocess.Popen(
            [found, "-c", PROBE, *modules],
            cwd="/",
            env=plain_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        reason = error.strerror
        return lambda: check("python", f"{found} cannot be run: {reason}", remedy)

    def finding() -> Json:
        with asked:
            # `communicate` sleeps until the process has ended, which fails where the clock is libfaketime's.
            if wait_until(lambda: asked.poll() is not None, timeout_s, LOOK_PAUSE_S):
                with contextlib.suppress(subprocess.TimeoutExpired):  # what it began may hold its pipes
                    said, complaint = asked.communicate(timeout=timeout_s)
                    return judged(found, said, complaint, len(modules), remedy)
            asked.kill()
        return check("python", f"{found} did not answer within {timeout_s:.0f} s", "see what that program is")

    return finding


def judged(found: str, said: bytes, complaint: bytes, modules: int, remedy: str) -> Json:
    """The finding by what the interpreter has said."""
    try:
        version, missing = json.loads(said)
    except (ValueError, TypeError):
        last = (tail(complaint, 1) or ["nothing"])[0]
        return check("python", f"{found} is no working Python; it said: {last}", remedy)
    number = ".".join(map(str, version))
    if version < [3, 12]:
        return check("python", f"{found} is Python {number}; a job needs 3.12 or later", remedy)
    if missing:
        return check("python", f"{found} (Python {number}) lacks {', '.join(missing)}", remedy)
    return check("python", f"{found} is Python {number} with all of {modules} modules")
