"""What nodes of a cluster are TPUs: machine types, chips on each, and the label that pods find them by. Data, no I/O.

Machine types, their chips and topologies: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus, labels
and TPU7x's topologies also xpk's table (https://github.com/AI-Hypercomputer/xpk, system_characteristics.py at commit
02b0c09). Zones are those of the Cloud TPU API, which Google lists for TPU VMs of either kind
(https://docs.cloud.google.com/tpu/docs/regions-zones); flex-start:
https://docs.cloud.google.com/kubernetes-engine/docs/concepts/dws. Read in November 2026. v3 on GKE is left out: it has
no multislice, no flex-start, and today's JAX may fail on it.
"""

from __future__ import annotations

import dataclasses

FLEX_START_ZONES = {
    "v5e": ("us-west4-a",),
    "v5p": ("us-east5-a",),
    "v6e": ("asia-northeast1-b", "us-east5-a", "us-east5-b"),
}
"""Generation → the zones in which Google lists flex-start for it. Of TPU7x it lists none, and has an example."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Of a generation. A machine type is `prefix`-Nt, N being its chips.

    label: the value of cloud.google.com/gke-tpu-accelerator on its nodes.
    workload_policy: slices of several nodes are placed by a policy of their own that carries the topology, as Compute
    Engine refuses TPU7x with a compact placement policy (https://github.com/vllm-project/ci-infra/pull/547).
    """

    prefix: str
    label: str
    chips: tuple[int, ...]
    workload_policy: bool = False


NODE_KINDS = {
    "v4": NodeKind(prefix="ct4p-hightpu", label="tpu-v4-podslice", chips=(4,)),
    "v5e": NodeKind(prefix="ct5lp-hightpu", label="tpu-v5-lite-podslice", chips=(1, 4, 8)),
    "v5p": NodeKind(prefix="ct5p-hightpu", label="tpu-v5p-slice", chips=(4,)),
    "v6e": NodeKind(prefix="ct6e-standard", label="tpu-v6e-slice", chips=(1, 4, 8)),
    "tpu7x": NodeKind(prefix="tpu7x-standard", label="tpu7x", chips=(4,), workload_policy=True),
}
"""Generation → its nodes; a generation that is not here is none of GKE's. xpk also knows tpu7x-standard-1t, a single
chip, which is no size of a slice here."""
