"""Why a registry does not take an image."""

from __future__ import annotations

import pytest

from launch.images.refusals import explained

REFERENCE = "us-central1-docker.pkg.dev/my-project/tpu-stack-dev/jax:tpu-0123456789ab"
RESOURCE = '"projects/my-project/locations/us-central1/repositories/tpu-stack-dev" (or it may not exist)'
UPLOAD = "artifactregistry.repositories.uploadArtifacts"


@pytest.mark.parametrize(
    "said",
    [
        f'denied: Permission "{UPLOAD}" denied on resource {RESOURCE}',
        f"denied: Permission '{UPLOAD}' denied on resource (or it may not exist).",
        "unexpected status from POST request to https://x/v2/: 403 Forbidden",
        "denied: requested access to the resource is denied",
    ],
)
def test_a_refusal_names_the_permission_the_role_and_the_repository(said: str) -> None:
    text = explained(said, REFERENCE, "dev")
    assert f"lacks {UPLOAD}, which roles/artifactregistry.writer on the repository tpu-stack-dev has" in text
    assert "add-iam-policy-binding tpu-stack-dev --project my-project --location us-central1" in text


def test_the_permission_that_is_missing_is_the_one_that_google_names() -> None:
    said = (
        f'denied: Permission "artifactregistry.repositories.downloadArtifacts" denied on resource {RESOURCE}'
    )
    assert "lacks artifactregistry.repositories.downloadArtifacts" in explained(said, REFERENCE, "dev")


@pytest.mark.parametrize(
    "said",
    [
        f'denied: Unauthenticated request. Unauthenticated requests do not have permission "{UPLOAD}" on {RESOURCE}',
        "unauthorized: authentication failed",
        "no basic auth credentials",
    ],
)
def test_somebody_unknown_is_told_to_log_in_and_not_to_ask_for_rights(said: str) -> None:
    text = explained(said, REFERENCE, "dev")
    assert "`gcloud auth configure-docker us-central1-docker.pkg.dev`" in text
    assert "roles/" not in text
    assert "docker login r.example:5000" in explained(said, "r.example:5000/p/jax:tpu-1", "dev")


def test_a_repository_that_is_not_there_is_made_by_pulumi() -> None:
    text = explained('name unknown: Repository "tpu-stack-dev" not found', REFERENCE, "dev")
    assert "`pulumi up --stack dev` makes it" in text


def test_a_registry_that_cannot_be_reached_is_no_question_of_rights() -> None:
    text = explained("Get https://x/v2/: dial tcp: lookup x: no such host", REFERENCE, "dev")
    assert "cannot be reached" in text
    assert "roles/" not in text
