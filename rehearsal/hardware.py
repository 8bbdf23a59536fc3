"""What stands behind the workers of the simulated nodes: nothing but numbers, or machines that somebody makes."""

from __future__ import annotations

import base64
import hashlib
import itertools
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rehearsal.nodes import Node


class Hardware(Protocol):
    """Asked and told by the cloud, whose lock is held meanwhile: nothing here may take long.

    Workers are known by their instance names, which no two ever share.
    """

    def addresses(self, instance: str) -> tuple[str, str]:
        """Of a worker that comes up for the first time, inside and outside; nobody else has them."""

    def host_key(self, instance: str) -> str:
        """The public ed25519 key of a worker that comes up for the first time, without its type: AAAA…"""

    def changed(self, node: Node, state: str) -> None:
        """A node has come into a state, or is "gone"."""


class Paper:
    """No hosts at all: addresses are numbers, and nobody has the private half of the keys."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def addresses(self, instance: str) -> tuple[str, str]:  # noqa: ARG002
        number = next(self._numbers)
        # Outside: addresses for benchmarks, which nobody on the internet has (RFC 2544).
        outside = f"198.{18 + number // 62500 % 2}.{number // 250 % 250}.{2 + number % 250}"
        return f"10.{128 + number // 62500}.{number // 250 % 250}.{2 + number % 250}", outside

    def host_key(self, instance: str) -> str:
        fields = [b"ssh-ed25519", hashlib.sha256(instance.encode()).digest()]
        return base64.b64encode(b"".join(len(field).to_bytes(4) + field for field in fields)).decode()

    def changed(self, node: Node, state: str) -> None:
        """Nothing is there that could hear of it."""
