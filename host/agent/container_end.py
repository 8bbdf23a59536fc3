"""How a container ended, by what its client said and what Docker knows of it: the job's end told from Docker's own."""

from __future__ import annotations

from . import engine
from .files import tail_of
from .notes import note
from .protocol import Failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .container import Container
    from .protocol import Json

DOCKERS_OWN = 125
"""Exit code of the client where Docker, and not the job, has failed."""
NEVER = "0001-01-01"


def look_back(container: Container, ended: Json, log_path: str) -> None:
    """Put into `ended` what the job's own end was, and say it in words where Docker had a part in it."""
    state: Json | None = None
    try:
        state = container.state()
    except Failed as failure:
        note(failure.message)
    said = engine.core("\n".join(tail_of(log_path)[-3:]))
    ended.update(judged(ended["code"], ended["signal"], state, said))


def judged(code: int | None, signum: int | None, state: Json | None, said: str) -> Json:
    """Exit code, signal, and the words for an end that is not the job's own. Pure.

    code, signum: the client's. state: Docker's of the container; empty if there is none, None if Docker is silent.
    """
    if signum is not None:
        return {"code": None, "signal": signum}
    if state and state["StartedAt"].startswith(NEVER):
        words = f"Docker could not start the container: {state['Error'] or said}"
        return {"code": DOCKERS_OWN, "signal": None, "words": words}
    if state and state["Running"]:
        return {"code": DOCKERS_OWN, "signal": None, "words": f"Docker lost the container: {said}"}
    if state and (code != DOCKERS_OWN or state["ExitCode"] == code):
        found = as_bare(state["ExitCode"])
        if state["OOMKilled"]:
            found["words"] = "the kernel killed it for want of memory (OOMKilled)"
        return found
    if code == DOCKERS_OWN:
        return {"code": code, "signal": None, "words": f"Docker went away while the job ran: {said}"}
    return as_bare(code)


def as_bare(code: int | None) -> Json:
    """An init that ends for a signal to its child says so by its exit code; a bare process would have it in its end."""
    if code is not None and 128 < code <= 128 + 64:
        return {"code": None, "signal": code - 128}
    return {"code": code, "signal": None}
