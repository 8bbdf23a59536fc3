"""Reads `tpu-stack:images`: the repository of the training images, and which image each stack of them uses. Pure."""

from __future__ import annotations

from infra import catalogue, naming
from infra.config import ImagesConfig, formats
from infra.config.fields import Section

KEEP = 10
MOST_KEPT = 1000


def read(root: Section, *, stack: str, zone: str | None, unlisted: bool) -> ImagesConfig:
    """zone: of the first slice, in whose region the repository is by default; None: unknown, and said so."""
    section = root.section("images")
    repository = section.text("repository", naming.resource_name(stack), rule=formats.repository)
    region = section.text("region", None, rule=formats.region(unlisted=unlisted))
    keep = section.integer("keep", KEEP, least=1, most=MOST_KEPT)
    references = section.mapping("references", key_rule=formats.framework, value_rule=formats.reference)
    section.close()
    return ImagesConfig(
        repository=repository,
        region=region or (catalogue.region_of(zone) if zone else ""),
        keep=keep,
        references=references,
    )
