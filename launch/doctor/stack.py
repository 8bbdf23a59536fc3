"""What the inventory says: which slice, what it costs, and whether bucket and images are where the TPUs are. Pure."""

from __future__ import annotations

from contracts.inventory import Inventory, Slice
from infra.catalogue import CatalogueError, accelerator, price_usd_per_hour, region_of
from launch.doctor.finding import Said, ok, skip, warn
from launch.ssh.problems import ATTRIBUTES_POLICY

MULTI_REGIONS = {"us": "us", "eu": "europe", "asia": "asia"}
EGRESS = "reading across regions is billed by the gigabyte"


def slice_in_use(inventory: Inventory, one_slice: Slice) -> list[Said]:
    """The slice, its hosts against what its type has, and what an hour of it costs."""
    others = [each.name for each in inventory.slices if each.name != one_slice.name]
    also = f" (also there: {', '.join(others)})" if others else ""
    count = len(one_slice.hosts)
    said = [ok(f"{one_slice.name}: {one_slice.accelerator_type} in {one_slice.zone}, {count} hosts{also}")]
    try:
        kind = accelerator(one_slice.accelerator_type)
    except CatalogueError:
        return said
    if count != kind.hosts * one_slice.count:
        said.append(
            warn(
                f"{one_slice.accelerator_type} has {kind.hosts * one_slice.count} hosts, the inventory has {count}",
                "`pulumi up --refresh`: the others had published no host key when it was written",
            )
        )
    nameless = [str(host.index) for host in one_slice.hosts if not host.host_keys]
    if nameless:
        said.append(
            warn(
                f"no host key is known of host {', '.join(nameless)}, so that nobody can be sure who answers",
                "`pulumi up --refresh` reads what they have published; where the organisation policy "
                f"{ATTRIBUTES_POLICY} holds, or in an inventory of your own: `fab trust --host {nameless[0]}`",
            )
        )
    return [*said, cost(one_slice)]


def cost(one_slice: Slice) -> Said:
    try:
        kind = accelerator(one_slice.accelerator_type)
        price = price_usd_per_hour(kind, one_slice.zone, one_slice.capacity)
    except CatalogueError as error:
        return skip(f"its price is not known: {error}")
    if price is None:
        return skip(f"no list price is known of {one_slice.accelerator_type} in {one_slice.zone}")
    return ok(f"{price * one_slice.count:,.2f} USD an hour at list price, if no grant covers it")


def regions(inventory: Inventory, one_slice: Slice) -> list[Said]:
    """Whether the bucket and the images are in the region of the TPUs."""
    try:
        here = region_of(one_slice.zone)
    except CatalogueError:
        return [skip(f"{one_slice.zone} is no zone of Google's")]
    said = []
    where = inventory.storage.bucket_region
    if inventory.storage.bucket_url is not None and where is not None:
        said.append(_region(f"the bucket {inventory.storage.bucket_url}", where.lower(), here))
    for stack, reference in sorted(inventory.images.items()):
        place = reference.partition("/")[0].removesuffix("-docker.pkg.dev")
        if place != reference.partition("/")[0]:
            said.append(_region(f"the image of {stack}", place, here))
        if "@sha256:" not in reference:
            said.append(warn(f"the image of {stack} is named by a tag: {reference}", "name it by its digest"))
    return said or [skip("the stack has neither a bucket nor images")]


def _region(what: str, where: str, here: str) -> Said:
    if where == here:
        return ok(f"{what} is in {here}, as the TPUs are")
    if MULTI_REGIONS.get(where, "-") == here.partition("-")[0]:
        return warn(
            f"{what} is in the multi-region {where}, the TPUs in {here}", f"{EGRESS}: use one in {here}"
        )
    return warn(f"{what} is in {where}, the TPUs in {here}", f"{EGRESS}: use one in {here}")
