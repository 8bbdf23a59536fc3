"""Which API makes a slice: the one place that decides, by the property `api`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from infra.cloud_tpu.queued_resources import QueuedResources
from infra.slice_apis.lifecycle import Lifecycle
from infra.slice_apis.retry import Backoff, CloudTpuError
from infra.slice_apis.slice_api import SliceApi

if TYPE_CHECKING:
    from infra.cloud_tpu.tpu_client import Client
    from infra.compute.compute_client import ComputeClient
    from infra.slice_apis.google_settings import Settings

CLOUD_TPU = "cloud-tpu"
COMPUTE = "compute"


class Clients:
    """The clients of both APIs, each made on first use. Thread-safe.

    read_settings: may raise CloudTpuError, as a preview needs neither settings nor credentials.
    """

    def __init__(self, read_settings: Callable[[], Settings], backoff: Backoff) -> None:
        self._read_settings, self._backoff = read_settings, backoff
        self._tpu: Client | None = None
        self._compute: ComputeClient | None = None
        self._lock = threading.Lock()

    @property
    def tpu(self) -> Client:
        from infra.cloud_tpu.tpu_client import Client  # loads Google's client, which takes a moment

        with self._lock:
            if self._tpu is None:
                self._tpu = Client(self._read_settings(), self._backoff)
            return self._tpu

    @property
    def compute(self) -> ComputeClient:
        from infra.compute.compute_client import ComputeClient  # as above

        with self._lock:
            if self._compute is None:
                self._compute = ComputeClient(self._read_settings(), self._backoff)
            return self._compute

    def close(self) -> None:
        """Close the connections. The clients cannot be used afterwards."""
        for client in (self._tpu, self._compute):
            if client is not None:
                client.close()


def read_environment_settings() -> Settings:
    """The settings of this process's environment."""
    from infra.slice_apis import google_settings

    return google_settings.read(lambda _: None)


def api_name(properties: Mapping[str, Any]) -> str:
    """The API that makes a slice: "cloud-tpu" or "compute"."""
    return str(properties.get("api") or CLOUD_TPU)


def api_for(properties: Mapping[str, Any], clients: Clients, backoff: Backoff) -> SliceApi[Any]:
    """Raises CloudTpuError for an API that this version does not know."""
    return named_api(api_name(properties), clients, backoff)


def named_api(name: str, clients: Clients, backoff: Backoff) -> SliceApi[Any]:
    if name == COMPUTE:
        from infra.compute.groups import ComputeGroups

        return ComputeGroups(clients.compute, backoff)
    if name == CLOUD_TPU:
        return QueuedResources(clients.tpu, backoff)
    raise CloudTpuError(
        f'a slice is specified for the API "{name}", which this version of tpu-stack does not know'
    )


def lifecycle_for(properties: Mapping[str, Any], clients: Clients, backoff: Backoff) -> Lifecycle[Any]:
    """The lifecycle of a slice. Raises as `api_for`."""
    return Lifecycle(api_for(properties, clients, backoff))


def named_lifecycles(names: Iterable[str], clients: Clients, backoff: Backoff) -> Iterator[Lifecycle[Any]]:
    """The lifecycles of these APIs."""
    for name in names:
        yield Lifecycle(named_api(name, clients, backoff))
