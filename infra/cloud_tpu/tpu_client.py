"""The Cloud TPU API v2: the few calls that we make."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from contracts.aliases import Json
from infra.cloud_tpu.tpu_request import ApiVersion
from infra.slice_apis import google_settings
from infra.slice_apis.google_api import PATIENCE_S, GoogleApi, Listing, found_or_none
from infra.slice_apis.retry import TPU_SERVICE, Backoff


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Api:
    """The collections of the API that we use, with the methods that Google's client makes of its document."""

    queued_resources: Any
    nodes: Any
    operations: Any


class Client:
    """Every method raises CloudTpuError; its `status` is Google's: NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION …

    patience_s: how long a request that may succeed later is retried; each retry prints its reason.
    """

    def __init__(self, settings: google_settings.Settings, backoff: Backoff) -> None:
        self.google = GoogleApi(settings, backoff, _collections, endpoint=settings.endpoint)
        alpha = dataclasses.replace(TPU_SERVICE, version="v2alpha1")
        self._alpha = GoogleApi(settings, backoff, _collections, endpoint=settings.endpoint, service=alpha)

    def under(self, backoff: Backoff) -> Client:
        """Return a client with the same connections that retries by another Backoff."""
        client = copy.copy(self)
        client.google, client._alpha = self.google.under(backoff), self._alpha.under(backoff)
        return client

    def close(self) -> None:
        """Close the connections of all threads. The client cannot be used afterwards."""
        self.google.close()
        self._alpha.close()

    def now(self) -> datetime.datetime:
        """The time by Google's clock, as its last answer had it: this machine's may be off."""
        return self.google.now()

    # --- queued resources ---------------------------------------------------------------------------------------

    def queued_resource(self, name: str, *, patience_s: float = PATIENCE_S) -> Json | None:
        """None: there is no such thing."""
        return self._get_or_none(
            f"reading {name}", lambda at: at.queued_resources.get(name=name), name, patience_s
        )

    def queued_resources(self, project: str) -> Listing:
        """All queued resources of a project, in every zone."""
        return self._listed(project, "queuedResources", lambda at: at.queued_resources)

    def nodes(self, project: str) -> Listing:
        """All nodes of a project, in every zone."""
        return self._listed(project, "nodes", lambda at: at.nodes)

    def _listed(self, project: str, key: str, collection: Callable[[_Api], Any]) -> Listing:
        parent = f"projects/{project}/locations/-"
        items: list[Json] = []
        unreachable: set[str] = set()
        more: dict[str, str] = {}
        while True:
            page = self._call(
                f"listing {parent}/{key}", functools.partial(_list, collection, parent, more), parent
            )
            items += page.get(key, [])
            unreachable |= {str(location).rpartition("/")[2] for location in page.get("unreachable", [])}
            if not page.get("nextPageToken"):
                return Listing(items=items, unreachable=tuple(sorted(unreachable)))
            more = {"pageToken": str(page["nextPageToken"])}

    def create_queued_resource(
        self, parent: str, own_id: str, body: Json, *, version: ApiVersion = "v2"
    ) -> Json:
        """The operation, which is over when the request is accepted, long before it is served."""
        request_id = str(uuid.uuid4())
        google = self._alpha if version == "v2alpha1" else self.google
        return google.call(
            f"asking for {parent}/queuedResources/{own_id}",
            lambda at: at.queued_resources.create(
                parent=parent, queuedResourceId=own_id, requestId=request_id, body=body
            ),
            parent.split("/")[1],
        )

    def delete_queued_resource(self, name: str) -> None:
        """Delete a queued resource with its nodes."""
        request_id = str(uuid.uuid4())
        self._call(
            f"deleting {name}",
            lambda at: at.queued_resources.delete(name=name, force=True, requestId=request_id),
            name,
        )

    # --- nodes --------------------------------------------------------------------------------------------------

    def node(self, name: str) -> Json | None:
        """None: there is no such thing."""
        return self._get_or_none(f"reading {name}", lambda at: at.nodes.get(name=name), name, PATIENCE_S)

    def patch_node(self, name: str, mask: str, body: Json) -> Json:
        """The operation."""
        return self._call(
            f"changing {mask} of {name}",
            lambda at: at.nodes.patch(name=name, updateMask=mask, body=body),
            name,
        )

    def delete_node(self, name: str) -> None:
        self._call(f"deleting {name}", lambda at: at.nodes.delete(name=name), name)

    def guest_attributes(self, name: str) -> list[Json]:
        """What each worker has published, in worker order."""
        answer = self._call(
            f"reading the guest attributes of {name}",
            lambda at: at.nodes.getGuestAttributes(name=name, body={}),
            name,
        )
        return list(answer.get("guestAttributes", []))

    def operation(self, name: str) -> Json | None:
        """None: there is no such thing (any more)."""
        return self._get_or_none(f"reading {name}", lambda at: at.operations.get(name=name), name, PATIENCE_S)

    # --- how ----------------------------------------------------------------------------------------------------

    def _get_or_none(
        self, action: str, build: Callable[[_Api], Any], name: str, patience_s: float
    ) -> Json | None:
        return found_or_none(lambda: self._call(action, build, name, patience_s))

    def _call(
        self, action: str, build: Callable[[_Api], Any], name: str, patience_s: float = PATIENCE_S
    ) -> Json:
        return self.google.call(action, build, name.split("/")[1], patience_s)


def _collections(service: Any) -> _Api:
    at = service.projects().locations()
    return _Api(queued_resources=at.queuedResources(), nodes=at.nodes(), operations=at.operations())


def _list(collection: Callable[[_Api], Any], parent: str, more: Mapping[str, str], at: _Api) -> Any:
    return collection(at).list(parent=parent, **more)
