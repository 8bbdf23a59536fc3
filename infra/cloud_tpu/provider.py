"""What our dynamic providers have in common: how Pulumi's state keeps them, and how they come to their session."""

from __future__ import annotations

from pulumi.dynamic import ConfigureRequest, ResourceProvider

from infra.cloud_tpu import plugin
from infra.cloud_tpu.session import Session


class Provider(ResourceProvider):
    """The engine makes it anew from its name in the plugin's process, and configures it once there.

    Its subclasses stand at the top of a module, so that the state holds that name and not their code.
    """

    serialize_as_secret_always = False
    _session: Session | None = None

    def configure(self, req: ConfigureRequest) -> None:
        plugin.allow_threads()
        self._session = Session(req.config.get)

    def require_session(self) -> Session:
        if self._session is None:
            raise RuntimeError("the provider was not configured")
        return self._session
