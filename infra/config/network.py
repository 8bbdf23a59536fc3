"""Reads `tpu-stack:network` and `tpu-stack:access`: how hosts are connected, and who may reach them. Pure."""

from __future__ import annotations

from infra.config import AccessConfig, NetworkConfig, formats
from infra.config.fields import Section


def read(root: Section) -> NetworkConfig:
    section = root.section("network")
    existing = section.text("existing", None, rule=formats.network)
    subnetwork = section.text("subnetwork", None, rule=formats.network)
    external_addresses = section.flag("external-addresses", default=False)
    if section.has("subnetwork") and not section.has("existing"):
        section.say("subnetwork", "is of an existing network; write existing: NAME beside it, or remove it")
    section.close()
    return NetworkConfig(existing=existing, subnetwork=subnetwork, external_addresses=external_addresses)


def read_access(root: Section) -> AccessConfig:
    section = root.section("access")
    members = section.texts("members", rule=formats.principal)
    administrators = section.texts("administrators", rule=formats.principal)
    section.close()
    return AccessConfig(members=members, administrators=administrators)
