"""What our dynamic providers share: their base class, their session with Google, and the process that runs them.

That process is `python -m pulumi.dynamic ENGINE`. Found with engine 3.250 and SDK 3.272:

- A line on standard error is a message of the preview or up, shown at once; `pulumi.log` does no more there.
- One Ctrl-C only tells the engine to start nothing new: a call in flight, such as a wait of hours, goes on; a provider
  in Python does not hear of it. A second one ends engine and plugin at once, and the engine's state has a pending
  operation, of which the next `up` warns and then calls `create`. A killed engine leaves the plugin running by itself:
  `engine_is_there`.
- An exception's traceback is shown to the user.
- Four threads serve all calls of all dynamic resources, so a fifth slice would not even be asked for while four wait.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pulumi.dynamic import ConfigureRequest, ResourceProvider

from infra.slice_apis.lifecycles import Clients
from infra.slice_apis.retry import AbandonedError, Backoff, CloudTpuError

if TYPE_CHECKING:
    from infra.cloud_tpu.tpu_client import Client
    from infra.slice_apis.google_settings import Settings

MODULE = "pulumi.dynamic.__main__"
THREADS = 300  # a slice each; they do nothing but wait


def is_this_process() -> bool:
    """Whether this process is the plugin's; false in a program that only imports this module, and in tests."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == MODULE


def say(line: str) -> None:
    """A message to the user. Raises AbandonedError when nobody can read it any more."""
    try:
        sys.stderr.write(
            f"{line}\n"
        )  # in one piece: many threads speak, and the engine takes lines as they come
        sys.stderr.flush()
    except OSError:
        raise AbandonedError("nobody waits for this any more: Pulumi has ended") from None


def engine_is_there() -> bool:
    """Whether the engine that started this process still listens. True where we cannot know."""
    host, colon, port = sys.argv[1].rpartition(":") if len(sys.argv) > 1 else ("", "", "")
    if not is_this_process() or not colon or not port.isdecimal():
        return True
    try:
        with socket.create_connection((host, int(port)), timeout=10):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Errors that are written for the user reach the engine without a traceback, all others with one."""
    try:
        yield
    except CloudTpuError:
        if is_this_process():
            sys.tracebacklimit = 0
        raise
    except Exception:
        if is_this_process():
            sys.tracebacklimit = 1000
        raise


def allow_threads(count: int = THREADS) -> bool:
    """Let the pool whose thread we are in grow to so many. False where it is not built as we know it: it stays small.

    There is no public way: the SDK makes its pool of four in `main` and keeps it there.
    """
    arguments = getattr(threading.current_thread(), "_args", None) or (None,)
    pool = arguments[0]() if callable(arguments[0]) else None
    if not isinstance(pool, concurrent.futures.ThreadPoolExecutor) or not hasattr(pool, "_max_workers"):
        return False
    pool._max_workers = max(count, pool._max_workers)
    return True


class Session:
    """What a provider needs to work with Google, made from the engine's configuration on first use. Thread-safe.

    A preview configures providers as well, and must need neither credentials nor the time to load Google's client.
    config: a key with its namespace → its value or None.
    """

    def __init__(self, config: Callable[[str], Any], backoff: Backoff | None = None) -> None:
        self._config = config
        self.backoff = backoff or Backoff(is_awaited=engine_is_there, say=say)
        self.clients = Clients(self._settings, self.backoff)

    def _settings(self) -> Settings:
        from infra.slice_apis import google_settings

        return google_settings.read(self._config)

    def client(self) -> Client:
        """Of the Cloud TPU API. Raises CloudTpuError where the configuration of the endpoint is wrong."""
        return self.clients.tpu

    def backoff_while(self, also: Callable[[], bool]) -> Backoff:
        """also: what has to hold besides whenever something is to be changed; it may raise."""
        is_awaited = self.backoff.is_awaited
        return dataclasses.replace(self.backoff, is_awaited=lambda: is_awaited() and also())


class Provider(ResourceProvider):
    """The engine makes it anew from its name in the plugin's process, and configures it once there.

    Its subclasses stand at the top of a module, so that the state holds that name and not their code.
    """

    serialize_as_secret_always = False
    _session: Session | None = None

    def configure(self, req: ConfigureRequest) -> None:
        allow_threads()
        self._session = Session(req.config.get)

    def require_session(self) -> Session:
        if self._session is None:
            raise RuntimeError("the provider was not configured")
        return self._session
