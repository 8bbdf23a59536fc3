"""From what Pulumi remembers to what is configured now: nothing, a change in place, or another one instead. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from infra.cloud_tpu import states
from infra.cloud_tpu.wanted import is_unknown

Props = Mapping[str, Any]

# What nodes.patch takes, and what no request is needed for.
IN_PLACE = frozenset({"labels", "metadata", "tags", "description", "external_addresses", "wait_s"})
REPLACING = (
    "project", "zone", "queued_resource_id", "owner", "accelerator_type", "accelerator_generation", "topology",
    "runtime_version", "capacity", "reservation_name", "node_count", "guaranteed_s", "network", "subnetwork",
    "service_account_email", "data_disks", "boot_disk_kms_key",
)  # fmt: skip
TIMING = "valid_until_s"  # has done its part once the request was served


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changes:
    """replaces: properties for which it is deleted and made anew; `state` among them where it is lost."""

    any: bool
    replaces: tuple[str, ...]


def between(before: Props, now: Props) -> Changes:
    """before: the outputs of the last create, update or read.

    One that is not ACTIVE yet always has a change, in place: the update waits on. One that is lost (a refresh has seen
    it SUSPENDED, FAILED, PREEMPTED …) is replaced for its state: the remains are deleted, the same is made again.
    """
    kind = states.kind_of(before.get("state"))
    changed = {
        name
        for name in (*REPLACING, *IN_PLACE, TIMING)
        if is_unknown(now.get(name)) or _plain(before.get(name)) != _plain(now.get(name))
    }
    replaces = [name for name in REPLACING if name in changed]
    if TIMING in changed and kind != "active":
        replaces.append(TIMING)
    if kind == "lost":
        replaces.append("state")
    return Changes(any=bool(changed) or kind != "active", replaces=tuple(replaces))


def _plain(value: Any) -> Any:
    """Without the difference between what is absent, empty, zero or false, between 1 and 1.0, and of order in tags."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None} or None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value] or None
    return value or None
