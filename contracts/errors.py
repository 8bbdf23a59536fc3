"""The exceptions whose message is all that a user needs to see, and the exit codes that tell a program the same."""

import contextlib
import errno
from collections.abc import Collection, Iterator

DONE = 0
FAILED = 1
WRONG_REQUEST = 2
UNAVAILABLE = 69
"""Something outside was away, such as a bucket or an API: EX_UNAVAILABLE of sysexits.h. The same request may succeed
later, so it is repeated, with growing pauses."""
RESUME_ME = 75
"""The run is saved and to be resumed: EX_TEMPFAIL of sysexits.h, the same request may succeed later."""
PEER_LOST = 76
"""Another host of the run was lost, so this one is not to blame."""
HUNG = 79
"""Of a pod: the run hung, and its processes were ended with their stack traces saved."""
FAILED_HERE = 80
"""Of a pod: its process failed. Whether the run is over is not its to say: it may have lost a peer, and the policy may
repeat it."""
SUPERSEDED = 81
"""A newer attempt of the run has begun, so this one ended without writing anything. Nobody repeats it."""
INTERRUPTED = 130


def is_signal_exit(code: int | None) -> bool:
    """Return whether an exit code means, as in a shell, that a signal ended the process; 128 (git) and 255 (ssh) do
    not."""
    return code is not None and 128 < code <= 128 + 64


def failure_kind(codes: Collection[int | None]) -> int | None:
    """Return the kind of a run's failure by the exit codes of its processes: WRONG_REQUEST, with which no repetition
    helps, rather than UNAVAILABLE; None: neither."""
    return next((kind for kind in (WRONG_REQUEST, UNAVAILABLE) if kind in codes), None)


class RequestError(Exception):
    """A mistake in what the user asked for.

    The message is all the user sees, so it names the value, the rule and the remedy. A job that meets one prints the
    message without a traceback and ends with WRONG_REQUEST: trying again cannot help.
    """


class Unreachable(RequestError):
    """A bucket, a server or an API does not answer, or cannot for now: the same request may succeed later.

    A job that meets one ends with UNAVAILABLE, as does a command. A place that answers and refuses is a RequestError.
    """


@contextlib.contextmanager
def noted_in(messages: list[str]) -> Iterator[None]:
    """Add a RequestError's lines to `messages`, and go on behind the `with`; what is `Unreachable` is raised."""
    try:
        yield
    except Unreachable:
        raise
    except RequestError as error:
        messages += str(error).splitlines()


def exit_code_for(error: RequestError) -> int:
    """Return the exit code of a command or job that ends with this error."""
    return UNAVAILABLE if isinstance(error, Unreachable) else WRONG_REQUEST


def first_line(error: BaseException, limit: int = 300) -> str:
    """Return an error of a library in one line: its type, and at most `limit` characters of its message."""
    return f"{type(error).__name__}: {message_line(error, limit)}"


def message_line(message: object, limit: int = 500) -> str:
    """Return the first line of a message, or of what an error says; of an error that says nothing, its type."""
    if lines := str(message).strip().splitlines():
        return lines[0][:limit]
    return type(message).__name__ if isinstance(message, BaseException) else "no reason is given"


def os_error_reason(error: OSError) -> str:
    place = f"{error.filename2 or error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}"


def remedy_for(error: OSError) -> str:
    """Return what to do about an error of a file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space on that disk"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "use a directory that this user may write, or change its owner"
    return "see to that file on this host"


def is_rate_limit(text: str) -> bool:
    """Return whether what Google says of a 403 is that too much was asked at once, which passes, and not that it may
    not be asked: https://docs.cloud.google.com/storage/docs/json_api/v1/status-codes."""
    return "ratelimitexceeded" in text.lower().replace(" ", "").replace("_", "")


class Superseded(Exception):
    """A newer attempt of the run has begun, so the one that meets this may not write any more.

    A process that meets it ends with SUPERSEDED. See contracts.fencing.
    """


class JobFailed(Exception):
    """The job has judged its own results, and training on is of no use; the message says why and what to do.

    Every process raises it after the same step. It ends with FAILED and without a traceback.
    """
