"""The simulated cloud behind an HTTP server: the Cloud TPU API and Compute Engine."""

from types import TracebackType

from contracts.aliases import Json
from rehearsal.simulated_cloud.capacity import ChipPool, Offers
from rehearsal.simulated_cloud.cloud import Clock, Cloud, Delays
from rehearsal.simulated_cloud.compute_lifecycle import ComputeLifecycle
from rehearsal.simulated_cloud.compute_methods import ComputeService
from rehearsal.simulated_cloud.control import Control
from rehearsal.simulated_cloud.hardware import Hardware, NoHardware
from rehearsal.simulated_cloud.tpu_lifecycle import TpuLifecycle
from rehearsal.simulated_cloud.tpu_methods import PREFIX, TpuService
from rehearsal.simulator.api_error import ApiError
from rehearsal.simulator.discovery import Call, Document
from rehearsal.simulator.http_server import ApiService, ConnectionCutError, SimulatorServer

COMPUTE_PATH = "/compute/v1/"


class SimulatedCloud:
    """The simulator, from `with` to the end of its block. `url` is the endpoint of its APIs, `control` the other side.

    capacity, quota: chips by pool, "ZONE:PREFIX:TIER"; all other pools are without end.
    hardware: what stands behind the hosts; None: nothing.
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
        tpu, compute = TpuLifecycle(self.cloud), ComputeLifecycle(self.cloud)
        self.control = Control(tpu, compute)
        services: dict[str, ApiService] = {
            "/": TpuService(tpu, Offers(has)),
            COMPUTE_PATH: ComputeService(compute),
        }
        self.server = SimulatorServer(
            {path: _WithFaults(service, self) for path, service in services.items()},
            now=self.cloud.clock.now,
        )

    @property
    def url(self) -> str:
        """http://127.0.0.1:PORT"""
        return self.server.url

    def __enter__(self) -> "SimulatedCloud":
        self.server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.__exit__(kind, error, trace)


class _WithFaults:
    """An API whose requests meet the injected faults, and find the cloud as it is at their moment."""

    def __init__(self, service: ApiService, cloud: SimulatedCloud) -> None:
        self._service, self._simulated = service, cloud

    def document(self, target: str) -> Document:
        return self._service.document(target)

    def error_body(self, error: ApiError) -> tuple[int, Json]:
        return self._service.error_body(error)

    def carry_out(self, call: Call) -> Json:
        with self._simulated.cloud.lock:
            fault = self._simulated.control.take_fault(call.method.id.removeprefix(PREFIX))
            if fault is not None and fault.kind == "cut-before":
                raise ConnectionCutError
            if fault is not None and (error := fault.error()) is not None:
                raise error
            self._simulated.cloud.settle()
            answer = self._service.carry_out(call)
        if fault is not None and fault.kind == "slow":
            self._simulated.server.closing.wait(fault.seconds)
        if fault is not None and fault.kind == "cut-after":
            raise ConnectionCutError
        return answer
