"""Why a registry does not take an image, and what to do: its words and Docker's, in ours. Pure.

Artifact Registry says `denied: Permission "artifactregistry.repositories.uploadArtifacts" denied on resource
"projects/P/locations/L/repositories/R" (or it may not exist)`, to somebody unknown `denied: Unauthenticated request.`
and more, and of a repository that is not there `name unknown: Repository "R" not found`.
"""

from __future__ import annotations

import re

ROLE = "roles/artifactregistry.writer"
PERMISSION = re.compile(r"artifactregistry\.\w+\.\w+")
GOOGLES = re.compile(r"(?P<region>[a-z0-9-]+)-docker\.pkg\.dev/(?P<project>[^/]+)/(?P<name>[^/]+)")
UNKNOWN_USER = (
    "unauthenticated",
    "unauthorized",
    "no basic auth credentials",
    "authentication required",
    "401",
)
REFUSED = ("denied", "forbidden", "403")
NOT_THERE = ("name unknown", "name_unknown", "not found", "does not exist", "404")
UNREACHABLE = (
    *("no such host", "connection refused", "i/o timeout", "timeout", "network is unreachable"),
    *("tls: ", "x509", "server gave http response", "proxyconnect"),
)


def explained(said: str, reference: str, stack: str) -> str:
    """reference: what was pushed; stack: Pulumi's, whose repository that is."""
    host, words = reference.partition("/")[0], said.lower()
    if any(word in words for word in UNKNOWN_USER):
        login = (
            f"gcloud auth configure-docker {host}" if host.endswith(".pkg.dev") else f"docker login {host}"
        )
        return f"{reference}: {host} does not know who pushes: {said}; `{login}`" + (
            " (and `gcloud auth login` where that has expired)" if "gcloud" in login else ""
        )
    if PERMISSION.search(said) or any(word in words for word in REFUSED):
        return f"{reference}: pushing is refused: {said}; {_grant(said, reference, stack)}"
    if any(word in words for word in NOT_THERE):
        return (
            f"{reference}: there is no such repository: {said}; `pulumi up --stack {stack}` makes it, and an older "
            "stack may still name one that was deleted"
        )
    if any(word in words for word in UNREACHABLE):
        return f"{reference}: {host} cannot be reached: {said}; Docker's daemon needs a way there, and its proxy if any"
    if "no space left" in words:
        return f"{reference}: a disk is full: {said}; `fab images --prune`"
    return f"{reference}: pushing failed: {said}; pushed again, it goes on where it stopped"


def _grant(said: str, reference: str, stack: str) -> str:
    found = PERMISSION.search(said)
    lacking = found[0] if found else "artifactregistry.repositories.uploadArtifacts"
    google = GOOGLES.match(reference)
    if google is None:
        return "whose account it is has to be allowed to push there"
    return (
        f"your account lacks {lacking}, which {ROLE} on the repository {google['name']} has: `gcloud artifacts "
        f"repositories add-iam-policy-binding {google['name']} --project {google['project']} --location "
        f"{google['region']} --role {ROLE} --member user:YOU`; where the repository is not there yet, "
        f"`pulumi up --stack {stack}`"
    )
