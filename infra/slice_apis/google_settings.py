"""Where the API is and who we are there, read as the gcp provider reads it: its configuration, then the environment.

The engine hands every provider the whole configuration of the stack, keys of other namespaces and secrets in the clear
included. Nothing of it may reach a log, the state or an exception's text.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import urllib.parse
from collections.abc import Callable
from typing import Any

import google.auth
import google.auth.credentials
import google.auth.exceptions
import google.oauth2.credentials
import google.oauth2.service_account

from infra.slice_apis.retry import CloudTpuError

ENDPOINT = "https://tpu.googleapis.com"
COMPUTE_ENDPOINT = "https://compute.googleapis.com"
SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
KEYS: dict[str, Any] = {
    "service_account": google.oauth2.service_account.Credentials.from_service_account_info,
    "authorized_user": google.oauth2.credentials.Credentials.from_authorized_user_info,
}
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
REMEDY = (
    "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the file of a service"
    " account's key, or `pulumi config set --secret gcp:accessToken …`"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """endpoint: of the Cloud TPU API, without a path; compute_endpoint: of Compute Engine.

    The rest is None where it is not given. Not shown by repr: two of them are secrets.
    """

    endpoint: str
    access_token: str | None = dataclasses.field(repr=False)
    credentials: str | None = dataclasses.field(repr=False)
    quota_project: str | None
    compute_endpoint: str = COMPUTE_ENDPOINT

    @property
    def is_rehearsal(self) -> bool:
        """The endpoint is on this machine and without TLS: nobody who could check a token."""
        url = urllib.parse.urlsplit(self.endpoint)
        return url.scheme == "http" and url.hostname in LOOPBACK


def read(config: Callable[[str], Any]) -> Settings:
    """`config`: a key with its namespace → its value or None. Raises CloudTpuError for an endpoint that is none."""

    def first(key: str, *variables: str) -> str | None:
        values = [config(key), *(os.environ.get(variable) for variable in variables)]
        return next((str(value) for value in values if value), None)

    return Settings(
        endpoint=_origin(
            "gcp:tpuV2CustomEndpoint",
            first("gcp:tpuV2CustomEndpoint", "GOOGLE_TPU_V2_CUSTOM_ENDPOINT") or ENDPOINT,
        ),
        compute_endpoint=_origin(
            "gcp:computeCustomEndpoint",
            first("gcp:computeCustomEndpoint", "GOOGLE_COMPUTE_CUSTOM_ENDPOINT") or COMPUTE_ENDPOINT,
        ),
        access_token=first("gcp:accessToken", "GOOGLE_OAUTH_ACCESS_TOKEN"),
        credentials=first("gcp:credentials", "GOOGLE_CREDENTIALS"),
        quota_project=first("gcp:billingProject", "GOOGLE_BILLING_PROJECT"),
    )


def _origin(key: str, address: str) -> str:
    """The address without the path that the provider's own value has (/v2/, /compute/v1/), which the client adds."""
    url = urllib.parse.urlsplit(address)
    if (
        url.scheme not in ("https", "http")
        or not url.netloc
        or (url.scheme == "http" and url.hostname not in LOOPBACK)
    ):
        raise CloudTpuError(
            f'{key}: "{address}" must be an https:// address, or http:// on this machine;'
            " remove it to use Google's own"
        )
    return f"{url.scheme}://{url.netloc}"


def credentials(settings: Settings) -> google.auth.credentials.Credentials:
    """Raises CloudTpuError, with the remedy, where there are none or they are of no use."""
    if settings.is_rehearsal:
        return google.auth.credentials.AnonymousCredentials()  # type: ignore[no-untyped-call]
    if settings.access_token:
        return google.oauth2.credentials.Credentials(  # type: ignore[no-untyped-call]
            token=settings.access_token, quota_project_id=settings.quota_project
        )
    try:
        if settings.credentials:
            return _key_credentials(settings.credentials, settings.quota_project)
        application_default, _ = google.auth.default(scopes=SCOPES, quota_project_id=settings.quota_project)
    except google.auth.exceptions.GoogleAuthError:
        raise CloudTpuError(f"there are no credentials for Google Cloud: {REMEDY}") from None
    return application_default


def _key_credentials(text: str, quota_project: str | None) -> google.auth.credentials.Credentials:
    """gcp:credentials is the content of a key file, or the file's path: of a service account or of a user."""
    try:
        key = json.loads(
            text if text.lstrip().startswith("{") else pathlib.Path(text).read_text(encoding="utf-8")
        )
        make = KEYS[key["type"]]
        key_credentials = make(key, scopes=SCOPES)
    except (OSError, ValueError, KeyError, TypeError, google.auth.exceptions.GoogleAuthError):
        raise CloudTpuError(
            f"gcp:credentials is neither the JSON of a key ({' or '.join(KEYS)}) nor the path of such a file: {REMEDY}"
        ) from None
    billed: google.auth.credentials.Credentials = (
        key_credentials.with_quota_project(quota_project) if quota_project else key_credentials
    )
    return billed
