"""The Cloud TPU API v2 through Google's client: the few calls that we make, each tried again as long as that can help.

httplib2 is not safe for threads and Pulumi calls a provider from several, so each thread has its own connection. By
itself httplib2 sends a request a second time when the connection ends without an answer, a POST too: creations and
deletions carry a requestId, by which Google knows the second from another one.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import email.utils
import functools
import http.client
import ssl
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import google.auth.credentials
import google.auth.exceptions
import google_auth_httplib2  # type: ignore[import-untyped]
import googleapiclient.http
import httplib2  # type: ignore[import-untyped]
from googleapiclient import discovery
from googleapiclient.errors import HttpError

from contracts.aliases import Json
from contracts.durations import spoken
from infra.cloud_tpu import settings as settings_
from infra.cloud_tpu.retry import Backoff, CloudTpuError, Refusal

ANSWER_LIMIT_S = 60
PATIENCE_S = 300.0
EARLY_S = 120.0  # what was just made is known everywhere by then; a lack of rights looks the same
# What a network that is down, a proxy or an answer that was cut short looks like.
UNREACHABLE = (
    OSError,
    http.client.HTTPException,
    httplib2.HttpLib2Error,
    google.auth.exceptions.TransportError,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Api:
    """The collections of the API that we use, with the methods that Google's client makes of its document."""

    queued_resources: Any
    nodes: Any
    operations: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """The items of all zones. unreachable: zones that Google could not ask, whose items are missing."""

    items: list[Json]
    unreachable: tuple[str, ...] = ()


class Client:
    """Every method raises CloudTpuError; its `status` is Google's: NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION …

    patience_s: how long a request that may succeed later is retried; each retry prints its reason.
    """

    def __init__(self, settings: settings_.Settings, backoff: Backoff) -> None:
        self._settings = settings
        self._backoff = backoff
        self._made: list[tuple[google.auth.credentials.Credentials, _Api]] = []  # once, for all copies too
        self._lock = threading.Lock()
        self._local = threading.local()
        self._ahead = datetime.timedelta(0)
        self._connections: list[Any] = []

    def under(self, backoff: Backoff) -> Client:
        """Return a client with the same connections that retries by another Backoff."""
        client = copy.copy(self)
        client._backoff = backoff
        return client

    def close(self) -> None:
        """Close the connections of all threads. The client cannot be used afterwards."""
        with self._lock:
            for connection in self._connections:
                connection.close()

    def now(self) -> datetime.datetime:
        """The time by Google's clock, as its last answer had it: this machine's may be off."""
        return datetime.datetime.now(datetime.UTC) + self._ahead

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

    def create_queued_resource(self, parent: str, own_id: str, body: Json) -> Json:
        """The operation, which is over when the request is accepted, long before it is served."""
        request_id = str(uuid.uuid4())
        return self._call(
            f"asking for {parent}/queuedResources/{own_id}",
            lambda at: at.queued_resources.create(
                parent=parent, queuedResourceId=own_id, requestId=request_id, body=body
            ),
            parent,
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

    def node(self, name: str, *, patience_s: float = PATIENCE_S) -> Json | None:
        """None: there is no such thing."""
        return self._get_or_none(f"reading {name}", lambda at: at.nodes.get(name=name), name, patience_s)

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
        try:
            return self._call(action, build, name, patience_s)
        except CloudTpuError as error:
            if error.status == "NOT_FOUND":
                return None
            raise

    def _call(
        self, action: str, build: Callable[[_Api], Any], name: str, patience_s: float = PATIENCE_S
    ) -> Json:
        project = name.split("/")[1]
        since, failures, limit_s = self._backoff.now(), 0, patience_s
        while True:
            try:
                http_request = build(self._api())
                http_request.add_response_callback(self._set_clock)
                answer: Json = http_request.execute(http=self._http())
                return answer
            except HttpError as error:
                refusal = Refusal.parse(int(error.resp.status), error.content)
                trouble = refusal.explained(action, project)
                reason, may_get_better = f"HTTP {refusal.http_code}", refusal.may_get_better
                if refusal.is_early:
                    limit_s = min(patience_s, EARLY_S)
            except google.auth.exceptions.TransportError:
                trouble, reason, may_get_better = (
                    _unreachable(action),
                    "Google's log-in cannot be reached",
                    True,
                )
            except google.auth.exceptions.GoogleAuthError:
                # Its text can hold what the token server has said, so it stays out of ours.
                raise CloudTpuError(
                    f"{action}: Google does not take the credentials (any more): {settings_.REMEDY}",
                    "UNAUTHENTICATED",
                ) from None
            except ssl.SSLCertVerificationError as error:
                raise CloudTpuError(f"{action}: {self._settings.endpoint}: {error.verify_message}") from None
            except UNREACHABLE as error:
                trouble, reason, may_get_better = _unreachable(action), type(error).__name__, True
            pause_s = self._backoff.retry_pause_s(failures)
            failures += 1
            if not may_get_better:
                raise trouble from None
            if self._backoff.now() + pause_s - since > limit_s:
                tried = f" (tried {failures} times in {spoken(self._backoff.now() - since)})"
                raise type(trouble)(f"{trouble}{tried}", trouble.status) from None
            if failures <= 3 or failures % 10 == 0:  # a network may be down for hours
                self._backoff.say(f"{action}: {reason}; try {failures + 1} in {pause_s:.0f} s")
            self._backoff.pause(pause_s)

    def _set_clock(self, answer: Any) -> None:
        with contextlib.suppress(KeyError, TypeError, ValueError):  # a proxy may say anything
            moment = email.utils.parsedate_to_datetime(answer["date"])
            self._ahead = moment - datetime.datetime.now(datetime.UTC)

    def _api(self) -> _Api:
        """Made once: reading the API's document takes a moment, and so does making the methods of a collection."""
        with self._lock:
            if not self._made:
                credentials = settings_.credentials(self._settings)
                service = discovery.build(
                    "tpu",
                    "v2",
                    http=httplib2.Http(timeout=ANSWER_LIMIT_S),
                    static_discovery=True,
                    client_options={"api_endpoint": self._settings.endpoint},
                )
                at = service.projects().locations()
                api = _Api(
                    queued_resources=at.queuedResources(), nodes=at.nodes(), operations=at.operations()
                )
                self._made.append((credentials, api))
            return self._made[0][1]

    def _http(self) -> Any:
        if not hasattr(self._local, "http"):
            plain = googleapiclient.http.set_user_agent(httplib2.Http(timeout=ANSWER_LIMIT_S), "tpu-stack")
            self._local.http = google_auth_httplib2.AuthorizedHttp(self._made[0][0], http=plain)
            with self._lock:
                self._connections.append(self._local.http)
        return self._local.http


def _list(collection: Callable[[_Api], Any], parent: str, more: Mapping[str, str], at: _Api) -> Any:
    return collection(at).list(parent=parent, **more)


def _unreachable(action: str) -> CloudTpuError:
    return CloudTpuError(
        f"{action}: Google cannot be reached; check the network and HTTPS_PROXY", "UNAVAILABLE"
    )
