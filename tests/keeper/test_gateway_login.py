"""How the keeper on a gateway logs in: with a metadata server and an OS Login on loopback, by Google's own document."""

import dataclasses
import importlib.resources
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from backends.vm.login import KEY_VARIABLE
from contracts.inventory import Inventory
from keeper import gateway_login
from launch.hosts import HostError
from rehearsal.simulator.discovery import Document
from tests.launch.slices import NO_STORAGE, make_host, make_inventory, make_slice
from tests.servers import Handler, serving

EMAIL = "tpu-stack-dev-keeper@my-project.iam.gserviceaccount.com"
USER = "sa_104372000000000000001"
SHIPPED = importlib.resources.files("googleapiclient") / "discovery_cache/documents/oslogin.v1.json"
# What checks requests knows paths of a version 2.
DOCUMENT = Document(json.loads(SHIPPED.read_text().replace('"v1/', '"v2/')))


@dataclasses.dataclass
class OsLogin:
    """keys: of each import the key and its end. status: what the next one is answered with."""

    keys: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    status: int = 200


class Google(Handler):
    os_login: OsLogin

    def do_GET(self) -> None:
        assert self.headers["Metadata-Flavor"] == "Google"
        of_account = "/computeMetadata/v1/instance/service-accounts/"
        if not self.path.startswith(of_account):
            self._answer({}, 404)
        elif "/token" in self.path:
            self._answer({"access_token": "t0ken", "expires_in": 3600, "token_type": "Bearer"})
        else:
            self._answer({"email": EMAIL, "scopes": [], "aliases": ["default"]})

    def do_POST(self) -> None:
        assert self.headers["Authorization"] == "Bearer t0ken"
        call = DOCUMENT.call("POST", self.path.replace("/v1/", "/v2/", 1), self.body())
        assert call.method.id == "oslogin.users.importSshPublicKey"
        assert (call.resource, call.query) == (f"users/{EMAIL}", {"projectId": "my-project"})
        if self.os_login.status != 200:
            error = {"code": self.os_login.status, "message": "OS Login API has not been used"}
            self._answer({"error": error}, self.os_login.status)
            return
        self.os_login.keys.append(call.body)
        accounts = [{"username": USER, "primary": True}]
        answer = {"loginProfile": {"name": EMAIL, "posixAccounts": accounts}}
        assert DOCUMENT.wrong("ImportSshPublicKeyResponse", answer) == []
        self._answer(answer)

    def _answer(self, value: Any, status: int = 200) -> None:
        self.reply(value, status, Metadata_Flavor="Google", Content_Type="application/json")


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[OsLogin]:
    os_login = OsLogin()
    with serving(type("Here", (Google,), {"os_login": os_login})) as address:
        monkeypatch.setattr("google.auth.compute_engine._metadata._GCE_METADATA_HOST", address)
        monkeypatch.setattr(gateway_login, "ENDPOINT", f"http://{address}")
        yield os_login


def inventory(project: str | None = "my-project") -> Inventory:
    host = make_host(0, internal_address="10.0.0.10", external_address="203.0.113.5")
    return make_inventory(make_slice((host,)), project=project, storage=NO_STORAGE)


def test_on_a_gateway_hosts_are_reached_from_inside_as_the_gateways_account_by_a_key_that_is_made_once_a_day(
    google: OsLogin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(gateway_login, "clock_s", lambda: now_s[0])
    key = tmp_path / "id_ed25519"
    environ = {gateway_login.VARIABLE: gateway_login.METADATA, KEY_VARIABLE: str(key)}
    for _ in range(2):
        (host,) = gateway_login.from_here(inventory(), environ).slices[0].hosts
        assert (host.reach, host.internal_address, host.external_address) == ("direct", "10.0.0.10", None)
        assert (host.user, host.host_keys) == (USER, ("ssh-ed25519 AAAA",))
    (imported,) = google.keys
    assert key.stat().st_mode & 0o777 == 0o600
    public = asyncssh.read_private_key(key).export_public_key("openssh").decode().strip()
    assert imported["key"] == public
    lives_s = int(imported["expirationTimeUsec"]) / 1e6 - time.time()
    assert gateway_login.KEY_LIFE_S - 60 < lives_s <= gateway_login.KEY_LIFE_S
    # Before it ends there is another one.
    now_s[0] += gateway_login.KEY_LIFE_S - gateway_login.RENEW_BEFORE_S
    gateway_login.from_here(inventory(), environ)
    assert len({each["key"] for each in google.keys}) == 2


def test_a_key_that_os_login_has_not_taken_is_not_used_and_the_next_look_tries_again(
    google: OsLogin, tmp_path: Path
) -> None:
    key = tmp_path / "id_ed25519"
    environ = {gateway_login.VARIABLE: gateway_login.METADATA, KEY_VARIABLE: str(key)}
    gateway_login.from_here(inventory(), environ)
    before = key.read_bytes()
    key.with_suffix(".json").write_text("torn")
    google.status = 403
    with pytest.raises(HostError, match="OS Login does not take a key"):
        gateway_login.from_here(inventory(), environ)
    assert key.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["id_ed25519"]
    google.status = 200
    gateway_login.from_here(inventory(), environ)
    assert key.read_bytes() != before


def test_elsewhere_the_keeper_logs_in_as_fab_does(tmp_path: Path) -> None:
    assert gateway_login.from_here(inventory(), {}) == inventory()
    inside = {gateway_login.VARIABLE: gateway_login.METADATA, KEY_VARIABLE: str(tmp_path / "key")}
    assert gateway_login.from_here(inventory(None), inside) == inventory(None)
