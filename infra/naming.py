"""Names and labels that Google takes, made of names that a user gave. Pure.

Names of Compute Engine and most others: RFC 1035, 1 to 63 of lower-case letters, digits and hyphens, the first a
letter, the last no hyphen (https://cloud.google.com/compute/docs/naming-resources). Values of labels: up to 63 of
lower-case letters, digits, hyphens and underscores (https://cloud.google.com/compute/docs/labeling-resources).
"""

from __future__ import annotations

import hashlib
import re

LONGEST = 63
LONGEST_CLUSTER = 40
"""Of a cluster and of a node pool."""
NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
LABEL_KEY = re.compile(r"[a-z][-_a-z0-9]{0,62}")
LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}")

PREFIX = "tpu-stack"
STACK_LABEL = "tpu-stack"
SLICE_LABEL = "tpu-stack-slice"
OWNER_LABEL = "tpu-stack-owner"
RUN_DURATION_LABEL = "tpu-stack-run-duration"
"""Of the nodes of a flex-start request, in seconds: v2 of the Cloud TPU API does not show how long they may run."""
SYSTEM_POOL = "system"
"""The node pool of GKE's own pods; slices have the others."""
RESERVED_LABELS = (STACK_LABEL, SLICE_LABEL, OWNER_LABEL, RUN_DURATION_LABEL)


def resource_name(stack: str, *parts: str, longest: int = LONGEST) -> str:
    """tpu-stack-STACK-PART…, legal and no longer than `longest`; two inputs never share a name by being shortened."""
    return _fit("-".join([PREFIX, stack, *parts]), longest)


def part_names(name: str, count: int) -> tuple[str, ...]:
    """The names of the `count` parts of a multislice: NAME-0, NAME-1, …; of a single one NAME itself."""
    return (name,) if count == 1 else tuple(f"{name}-{number}" for number in range(count))


def cluster_name(stack: str) -> str:
    """Of the stack's own cluster (https://cloud.google.com/kubernetes-engine/docs/reference/rest)."""
    return resource_name(stack, longest=LONGEST_CLUSTER)


def label_value(text: str) -> str:
    """`text` as the value of a label; what had to be changed is told apart by a hash."""
    return _fit(text, LONGEST)


def labels(stack: str, *, slice_name: str | None = None) -> dict[str, str]:
    """The labels of everything that a stack makes, and of what belongs to one slice."""
    values = {STACK_LABEL: label_value(stack)}
    if slice_name is not None:
        values[SLICE_LABEL] = label_value(slice_name)
    return values


def _fit(text: str, longest: int) -> str:
    plain = re.sub(r"[^-a-z0-9]+", "-", text.lower()).strip("-")
    if plain == text and len(plain) <= longest:
        return plain
    digest = hashlib.sha256(text.encode()).hexdigest()[:6]
    return f"{plain[: longest - 7].rstrip('-')}-{digest}"
