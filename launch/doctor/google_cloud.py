"""What Google Cloud says with this machine's credentials, and what the inventory says of the slice and its region."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from contracts.inventory import Inventory, Slice
from infra.catalogue import CatalogueError, accelerator, price_usd_per_hour, region_of
from launch.doctor.check import Said, fail, ok, skip, warn
from launch.doctor.workstation import Ask
from launch.ssh.problems import ATTRIBUTES_POLICY

ADC_REMEDY = "`gcloud auth application-default login`"
ANSWER_LIMIT_S = 20.0
PERMISSIONS = {
    "iap.tunnelInstances.accessViaIAP": "roles/iap.tunnelResourceAccessor",
    "compute.instances.osLogin": "roles/compute.osLogin",
}
"""What logging in through IAP takes, and the role that gives it (`tpu-stack:access` grants both)."""
BUCKET_VARIABLE = "STORAGE_EMULATOR_HOST"
Test = Callable[[str, Sequence[str]], Sequence[str]]


def default_credentials(environ: Mapping[str, str]) -> Said:
    """What Pulumi and the bucket's client library use. No token is shown."""
    if environ.get(BUCKET_VARIABLE):
        return skip(f"not needed: ${BUCKET_VARIABLE} names a stand-in for Google's buckets")
    import google.auth.exceptions

    try:
        credentials, project = _credentials()
    except google.auth.exceptions.DefaultCredentialsError:
        return fail("there are no application default credentials", ADC_REMEDY)
    except google.auth.exceptions.RefreshError as error:
        return fail(f"the application default credentials are refused: {_first_line(error)}", ADC_REMEDY)
    except google.auth.exceptions.TransportError as error:
        return warn(
            f"Google cannot be asked: {_first_line(error)}", "see that this machine reaches googleapis.com"
        )
    who = getattr(credentials, "service_account_email", None) or "a person"
    return ok(f"of {who}" + (f", project {project}" if project else ""))


def _credentials() -> tuple[Any, str | None]:
    import google.auth
    import google.auth.transport.requests

    credentials, project = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    request = google.auth.transport.requests.Request()

    def limited(*arguments: Any, **options: Any) -> Any:
        return request(*arguments, **{**options, "timeout": ANSWER_LIMIT_S})

    credentials.refresh(limited)  # type: ignore[no-untyped-call]
    return credentials, project


def tested_permissions(project: str, wanted: Sequence[str]) -> Sequence[str]:
    """Those of the permissions that the caller has in the project, as Resource Manager says."""
    import google.auth.transport.requests

    session = google.auth.transport.requests.AuthorizedSession(_credentials()[0])  # type: ignore[no-untyped-call]
    answer = session.post(
        f"https://cloudresourcemanager.googleapis.com/v1/projects/{project}:testIamPermissions",
        json={"permissions": list(wanted)},
        timeout=ANSWER_LIMIT_S,
    )
    answer.raise_for_status()
    return [str(each) for each in answer.json().get("permissions", [])]


def roles(project: str, environ: Mapping[str, str], test: Test = tested_permissions) -> list[Said]:
    """Whether the account may tunnel and log in. A role that holds for single machines does not show: no failure."""
    if environ.get(BUCKET_VARIABLE):
        return [skip("not asked: this is a rehearsal")]
    try:
        have = test(project, list(PERMISSIONS))
    except Exception as error:  # whichever library refuses, it is only a question less answered
        return [
            warn(
                f"the roles in {project} cannot be asked: {_first_line(error)}", "logging in below shows them"
            )
        ]
    lacking = {name: role for name, role in PERMISSIONS.items() if name not in have}
    if not lacking:
        return [ok(f"may tunnel through IAP and log in to {project}")]
    return [
        warn(
            f"{name} is not granted in {project}",
            f"have an administrator give you {role} (`tpu-stack:access`)",
        )
        for name, role in lacking.items()
    ]


def queued_resource(ask: Ask, project: str, one_slice: Slice) -> Said:
    """What the Cloud TPU API says of the slice's queued resource, or of its node."""
    kind, _, name = one_slice.origin.partition(" ")
    commands = {"queued-resource": "queued-resources", "node": "tpu-vm"}
    if kind not in commands or not name:
        return skip(f"{one_slice.name} came neither from a queued resource nor from a node of Google's")
    form = "value(state.state)" if kind == "queued-resource" else "value(state)"
    answer = ask(
        [
            "gcloud", "compute", "tpus", commands[kind], "describe", name,
            f"--zone={one_slice.zone}", f"--project={project}", f"--format={form}",
        ]
    )  # fmt: skip
    if answer.exit_code is None:
        return skip("cannot be asked without `gcloud`")
    again = "`fab recover`, or `pulumi up --refresh`"
    if answer.exit_code != 0:
        if re.search(r"NOT_FOUND|not found|404", answer.stderr):
            return fail(f"{one_slice.origin} is gone", again)
        return warn(f"{one_slice.origin} cannot be asked: {answer.last_line}", "`gcloud auth login`")
    state = answer.stdout.strip()
    if state in ("ACTIVE", "READY"):
        return ok(f"{one_slice.origin} is {state}")
    lost = state in ("SUSPENDED", "SUSPENDING", "FAILED", "PREEMPTED", "TERMINATED", "STOPPED")
    return (fail if lost else warn)(
        f"{one_slice.origin} is {state or 'in no state that it tells'}",
        again if lost else "wait, then `pulumi up --refresh`",
    )


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__


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
