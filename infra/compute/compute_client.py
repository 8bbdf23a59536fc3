"""Compute Engine v1: the few calls that we make."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from contracts.aliases import Json
from infra.slice_apis import google_settings
from infra.slice_apis.google_api import PATIENCE_S, GoogleApi, Listing, found_or_none
from infra.slice_apis.retry import COMPUTE_SERVICE, Backoff

TEMPLATE = re.compile(
    "projects/(?P<project>[^/]+)/regions/(?P<region>[^/]+)/instanceTemplates/(?P<instanceTemplate>[^/]+)$"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Api:
    """The collections of the API that we use, with the methods that Google's client makes of its document."""

    groups: Any
    instances: Any
    operations: Any
    templates: Any


class ComputeClient:
    """Every method raises CloudTpuError. zone: a zone of the project. patience_s: as of `GoogleApi.call`.

    Methods that change something return the operation.
    """

    def __init__(self, settings: google_settings.Settings, backoff: Backoff) -> None:
        # Google's client takes the endpoint of this API with the path of all its methods.
        endpoint = f"{settings.compute_endpoint}/compute/v1/"
        self.google = GoogleApi(settings, backoff, _collections, endpoint=endpoint, service=COMPUTE_SERVICE)

    def under(self, backoff: Backoff) -> ComputeClient:
        """Return a client with the same connections that retries by another Backoff."""
        client = copy.copy(self)
        client.google = self.google.under(backoff)
        return client

    def close(self) -> None:
        """Close the connections of all threads. The client cannot be used afterwards."""
        self.google.close()

    def now(self) -> datetime.datetime:
        """The time by Google's clock, as its last answer had it: this machine's may be off."""
        return self.google.now()

    # --- what there is ----------------------------------------------------------------------------------------------

    def group(self, project: str, zone: str, name: str, *, patience_s: float = PATIENCE_S) -> Json | None:
        """A managed instance group; None: there is no such thing."""
        place = {"project": project, "zone": zone, "instanceGroupManager": name}
        return self._get_or_none(
            f"reading {zone}/{name}", lambda at: at.groups.get(**place), place, patience_s
        )

    def instance(self, project: str, zone: str, name: str, *, patience_s: float = PATIENCE_S) -> Json | None:
        """None: there is no such thing."""
        place = {"project": project, "zone": zone, "instance": name}
        return self._get_or_none(
            f"reading {zone}/{name}", lambda at: at.instances.get(**place), place, patience_s
        )

    def template(self, link: str) -> Json | None:
        """The template that a group names; None: it is gone, or not one of a region, as ours are."""
        match = TEMPLATE.search(link)
        if match is None:
            return None
        place = match.groupdict()
        return self._get_or_none(
            f"reading the template of {link}", lambda at: at.templates.get(**place), place, PATIENCE_S
        )

    def zone_instances(
        self, project: str, zone: str, label: tuple[str, str], *, patience_s: float = PATIENCE_S
    ) -> list[Json]:
        """The instances of a zone with a label."""
        place = {"project": project, "zone": zone, "filter": f"labels.{label[0]}={label[1]}"}
        items: list[Json] = []
        while True:
            page = self._call(
                f"listing the instances of {zone}",
                functools.partial(_list_instances, dict(place)),
                place,
                patience_s,
            )
            items += page.get("items", [])
            if not page.get("nextPageToken"):
                return items
            place["pageToken"] = page["nextPageToken"]

    def groups(self, project: str) -> Listing:
        """All managed instance groups of a project's zones."""
        return self._aggregated(project, "instanceGroupManagers", lambda at: at.groups)

    def instances(self, project: str) -> Listing:
        """All instances of a project."""
        return self._aggregated(project, "instances", lambda at: at.instances)

    def _aggregated(self, project: str, key: str, collection: Callable[[_Api], Any]) -> Listing:
        items: list[Json] = []
        unreachable: set[str] = set()
        place = {"project": project}
        while True:
            page = self._call(
                f"listing projects/{project}/aggregated/{key}",
                functools.partial(_aggregated_list, collection, dict(place)),
                place,
            )
            for scope, scoped in page.get("items", {}).items():
                if scope.startswith("zones/"):
                    items += scoped.get(key, [])
                if scoped.get("warning", {}).get("code") == "UNREACHABLE":
                    unreachable.add(scope.rpartition("/")[2])
            unreachable |= {str(scope).rpartition("/")[2] for scope in page.get("unreachables", [])}
            if not page.get("nextPageToken"):
                return Listing(items=items, unreachable=tuple(sorted(unreachable)))
            place["pageToken"] = page["nextPageToken"]

    def guest_attributes(self, project: str, zone: str, name: str, namespace: str) -> list[Json]:
        """What an instance has published in a namespace: [{namespace, key, value}]; empty: nothing yet."""
        place = {"project": project, "zone": zone, "instance": name, "queryPath": f"{namespace}/"}
        answer = self._get_or_none(
            f"reading the guest attributes of {zone}/{name}",
            lambda at: at.instances.getGuestAttributes(**place),
            place,
            PATIENCE_S,
        )
        return list((answer or {}).get("queryValue", {}).get("items", []))

    def operation(self, project: str, zone: str, name: str) -> Json | None:
        """None: there is no such thing (any more)."""
        place = {"project": project, "zone": zone, "operation": name}
        return self._get_or_none(
            f"reading {zone}/{name}", lambda at: at.operations.get(**place), place, PATIENCE_S
        )

    # --- changes ----------------------------------------------------------------------------------------------------

    def insert_group(self, project: str, zone: str, body: Json) -> Json:
        return self._change(
            f"asking for the group {zone}/{body['name']}", lambda at: at.groups.insert,
            {"project": project, "zone": zone, "body": body},
        )  # fmt: skip

    def delete_group(self, project: str, zone: str, name: str) -> Json:
        """Delete a group with its instances."""
        return self._change(
            f"deleting the group {zone}/{name}", lambda at: at.groups.delete,
            {"project": project, "zone": zone, "instanceGroupManager": name},
        )  # fmt: skip

    def set_template(self, project: str, zone: str, name: str, template: str) -> Json:
        """The template of instances that are made later."""
        return self._change(
            f"changing the template of {zone}/{name}", lambda at: at.groups.setInstanceTemplate,
            {"project": project, "zone": zone, "instanceGroupManager": name, "body": {"instanceTemplate": template}},
        )  # fmt: skip

    def insert_instance(self, project: str, zone: str, body: Json, template: str) -> Json:
        """An instance as its template has it, but for what the body has."""
        return self._change(
            f"asking for the instance {zone}/{body['name']}", lambda at: at.instances.insert,
            {"project": project, "zone": zone, "body": body, "sourceInstanceTemplate": template},
        )  # fmt: skip

    def delete_instance(self, project: str, zone: str, name: str) -> Json:
        return self._change(
            f"deleting the instance {zone}/{name}", lambda at: at.instances.delete,
            {"project": project, "zone": zone, "instance": name},
        )  # fmt: skip

    def change_instance(self, project: str, zone: str, name: str, method: str, body: Json) -> Json:
        """method: setLabels, setMetadata or setTags."""
        return self._change(
            f"changing the {method.removeprefix('set').lower()} of {zone}/{name}",
            lambda at: getattr(at.instances, method),
            {"project": project, "zone": zone, "instance": name, "body": body},
        )  # fmt: skip

    # --- how --------------------------------------------------------------------------------------------------------

    def _change(
        self, action: str, method: Callable[[_Api], Callable[..., Any]], arguments: Mapping[str, Any]
    ) -> Json:
        request_id = str(uuid.uuid4())
        return self._call(action, lambda at: method(at)(**arguments, requestId=request_id), arguments)

    def _get_or_none(
        self, action: str, build: Callable[[_Api], Any], place: Mapping[str, Any], patience_s: float
    ) -> Json | None:
        return found_or_none(lambda: self._call(action, build, place, patience_s))

    def _call(
        self,
        action: str,
        build: Callable[[_Api], Any],
        place: Mapping[str, Any],
        patience_s: float = PATIENCE_S,
    ) -> Json:
        return self.google.call(action, build, str(place["project"]), patience_s)


def _collections(service: Any) -> _Api:
    return _Api(
        groups=service.instanceGroupManagers(),
        instances=service.instances(),
        operations=service.zoneOperations(),
        templates=service.regionInstanceTemplates(),
    )


def _list_instances(place: Mapping[str, str], at: _Api) -> Any:
    return at.instances.list(**place)


def _aggregated_list(collection: Callable[[_Api], Any], place: Mapping[str, str], at: _Api) -> Any:
    return collection(at).aggregatedList(**place)
