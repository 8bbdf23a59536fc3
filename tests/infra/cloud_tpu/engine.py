"""A small model of what Pulumi's engine does with a provider: the state file and the order of its calls."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.infra.cloud_tpu.lab import Cloud, Json, wanted_props, wire


@dataclasses.dataclass(kw_only=True)
class Stack:
    """A stack with one queued resource, as the engine runs it: its state file and the order of its calls.

    What the engine does: check; without a state create; with one diff, then nothing, update, or delete and create.
    A failed call leaves the state as it was before that call. Refresh: read; an empty id drops it. Destroy: delete.
    """

    cloud: Cloud
    state: Json | None = None

    def up(self, **more: Any) -> None:
        """Raises what the provider raises."""
        props = wire(wanted_props(**more))
        provider = self.cloud.provider
        assert provider.check({}, props).failures == []
        if self.state is not None:
            found = provider.diff("id", self.state, props)
            if not found.changes and not found.replaces:
                return
            if not found.replaces:
                self.state = wire(provider.update("id", self.state, props).outs or {})
                return
            assert found.delete_before_replace
            provider.delete("id", self.state)
            self.state = None
        self.state = wire(provider.create(props).outs or {})

    def refresh(self) -> None:
        if self.state is not None:
            found = self.cloud.provider.read("id", self.state)
            self.state = wire(found.outs or {}) if found.id else None

    def destroy(self) -> None:
        if self.state is not None:
            self.cloud.provider.delete("id", self.state)
            self.state = None
