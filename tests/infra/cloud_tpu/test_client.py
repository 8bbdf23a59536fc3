"""How the API is spoken to: what is tried again, what is an error at once, by whose credentials; no secret in words."""

import concurrent.futures
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

from infra.cloud_tpu.tpu_client import Client
from infra.slice_apis import google_settings
from infra.slice_apis.google_settings import Settings
from infra.slice_apis.retry import Backoff, CloudTpuError, Refusal, poll_pause_s
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


DISABLED = "Cloud TPU API has not been used in project 1 before or it is disabled."


@pytest.mark.parametrize(
    ("found", "may_get_better", "remedy"),
    [
        *((refusal(code, ""), True, "") for code in (408, 500, 502, 503, 504)),
        *((refusal(code, "no"), False, "") for code in (400, 404, 409)),
        (refusal(401, "no", "UNAUTHENTICATED"), False, "gcloud auth application-default login"),
        (refusal(403, "no", "PERMISSION_DENIED"), False, "roles/tpu.admin in grant"),
        # Too many requests pass, a quota of chips does not.
        (refusal(429, RATE, "RESOURCE_EXHAUSTED"), True, ""),
        (refusal(429, QUOTA, "RESOURCE_EXHAUSTED", "RATE_LIMIT_EXCEEDED"), True, ""),
        (refusal(429, "Resource has been exhausted (e.g. check quota).", "RESOURCE_EXHAUSTED"), True, ""),
        (
            refusal(429, QUOTA, "RESOURCE_EXHAUSTED"),
            False,
            "https://console.cloud.google.com/iam-admin/quotas?project=grant",
        ),
        # What this very `up` has just made may not be known everywhere yet.
        (refusal(400, "Service account hosts@p.iam.gserviceaccount.com does not exist."), True, ""),
        (refusal(403, "The caller may not act as service account hosts@p."), True, ""),
        (refusal(403, "it is disabled", "PERMISSION_DENIED", "SERVICE_DISABLED"), True, "gcloud services enable"),
        (refusal(403, DISABLED), True, "gcloud services enable tpu.googleapis.com --project=grant"),
    ],
)  # fmt: skip
def test_what_can_get_better_is_tried_again_and_the_rest_says_what_to_do(
    found: Refusal, may_get_better: bool, remedy: str
) -> None:
    assert found.may_get_better == may_get_better
    assert remedy in str(found.explained("asking", "grant"))


@pytest.mark.parametrize("content", [b"<html>Bad gateway</html>", b"", b"[]", b'{"error": "no"}', b"\xff"])
def test_an_answer_that_is_not_googles_is_understood_by_its_code(content: bytes) -> None:
    assert str(Refusal.parse(502, content).explained("x", "p")) == "x: HTTP 502 without an explanation"


def test_retries_double_their_pause_name_reason_and_count_and_end_with_how_often_and_how_long(
    cloud: Cloud,
) -> None:
    cloud.control.inject("unavailable", "queuedResources.get", 3)
    assert cloud.queued() is None
    assert cloud.lines == [
        f"reading {QR}: HTTP 503; try {number} in {pause} s" for number, pause in ((2, 1), (3, 2), (4, 3))
    ]
    cloud.control.inject("unavailable", "queuedResources.get", 1000)
    with pytest.raises(CloudTpuError, match=r"currently unavailable\. \(tried \d\d times in 4 min \d+ s\)"):
        cloud.queued()


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
    def ask(_: int) -> Any:
        cloud.queued()
        together.wait(20)  # each in a thread of its own
        return cloud.client.google.http()

    together = threading.Barrier(6)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert len({id(each) for each in pool.map(ask, range(6))}) == 6


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
    said = str(caught.value) + caplog.text + cloud.said
    assert "a-token" not in said and "a-secret-script" not in said
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_looks_become_fewer_the_longer_one_waits() -> None:
    assert [poll_pause_s(waited) for waited in (0, 30, 100, 10_000)] == [5, 5, 10, 30]


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


def test_google_is_asked_by_default_and_a_rehearsal_needs_no_credentials_and_gets_none() -> None:
    google_s = google_settings.read(NOTHING)
    assert (google_s.endpoint, google_s.is_rehearsal) == ("https://tpu.googleapis.com", False)
    key = {"gcp:tpuV2CustomEndpoint": "http://127.0.0.1:8470/v2/", "gcp:accessToken": "t"}
    ours = google_settings.read(key.get)  # the provider's own key has a version
    assert (ours.endpoint, ours.is_rehearsal) == ("http://127.0.0.1:8470", True)
    assert isinstance(google_settings.credentials(ours), google.auth.credentials.AnonymousCredentials)


@pytest.mark.parametrize("endpoint", ["tpu.googleapis.com", "http://example.com/v2/", "ftp://x", "https://"])
def test_a_token_is_never_sent_without_tls_to_another_machine(endpoint: str) -> None:
    with pytest.raises(CloudTpuError, match=r"gcp:tpuV2CustomEndpoint: .* must be an https:// address"):
        google_settings.read({"gcp:tpuV2CustomEndpoint": endpoint}.get)


def test_a_token_of_the_configuration_goes_before_one_of_the_environment_and_may_charge_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GOOGLE_OAUTH_ACCESS_TOKEN", "of-the-environment")
    config = {"gcp:accessToken": "of-the-config", "gcp:billingProject": "payer"}
    for get, token, payer in ((config.get, "of-the-config", "payer"), (NOTHING, "of-the-environment", None)):
        found = google_settings.credentials(google_settings.read(get))
        assert isinstance(found, google.oauth2.credentials.Credentials)
        assert (found.token, found.quota_project_id) == (token, payer)


def test_a_key_may_be_given_by_content_or_by_path(tmp_path: Path) -> None:
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {
        "type": "service_account",
        "client_email": "a@b",
        "token_uri": "https://oauth2.googleapis.com/token",
    }
    key = json.dumps(account | {"private_key": private.decode()})
    path = tmp_path / "key.json"
    path.write_text(key)
    for value in (key, str(path)):
        found = google_settings.credentials(google_settings.read({"gcp:credentials": value}.get))
        assert isinstance(found, google.oauth2.service_account.Credentials)


@pytest.mark.parametrize("value", ['{"private_key": "a-secret"}', '{"a-secret', "/no/such/a-secret", None])
def test_a_key_that_is_none_is_an_error_that_says_how_to_get_one_and_does_not_show_it(
    value: str | None,
) -> None:
    with pytest.raises(CloudTpuError, match="run `gcloud auth application-default login`") as caught:
        google_settings.credentials(google_settings.read({"gcp:credentials": value}.get))
    assert "a-secret" not in str(caught.value)
