"""What goes wrong with Google's API, in words for the person who typed `pulumi up`, and how it is tried again.

`Backoff` is also the clock of the provider, which a test replaces to go through a day in a second.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import time
from collections.abc import Callable

from contracts.aliases import Json
from contracts.durations import spoken

LONGEST_RETRY_S = 30.0
CHANGE_LIMIT_S = 300.0
"""For a change of what runs."""

# "… limit 'Requests per minute' …" passes by itself; "Quota limit 'TPUV5s…PerZone…' has been exceeded" does not.
_PER_TIME = re.compile(
    r"per (second|minute|\d+ seconds)|PerMinute|PerSecond|rate.?limit|too many requests", re.IGNORECASE
)
_ACCOUNT = re.compile(r"service ?account", re.IGNORECASE)
_NO_PROJECT = re.compile(
    r"project.*(has been deleted|not found or deleted|pending deletion)", re.IGNORECASE | re.DOTALL
)
_ALLOCATION = re.compile(r"quota limit|quota.* exceeded|exceeded.* quota", re.IGNORECASE)


class CloudTpuError(Exception):
    """A refusal or failure, its message ready to be read. `status`: the API's name of it, or "" where it has none.

    It never holds a request's headers or body: a token or a start-up script must not get into a log.
    """

    __module__ = "builtins"  # Pulumi prints the class with its module; a user has no use for the path

    def __init__(self, message: str, status: str = "") -> None:
        super().__init__(message)
        self.status = status


class AbandonedError(CloudTpuError):
    """The engine that asked is gone: nothing may be done any more, and above all nothing deleted."""

    __module__ = "builtins"


class RunningError(CloudTpuError):
    """Something of ours runs that is not what is asked for; only a person has it deleted."""

    __module__ = "builtins"


class GoneError(CloudTpuError):
    """The request has vanished: there is nothing that a state could know of."""

    __module__ = "builtins"


class LostAgainError(CloudTpuError):
    """A zone had capacity and took it back before the request was ACTIVE; nothing is left of it."""

    __module__ = "builtins"


class NoServiceError(CloudTpuError):
    """The API is switched off in the project, or the project is deleted: there is no TPU."""

    __module__ = "builtins"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """One of Google's APIs. role: of who calls it. listing: the command that shows what counts against a quota."""

    name: str
    version: str
    host: str
    role: str
    listing: str


TPU_SERVICE = Service(
    name="tpu",
    version="v2",
    host="tpu.googleapis.com",
    role="roles/tpu.admin",
    listing="gcloud compute tpus queued-resources list --project={project} --zone=ZONE",
)
COMPUTE_SERVICE = Service(
    name="compute",
    version="v1",
    host="compute.googleapis.com",
    role="roles/compute.instanceAdmin.v1",
    listing="gcloud compute instances list --project={project}",
)

# Compute Engine's errors have a reason and often no status.
STATUS_BY_REASON = {
    "resourceNotReady": "FAILED_PRECONDITION",
    "resourceInUseByAnotherResource": "FAILED_PRECONDITION",
    "conditionNotMet": "FAILED_PRECONDITION",
    "quotaExceeded": "RESOURCE_EXHAUSTED",
    "rateLimitExceeded": "RESOURCE_EXHAUSTED",
}
STATUS_BY_CODE = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    412: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """An answer of the API that is an error."""

    http_code: int
    status: str
    message: str
    reason: str

    @classmethod
    def parse(cls, http_code: int, content: bytes) -> Refusal:
        """Read the body of an answer, which may be anything: a proxy in between answers in HTML."""
        try:
            answer = json.loads(content)
        except ValueError:
            answer = {}
        value = answer.get("error") if isinstance(answer, dict) else None
        error: Json = value if isinstance(value, dict) else {}
        details = [detail for detail in error.get("details", []) if isinstance(detail, dict)]
        reasons = [str(detail["reason"]) for detail in details if "reason" in detail]
        reasons += [str(entry.get("reason")) for entry in error.get("errors", []) if isinstance(entry, dict)]
        reason_status = next(
            (STATUS_BY_REASON[reason] for reason in reasons if reason in STATUS_BY_REASON), ""
        )
        return cls(
            http_code=http_code,
            status=str(
                error.get("status") or reason_status or (error and STATUS_BY_CODE.get(http_code, "")) or ""
            ),
            message=str(error.get("message", "")) or f"HTTP {http_code} without an explanation",
            reason=reasons[0] if reasons else "",
        )

    @property
    def is_quota(self) -> bool:
        """More was asked for than the project may have: waiting does not help, unlike with a rate limit.

        Both are 429 RESOURCE_EXHAUSTED. The words tell, or the reason of google.rpc.ErrorInfo where there is one
        (https://cloud.google.com/apis/design/errors#error_info).
        """
        if self.reason == "quotaExceeded":  # Compute Engine's, with 403
            return _PER_TIME.search(self.message) is None
        if self.http_code != 429 or self.reason == "RATE_LIMIT_EXCEEDED" or _PER_TIME.search(self.message):
            return False
        return self.reason == "QUOTA_EXCEEDED" or _ALLOCATION.search(self.message) is not None

    @property
    def is_early(self) -> bool:
        """Whether the cause may be a service or account that this `pulumi up` has just made, not known everywhere yet.

        Google's own sample for TPU VMs sleeps a minute after it has made the account.
        """
        if self.http_code not in (400, 403, 404):
            return False
        account = _ACCOUNT.search(self.message) is not None and "delete" not in self.message
        return account or self.is_disabled

    @property
    def is_disabled(self) -> bool:
        return self.reason == "SERVICE_DISABLED" or "has not been used in project" in self.message

    @property
    def may_get_better(self) -> bool:
        """Whether the same request can succeed a little later."""
        is_rate = self.http_code == 429 or self.reason == "rateLimitExceeded"
        passing = self.http_code in (408, 500, 502, 503, 504) or (is_rate and not self.is_quota)
        return passing or self.is_early

    def explained(self, action: str, project: str, service: Service = TPU_SERVICE) -> CloudTpuError:
        """The error for the user: the action that failed, why, and the remedy."""
        is_off = self.is_disabled or (self.http_code in (403, 404) and _NO_PROJECT.search(self.message))
        kind = NoServiceError if is_off else CloudTpuError
        return kind(f"{action}: {self.message.strip()}{self._remedy(project, service)}", self.status)

    def _remedy(self, project: str, service: Service) -> str:
        if self.is_quota:
            return (
                "\nThe project may not have so many chips of this type, zone and capacity. A grant counts each apart:"
                " check that zone and capacity (spot or on-demand) are those of the grant, and that nothing old counts"
                f" (`{service.listing.format(project=project)}`)."
                f"\nMore is asked for at https://console.cloud.google.com/iam-admin/quotas?project={project}"
            )
        if self.is_disabled:
            return (
                "\nA service that was just turned on takes minutes to be known everywhere: `pulumi up` again, or"
                f" turn it on: gcloud services enable {service.host} --project={project}"
            )
        if self.http_code == 401:
            return "\nLog in again: gcloud auth application-default login"
        if self.http_code == 403:
            return (
                f"\nWho runs Pulumi needs {service.role} in {project} and roles/iam.serviceAccountUser on the slices'"
                " service account, and the zone must be one that the project may use."
                "\nWho that is: `gcloud auth application-default login` sets it; a user without a quota project also"
                f" needs `gcloud auth application-default set-quota-project {project}`"
            )
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backoff:
    """now, sleep: seconds. jitter: 0 to 1. is_awaited: whether somebody still waits for it. say: a line to the user."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random
    is_awaited: Callable[[], bool] = lambda: True
    say: Callable[[str], None] = print

    def pause(self, seconds: float) -> None:
        """Sleep. Raises AbandonedError when nobody waits for the result any more."""
        self.require_awaited()
        self.sleep(seconds)
        self.require_awaited()

    def require_awaited(self) -> None:
        """Before anything is changed at Google: a killed `pulumi up` must not delete what the next one adopts."""
        if not self.is_awaited():
            raise AbandonedError("nobody waits for this any more: Pulumi has ended")

    def until_done(
        self, operation: Json, read: Callable[[str], Json | None], is_done: Callable[[Json], bool]
    ) -> Json | None:
        """Wait for an operation; return it as it has ended, None where Google does not show it any more.

        read: by its name. Raises CloudTpuError after CHANGE_LIMIT_S.
        """
        name, until = str(operation["name"]), self.now() + CHANGE_LIMIT_S
        current: Json | None = operation
        while current is not None and not is_done(current):
            if self.now() >= until:
                raise CloudTpuError(f"{name}: it has not ended within {spoken(CHANGE_LIMIT_S)}")
            self.pause(2.0)
            current = read(name)
        return current

    def retry_pause_s(self, failures: int) -> float:
        """Before the next try: doubling from 1 s, half of it by chance so that many slices do not come back at once."""
        return float(min(LONGEST_RETRY_S, 2.0 ** min(failures, 10)) * (0.5 + 0.5 * self.jitter()))


def poll_pause_s(waited_s: float) -> float:
    """Between two looks: 5 s at first, then a tenth of the time waited, at most half a minute.

    Twenty slices in a queue then ask 40 times a minute; the API allows hundreds.
    """
    return min(30.0, max(5.0, waited_s / 10))
