"""Says what a direct TPU VM may be waiting for: the gcp provider itself says nothing.

It asks again and again, with growing pauses and without a word, when the Cloud TPU API answers 429 because a quota is
used up, until the time limit of the resource is over. That looks like a TPU that is slow to come.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pulumi

FIRST_WORD_S = 120.0
"""A node of one host is there in about a minute; a large slice in a few."""


def watch(node: pulumi.CustomResource, named: str, say: Callable[[str], None]) -> None:
    """While `node` is being made, call `say` every FIRST_WORD_S with what that may mean.

    named: the node's full name, projects/P/locations/Z/nodes/N.
    """
    if pulumi.runtime.is_dry_run():
        return
    # In the program's own loop, which goes on until the engine has made everything.
    task = asyncio.ensure_future(_watch(node, named, say))
    task.add_done_callback(_forget)


async def _watch(node: pulumi.CustomResource, named: str, say: Callable[[str], None]) -> None:
    made = asyncio.ensure_future(node.id.future())
    waited_s = 0.0
    while True:
        done, _ = await asyncio.wait({made}, timeout=FIRST_WORD_S)
        if done:
            # Its failure is the engine's to tell.
            _ = made.cancelled() or made.exception()
            return
        waited_s += FIRST_WORD_S
        say(message(named, waited_s))


def message(named: str, waited_s: float) -> str:
    """What a person should know after so long, with the two commands that tell the cases apart."""
    _, project, _, zone, _, node = named.split("/")
    return (
        f"{named} is not ready after {waited_s / 60:.0f} min. If "
        f"`gcloud compute tpus tpu-vm describe {node} --project={project} --zone={zone}` finds it, it is being made. "
        "If not, the request is refused and asked again in silence, as a rule because the quota is used up (HTTP 429): "
        f"compare https://console.cloud.google.com/iam-admin/quotas?project={project}, Ctrl-C, and free some, ask for "
        "more, or set provisioning: queued, which says so at once"
    )


def _forget(task: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        task.result()
