"""Ends a rank of JAX that an exception or `sys.exit` has ended: JAX's exit handler would wait for the others.

Those wait for this one inside a collective operation, so that nobody moves for five minutes, and the slice is paid
for. Every interpreter of a command's environment imports this file at its start (`command_environment`). Standard
library only; what only an end needs is imported then.
"""

import sys
from typing import NoReturn

LIMIT_S = 10.0
"""For the exit handlers of a program that has failed."""
RESUME_ME = 75
"""As in contracts.errors: no failure. What has been saved here the others may still be saving."""


def _is_in_group() -> bool:
    """Return whether this process is one of JAX's, whose exit handler waits for the others."""
    try:
        return bool(sys.modules["jax"].distributed.is_initialized())
    except (KeyError, AttributeError):
        return False


def _end_after_limit(code: int, what: str) -> None:
    import os
    import threading
    import time

    threading.main_thread().join()  # who shows an exception by this hook may go on
    time.sleep(LIMIT_S)
    text = f"tpu-stack: {what} has ended this rank, and its exit handlers are not waited for any longer\n"
    os.write(2, text.encode())
    os._exit(code)


def _end_if_it_waits(code: int, what: str) -> None:
    if _is_in_group():
        import threading

        threading.Thread(target=_end_after_limit, args=(code, what), daemon=True).start()


def _is_main_thread() -> bool:
    import threading

    return threading.get_ident() == threading.main_thread().ident


class _Exit(SystemExit):
    """What `sys.exit` raises. The interpreter lets go of it outside of every frame if it has ended the program; who
    catches it does so inside of one."""

    def __del__(self) -> None:
        status = self.code
        code = status & 0xFF if isinstance(status, int) else 0 if status is None else 1
        if code not in (0, RESUME_ME) and sys._getframe().f_back is None and _is_main_thread():
            _end_if_it_waits(code, "sys.exit")

    def __reduce__(self) -> tuple[type[SystemExit], tuple[object, ...]]:
        return SystemExit, self.args


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"


def _exit(status: object = None, /) -> NoReturn:
    raise _Exit(status)


def _install() -> None:
    show = sys.excepthook

    def show_and_end(kind: type[BaseException], value: BaseException, trace: object) -> None:
        show(kind, value, trace)  # type: ignore[arg-type]
        _end_if_it_waits(1, "an exception")

    sys.excepthook, sys.exit = show_and_end, _exit


_install()
