"""A simulator of the Cloud TPU API v2 on loopback, to rehearse with. It is not Google's service and makes no TPU.

with TpuApi() as api: … api.url … api.control.preempt("my-node")
"""

from rehearsal.simulator.api_error import ApiError
from rehearsal.tpu_api.cloud import Clock, Delays
from rehearsal.tpu_api.control import Control, FaultKind
from rehearsal.tpu_api.resources import Hardware, Hosts, Node, NoHardware
from rehearsal.tpu_api.simulated_cloud import TpuApi

__all__ = [
    "ApiError",
    "Clock",
    "Control",
    "Delays",
    "FaultKind",
    "Hardware",
    "Hosts",
    "NoHardware",
    "Node",
    "TpuApi",
]
