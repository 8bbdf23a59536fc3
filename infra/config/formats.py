"""How names, places, principals and references are written: a rule each, for `fields.Section`. Pure.

A rule answers None for a good text, otherwise what is wrong with it and what to write instead. Sources, November 2026:
project ids https://cloud.google.com/resource-manager/docs/creating-managing-projects, buckets
https://cloud.google.com/storage/docs/buckets (names) and …/locations (multi-regions), principals
https://cloud.google.com/iam/docs/principal-identifiers, keys https://cloud.google.com/kms/docs/getting-resource-ids,
stack names the Pulumi command line's own rule.
"""

from __future__ import annotations

import re

from infra import catalogue, naming
from infra.config.shown import Rule

PROJECT = re.compile(r"(?:[a-z0-9][-.a-z0-9]*:)?[a-z][-a-z0-9]{4,28}[a-z0-9]")
STACK = re.compile(r"[-._a-zA-Z0-9]{1,100}")
REGION = re.compile(r"[a-z]+-[a-z]+[0-9]+")
BUCKET = re.compile(r"[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]")
ADDRESS = re.compile(r"[0-9]+(?:\.[0-9]+){3}")
KMS_KEY = re.compile(
    r"projects/[-.:a-z0-9]+/locations/[-a-z0-9]+/keyRings/[-_a-zA-Z0-9]{1,63}/cryptoKeys/[-_a-zA-Z0-9]{1,63}"
)
MAIL = re.compile(r"[^\s@:/]+@[a-zA-Z0-9](?:[-.a-zA-Z0-9]*[a-zA-Z0-9])?")
DOMAIN = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)+")
FEDERATED = re.compile(r"principal(?:Set)?://[a-z]+\.googleapis\.com/[^\s]+")
REFERENCE = re.compile(r"[-.a-z0-9]+(?::[0-9]+)?(?:/[-._a-z0-9]+)+@sha256:[0-9a-f]{64}")
MACHINE = re.compile(r"[a-z][a-z0-9]*-[a-z0-9]+(?:-[a-z0-9]+)*")
RUNTIME = re.compile(r"[a-z0-9](?:[-._a-z0-9]*[a-z0-9])?")
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


def zone(text: str) -> str | None:
    if catalogue.ZONE.fullmatch(text):
        return None
    if REGION.fullmatch(text):
        return f"is a region; write one of its zones, such as {text}-b"
    return "is not a zone; write it as us-central1-b"


def region(text: str) -> str | None:
    if REGION.fullmatch(text):
        return None
    if text.lower() in MULTI_REGIONS:
        return (
            "is a multi-region, which a TPU does not read free of charge; write a region such as us-central1"
        )
    if catalogue.ZONE.fullmatch(text):
        return f"is a zone; write its region, {catalogue.region_of(text)}"
    return "is not a region; write it as us-central1"


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


def network(text: str) -> str | None:
    if "/" in text:
        return "is a path; write the network's name alone, it must be in this project"
    return name(longest=naming.LONGEST)(text)


def label_key(text: str) -> str | None:
    if text in naming.RESERVED_LABELS:
        return "is a label that tpu-stack sets itself; take another name"
    if text.startswith("goog"):
        return 'is a label of Google\'s own; take a name that does not begin with "goog"'
    if naming.LABEL_KEY.fullmatch(text):
        return None
    return "is no label; write 1 to 63 of lower-case letters, digits, hyphens and underscores, a letter first"


def label_value(text: str) -> str | None:
    if naming.LABEL_VALUE.fullmatch(text):
        return None
    return "is no value of a label; write up to 63 of lower-case letters, digits, hyphens and underscores"


def kms_key(text: str) -> str | None:
    if KMS_KEY.fullmatch(text):
        return None
    return "is not a key; write projects/PROJECT/locations/LOCATION/keyRings/RING/cryptoKeys/KEY"


def bucket(text: str) -> str | None:
    if text.startswith("gs://"):
        return "is a URL; write the bucket's name alone"
    if text.startswith("goog") or "google" in text or "g00gle" in text:
        return 'is no name for a bucket: none may begin with "goog" or contain "google"'
    if ADDRESS.fullmatch(text):
        return "is no name for a bucket: it has the form of an IP address"
    if "." in text:
        return "has a dot, which Google lets those have alone who own the domain; write hyphens instead"
    if BUCKET.fullmatch(text) is None or len(text) > 63:
        return (
            "is no name for a bucket; write 3 to 63 of lower-case letters, digits, hyphens and underscores, "
            "a letter or digit first and last"
        )
    return None


def repository(text: str) -> str | None:
    if "/" in text:
        return "is a path; write the repository's name alone"
    return name(longest=naming.LONGEST)(text)


def principal(text: str) -> str | None:
    if text in ("allUsers", "allAuthenticatedUsers"):
        return "is the whole internet; name people, groups or service accounts"
    kind, _, who = text.partition(":")
    if kind in ("user", "group", "serviceAccount") and MAIL.fullmatch(who):
        # To Google they are one, and two bindings of one person take each other away.
        return None if who == who.lower() else f"has capital letters; write {kind}:{who.lower()}"
    if kind == "domain" and DOMAIN.fullmatch(who):
        return None
    if FEDERATED.fullmatch(text):
        return None
    if MAIL.fullmatch(text):
        which = "serviceAccount" if text.endswith(".gserviceaccount.com") else "user"
        return f"does not say what it is; did you mean {which}:{text}?"
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


def image_stack(text: str) -> str | None:
    if re.fullmatch(r"[a-z][-_a-z0-9]{0,30}", text):
        return None
    return "is no name of an image's stack; write lower-case letters, digits, hyphens and underscores"


FAMILIES = ("e2", "n1", "n2", "n2d", "t2d")
"""x86 with Persistent Disk: https://cloud.google.com/compute/docs/machine-resource; newer ones take Hyperdisk alone."""


def machine_type(text: str) -> str | None:
    if MACHINE.fullmatch(text) is None:
        return "is not a machine type; write one such as e2-small"
    family = text.partition("-")[0]
    if family in ARM_FAMILIES:
        return "is an Arm machine, the gateway's image is for x86; write one such as e2-small"
    if family not in FAMILIES:
        return f"is not of a family that takes the gateway's pd-balanced disks; write one of {', '.join(FAMILIES)}"
    return None


def runtime_version(text: str) -> str | None:
    return None if RUNTIME.fullmatch(text) else "is not a runtime version; write one such as v2-alpha-tpuv6e"
