"""Changing the nodes of an active queued resource in place, until they are as wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infra.cloud_tpu import request
from infra.cloud_tpu.client import Client
from infra.cloud_tpu.errors import CloudTpuError
from infra.cloud_tpu.pace import Pace, words
from infra.cloud_tpu.waiting import Waiting
from infra.cloud_tpu.wanted import Wanted

Json = dict[str, Any]

LIMIT_S = 300.0
TRY_AGAIN_S = 10.0


class Upkeep:
    """Each node apart: the API has no change of a queued resource, and those of its nodes are all that can change."""

    def __init__(self, client: Client, pace: Pace, waiting: Waiting) -> None:
        self._client = client
        self._pace = pace
        self._waiting = waiting

    def done(self, wanted: Wanted, nodes: Sequence[Json], before: Sequence[Mapping[str, Any]]) -> list[Json]:
        """The nodes as they are afterwards. before: see `request.patch`."""
        for node in nodes:
            mask, body = request.patch(wanted, node, before)
            if mask:
                self._patch(_name(wanted, node), mask, body)
        return [self._client.node(_name(wanted, node)) or node for node in nodes]

    def _patch(self, name: str, mask: str, body: Json) -> None:
        until = self._pace.now() + LIMIT_S
        while True:
            try:
                self._waiting.until_done(self._client.patch_node(name, mask, body), LIMIT_S)
                return
            except CloudTpuError as error:
                # A node under maintenance, or one that another change is under way on, takes it a little later.
                if error.status != "FAILED_PRECONDITION" or self._pace.now() >= until:
                    raise
                left = words(until - self._pace.now())
                self._pace.say(f"{name.rpartition('/')[2]}: {error}; tried again for {left}")
            self._pace.pause(TRY_AGAIN_S)


def _name(wanted: Wanted, node: Json) -> str:
    """With the project as we call it: Google may write its number."""
    return f"{wanted.parent}/nodes/{node['name'].rpartition('/')[2]}"
