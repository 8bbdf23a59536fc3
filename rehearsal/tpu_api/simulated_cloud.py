"""The simulated cloud behind an HTTP server: the Cloud TPU API and, where it is added, Compute Engine."""

from types import TracebackType

from contracts.aliases import Json
from rehearsal.simulator.api_error import ApiError
from rehearsal.simulator.discovery import Call, Document
from rehearsal.simulator.http_server import ApiService, ConnectionCutError, SimulatorServer
from rehearsal.tpu_api.capacity import ChipPool, Offers
from rehearsal.tpu_api.cloud import Clock, Cloud, Delays
from rehearsal.tpu_api.control import Control
from rehearsal.tpu_api.methods import PREFIX, TpuService
from rehearsal.tpu_api.resources import Hardware, NoHardware


class TpuApi:
    """The simulator, from `with` to the end of its block. `url` is the API's endpoint, `control` the other side.

    capacity, quota: chips by pool, "ZONE:PREFIX:TIER"; all other pools are without end.
    hardware: what stands behind the workers; None: nothing.
    """

    def __init__(
        self,
        *,
        capacity: dict[str, int] | None = None,
        quota: dict[str, int] | None = None,
        delays: Delays | None = None,
        clock: Clock | None = None,
        hardware: Hardware | None = None,
    ) -> None:
        has = {ChipPool.parse(pool): chips for pool, chips in (capacity or {}).items()}
        may = {ChipPool.parse(pool): chips for pool, chips in (quota or {}).items()}
        self.cloud = Cloud(
            clock=clock or Clock(),
            delays=delays or Delays(),
            capacity=has,
            quota=may,
            hardware=hardware or NoHardware(),
        )
        self.control = Control(self.cloud)
        self._services: dict[str, ApiService] = {"/": _WithFaults(TpuService(self.cloud, Offers(has)), self)}
        self.server = SimulatorServer(self._services, now=self.cloud.clock.now)

    @property
    def url(self) -> str:
        """http://127.0.0.1:PORT"""
        return self.server.url

    def __enter__(self) -> "TpuApi":
        self.server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.__exit__(kind, error, trace)

    def add(self, prefix: str, service: ApiService) -> None:
        """Answer for another API of this cloud too. prefix: of its paths."""
        self._services[prefix] = _WithFaults(service, self)


class _WithFaults:
    """An API whose requests meet the injected faults, and find the cloud as it is at their moment."""

    def __init__(self, service: ApiService, api: TpuApi) -> None:
        self._service, self._api = service, api

    def document(self, target: str) -> Document:
        return self._service.document(target)

    def error_body(self, error: ApiError) -> tuple[int, Json]:
        return self._service.error_body(error)

    def carry_out(self, call: Call) -> Json:
        with self._api.cloud.lock:
            fault = self._api.control.take_fault(call.method.id.removeprefix(PREFIX))
            if fault is not None and fault.kind == "cut-before":
                raise ConnectionCutError
            if fault is not None and (error := fault.error()) is not None:
                raise error
            self._api.cloud.settle()
            answer = self._service.carry_out(call)
        if fault is not None and fault.kind == "slow":
            self._api.server.closing.wait(fault.seconds)
        if fault is not None and fault.kind == "cut-after":
            raise ConnectionCutError
        return answer
