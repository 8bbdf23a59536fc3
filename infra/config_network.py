"""Reads `tpu-stack:network` and `tpu-stack:access`: how hosts are connected, and who may reach them. Pure."""

from __future__ import annotations

from infra import config_formats
from infra.config import AccessConfig, NetworkConfig
from infra.config_fields import Section


def read(root: Section) -> NetworkConfig:
    section = root.section("network")
    existing = section.text("existing", None, rule=config_formats.network)
    subnetwork = section.text("subnetwork", None, rule=config_formats.network)
    external_addresses = section.flag("external-addresses", default=False)
    if section.has("subnetwork") and not section.has("existing"):
        section.say("subnetwork", "is of an existing network; write existing: NAME beside it, or remove it")
    section.close()
    return NetworkConfig(existing=existing, subnetwork=subnetwork, external_addresses=external_addresses)


def read_access(root: Section) -> AccessConfig:
    section = root.section("access")
    members = section.texts("members", rule=config_formats.principal)
    administrators = section.texts("administrators", rule=config_formats.principal)
    section.close()
    return AccessConfig(members=members, administrators=administrators)
