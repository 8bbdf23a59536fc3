"""A rehearsal's stack tells where its images really go."""

from __future__ import annotations

from rehearsal.room.outputs import with_registry

OUTPUTS = {"inventory": "{}", "image_repository": "us-central1-docker.pkg.dev/my-rehearsal/images"}


def test_images_go_to_the_rehearsals_own_registry_under_the_path_that_they_would_have_at_googles() -> None:
    assert (
        with_registry(OUTPUTS, "127.0.0.1:5000")["image_repository"] == "127.0.0.1:5000/my-rehearsal/images"
    )
    assert with_registry(OUTPUTS, None) == OUTPUTS
