"""Reads a stack's configuration, all of it, and finds every mistake before anything is made.

`read` is pure. `from_pulumi` is the one place that takes something of Pulumi's configuration.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import pulumi
import pulumi.runtime

from infra import catalogue, naming
from infra.catalogue import zones
from infra.config import (
    AccessConfig,
    Allowances,
    Config,
    ConfigError,
    ImagesConfig,
    NetworkConfig,
    formats,
    grant_keys,
    slice_keys,
    storage_keys,
)
from infra.config.section import Section, key_shown, shown
from infra.config.slice_keys import Home

NAMESPACE = "tpu-stack"
PROJECT_KEY = "gcp:project"
PLACES_OF_THE_PROVIDER = ("gcp:zone", "gcp:region")
PROVIDER = "gcp:"
UNNAMED = ("version", "pluginDownloadURL")
"""What the engine reads of any provider."""
KEEP = 10
MOST_KEPT = 1000


def from_pulumi() -> Config:
    """The configuration of the stack that runs.

    Raises:
        ConfigError: with every mistake in it.
    """
    # pulumi.Config answers for a key that one names; only the map below it knows which keys there are.
    everything = {**pulumi.runtime.get_config_env(), **pulumi.runtime.config.CONFIG.get()}
    prefix = f"{NAMESPACE}:"
    values = {key.removeprefix(prefix): everything[key] for key in everything if key.startswith(prefix)}
    secrets = [key for key in values if pulumi.runtime.is_config_secret(prefix + key)]
    provider_keys = [key for key in everything if key.startswith(PROVIDER)]
    return read(
        values,
        project=pulumi.Config("gcp").get("project"),
        stack=pulumi.get_stack(),
        secrets=secrets,
        provider_keys=provider_keys,
    )


def read(
    values: Mapping[str, object],
    *,
    project: str | None,
    stack: str,
    secrets: Collection[str] = (),
    provider_keys: Collection[str] = (),
) -> Config:
    """values: this project's keys without the namespace, as YAML has them or as the texts that Pulumi makes of them.

    secrets: the keys that are kept as secrets, which none of them is; their values are neither read nor shown.
    provider_keys: those below gcp: that are set, with the namespace.

    Raises:
        ConfigError: with every mistake in it.
    """
    problems = [
        f"{NAMESPACE}:{key}: is kept as a secret, nothing here is one; set it anew without --secret"
        for key in sorted(secrets)
    ]
    open_values: dict[object, object] = {key: values[key] for key in values if key not in secrets}
    root = Section(
        open_values, prefix=f"{NAMESPACE}:", problems=problems, as_text=True, hidden=frozenset(secrets)
    )
    problems += _unknown_keys_of_the_provider(provider_keys)
    project = _project(project, problems)
    if (wrong := formats.stack(stack)) is not None:
        problems.append(f"stack: {shown(stack)} {wrong}; `pulumi stack rename NAME` changes it")
    unlisted = root.flag("allow-unlisted", default=False)
    ignored = [key for key in PLACES_OF_THE_PROVIDER if key in provider_keys]
    home = _home(root, project, ignored, unlisted)
    slices = slice_keys.read(root, home)
    first_zone = next((each.zone for each in slices if each.zone), home.zone)
    bucket, nfs = storage_keys.read(root, project=project, stack=stack, zone=first_zone, unlisted=unlisted)
    network = _network(root)
    access = _access(root)
    images = _images(root, stack=stack, zone=first_zone, unlisted=unlisted)
    grant = grant_keys.read(root, unlisted=unlisted)
    allow = Allowances(
        unlisted=unlisted,
        billable=root.flag("allow-billable", default=False),
        cross_region=root.flag("allow-cross-region", default=False),
    )
    budget_usd_per_hour = root.number_above_zero("budget-usd-per-hour")
    protect = root.flag("protect", default=True)
    root.close()
    if problems or project is None:
        raise ConfigError(tuple(problems))
    return Config(
        project=project,
        stack=stack,
        slices=slices,
        bucket=bucket,
        nfs=nfs,
        network=network,
        access=access,
        images=images,
        grant=grant,
        allow=allow,
        budget_usd_per_hour=budget_usd_per_hour,
        protect=protect,
    )


def _project(project: str | None, problems: list[str]) -> str | None:
    section = Section({} if project is None else {PROJECT_KEY: project}, prefix="", problems=problems)
    return section.text(
        PROJECT_KEY,
        None,
        rule=formats.project,
        missing=f"name your project: `pulumi config set {PROJECT_KEY} PROJECT-ID`",
    )


def _home(root: Section, project: str | None, ignored: Collection[str], unlisted: bool) -> Home:
    zone = root.text("zone", None, rule=formats.zone(unlisted=unlisted))
    region = root.text("region", None, rule=formats.region(unlisted=unlisted))
    if root.has("zone") and root.has("region"):
        root.say("region", "stands beside tpu-stack:zone; write one of the two")
    verb = "is" if len(ignored) == 1 else "are"
    said = f" ({' and '.join(ignored)} {verb} the provider's own and not read for this)" if ignored else ""
    return Home(
        project=project,
        zone=zone,
        region=region,
        fine=root.fine("zone", "region"),
        ignored=said,
        unlisted=unlisted,
    )


def _network(root: Section) -> NetworkConfig:
    section = root.section("network")
    existing = section.text("existing", None, rule=formats.network)
    subnetwork = section.text("subnetwork", None, rule=formats.network)
    external_addresses = section.flag("external-addresses", default=False)
    if section.has("subnetwork") and not section.has("existing"):
        section.say("subnetwork", "is of an existing network; write existing: NAME beside it, or remove it")
    section.close()
    return NetworkConfig(existing=existing, subnetwork=subnetwork, external_addresses=external_addresses)


def _access(root: Section) -> AccessConfig:
    section = root.section("access")
    members = section.texts("members", rule=formats.principal)
    administrators = section.texts("administrators", rule=formats.principal)
    section.close()
    return AccessConfig(members=members, administrators=administrators)


def _images(root: Section, *, stack: str, zone: str | None, unlisted: bool) -> ImagesConfig:
    """zone: of the first slice, in whose region the repository is by default; None: unknown, and said so."""
    section = root.section("images")
    repository = section.text("repository", naming.resource_name(stack), rule=formats.repository)
    region = section.text("region", None, rule=formats.region(unlisted=unlisted))
    keep = section.integer("keep", KEEP, least=1, most=MOST_KEPT)
    references = section.mapping("references", key_rule=formats.framework, value_rule=formats.reference)
    section.close()
    return ImagesConfig(
        repository=repository,
        region=region or (catalogue.region_of(zone) if zone else ""),
        keep=keep,
        references=references,
    )


def _unknown_keys_of_the_provider(keys: Collection[str]) -> list[str]:
    """The provider itself takes them without a word."""
    known = _keys_of_the_provider()
    return [
        f"{PROVIDER}{key_shown(name)}: unknown key of Pulumi's gcp provider; "
        + (f"did you mean {PROVIDER}{near}?" if (near := zones.nearest(name, known)) else "remove it")
        for name in sorted(key.removeprefix(PROVIDER) for key in keys)
        if name not in known
    ]


@functools.cache
def _keys_of_the_provider() -> frozenset[str]:
    """Read from the SDK's own list, as text: to import it takes a second."""
    package = importlib.util.find_spec("pulumi_gcp")
    assert package is not None and package.submodule_search_locations is not None
    text = Path(package.submodule_search_locations[0], "config", "vars.py").read_text(encoding="utf-8")
    return frozenset({*re.findall(r"__config__\.get\w*\(.(\w+).\)", text), *UNNAMED})
