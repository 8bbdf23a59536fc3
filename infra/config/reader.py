"""Reads a stack's configuration, all of it, and finds every mistake before anything is made.

`read` is pure. `from_pulumi` is the one place that takes something of Pulumi's configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pulumi
import pulumi.runtime

from infra.config import Allowances, Config, ConfigError, formats
from infra.config import grant as config_grant
from infra.config import images as config_images
from infra.config import network as config_network
from infra.config import slices as config_slices
from infra.config import storage as config_storage
from infra.config.fields import Section
from infra.config.places import Home
from infra.config.shown import shown

NAMESPACE = "tpu-stack"
PROJECT_KEY = "gcp:project"
PLACES_OF_THE_PROVIDER = ("gcp:zone", "gcp:region")


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
    ignored = [key for key in PLACES_OF_THE_PROVIDER if key in everything]
    return read(
        values,
        project=pulumi.Config("gcp").get("project"),
        stack=pulumi.get_stack(),
        secrets=secrets,
        ignored=ignored,
    )


def read(
    values: Mapping[str, object],
    *,
    project: str | None,
    stack: str,
    secrets: Collection[str] = (),
    ignored: Collection[str] = (),
) -> Config:
    """values: this project's keys without the namespace, as YAML has them or as the texts that Pulumi makes of them.

    secrets: the keys that are kept as secrets, which none of them is; their values are neither read nor shown.
    ignored: keys of the provider that the user set, taking them for ours.

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
    project = _project(project, problems)
    if (wrong := formats.stack(stack)) is not None:
        problems.append(f"stack: {shown(stack)} {wrong}; `pulumi stack rename NAME` changes it")
    home = _home(root, project, ignored)
    slices = config_slices.read(root, home)
    first_zone = next((each.zone for each in slices if each.zone), home.zone)
    bucket, nfs = config_storage.read(root, project=project, stack=stack, zone=first_zone)
    network = config_network.read(root)
    access = config_network.read_access(root)
    images = config_images.read(root, stack=stack, zone=first_zone)
    grant = config_grant.read(root)
    allow = Allowances(
        unlisted=root.flag("allow-unlisted", default=False),
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


def _home(root: Section, project: str | None, ignored: Collection[str]) -> Home:
    zone = root.text("zone", None, rule=formats.zone)
    region = root.text("region", None, rule=formats.region)
    if root.has("zone") and root.has("region"):
        root.say("region", "stands beside tpu-stack:zone; write one of the two")
    verb = "is" if len(ignored) == 1 else "are"
    said = f" ({' and '.join(ignored)} {verb} the provider's own and not read for this)" if ignored else ""
    return Home(project=project, zone=zone, region=region, fine=root.fine("zone", "region"), ignored=said)
