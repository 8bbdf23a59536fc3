"""Reads a stack's configuration, all of it, and finds every mistake before anything is made. Pure.

`slice_keys` reads the slices, this module everything else. Sizes: a disk of the gateway
https://cloud.google.com/compute/docs/disks, Filestore's basic HDD tier (1 to 63.9 TiB)
https://cloud.google.com/filestore/docs/service-tiers; soft delete https://cloud.google.com/storage/docs/soft-delete
(November 2026).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import posixpath
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from contracts.inventory import Capacity
from contracts.suggestions import suggestion
from infra import catalogue, naming
from infra.catalogue import CatalogueError, zones
from infra.config import (
    AccessConfig,
    Allowances,
    BucketConfig,
    ClusterConfig,
    Config,
    ConfigError,
    GrantLine,
    ImagesConfig,
    NetworkConfig,
    NfsConfig,
    NfsKind,
    NotifyConfig,
    ReleaseChannel,
    SliceConfig,
    formats,
    slice_keys,
)
from infra.config.section import Section, key_shown, shown
from infra.config.slice_keys import Home

NAMESPACE = "tpu-stack"
PROJECT_KEY = "gcp:project"
PLACES_OF_THE_PROVIDER = ("gcp:zone", "gcp:region")
PROVIDER = "gcp:"
UNNAMED = ("version", "pluginDownloadURL")
"""What the engine reads of any provider."""
NAMES_OF_PROVIDERS = frozenset({"zone", "region"})
"""Keys of other providers too, such as aws:region."""
KEEP = 10
MOST_KEPT = 1000
MOST_CHIPS = 1_000_000
GRANTED_CAPACITIES: tuple[Capacity, ...] = tuple(
    capacity for capacity in typing.get_args(Capacity) if capacity not in ("reserved", "flex-start")
)

CHANNELS: tuple[ReleaseChannel, ...] = typing.get_args(ReleaseChannel)
MOST_NETWORKS = 100

KINDS: tuple[NfsKind | typing.Literal["none"], ...] = (*typing.get_args(NfsKind), "none")
DEFAULT_GIB: dict[NfsKind, int] = {"gateway": 200, "filestore": 1024}
LEAST_GIB: dict[NfsKind, int] = {"gateway": 10, "filestore": 1024}
MOST_GIB: dict[NfsKind, int] = {"gateway": 65536, "filestore": 65433}
MOUNT = "/mnt/share"

# Nothing is mounted over these, nor over anything below the first kind: programs, people's homes, Docker's images.
SYSTEM = (
    *("bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "lost+found", "proc", "root"),
    *("run", "sbin", "snap", "sys", "tmp", "usr", "var"),
)
SHARED = ("media", "mnt", "opt", "srv")
IMAGE_FOLDERS = ("/opt/venv", "/opt/tpu-stack")
"""What the images of `images/` keep there; the share is seen in containers under the same path."""

LEAST_SOFT_DELETE_DAYS, MOST_SOFT_DELETE_DAYS = 7, 90
MOST_TEMPORARY_DAYS = 365
DEFAULT_DAYS = 7


def read(
    values: Mapping[str, object],
    *,
    project: str | None,
    stack: str,
    secrets: Collection[str] = (),
    provider: Mapping[str, object] = types.MappingProxyType({}),
    other_keys: Collection[str] = (),
) -> Config:
    """values: this project's keys without the namespace, as YAML has them or as the texts that Pulumi makes of them.

    secrets: the keys that are kept as secrets, which none of them is; their values are neither read nor shown.
    provider: the keys below gcp:, with the namespace; None where the value is a secret. other_keys: the keys of all
    other namespaces, with the namespace.

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
    problems += _unknown_keys_of_the_provider(provider)
    project = _project(project, problems)
    if (wrong := formats.stack(stack)) is not None:
        problems.append(f"stack: {shown(stack)} {wrong}; `pulumi stack rename NAME` changes it")
    with root:
        for name in sorted({NAMESPACE, PROVIDER.rstrip(":")} & {*open_values}):
            root.say(
                name,
                f"is the beginning of keys and no key; write those below it as {name}:KEY, each below config:",
            )
        unlisted = root.flag("allow-unlisted", default=False)
        _provider(provider, problems, unlisted=unlisted)
        home = _home(root, project, stack, provider, unlisted)
        grant = _grant(root, unlisted=unlisted)
        config = _config(root, dataclasses.replace(home, grant=grant))
        problems += [
            f"{key_shown(key)}: {wrong}" for key in other_keys if (wrong := _meant_for_us(key, root.keys))
        ]
    if problems:
        raise ConfigError(tuple(problems))
    return config


def _config(root: Section, home: Home) -> Config:
    slices = slice_keys.read(root, home)
    # What is not a slice is where the first one is.
    home = dataclasses.replace(
        home, zone=next((slice_config.zone for slice_config in slices if slice_config.zone), home.zone)
    )
    with root.section("storage") as storage:
        bucket = _bucket(storage, home)
        nfs = _nfs(storage, home)
    keeper = _keeper(root, bucket)
    return Config(
        project=home.project or "",
        stack=home.stack,
        slices=slices,
        bucket=bucket,
        nfs=nfs,
        cluster=_cluster(root, home, slices),
        network=_network(root),
        access=_access(root),
        images=_images(root, home),
        keeper=keeper,
        notify=_notify(root, keeper=keeper),
        grant=home.grant,
        allow=Allowances(
            unlisted=home.unlisted,
            billable=root.flag("allow-billable", default=False),
            cross_region=root.flag("allow-cross-region", default=False),
        ),
        budget_usd_per_hour=root.number_above_zero("budget-usd-per-hour"),
        idle_hours=root.number_above_zero("idle-hours"),
        protect=root.flag("protect", default=True),
    )


def read_grant(value: object) -> tuple[GrantLine, ...]:
    """The lines of a value of `tpu-stack:grant`, whatever else the configuration says.

    Raises:
        ConfigError: with every mistake in them.
    """
    problems: list[str] = []
    root = Section({"grant": value}, prefix="tpu-stack:", problems=problems)
    lines = _grant(root, unlisted=True)
    if problems:
        raise ConfigError(tuple(problems))
    return lines


def _project(project: str | None, problems: list[str]) -> str | None:
    section = Section({} if project is None else {PROJECT_KEY: project}, prefix="", problems=problems)
    return section.text(
        PROJECT_KEY,
        None,
        rule=formats.project,
        missing=f"name your project: `pulumi config set {PROJECT_KEY} PROJECT-ID`",
    )


def _home(root: Section, project: str | None, stack: str, provider: Collection[str], unlisted: bool) -> Home:
    zone = root.text("zone", None, rule=formats.zone(unlisted=unlisted))
    region = root.text("region", None, rule=formats.region(unlisted=unlisted))
    if root.has("zone") and root.has("region"):
        root.say("region", "stands beside tpu-stack:zone; write one of the two")
    ignored = [key for key in PLACES_OF_THE_PROVIDER if key in provider]
    verb = "is" if len(ignored) == 1 else "are"
    return Home(
        project=project,
        stack=stack,
        zone=zone,
        region=region,
        fine=root.fine("zone", "region"),
        ignored=f" ({' and '.join(ignored)} {verb} the provider's own and not read for this)"
        if ignored
        else "",
        unlisted=unlisted,
    )


def _bucket(storage: Section, home: Home) -> BucketConfig | None:
    if storage.is_false("bucket"):
        return None
    with storage.section("bucket", example="name: my-bucket, or false for none") as section:
        # A legal value of a label is a legal name of a bucket where it begins with the project's letter.
        default = naming.label_value(f"{home.project or 'project'}-{home.stack}-{naming.PREFIX}")
        name = section.text("name", None, rule=formats.bucket)
        if not section.has("name") and (wrong := formats.bucket(default)) is not None:
            section.say("name", f'missing, and the default "{default}" {wrong}')
        region = section.text("region", None, rule=formats.region(unlisted=home.unlisted))
        soft_delete_days = section.integer(
            "soft-delete-days", DEFAULT_DAYS, minimum=0, maximum=MOST_SOFT_DELETE_DAYS
        )
        if 0 < soft_delete_days < LEAST_SOFT_DELETE_DAYS:
            section.refuse("soft-delete-days", "is not 0 (off) or 7 to 90")
        return BucketConfig(
            name=name or default,
            region=region or home.storage_region,
            soft_delete_days=soft_delete_days,
            temporary_days=section.integer(
                "temporary-days", DEFAULT_DAYS, minimum=1, maximum=MOST_TEMPORARY_DAYS
            ),
        )


def _nfs(storage: Section, home: Home) -> NfsConfig | None:
    with storage.section("nfs", example="kind: none") as section:
        kind = section.choice("kind", "gateway", KINDS)
        # An AI zone has accelerators, and hardly the small machines and the file service of its parent.
        default_zone = zones.parent_zone(home.zone) if home.zone else ""
        zone = section.text("zone", default_zone, rule=formats.zone(unlisted=home.unlisted))
        machine_type = section.text("machine-type", None, rule=formats.machine_type(unlisted=home.unlisted))
        default_type = zones.gateway_machine_type(zone)
        families = zones.families_in(zone)
        if machine_type and not home.unlisted and zones.machine_family(machine_type) not in families:
            section.refuse(
                "machine-type",
                f"is not available in {zone}, which has {', '.join(families)}; write {default_type}, or leave it out",
            )
        mount = section.text("mount", MOUNT, rule=_mount_rule)
        if kind == "none":
            for key in ("zone", "size-gib", "machine-type", "mount"):
                if section.has(key):
                    section.say(key, "is of no use with kind none; remove it, or take gateway or filestore")
            return None
        minimum, maximum = LEAST_GIB[kind], MOST_GIB[kind]
        unit = f", which is what {kind} takes"
        size_gib = section.integer("size-gib", DEFAULT_GIB[kind], minimum=minimum, maximum=maximum, unit=unit)
        if kind == "filestore" and section.has("machine-type"):
            section.say("machine-type", "is only for the gateway; remove it, or write kind: gateway")
        return NfsConfig(
            kind=kind, zone=zone, size_gib=size_gib, machine_type=machine_type or default_type, mount=mount
        )


def _cluster(root: Section, home: Home, slices: Sequence[SliceConfig]) -> ClusterConfig | None:
    """The cluster; None if no slice is a node pool and no cluster is configured."""
    pools = [(index, slice_config) for index, slice_config in enumerate(slices) if slice_config.in_cluster]
    if not pools and not root.has("cluster"):
        return None
    with root.section("cluster") as section:
        context = section.text("context", None, rule=formats.context)
        first = next((slice_config.zone for _, slice_config in pools if slice_config.zone), home.zone or "")
        zone = section.text("zone", zones.parent_zone(first), rule=formats.zone(unlisted=home.unlisted))
        cluster_config = ClusterConfig(
            context=context,
            zone=zone,
            release_channel=section.choice("release-channel", "regular", CHANNELS),
            authorized_networks=section.texts("authorized-networks", rule=formats.cidr),
            namespace=section.text(
                "namespace", naming.resource_name(home.stack), rule=formats.name(longest=naming.LONGEST)
            ),
            service_account=section.text(
                "service-account", naming.PREFIX, rule=formats.name(longest=naming.LONGEST)
            ),
        )
        for key in ("zone", "release-channel", "authorized-networks"):
            if context is not None and section.has(key):
                section.say(
                    key, "is of a cluster that is made, and context names one that exists; remove one of them"
                )
        if len(cluster_config.authorized_networks) > MOST_NETWORKS:
            section.say(
                "authorized-networks",
                f"{len(cluster_config.authorized_networks)} ranges; GKE takes {MOST_NETWORKS}; join some",
            )
        if context is None and zone and section.fine("zone"):
            for index, slice_config in pools:
                if slice_config.zone and slice_config.region != cluster_config.region:
                    section.say(
                        "zone",
                        f"{zone} is not in {slice_config.region}, where tpu-stack:slices[{index}] is, and a "
                        "cluster is in one region; write a zone of that region, or give the slice a stack of its own",
                    )
        return cluster_config


def _mount_rule(text: str) -> str | None:
    if re.fullmatch(r"/[-._a-zA-Z0-9/]*", text) is None:
        return f"is not an absolute path of letters, digits, dots, hyphens and underscores; write one such as {MOUNT}"
    if posixpath.normpath(text) != text:
        return "is not the shortest form of that path; leave out dots, doubled slashes and the last slash"
    first, _, subfolder = text[1:].partition("/")
    in_image = any(f"{text}/".startswith(f"{folder}/") for folder in IMAGE_FOLDERS)
    if not first or first in SYSTEM or (first in SHARED and not subfolder) or in_image:
        return f"would hide a folder of the system, of people or of the images; write one such as {MOUNT}"
    # It also lands in /etc/fstab and in a unit of systemd, where no other name needs quotes.
    if re.search(r"/[-.]", text):
        return f"has a folder whose name begins with a dot or a hyphen; write one such as {MOUNT}"
    return None


def _network(root: Section) -> NetworkConfig:
    with root.section("network") as section:
        network_config = NetworkConfig(
            existing=section.text("existing", None, rule=formats.network),
            subnetwork=section.text("subnetwork", None, rule=formats.network),
            external_addresses=section.flag("external-addresses", default=False),
        )
        if section.has("subnetwork") and not section.has("existing"):
            section.say(
                "subnetwork", "is of an existing network; write existing: NAME beside it, or remove it"
            )
        return network_config


def _access(root: Section) -> AccessConfig:
    with root.section("access") as section:
        return AccessConfig(
            members=section.texts("members", rule=formats.principal),
            administrators=section.texts("administrators", rule=formats.principal),
        )


def _images(root: Section, home: Home) -> ImagesConfig:
    with root.section("images") as section:
        name = naming.resource_name(home.stack)
        repository = section.text("repository", name, rule=formats.repository)
        region = section.text("region", None, rule=formats.region(unlisted=home.unlisted))
        return ImagesConfig(
            repository=repository,
            region=region or home.storage_region,
            keep=section.integer("keep", KEEP, minimum=1, maximum=MOST_KEPT),
            references=section.mapping(
                "references", key_rule=formats.framework, value_rule=formats.reference
            ),
        )


def _keeper(root: Section, bucket: BucketConfig | None) -> bool:
    keeper = root.flag("keeper", default=False)
    if keeper and bucket is None:
        root.say(
            "keeper",
            "keeps what it watches in the bucket; remove storage.bucket: false, or set keeper: false",
        )
    return keeper


def _notify(root: Section, *, keeper: bool) -> NotifyConfig:
    with root.section("notify") as section:
        names = {key: section.text(key, None) for key in ("slack", "webhook", "smtp")}
        for key, name in names.items():
            # It may be the address itself, and is not shown.
            if name is not None and formats.SECRET.fullmatch(name) is None:
                section.say(
                    key,
                    "is not the name of a secret; put the address into Secret Manager (`gcloud secrets create NAME "
                    "--data-file=FILE`) and write NAME here",
                )
        if any(names.values()) and not keeper and root.fine("keeper"):
            root.say("notify", "is for the keeper; set tpu-stack:keeper: true, or remove it")
        return NotifyConfig(**names)


def _grant(root: Section, *, unlisted: bool) -> tuple[GrantLine, ...]:
    """unlisted: take zones that are not known here too."""
    return tuple(_grant_line(section, unlisted) for section in root.sections("grant"))


def _grant_line(section: Section, unlisted: bool) -> GrantLine:
    zone_missing = "a grant is for one zone; write it as the grant does"
    capacity_missing = "write on-demand or spot, as the grant does"
    with section:
        return GrantLine(
            generation=_granted_generation(section),
            zone=section.text("zone", "", rule=formats.zone(unlisted=unlisted), missing=zone_missing),
            chips=section.integer(
                "chips", 0, minimum=1, maximum=MOST_CHIPS, missing="write how many the grant lists"
            ),
            capacity=section.choice("capacity", "spot", GRANTED_CAPACITIES, missing=capacity_missing),
            until=section.date("until"),
        )


def _granted_generation(section: Section) -> str:
    """The name of a generation that is given by its name or by the prefix of its types."""
    text = section.text("type", None, missing="write the generation, such as v5e")
    if text is None:
        return ""
    try:
        generation = catalogue.generation(text)
    except CatalogueError as error:
        if text in catalogue.ACCELERATORS:
            accelerator = catalogue.ACCELERATORS[text]
            section.refuse(
                "type",
                f"is a size; write {accelerator.generation.name}, and how many as chips: {accelerator.chips}",
            )
        else:
            section.say("type", str(error))
        return ""
    if not generation.offered:
        section.refuse("type", f"is not offered by the Cloud TPU API; choose one of {catalogue.NAMES}")
    return generation.name


def _provider(provider: Mapping[str, object], problems: list[str], *, unlisted: bool) -> None:
    """Check the provider's places and switches, whose values it takes without a word."""
    values: dict[object, object] = {
        key.removeprefix(PROVIDER): value for key, value in provider.items() if value is not None
    }
    section = Section(values, prefix=PROVIDER, problems=problems, as_text=True)
    section.text("zone", None, rule=formats.zone(unlisted=unlisted))
    section.text("region", None, rule=formats.region(unlisted=unlisted))
    for name in sorted(_keys_of_the_provider(switches=True) & {*values}):
        section.flag(name, default=False)


def _meant_for_us(key: str, own: Collection[str]) -> str | None:
    """The mistake in a key of another namespace that seems to be a misspelt key of this one, or None."""
    namespace, _, name = key.partition(":")
    likely_namespace = suggestion(namespace, (NAMESPACE, PROVIDER.rstrip(":")))
    if likely_namespace is None and name in {*own} - NAMES_OF_PROVIDERS:
        likely_namespace = NAMESPACE
    if likely_namespace is None:
        return None
    names = own if likely_namespace == NAMESPACE else _keys_of_the_provider()
    return f"nothing reads it; did you mean {likely_namespace}:{suggestion(name, names) or name}?"


def _unknown_keys_of_the_provider(keys: Collection[str]) -> list[str]:
    """A mistake for each key that the provider does not know; the provider itself ignores such a key."""
    known_keys = _keys_of_the_provider()
    return [
        f"{PROVIDER}{key_shown(name)}: unknown key of Pulumi's gcp provider; "
        + (f"did you mean {PROVIDER}{near}?" if (near := suggestion(name, known_keys)) else "remove it")
        for name in sorted(key.removeprefix(PROVIDER) for key in keys)
        if name not in known_keys
    ]


@functools.cache
def _keys_of_the_provider(*, switches: bool = False) -> frozenset[str]:
    """Read from the SDK's own list, as text: to import it takes a second."""
    package = importlib.util.find_spec("pulumi_gcp")
    assert package is not None and package.submodule_search_locations is not None
    text = Path(package.submodule_search_locations[0], "config", "vars.py").read_text(encoding="utf-8")
    if switches:
        return frozenset(re.findall(r"__config__\.get_bool\(.(\w+).\)", text))
    return frozenset({*re.findall(r"__config__\.get\w*\(.(\w+).\)", text), *UNNAMED})
