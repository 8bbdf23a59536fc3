"""A simulator of the Cloud TPU API v2 on loopback, to rehearse with. It is not Google's service and makes no TPU.

with TpuApi() as api: … api.url … api.control.preempt("my-node")
"""

import functools
import threading
from types import TracebackType

from rehearsal.tpu_api import lifecycle
from rehearsal.tpu_api.api_error import ApiError
from rehearsal.tpu_api.capacity import Limits, Offers, Pool
from rehearsal.tpu_api.clock import Clock
from rehearsal.tpu_api.cloud import Cloud, Delays
from rehearsal.tpu_api.control import Control, FaultKind
from rehearsal.tpu_api.methods import Methods
from rehearsal.tpu_api.resources import Hardware, Node, NoHardware
from rehearsal.tpu_api.server import Server

__all__ = ["ApiError", "Clock", "Control", "Delays", "FaultKind", "Hardware", "NoHardware", "Node", "TpuApi"]


class TpuApi:
    """The simulator, from `with` to the end of its block. `url` is the API's endpoint, `control` the other side.

    capacity, quota: chips by pool, "ZONE:PREFIX:TIER"; all other pools have `other_chips`, None for no end.
    hardware: what stands behind the workers; None: nothing.
    """

    def __init__(
        self,
        *,
        capacity: dict[str, int] | None = None,
        quota: dict[str, int] | None = None,
        other_chips: int | None = None,
        delays: Delays | None = None,
        clock: Clock | None = None,
        hardware: Hardware | None = None,
    ) -> None:
        has = {Pool.parse(pool): chips for pool, chips in (capacity or {}).items()}
        may = {Pool.parse(pool): chips for pool, chips in (quota or {}).items()}
        cloud = Cloud(
            clock=clock or Clock(),
            delays=delays or Delays(),
            capacity=Limits(has, other_chips),
            quota=Limits(may, None),
            hardware=hardware or NoHardware(),
        )
        cloud.on_capacity(functools.partial(lifecycle.grant_capacity, cloud))
        self.control = Control(cloud)
        self._server = Server(cloud=cloud, methods=Methods(cloud, Offers(has)), control=self.control)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="tpu-api", daemon=True
        )

    @property
    def url(self) -> str:
        """http://127.0.0.1:PORT"""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "TpuApi":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self._thread.join()
