"""What there is to choose from, as the API lists it: locations, accelerator types, runtime versions. Pages of lists."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from rehearsal.discovery import Call
from rehearsal.errors import ApiError, invalid, missing
from rehearsal.offers import Offers, config_of

Json = dict[str, Any]

PAGE_SIZE = 100  # where none is asked for
LARGEST_PAGE = 1000


class Listings:
    """The methods that look at offers and at nothing else."""

    def __init__(self, offers: Offers) -> None:
        self._offers = offers

    def table(self) -> dict[str, Callable[[Call], Json]]:
        """Method, less what all have in common, to what answers it."""
        return {
            "get": self._location,
            "list": self._locations,
            "generateServiceIdentity": self._service_identity,
            "acceleratorTypes.get": self._accelerator_type,
            "acceleratorTypes.list": self._accelerator_types,
            "runtimeVersions.get": self._runtime_version,
            "runtimeVersions.list": self._runtime_versions,
        }

    def _location(self, call: Call) -> Json:
        return self._describe(call.resource)

    def _describe(self, name: str) -> Json:
        zone = name.rpartition("/")[2]
        region = {"cloud.googleapis.com/region": zone.rpartition("-")[0]}
        return {"name": name, "locationId": zone, "displayName": zone, "labels": region}

    def _locations(self, call: Call) -> Json:
        names = [f"{call.resource}/locations/{zone}" for zone in self._offers.zones]
        return pages(call, "locations", [self._describe(name) for name in names])

    def _service_identity(self, call: Call) -> Json:
        project = call.resource.split("/")[1]
        return {"identity": {"email": f"service-{project}@cloud-tpu.rehearsal.invalid"}}

    def _accelerator_types(self, call: Call) -> Json:
        zone = call.resource.rpartition("/")[2]
        found = [
            {"name": f"{call.resource}/acceleratorTypes/{which.type_name}", "type": which.type_name,
             "acceleratorConfigs": [config_of(which)]}
            for which in self._offers.accelerators(zone)
        ]  # fmt: skip
        return pages(call, "acceleratorTypes", found)

    def _accelerator_type(self, call: Call) -> Json:
        parent, _, name = call.resource.rpartition("/acceleratorTypes/")
        for which in self._offers.accelerators(parent.rpartition("/")[2]):
            if which.type_name == name:
                return {"name": call.resource, "type": name, "acceleratorConfigs": [config_of(which)]}
        raise missing(call.resource)

    def _runtime_versions(self, call: Call) -> Json:
        versions = self._offers.runtime_versions()
        found = [{"name": f"{call.resource}/runtimeVersions/{each}", "version": each} for each in versions]
        return pages(call, "runtimeVersions", found)

    def _runtime_version(self, call: Call) -> Json:
        version = call.resource.rpartition("/")[2]
        if not self._offers.has_runtime(version):
            raise missing(call.resource)
        return {"name": call.resource, "version": version}


def pages(call: Call, key: str, found: Sequence[Json]) -> Json:
    """One page of a list, which is in order of names. Raises ApiError for a token that no list gave."""
    for name in ("filter", "orderBy", "extraLocationTypes"):
        if call.query.get(name):
            raise ApiError("UNIMPLEMENTED", f"{name}: this stand-in does not filter or sort")
    size, token = call.query.get("pageSize", 0), call.query.get("pageToken", "")
    if size < 0:
        raise invalid("pageSize", f"{size} is negative")
    # A token is the name of the last thing that was listed, so that a list that changes meanwhile skips nothing.
    last = _token_name(token)
    rest = sorted((each for each in found if each["name"] > last), key=lambda each: str(each["name"]))
    count = min(size, LARGEST_PAGE) or PAGE_SIZE
    answer: Json = {key: rest[:count]} if rest else {}
    if len(rest) > count:
        answer["nextPageToken"] = json.dumps([rest[count - 1]["name"]]).encode().hex()
    return answer


def _token_name(token: str) -> str:
    try:
        return str(json.loads(bytes.fromhex(token))[0]) if token else ""
    except (ValueError, IndexError, TypeError, KeyError):
        raise invalid("pageToken", f"{token!r} is none that a list gave") from None
