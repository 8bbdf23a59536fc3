"""How the API is spoken to: what is tried again, what is an error at once, by whose credentials; no secret in words."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import google.auth.credentials
import google.oauth2.credentials
import google.oauth2.service_account
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from infra.cloud_tpu import settings
from infra.cloud_tpu.backoff import Backoff, poll_pause_s, words
from infra.cloud_tpu.client import Client
from infra.cloud_tpu.refusal import CloudTpuError, Refusal
from infra.cloud_tpu.settings import Settings
from tests.infra.cloud_tpu.lab import PARENT, Cloud

QR = f"{PARENT}/queuedResources/main"


def refusal(code: int, message: str, status: str = "", reason: str | None = None) -> Refusal:
    details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason}] if reason else []
    body = {"error": {"code": code, "message": message, "status": status, "details": details}}
    return Refusal.parse(code, json.dumps(body).encode())


RATE = "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute' of service 'tpu.googleapis.com'."
QUOTA = (
    "Quota limit 'TPUV5sLitepodPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone z."
)


@pytest.mark.parametrize("code", [408, 500, 502, 503, 504])
def test_a_server_in_trouble_may_get_better(code: int) -> None:
    assert refusal(code, "").may_get_better


def test_too_many_requests_may_get_better() -> None:
    assert refusal(429, RATE, "RESOURCE_EXHAUSTED").may_get_better
    assert refusal(429, QUOTA, "RESOURCE_EXHAUSTED", "RATE_LIMIT_EXCEEDED").may_get_better
    assert refusal(
        429, "Resource has been exhausted (e.g. check quota).", "RESOURCE_EXHAUSTED"
    ).may_get_better


def test_a_quota_does_not_get_better_and_the_error_says_where_to_ask_for_more() -> None:
    found = refusal(429, QUOTA, "RESOURCE_EXHAUSTED")
    assert not found.may_get_better
    assert "https://console.cloud.google.com/iam-admin/quotas?project=grant" in str(
        found.explained("x", "grant")
    )


@pytest.mark.parametrize(
    "found",
    [
        refusal(400, "Service account hosts@p.iam.gserviceaccount.com does not exist.", "INVALID_ARGUMENT"),
        refusal(403, "The caller may not act as service account hosts@p.", "PERMISSION_DENIED"),
        refusal(403, "it is disabled", "PERMISSION_DENIED", "SERVICE_DISABLED"),
        refusal(403, "Cloud TPU API has not been used in project 1 before or it is disabled."),
    ],
)
def test_what_this_up_has_just_made_may_not_be_known_everywhere_yet(found: Refusal) -> None:
    assert found.is_early and found.may_get_better


@pytest.mark.parametrize("code", [400, 401, 403, 404, 409])
def test_a_refusal_does_not_get_better(code: int) -> None:
    assert not refusal(code, "no").may_get_better


@pytest.mark.parametrize(
    ("found", "remedy"),
    [
        (
            refusal(403, "it is disabled", "PERMISSION_DENIED", "SERVICE_DISABLED"),
            "gcloud services enable tpu.googleapis.com --project=grant",
        ),
        (refusal(403, "no", "PERMISSION_DENIED"), "roles/tpu.admin in grant"),
        (refusal(401, "no", "UNAUTHENTICATED"), "gcloud auth application-default login"),
    ],
)
def test_a_refusal_says_what_to_do(found: Refusal, remedy: str) -> None:
    assert remedy in str(found.explained("asking", "grant"))


@pytest.mark.parametrize("content", [b"<html>Bad gateway</html>", b"", b"[]", b'{"error": "no"}', b"\xff"])
def test_an_answer_that_is_not_googles_is_understood_by_its_code(content: bytes) -> None:
    assert str(Refusal.parse(502, content).explained("x", "p")) == "x: HTTP 502 without an explanation"


def test_retries_double_their_pause_and_name_reason_and_count(cloud: Cloud) -> None:
    cloud.control.inject("unavailable", "queuedResources.get", 3)
    assert cloud.queued() is None
    assert cloud.lines == [
        f"reading {QR}: HTTP 503; try {number} in {pause} s" for number, pause in ((2, 1), (3, 2), (4, 3))
    ]


def test_retries_end_and_the_error_says_how_often_and_how_long(cloud: Cloud) -> None:
    cloud.control.inject("unavailable", "queuedResources.get", 1000)
    with pytest.raises(CloudTpuError, match=r"currently unavailable\. \(tried \d\d times in 4 min\)"):
        cloud.queued()


def test_a_lost_answer_to_a_creation_is_not_a_second_creation(cloud: Cloud) -> None:
    cloud.control.inject("cut-after", "queuedResources.create", 3)
    cloud.put()
    assert cloud.history() == ["ACCEPTED"]


def test_nobody_there_is_tried_again_and_then_an_error_in_words() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    backoff = Backoff(now=lambda: now[0], sleep=sleep, say=lambda line: None)
    settings = Settings(
        endpoint="http://127.0.0.1:1", access_token=None, credentials=None, quota_project=None
    )
    with pytest.raises(CloudTpuError, match="Google cannot be reached; check the network"):
        Client(settings, backoff).queued_resource(QR)
    assert now[0] > 200


def test_threads_do_not_share_a_connection(cloud: Cloud) -> None:
    seen: list[Any] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            for _ in range(5):
                cloud.queued()
            seen.append(cloud.client._http())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len({id(each) for each in seen}) == 6


def test_no_token_and_no_script_is_in_a_log_or_an_error(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(
        endpoint=cloud.api.url.replace("127.0.0.1", "localhost"),
        access_token="a-token",
        credentials="a-key",
        quota_project=None,
    )
    assert "a-token" not in repr(settings) and "a-key" not in repr(settings)
    with caplog.at_level(logging.DEBUG), pytest.raises(CloudTpuError) as caught:
        cloud.create(runtime_version="none", metadata={"startup-script": "a-secret-script"})
    words_ = str(caught.value) + caplog.text + cloud.said
    assert "a-token" not in words_ and "a-secret-script" not in words_
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_looks_become_fewer_the_longer_one_waits() -> None:
    assert [poll_pause_s(waited) for waited in (0, 30, 100, 10_000)] == [5, 5, 10, 30]


def test_times_are_told_in_words() -> None:
    assert [words(seconds) for seconds in (0, 59, 60, 3600, 11_100)] == [
        "0 s", "59 s", "1 min", "1 h", "3 h 5 min",
    ]  # fmt: skip


# --- where the API is, and who we are there ---------------------------------------------------------------------


NOTHING = dict[str, str]().get
VARIABLES = (
    "GOOGLE_TPU_V2_CUSTOM_ENDPOINT", "GOOGLE_OAUTH_ACCESS_TOKEN", "GOOGLE_CREDENTIALS", "GOOGLE_BILLING_PROJECT",
    "GOOGLE_APPLICATION_CREDENTIALS",
)  # fmt: skip


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials of this machine's user, and no metadata server."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")


def test_google_is_asked_by_default() -> None:
    found = settings.read(NOTHING)
    assert found.endpoint == "https://tpu.googleapis.com"
    assert not found.is_rehearsal


def test_the_endpoint_is_the_providers_own_key_less_its_version() -> None:
    found = settings.read({"gcp:tpuV2CustomEndpoint": "http://127.0.0.1:8470/v2/"}.get)
    assert found.endpoint == "http://127.0.0.1:8470"
    assert found.is_rehearsal


@pytest.mark.parametrize("endpoint", ["tpu.googleapis.com", "http://example.com/v2/", "ftp://x", "https://"])
def test_a_token_is_never_sent_without_tls_to_another_machine(endpoint: str) -> None:
    with pytest.raises(CloudTpuError, match=r"gcp:tpuV2CustomEndpoint: .* must be an https:// address"):
        settings.read({"gcp:tpuV2CustomEndpoint": endpoint}.get)


def test_a_rehearsal_needs_no_credentials_and_gets_none() -> None:
    found = settings.read({"gcp:tpuV2CustomEndpoint": "http://127.0.0.1:1/v2/", "gcp:accessToken": "t"}.get)
    assert isinstance(settings.credentials(found), google.auth.credentials.AnonymousCredentials)


def test_a_token_of_the_configuration_goes_before_one_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GOOGLE_OAUTH_ACCESS_TOKEN", "of-the-environment")
    found = settings.credentials(settings.read({"gcp:accessToken": "of-the-config"}.get))
    assert isinstance(found, google.oauth2.credentials.Credentials)
    assert found.token == "of-the-config"
    environment = settings.credentials(settings.read(NOTHING))
    assert isinstance(environment, google.oauth2.credentials.Credentials)
    assert environment.token == "of-the-environment"


def test_a_key_may_be_given_by_content_or_by_path(tmp_path: Path) -> None:
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    key = json.dumps(
        {
            "type": "service_account",
            "client_email": "a@b",
            "token_uri": "https://oauth2.googleapis.com/token",
            "private_key": private.decode(),
        }
    )
    path = tmp_path / "key.json"
    path.write_text(key)
    for value in (key, str(path)):
        found = settings.credentials(settings.read({"gcp:credentials": value}.get))
        assert isinstance(found, google.oauth2.service_account.Credentials)


@pytest.mark.parametrize("value", ['{"private_key": "a-secret"}', '{"a-secret', "/no/such/a-secret"])
def test_a_key_that_is_none_is_an_error_that_does_not_show_it(value: str) -> None:
    with pytest.raises(CloudTpuError, match="gcloud auth application-default login") as caught:
        settings.credentials(settings.read({"gcp:credentials": value}.get))
    assert "a-secret" not in str(caught.value)


def test_no_credentials_at_all_is_an_error_that_says_how_to_get_some() -> None:
    with pytest.raises(CloudTpuError, match="run `gcloud auth application-default login`"):
        settings.credentials(settings.read(NOTHING))


def test_who_is_charged_for_requests_can_be_said() -> None:
    found = settings.read({"gcp:accessToken": "t", "gcp:billingProject": "payer"}.get)
    assert found.quota_project == "payer"
    assert settings.credentials(found).quota_project_id == "payer"
