"""A simulator of the Cloud TPU API v2 and of Compute Engine v1 for slices, on loopback: one cloud, clock and capacity.

It is not Google's service and makes no TPU.

with SimulatedCloud() as api: … api.url … api.control.preempt("my-node")
"""

from rehearsal.simulated_cloud.cloud import Clock, Delays
from rehearsal.simulated_cloud.cloud_server import COMPUTE_PATH, SimulatedCloud
from rehearsal.simulated_cloud.compute_lifecycle import families
from rehearsal.simulated_cloud.compute_records import Group, Instance
from rehearsal.simulated_cloud.control import Control, FaultKind
from rehearsal.simulated_cloud.hardware import Hardware, NoHardware
from rehearsal.simulated_cloud.tpu_records import Node, QueuedResource
from rehearsal.simulator.api_error import ApiError

__all__ = [
    "COMPUTE_PATH",
    "ApiError",
    "Clock",
    "Control",
    "Delays",
    "FaultKind",
    "Group",
    "Hardware",
    "Instance",
    "NoHardware",
    "Node",
    "QueuedResource",
    "SimulatedCloud",
    "families",
]
