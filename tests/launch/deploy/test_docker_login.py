"""Docker's log-in: a helper that keeps no secret, and a configuration in which everybody else's lines stay."""

from __future__ import annotations

import dataclasses
import http.server
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.deploy import steps
from launch.deploy.steps import Step
from tests.launch.deploy.conftest import oldest_python

CarryOut = Callable[..., list[dict[str, Any]]]
REGISTRY = "europe-west4-docker.pkg.dev"
TOKEN = "ya29.secret"


@pytest.fixture
def log_in(tmp_path: Path) -> list[Step]:
    """The steps, with the helper in the test's own folder and without asking for docker and root."""
    folder = str(tmp_path)
    return [
        dataclasses.replace(
            step,
            when="",
            root=False,
            check=step.check.replace("/usr/local/bin", folder),
            change=step.change.replace("/usr/local/bin", folder),
        )
        for step in steps.docker_login([REGISTRY])
    ]


def test_only_googles_registries_are_logged_in_to_each_once() -> None:
    images = [f"{REGISTRY}/p/r/jax@sha256:00", f"{REGISTRY}/p/r/tf@sha256:01", "gcr.io/p/x", "docker.io/x/y"]
    assert steps.registries([*images, "evil-docker.pkg.dev.example.org/x"]) == (REGISTRY, "gcr.io")
    assert steps.docker_login([]) == ()


def test_what_others_wrote_in_dockers_configuration_stays(
    carry_out: CarryOut, log_in: list[Step], home: Path
) -> None:
    path = home / ".docker" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"auths": {"x": {}}, "credHelpers": {"gcr.io": "gcloud"}}))
    assert [answer["state"] for answer in carry_out(log_in)] == ["changed", "changed"]
    settings = json.loads(path.read_text())
    assert settings == {"auths": {"x": {}}, "credHelpers": {"gcr.io": "gcloud", REGISTRY: "tpu-stack"}}
    assert path.stat().st_mode & 0o777 == 0o600
    assert [answer["state"] for answer in carry_out(log_in)] == ["ok", "ok"]


@pytest.mark.parametrize("text", ["{", "[]", '{"credHelpers": []}'])
def test_a_configuration_that_cannot_be_read_is_left_as_it_is(
    carry_out: CarryOut, log_in: list[Step], home: Path, text: str
) -> None:
    path = home / ".docker" / "config.json"
    path.parent.mkdir()
    path.write_text(text)
    assert [answer["state"] for answer in carry_out(log_in)] == ["changed", "failed"]
    assert path.read_text() == text


@pytest.fixture
def metadata() -> Iterator[str]:
    """A metadata server: host:port."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers["Metadata-Flavor"] != "Google" or not self.path.endswith("/default/token"):
                self.send_error(403)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"access_token": TOKEN, "expires_in": 3000}).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(helper: Path, registry: str, metadata: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [oldest_python(), "-S", "-E", str(helper), "get"],
        input=registry,
        env={"GCE_METADATA_HOST": metadata, "http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_helper_gives_docker_a_token_of_the_service_account_and_keeps_none(
    carry_out: CarryOut, log_in: list[Step], home: Path, tmp_path: Path, metadata: str
) -> None:
    carry_out(log_in)
    done = ask(tmp_path / "docker-credential-tpu-stack", REGISTRY, metadata)
    assert json.loads(done.stdout) == {
        "ServerURL": REGISTRY,
        "Username": "oauth2accesstoken",
        "Secret": TOKEN,
    }
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN in path.read_text()]


@pytest.mark.parametrize(
    "registry", ["docker.io", "https://x-docker.pkg.dev.example.org", "a-docker.pkg.dev@evil", ""]
)
def test_no_other_registry_ever_gets_a_token(metadata: str, registry: str) -> None:
    done = ask(steps.HELPER_TEXT, registry, metadata)
    assert done.returncode == 1 and TOKEN not in done.stdout + done.stderr
    assert "no Google registry" in done.stdout


def test_a_host_without_metadata_server_is_a_message_and_no_traceback() -> None:
    done = ask(steps.HELPER_TEXT, REGISTRY, "127.0.0.1:9")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("no token from the metadata server")
