"""One of Google's APIs through Google's client: every call is retried as long as that can help.

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
import http.client
import ssl
import threading
from collections.abc import Callable
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
from infra.slice_apis import google_settings
from infra.slice_apis.retry import TPU_SERVICE, Backoff, CloudTpuError, Refusal, Service

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
class Listing:
    """The items of all zones. unreachable: zones that Google could not ask, whose items are missing."""

    items: list[Json]
    unreachable: tuple[str, ...] = ()


class GoogleApi[Collections]:
    """The connection to one API. Every call raises CloudTpuError; its `status` is Google's: NOT_FOUND, …

    collections: of the service that Google's client makes of the API's discovery document, those that are called.
    """

    def __init__(
        self,
        settings: google_settings.Settings,
        backoff: Backoff,
        collections: Callable[[Any], Collections],
        *,
        endpoint: str,
        service: Service = TPU_SERVICE,
    ) -> None:
        self._settings, self._endpoint, self._service = settings, endpoint, service
        self._backoff = backoff
        self._collections = collections
        self._made: list[
            tuple[google.auth.credentials.Credentials, Collections]
        ] = []  # once, for all copies too
        self._lock = threading.Lock()
        self._local = threading.local()
        self._dated: tuple[datetime.datetime, float] | None = None  # the last answer, and when it came
        self._connections: list[Any] = []

    def under(self, backoff: Backoff) -> GoogleApi[Collections]:
        """Return the same connections, retried by another Backoff."""
        api = copy.copy(self)
        api._backoff = backoff
        return api

    def close(self) -> None:
        """Close the connections of all threads. They cannot be used afterwards."""
        with self._lock:
            for connection in self._connections:
                connection.close()

    def now(self) -> datetime.datetime:
        """The time by Google's clock, as its last answer had it: this machine's may be off."""
        if self._dated is None:
            return datetime.datetime.now(datetime.UTC)
        moment, at_s = self._dated
        return moment + datetime.timedelta(seconds=self._backoff.now() - at_s)

    def call(
        self, action: str, build: Callable[[Collections], Any], project: str, patience_s: float = PATIENCE_S
    ) -> Json:
        """Carry out the request that `build` makes. patience_s: how long one that may succeed later is retried."""
        since, failures, limit_s = self._backoff.now(), 0, patience_s
        while True:
            try:
                http_request = build(self._api())
                http_request.add_response_callback(self._set_clock)
                answer: Json = http_request.execute(http=self.http())
                return answer
            except HttpError as error:
                refusal = Refusal.parse(int(error.resp.status), error.content)
                trouble = refusal.explained(action, project, self._service)
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
                    f"{action}: Google does not take the credentials (any more): {google_settings.REMEDY}",
                    "UNAUTHENTICATED",
                ) from None
            except ssl.SSLCertVerificationError as error:
                raise CloudTpuError(f"{action}: {self._endpoint}: {error.verify_message}") from None
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
            self._dated = email.utils.parsedate_to_datetime(answer["date"]), self._backoff.now()

    def _api(self) -> Collections:
        """Made once: reading the API's document takes a moment, and so does making the methods of a collection."""
        with self._lock:
            if not self._made:
                credentials = google_settings.credentials(self._settings)
                service = discovery.build(
                    self._service.name,
                    self._service.version,
                    http=httplib2.Http(timeout=ANSWER_LIMIT_S),
                    static_discovery=True,
                    client_options={"api_endpoint": self._endpoint},
                )
                self._made.append((credentials, self._collections(service)))
            return self._made[0][1]

    def http(self) -> Any:
        """The connection of this thread."""
        if not hasattr(self._local, "http"):
            plain = googleapiclient.http.set_user_agent(httplib2.Http(timeout=ANSWER_LIMIT_S), "tpu-stack")
            self._local.http = google_auth_httplib2.AuthorizedHttp(self._made[0][0], http=plain)
            with self._lock:
                self._connections.append(self._local.http)
        return self._local.http


def _unreachable(action: str) -> CloudTpuError:
    return CloudTpuError(
        f"{action}: Google cannot be reached; check the network and HTTPS_PROXY", "UNAVAILABLE"
    )


def found_or_none(read: Callable[[], Json]) -> Json | None:
    """What a call reads; None: there is no such thing."""
    try:
        return read()
    except CloudTpuError as error:
        if error.status == "NOT_FOUND":
            return None
        raise
