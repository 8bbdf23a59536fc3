"""Why a registry does not take an image, in words that name the remedy."""

import re

import pytest

from images.push import explained

UPLOAD = "artifactregistry.repositories.uploadArtifacts"


# --- why a registry does not take an image --------------------------------------------------------------------

REFERENCE = "us-central1-docker.pkg.dev/my-project/tpu-stack-dev/jax:tpu-0123456789ab"
RESOURCE = '"projects/my-project/locations/us-central1/repositories/tpu-stack-dev" (or it may not exist)'
DOWNLOAD = "artifactregistry.repositories.downloadArtifacts"
MAY_WRITE = (
    f"lacks {UPLOAD}, which roles/artifactregistry.writer on the repository tpu-stack-dev has.*"
    "add-iam-policy-binding tpu-stack-dev --project my-project --location us-central1"
)
LOG_IN = "`gcloud auth configure-docker us-central1-docker.pkg.dev`"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (f'denied: Permission "{UPLOAD}" denied on resource {RESOURCE}', MAY_WRITE),
        (f"denied: Permission '{UPLOAD}' denied on resource (or it may not exist).", MAY_WRITE),
        ("unexpected status from POST request to https://x/v2/: 403 Forbidden", MAY_WRITE),
        ("denied: requested access to the resource is denied", MAY_WRITE),
        (f'denied: Permission "{DOWNLOAD}" denied on resource {RESOURCE}', f"lacks {DOWNLOAD}"),
        (f'denied: Unauthenticated request. They do not have permission "{UPLOAD}" on {RESOURCE}', LOG_IN),
        ("unauthorized: authentication failed", LOG_IN),
        ("no basic auth credentials", LOG_IN),
        ('name unknown: Repository "tpu-stack-dev" not found', "`pulumi up --stack dev` makes it"),
        ("Get https://x/v2/: dial tcp: lookup x: no such host", "cannot be reached"),
    ],
)
def test_a_refusal_names_what_is_missing_and_no_rights_where_it_is_not_rights(said: str, words: str) -> None:
    text = explained(said, REFERENCE, "dev")
    assert re.search(words, text), text
    assert ("roles/" in text) == ("lacks" in words)
    if words == LOG_IN:
        assert "docker login r.example:5000" in explained(said, "r.example:5000/p/jax:tpu-1", "dev")
