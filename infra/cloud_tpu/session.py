"""From the engine's configuration to something that works with Google, made when it is first needed.

A preview configures providers as well, and must need neither credentials nor the time to load Google's client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from infra.cloud_tpu import plugin
from infra.cloud_tpu.pace import Pace

if TYPE_CHECKING:
    from infra.cloud_tpu.client import Client
    from infra.cloud_tpu.lifecycle import Lifecycle
    from infra.cloud_tpu.remover import Remover


class Session:
    """config: a key with its namespace → its value or None. Safe for threads."""

    def __init__(self, config: Callable[[str], Any], pace: Pace | None = None) -> None:
        self._config = config
        self.pace = pace or Pace(wanted=plugin.engine_is_there, say=plugin.say)
        self._client: Client | None = None
        self._lock = threading.Lock()

    def client(self) -> Client:
        """Raises CloudTpuError where the configuration of the endpoint is wrong."""
        from infra.cloud_tpu import client, settings

        with self._lock:
            if self._client is None:
                self._client = client.Client(settings.read(self._config), self.pace)
            return self._client

    def remover(self) -> Remover:
        from infra.cloud_tpu import remover

        return remover.Remover(self.client(), self.pace)

    def lifecycle(self) -> Lifecycle:
        from infra.cloud_tpu import lifecycle

        return lifecycle.Lifecycle(self.client(), self.pace)
