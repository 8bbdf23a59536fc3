"""Where the API is and who we are there."""

from __future__ import annotations

import json
from pathlib import Path

import google.auth.credentials
import google.oauth2.credentials
import google.oauth2.service_account
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from infra.cloud_tpu import settings
from infra.cloud_tpu.errors import CloudTpuError

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
