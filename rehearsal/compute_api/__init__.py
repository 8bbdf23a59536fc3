"""A simulator of Compute Engine v1 for TPU slices, beside that of the Cloud TPU API: one cloud, clock and capacity.

with TpuApi() as api: compute = ComputeApi(api); … api.url … compute.control.preempt("my-group")
"""

from rehearsal.compute_api.compute_cloud import families
from rehearsal.compute_api.compute_control import ComputeControl
from rehearsal.compute_api.compute_methods import ComputeApi

__all__ = ["ComputeApi", "ComputeControl", "families"]
