"""What stands behind the hosts of the simulated cloud: machines of a rehearsal, or nothing."""

import base64
import hashlib
import itertools
from collections.abc import Sequence
from typing import Protocol


class Hardware(Protocol):
    """Asked and told by the cloud, whose lock is held meanwhile: nothing here may take long.

    Hosts are known by their instance names. Two hosts of one name are never there at once.
    """

    def addresses(self, instance: str) -> tuple[str, str]:
        """The internal and external address of a host that boots for the first time; both are unique."""

    def host_key(self, instance: str) -> str:
        """The public ed25519 key of a host that comes up for the first time, without its type: AAAA…"""

    def changed(self, instances: Sequence[str], state: str) -> None:
        """The hosts of a node, or an instance, have come into a state of it, or are "gone"."""


class NoHardware:
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

    def changed(self, instances: Sequence[str], state: str) -> None:
        """Do nothing: there is no hardware."""
