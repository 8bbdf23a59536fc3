"""How names, places, principals and references are written: a rule each, for `section.Section`. Pure.

A rule answers None for a good text, otherwise what is wrong with it and what to write instead. Sources, November 2026:
project ids https://cloud.google.com/resource-manager/docs/creating-managing-projects, buckets
https://cloud.google.com/storage/docs/buckets (names) and …/locations (multi-regions), principals
https://cloud.google.com/iam/docs/principal-identifiers, keys https://cloud.google.com/kms/docs/getting-resource-ids,
secrets https://cloud.google.com/secret-manager/docs/creating-and-accessing-secrets, stack names the Pulumi command
line's own rule.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from contracts.suggestions import did_you_mean, suggestion
from infra import catalogue, naming
from infra.catalogue import generations, zones
from infra.config.section import Rule

PROJECT = re.compile(r"(?:[a-z0-9][-.a-z0-9]*:)?[a-z][-a-z0-9]{4,28}[a-z0-9]")
STACK = re.compile(r"[-._a-zA-Z0-9]{1,100}")
REGION = re.compile(r"[a-z]+-[a-z]+[0-9]+")
BUCKET = re.compile(r"[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]")
ADDRESS = re.compile(r"[0-9]+(?:\.[0-9]+){3}")
IMAGE = re.compile(r"projects/[-a-z0-9.:]+/global/images/(?:family/)?[a-z][-a-z0-9]{0,62}")
KMS_KEY = re.compile(
    r"projects/[-.:a-z0-9]+/locations/[-a-z0-9]+/keyRings/[-_a-zA-Z0-9]{1,63}/cryptoKeys/[-_a-zA-Z0-9]{1,63}"
)
MAIL = re.compile(r"[^\s@:/]+@[a-zA-Z0-9](?:[-.a-zA-Z0-9]*[a-zA-Z0-9])?")
DOMAIN = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)+")
FEDERATED = re.compile(r"principal(?:Set)?://[a-z]+\.googleapis\.com/[^\s]+")
REFERENCE = re.compile(r"[-.a-z0-9]+(?::[0-9]+)?(?:/[-._a-z0-9]+)+@sha256:[0-9a-f]{64}")
MACHINE = re.compile(r"[a-z][a-z0-9]*-[a-z0-9]+(?:-[a-z0-9]+)*")
SECRET = re.compile(r"[-_a-zA-Z0-9]{1,255}")
RUNTIME = re.compile(r"[a-z0-9](?:[-._a-z0-9]*[a-z0-9])?")
UNLISTED = "tpu-stack:allow-unlisted"
ARM_FAMILIES = ("a4x", "c4a", "n4a", "t2a")
MULTI_REGIONS = ("asia", "asia1", "eu", "eur4", "eur5", "eur7", "eur8", "europe", "nam4", "us")


def project(text: str) -> str | None:
    if PROJECT.fullmatch(text):
        return None
    if text.isdigit():
        return "is a project number; write the project id, as `gcloud projects list` shows it"
    return "is not a project id; write 6 to 30 of lower-case letters, digits and hyphens, a letter first"


def stack(text: str) -> str | None:
    if STACK.fullmatch(text) and re.search(r"[a-zA-Z0-9]", text):
        return None
    return "is no name for a stack; write letters, digits, hyphens, underscores and dots"


def zone(*, unlisted: bool) -> Rule:
    """unlisted: take one that is not known here too."""

    def rule(text: str) -> str | None:
        if catalogue.ZONE.fullmatch(text):
            return None if unlisted or text in zones.ZONES else _unknown_zone(text)
        if REGION.fullmatch(text):
            own = zones.zones_in(text)
            return f"is a region; write one of its zones, {', '.join(own) or f'such as {text}-b'}"
        return f"is not a zone{did_you_mean(text, zones.ZONES) or '; write it as us-central1-a'}"

    return rule


def _unknown_zone(text: str) -> str:
    region_name = catalogue.zone_region(text)
    own = zones.zones_in(region_name)
    if own:
        return (
            f"is not a zone of {region_name} that is known; choose one of {', '.join(own)}{_newer(', or if')}"
        )
    return f"is not a zone that is known{_hint(text, zones.ZONES)}"


def region(*, unlisted: bool) -> Rule:
    """unlisted: take one that is not known here too."""

    def rule(text: str) -> str | None:
        if text.lower() in MULTI_REGIONS:
            return (
                "is a multi-region, which a TPU does not read free of charge; "
                "write a region such as us-central1"
            )
        if REGION.fullmatch(text):
            is_known = unlisted or text in zones.REGIONS
            return None if is_known else f"is not a region that is known{_hint(text, zones.REGIONS)}"
        if catalogue.ZONE.fullmatch(text):
            return f"is a zone; write its region, {catalogue.zone_region(text)}"
        return f"is not a region{did_you_mean(text, zones.REGIONS) or '; write it as us-central1'}"

    return rule


def _hint(text: str, names: Collection[str]) -> str:
    """A suggestion, and how to use a name that is right and not listed here."""
    near = did_you_mean(text, names)
    return near + _newer(" If") if near else _newer("; if")


def _newer(begins: str) -> str:
    return f"{begins} it is newer than this list, set {UNLISTED}: true"


def name(*, longest: int) -> Rule:
    """A name as Compute Engine takes it (RFC 1035)."""

    def rule(text: str) -> str | None:
        if len(text) > longest:
            return f"is longer than {longest} characters; shorten it"
        if naming.NAME.fullmatch(text) is None:
            return (
                "is no name; write lower-case letters, digits and hyphens, a letter first and no hyphen last"
            )
        return None

    return rule


def _matching(pattern: re.Pattern[str], wrong: str) -> Rule:
    return lambda text: None if pattern.fullmatch(text) else wrong


def _name_and_no_path(kind: str, more: str = "") -> Rule:
    def rule(text: str) -> str | None:
        if "/" in text:
            return f"is a path; write only the {kind}'s name{more}"
        return name(longest=naming.LONGEST)(text)

    return rule


network = _name_and_no_path("network", ", it must be in this project")
repository = _name_and_no_path("repository")
kms_key = _matching(
    KMS_KEY, "is not a key; write projects/PROJECT/locations/LOCATION/keyRings/RING/cryptoKeys/KEY"
)
image = _matching(
    IMAGE, "is not an image; write projects/PROJECT/global/images/NAME, or …/images/family/FAMILY"
)
label_value = _matching(
    naming.LABEL_VALUE,
    "is no value of a label; write up to 63 of lower-case letters, digits, hyphens and underscores",
)


def label_key(text: str) -> str | None:
    if text in naming.RESERVED_LABELS:
        return "is a label that tpu-stack sets itself; take another name"
    if text.startswith("goog"):
        return 'is a label of Google\'s own; take a name that does not begin with "goog"'
    if naming.LABEL_KEY.fullmatch(text):
        return None
    return "is no label; write 1 to 63 of lower-case letters, digits, hyphens and underscores, a letter first"


def bucket(text: str) -> str | None:
    if text.startswith("gs://"):
        return "is a URL; write only the bucket's name"
    if text.startswith("goog") or "google" in text or "g00gle" in text:
        return 'is no name for a bucket: none may begin with "goog" or contain "google"'
    if ADDRESS.fullmatch(text):
        return "is no name for a bucket: it has the form of an IP address"
    if "." in text:
        return "has a dot, which only the owner of that domain may use; write hyphens instead"
    if BUCKET.fullmatch(text) is None or len(text) > 63:
        return (
            "is no name for a bucket; write 3 to 63 of lower-case letters, digits, hyphens and underscores, "
            "a letter or digit first and last"
        )
    return None


def principal(text: str) -> str | None:
    if text in ("allUsers", "allAuthenticatedUsers"):
        return "is the whole internet; name people, groups or service accounts"
    kind, _, identity = text.partition(":")
    if kind in ("user", "group", "serviceAccount") and MAIL.fullmatch(identity):
        # To Google they are one, and two bindings of one person take each other away.
        return (
            None if identity == identity.lower() else f"has capital letters; write {kind}:{identity.lower()}"
        )
    if (kind == "domain" and DOMAIN.fullmatch(identity)) or FEDERATED.fullmatch(text):
        return None
    if MAIL.fullmatch(text):
        principal_kind = "serviceAccount" if text.endswith(".gserviceaccount.com") else "user"
        return f"does not say what it is; did you mean {principal_kind}:{text}?"
    return (
        "is no principal; write user:MAIL, group:MAIL, serviceAccount:MAIL, domain:DOMAIN, "
        "or one that begins with principal:// or principalSet://"
    )


def reference(text: str) -> str | None:
    if REFERENCE.fullmatch(text):
        return None
    if "@" not in text and re.search(r":[^/]+$", text):
        return "is a tag, which may move; write the image by its digest, …@sha256:…"
    return "is no image by digest; write HOST/PATH@sha256: and 64 hexadecimal digits"


FRAMEWORKS = ("jax", "tensorflow", "pytorch", "pytorch_xla")
"""The folders of `images/`: what an image can be of, and a run asks the inventory for."""


def cidr(text: str) -> str | None:
    try:
        ipaddress.IPv4Network(text if "/" in text else "")
    except ValueError:
        return "is no range of IPv4 addresses; write it as 203.0.113.0/24, or 203.0.113.7/32 for one address"
    return None


def context(text: str) -> str | None:
    return (
        None
        if text == text.strip()
        else "has blanks around it; `kubectl config get-contexts` shows the names"
    )


def framework(text: str) -> str | None:
    if text in FRAMEWORKS:
        return None
    near = suggestion(text, FRAMEWORKS)
    return (
        f"is not a framework; {f'did you mean {near}?' if near else f'choose one of {", ".join(FRAMEWORKS)}'}"
    )


def machine_type(*, unlisted: bool) -> Rule:
    """unlisted: take one that is not known here too."""

    def rule(text: str) -> str | None:
        if MACHINE.fullmatch(text) is None:
            return "is not a machine type; write one such as e2-small"
        family = zones.machine_family(text)
        if family in ARM_FAMILIES:
            return "is an Arm machine, the gateway's image is for x86; write one such as e2-small"
        if family not in zones.FAMILIES:
            families = ", ".join(zones.FAMILIES)
            return f"is not of a family that takes the gateway's pd-balanced disks; write one of {families}"
        if unlisted or zones.is_machine_type(text):
            return None
        kind = text.rpartition("-")[0] + "-"
        sizes = [
            listed_type[len(kind) :] for listed_type in zones.MACHINE_TYPES if listed_type.startswith(kind)
        ]
        if sizes and sizes[0].isdigit():
            return f"is not a size that is known; those of {kind}N are {', '.join(sizes)}{_newer('; if')}"
        return f"is not a machine type that is known{_hint(text, zones.MACHINE_TYPES)}"

    return rule


def runtime_version(*, unlisted: bool) -> Rule:
    """unlisted: take one that is not known here too."""

    def rule(text: str) -> str | None:
        if RUNTIME.fullmatch(text) is None:
            return "is not a runtime version; write one such as v2-alpha-tpuv6e"
        if unlisted or generations.is_runtime_version(text):
            return None
        return f"is not a runtime version that is known{_hint(text, generations.RUNTIME_VERSIONS)}"

    return rule
