"""How likely a slice comes as it is asked for, and what happens when it does not. Pure."""

from __future__ import annotations

from infra.config import Config, SliceConfig
from infra.policy.findings import Finding, note, refused, slice_path, warning

LARGE_SPOT_CHIPS = 64


def findings(config: Config) -> tuple[Finding, ...]:
    return tuple(
        found
        for index, each in enumerate(config.slices)
        for found in (
            *_unlisted(config, index, each),
            *_direct(config, index, each),
            *_large_spot(index, each),
        )
    )


def _unlisted(config: Config, index: int, each: SliceConfig) -> list[Finding]:
    zones = each.accelerator.zones
    if each.zone in zones:
        return []
    return [
        refused(
            slice_path(index, "zone"),
            f"{each.zone} does not list {each.accelerator.type_name}; these do: {', '.join(zones)}",
            unless="tpu-stack:allow-unlisted",
            allowed=config.allow.unlisted,
        )
    ]


def _direct(config: Config, index: int, each: SliceConfig) -> list[Finding]:
    """Google answers a used-up quota with 429, which the provider takes for a passing fault."""
    if each.provisioning != "direct":
        return []
    path = slice_path(index, "provisioning")
    made = [
        warning(
            path,
            f"direct: a refused quota (HTTP 429) is retried without a word until wait, {_duration(each.wait_s)}, is "
            "over; if `pulumi up` seems to hang, look at the quotas of Cloud TPU API in the console (IAM & Admin, "
            f"Quotas, project {config.project}); queued says at once what was refused",
        )
    ]
    if each.capacity == "spot":
        made.append(
            warning(
                path,
                "direct: a spot node that is preempted is not made again by the next `pulumi up`, only by `pulumi up "
                "--replace URN`; a queued one is, by `pulumi up --refresh`",
            )
        )
    return made


def _large_spot(index: int, each: SliceConfig) -> list[Finding]:
    chips = each.accelerator.chips
    if each.capacity != "spot" or chips < LARGE_SPOT_CHIPS:
        return []
    return [
        note(
            slice_path(index, "accelerator"),
            f"{each.accelerator.type_name} asks for {chips} spot chips at once, which seldom come; several smaller "
            "slices sooner do",
        )
    ]


def _duration(seconds: int) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
