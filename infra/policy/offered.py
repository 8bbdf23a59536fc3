"""What Google says that it offers where a configuration wants it: asked in a preview, where there are credentials.

The catalogue answers without an account. This asks the Cloud TPU API for the accelerator types and runtime versions of
each zone, Compute for the machine types of the gateway and of slices that it makes, and Resource Manager for the
organisation that the project is in, all at once and with one short limit. A preview never fails of it: what could not
be asked is said in one line.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import queue
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from contracts.aliases import Json
from contracts.suggestions import suggestion
from infra.config import Config, SliceConfig
from infra.policy.findings import Finding, note, slice_path, warning

Setting = Callable[[str], Any]
"""A key of the configuration with its namespace → its value or None."""

LIMIT_S = 8.0
ANSWER_LIMIT_S = 5
COMPUTE = "https://compute.googleapis.com/compute/v1"
RESOURCE_MANAGER = "https://cloudresourcemanager.googleapis.com/v1"
CONSUMER_DOMAINS = ("gmail.com", "googlemail.com")
"""Of accounts that belong to no organisation."""
EXTERNAL = "roles/compute.osLoginExternalUser"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Organisation:
    """domain: None where this account may not read it. id: None where the project is in no organisation."""

    id: str | None
    domain: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offered:
    """What Google offers, by zone. machine_types: by ZONE/TYPE, none that is not known. not_asked: why something is
    unknown."""

    accelerators: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    runtimes: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    machine_types: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    organisation: Organisation | None = None
    not_asked: str | None = None


class NotAskedError(Exception):
    """Why one question has no answer, in words."""


def ask(config: Config, setting: Setting, *, limit_s: float = LIMIT_S) -> Offered:
    """Ask Google what it offers. Never raises, and returns within the limit."""
    # Loading Google's client takes half a second, and only a preview has this question. Not in the threads, where it
    # would count against the limit.
    import google_auth_httplib2  # type: ignore[import-untyped]  # noqa: F401

    from infra.slice_apis import google_settings
    from infra.slice_apis.retry import CloudTpuError

    ends = time.monotonic() + limit_s
    try:
        settings = google_settings.read(setting)
    except CloudTpuError as error:
        return Offered(not_asked=str(error))
    (credentials,) = together([lambda: google_settings.credentials(settings)], limit_s)
    if isinstance(credentials, Exception):
        return Offered(not_asked=describe_error(credentials))
    api = Api(credentials)
    zones = dict.fromkeys(
        zone
        for slice_config in config.slices
        for zone in slice_config.zones
        if not slice_config.in_cluster and not slice_config.on_compute
    )
    tpus = f"{settings.endpoint}/v2/projects/{config.project}/locations"
    questions: dict[tuple[str, str], Callable[[], Any]] = {}
    for zone in zones:
        questions["accelerators", zone] = functools.partial(api.names, f"{tpus}/{zone}", "acceleratorTypes")
        questions["runtimes", zone] = functools.partial(api.names, f"{tpus}/{zone}", "runtimeVersions")
    compute = endpoint(setting, "compute", COMPUTE, ours=settings.is_rehearsal)
    for place in _machines(config) if compute is not None else ():
        zone, machine_type = place.split("/")
        url = f"{compute}/projects/{config.project}/zones/{zone}/machineTypes/{machine_type}"
        questions["machine_types", place] = functools.partial(api.is_there, url)
    manager = endpoint(setting, "resourceManager", RESOURCE_MANAGER, ours=settings.is_rehearsal)
    if _people(config) and config.has_machines and manager is not None:
        questions["organisation", ""] = lambda: api.organisation(manager, config.project)
    answers = dict(
        zip(questions, together(list(questions.values()), max(0.1, ends - time.monotonic())), strict=True)
    )
    # Who may not ask for the organisation loses only a hint.
    failed = [
        answer
        for (question, _), answer in answers.items()
        if question != "organisation" and isinstance(answer, Exception)
    ]
    good = {key: answer for key, answer in answers.items() if not isinstance(answer, Exception)}
    return Offered(
        accelerators={zone: good[question, zone] for question, zone in good if question == "accelerators"},
        runtimes={zone: good[question, zone] for question, zone in good if question == "runtimes"},
        machine_types={
            place: good[question, place] for question, place in good if question == "machine_types"
        },
        organisation=good.get(("organisation", "")),
        not_asked=describe_error(failed[0]) if failed else None,
    )


def findings(config: Config, offered: Offered) -> Iterator[Finding]:
    """A warning for each thing that is wanted and not offered. Pure."""
    for index, slice_config in enumerate(config.slices):
        for zone in () if slice_config.on_compute else slice_config.zones:
            yield from _zone_findings(config.project, index, slice_config, zone, offered)
    for place, path in _machines(config).items():
        if offered.machine_types.get(place) is False:
            zone, machine_type = place.split("/")
            yield warning(
                path,
                f"Compute Engine has no {machine_type} in {zone}; `gcloud compute machine-types list "
                f"--zones {zone}` shows what it has",
            )
    yield from _externals(config, offered.organisation)
    if offered.not_asked is not None:
        yield note(
            "gcp:project",
            f"what Google offers in these zones could not be asked, so only the catalogue was: {offered.not_asked}",
        )


def _machines(config: Config) -> dict[str, str]:
    """The machines of the gateway and of slices of Compute Engine, ZONE/TYPE, and the keys that ask for them."""
    machines = {
        f"{zone}/{slice_config.accelerator.machine_type}": slice_path(index, "accelerator")
        for index, slice_config in enumerate(config.slices)
        for zone in slice_config.zones
        if slice_config.on_compute
    }
    if config.gateway is not None:
        gateway = config.gateway
        machines[f"{gateway.zone}/{gateway.machine_type}"] = "tpu-stack:storage.nfs.machine-type"
    return machines


def _zone_findings(
    project: str, index: int, slice_config: SliceConfig, zone: str, offered: Offered
) -> Iterator[Finding]:
    types, versions = offered.accelerators.get(zone), offered.runtimes.get(zone)
    if types is not None and slice_config.accelerator.type_name not in types:
        yield warning(
            slice_path(index, "accelerator"),
            f"the Cloud TPU API lists no {slice_config.accelerator.type_name} in {zone} for {project}; "
            f"it lists {_few(types) or 'no TPU at all'}",
        )
    if versions is not None and slice_config.runtime_version not in versions:
        near = suggestion(slice_config.runtime_version, versions)
        yield warning(
            slice_path(index, "runtime-version"),
            f'the Cloud TPU API lists no "{slice_config.runtime_version}" in {zone}; '
            + (f"did you mean {near}?" if near else f"it lists {_few(versions)}"),
        )


def _externals(config: Config, organisation: Organisation | None) -> Iterator[Finding]:
    """Warn of users who need a role that only an organisation can grant, not a project's stack, to log in by OS Login.

    https://cloud.google.com/compute/docs/oslogin/set-up-oslogin (users from outside the organisation): their login
    names begin with ext_.
    """
    domain = organisation.domain if organisation else None
    outside = [
        member
        for member in (_people(config) if config.has_machines else ())
        if (_domain(member) in CONSUMER_DOMAINS if domain is None else _domain(member) != domain)
    ]
    if not outside:
        return
    if organisation is None:
        yield note(
            "tpu-stack:access",
            f"{', '.join(outside)}: if {config.project} belongs to an organisation, its administrator has to give "
            f"{EXTERNAL} to those from outside; no project can",
        )
    elif organisation.id is not None:
        commands = " ".join(
            f"`gcloud organizations add-iam-policy-binding {organisation.id} --member {member} --role {EXTERNAL}`"
            for member in outside
        )
        yield warning(
            "tpu-stack:access",
            f"{', '.join(outside)} seem to be from outside the organisation {domain or organisation.id}: OS Login lets "
            f"them in after its administrator has run {commands}; no project can give that role",
        )


def _people(config: Config) -> list[str]:
    everybody = dict.fromkeys((*config.access.administrators, *config.access.members))
    return [member for member in everybody if member.startswith("user:")]


def _domain(member: str) -> str:
    return member.rpartition("@")[2]


def _few(names: frozenset[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered) if len(ordered) <= 10 else f"{', '.join(ordered[:9])} … ({len(ordered)} in all)"


# --- asking ---------------------------------------------------------------------------------------------------


def together(questions: list[Callable[[], Any]], limit_s: float) -> list[Any]:
    """Ask all questions at once. Returns the answers in order, an exception for each that has none.

    Threads that hang are abandoned."""
    late = NotAskedError(f"no answer within {limit_s:.0f} s")
    answers: list[Any] = [late] * len(questions)
    answered: queue.Queue[tuple[int, Any]] = queue.Queue()

    def answer(index: int) -> None:
        try:
            answered.put((index, questions[index]()))
        except Exception as error:  # whatever it is, it is said and stops nothing
            answered.put((index, error))

    for index in range(len(questions)):
        threading.Thread(target=answer, args=(index,), daemon=True).start()
    ends = time.monotonic() + limit_s
    for _ in questions:
        try:
            index, value = answered.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            break
        answers[index] = value
    return answers


def endpoint(setting: Setting, name: str, google: str, *, ours: bool) -> str | None:
    """The URL of an API, found as the gcp provider does. ours: a cloud on this machine has only named endpoints."""
    variable = re.sub(r"(?=[A-Z])", "_", name).upper()
    custom = setting(f"gcp:{name}CustomEndpoint") or os.environ.get(f"GOOGLE_{variable}_CUSTOM_ENDPOINT")
    return str(custom).rstrip("/") if custom else None if ours else google


class Api:
    """Requests to Google's APIs; each has its own connection, since httplib2's are not thread-safe."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def names(self, parent: str, collection: str) -> frozenset[str]:
        """The last parts of the names of all that are listed."""
        listed: list[str] = []
        token = ""
        while True:
            query = urllib.parse.urlencode({"pageSize": 1000, **({"pageToken": token} if token else {})})
            page = self._request("GET", f"{parent}/{collection}?{query}")
            listed += [str(item.get("name", "")).rpartition("/")[2] for item in page.get(collection, [])]
            token = page.get("nextPageToken", "")
            if not token:
                return frozenset(listed)

    def is_there(self, url: str) -> bool:
        return self.get(url) is not None

    def get(self, url: str) -> Json | None:
        """The resource at a URL; None if there is none."""
        response = self._request("GET", url, absent={})
        return response or None

    def organisation(self, manager: str, project: str) -> Organisation:
        ancestors = self._request("POST", f"{manager}/projects/{project}:getAncestry").get("ancestor", [])
        ids = [
            ancestor["resourceId"]["id"]
            for ancestor in ancestors
            if ancestor["resourceId"]["type"] == "organization"
        ]
        if not ids:
            return Organisation(id=None)
        try:
            domain = self._request("GET", f"{manager}/organizations/{ids[0]}").get("displayName")
        except NotAskedError:
            domain = None
        return Organisation(id=ids[0], domain=domain)

    def _request(self, method: str, url: str, absent: Json | None = None) -> Json:
        """absent: the answer to a 404; None: a 404 is an error like others."""
        import google_auth_httplib2
        import httplib2  # type: ignore[import-untyped]

        from infra.slice_apis.retry import Refusal

        plain = httplib2.Http(timeout=ANSWER_LIMIT_S)
        http = google_auth_httplib2.AuthorizedHttp(self._credentials, http=plain)
        body = "{}" if method == "POST" else None
        try:
            answer, content = http.request(
                url, method, body=body, headers={"Content-Type": "application/json"}
            )
        finally:
            plain.close()
        if int(answer.status) == 200:
            decoded: Json = json.loads(content)
            return decoded
        if int(answer.status) == 404 and absent is not None:
            return absent
        refusal = Refusal.parse(int(answer.status), content)
        host = urllib.parse.urlsplit(url).netloc
        if refusal.is_disabled:
            raise NotAskedError(f"{host} is not turned on for the project yet, which `pulumi up` does")
        first = (refusal.message.strip().splitlines() or [""])[0]
        raise NotAskedError(f"{host}: HTTP {refusal.http_code}: {first[:200]}")


def describe_error(error: Exception) -> str:
    """The error in one line. Of a library's exception only the type is shown: its text may hold what a server sent."""
    from infra.slice_apis.retry import CloudTpuError

    if isinstance(error, NotAskedError | CloudTpuError):
        return str(error)
    return f"Google cannot be reached ({type(error).__name__})"
