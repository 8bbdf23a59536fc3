"""Ends a rank of JAX that an exception has ended: JAX's exit handler would wait five minutes for the other ranks.

Those wait for this one inside a collective operation, so that nobody moves, and the slice is paid for. Every
interpreter of a command's environment imports this file at its start (`command_environment`). Standard library only;
what only an exception needs is imported then.
"""

import sys

LIMIT_S = 10.0
"""For the exit handlers of a program that an exception has ended."""


def _is_in_group() -> bool:
    """Return whether this process is one of JAX's, whose exit handler waits for the others."""
    try:
        return bool(sys.modules["jax"].distributed.is_initialized())
    except (KeyError, AttributeError):
        return False


def _end_after_limit() -> None:
    import os
    import threading
    import time

    threading.main_thread().join()  # who shows an exception by this hook may go on
    time.sleep(LIMIT_S)
    os.write(
        2,
        b"tpu-stack: an exception has ended this rank, and its exit handlers are not waited for any longer\n",
    )
    os._exit(1)


def _install() -> None:
    show = sys.excepthook

    def show_and_end(kind: type[BaseException], value: BaseException, trace: object) -> None:
        show(kind, value, trace)  # type: ignore[arg-type]
        if _is_in_group():
            import threading

            threading.Thread(target=_end_after_limit, daemon=True).start()

    sys.excepthook = show_and_end


_install()
