"""How a task ends: a user's mistake is a message and an exit code, never a traceback."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import fabric.tasks


class Command(fabric.tasks.Task):  # type: ignore[misc]  # Fabric has no types
    """A task of which -h means --help, and not the first option with an h."""

    def arg_opts(self, name: str, default: str, taken_names: set[str]) -> dict[str, Any]:
        opts: dict[str, Any] = super().arg_opts(name, default, {*taken_names, "h"})
        return opts


task = functools.partial(fabric.tasks.task, klass=Command)


def whole(option: str, text: str, *, least: int) -> int | None:
    """The number in an option's text; None where the option was not given.

    Invoke would read numbers itself, but answers what is none with a traceback, and takes 0 for "not given".

    Raises:
        RequestError: the text is no whole number of at least `least`.
    """
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        from contracts.errors import RequestError

        raise RequestError(f"{option} {text}: must be a whole number of at least {least}")
    return int(text)


def reported[**P](body: Callable[P, int]) -> Callable[P, None]:
    """The task as Fabric calls it: its return value becomes the exit code, its known errors become messages.

    Exit codes: 0 done; 1 the job failed; 2 the request was wrong, nothing was started; 130 interrupted.
    """

    @functools.wraps(body)
    def task(*args: P.args, **kwargs: P.kwargs) -> None:
        from contracts.errors import RequestError
        from launch.hosts import HostError, HostsError

        try:
            code = body(*args, **kwargs)
        except (RequestError, HostsError, HostError) as error:
            print(f"error: {error}", file=sys.stderr)
            code = 2
        except BrokenPipeError:
            sys.stderr.close()  # the reader of our output went away; nothing to tell it
            code = 0
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            print(f"error: {where}{error.strerror or error}", file=sys.stderr)
            code = 1
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 130
        if code:
            sys.exit(code)

    return task
