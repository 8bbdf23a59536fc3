"""Images go to a registry by Docker's own push; the registry is a small one of the test's, which may also refuse."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from contracts.errors import RequestError
from images import local_images, push
from images.push import explained
from images.recipe import BASE_VARIABLE, Recipe
from tests.servers import Handler, serving

slow = pytest.mark.slow  # seconds, but they need Docker

STAND_IN_BASE = "stand-in:1"
UPLOAD = "artifactregistry.repositories.uploadArtifacts"
PULUMI = """\
#!/bin/sh
echo "$@" >>"$PULUMI_LOG"
case "$1 $2" in
  "stack output") echo "$PULUMI_OUTPUTS" ;;
  "config set") [ -z "$PULUMI_FAILS" ] || { echo "error: $PULUMI_FAILS" >&2; exit 255; } ;;
esac
"""


@dataclasses.dataclass
class Registry:
    """refusal: status, code and message for every upload."""

    host: str = ""
    refusal: tuple[int, str, str] | None = None
    stored: dict[str, bytes] = dataclasses.field(default_factory=dict)
    manifests: dict[str, str] = dataclasses.field(default_factory=dict)


class Protocol(Handler):
    """As much of the registry's protocol as a push takes."""

    registry: Registry
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.registry.refusal is not None and self.registry.refusal[0] == 401:
            self.reply_with(401, WWW_Authenticate='Basic realm="registry"')
        else:
            self.reply_with(200)

    def do_HEAD(self) -> None:
        self.reply_with(200 if self.path.rpartition("/")[2] in self.registry.stored else 404)

    def do_POST(self) -> None:
        if self.registry.refusal is not None:
            status, code, message = self.registry.refusal
            self.reply_with(status, {"errors": [{"code": code, "message": message}]})
            return
        self.reply_with(202, Location=f"http://{self.registry.host}{self.path}one", Docker_Upload_UUID="one")

    def do_PATCH(self) -> None:
        body = self.registry.stored[self.path] = self.body()
        self.reply_with(202, Location=f"http://{self.registry.host}{self.path}", Range=f"0-{len(body) - 1}")

    def do_PUT(self) -> None:
        body = self.body()
        if "/manifests/" in self.path:
            digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
            self.registry.manifests[self.path] = digest
        else:
            path, _, digest = self.path.replace("%3A", ":").partition("?digest=")
            self.registry.stored[digest] = self.registry.stored.pop(path, b"") + body
        self.reply_with(201, Docker_Content_Digest=digest)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return super().body() if "Content-Length" in self.headers else b""
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def reply_with(self, status: int, content: Any = b"", **headers: str) -> None:
        if self.command == "POST" and self.registry.refusal:
            self.body()
        self.reply(content, status, Docker_Distribution_Api_Version="registry/2.0", **headers)


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry()
    with serving(type("Here", (Protocol,), {"registry": made})) as address:
        made.host = address
        yield made


@pytest.fixture
def recipes(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Recipe]]:
    """Makes an image of one file that is named as a recipe says, and the folder of images that has the recipe."""
    folder, made = tmp_path / "images", list[Recipe]()

    def make(framework: str, *, image: bool = True) -> Recipe:
        (folder / framework).mkdir(parents=True)
        (folder / framework / "Dockerfile").write_text(str(tmp_path))
        recipe = Recipe(
            framework=framework, platform="cpu", base=STAND_IN_BASE,
            files={"Dockerfile": str(tmp_path).encode(), "requirements.txt": b""},
        )  # fmt: skip
        made.append(recipe)
        if image:
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w") as tar:
                member = tarfile.TarInfo("file")
                member.size = len(framework)
                tar.addfile(member, io.BytesIO(framework.encode()))
            said = [f'LABEL "{key}"="{value}"' for key, value in recipe.labels(None).items()]
            repository, _, tag = recipe.tag.rpartition(":")
            client.api.import_image_from_data(packed.getvalue(), repository, tag, changes=said)
        return recipe

    by_name = lambda name, on, environ: next(each for each in made if each.framework == name)  # noqa: E731
    monkeypatch.setattr(push, "read", by_name)
    monkeypatch.setattr(
        push, "chosen", lambda option, text: text.split(",") if text else [r.framework for r in made]
    )
    monkeypatch.setenv(BASE_VARIABLE, STAND_IN_BASE)
    yield make
    for image in local_images.list_all(client):
        if any(image.recipe == recipe.hash for recipe in made):
            local_images.remove(client, image)


@pytest.fixture
def pulumi(
    tmp_path: Path, registry: Registry, program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A `pulumi` whose stack has that registry for its images; the path of what it was asked."""
    program("pulumi", PULUMI)
    monkeypatch.setenv("PULUMI_LOG", str(tmp_path / "pulumi.log"))
    monkeypatch.setenv("PULUMI_OUTPUTS", json.dumps({"image_repository": f"{registry.host}/p/r"}))
    return tmp_path / "pulumi.log"


def run(framework: str = "", stack: str = "dev") -> int:
    return push.push(stack=stack, framework=framework, platform="cpu", environ=os.environ)


@slow
def test_images_that_are_built_are_pushed_and_their_digests_noted_in_the_stacks_configuration(
    registry: Registry,
    recipes: Any,
    pulumi: Path,
    client: docker.DockerClient,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = recipes("pushed")
    recipes("elsewhere", image=False)
    assert run() == 0
    ((path, digest),) = registry.manifests.items()
    assert path == f"/v2/p/r/pushed/manifests/{recipe.version}"
    reference = f"{registry.host}/p/r/pushed@{digest}"
    asked = pulumi.read_text().splitlines()
    assert asked[-1] == f"config set --path tpu-stack:images.references.pushed {reference} --stack dev"
    said = capsys.readouterr().out
    assert reference in said
    assert "Now `pulumi up --stack dev`" in said
    (image,) = [each for each in local_images.list_all(client) if each.recipe == recipe.hash]
    assert image.references == (reference,)
    # One that is named has to be there.
    lacking = "elsewhere for cpu: not built here.*`fab build --framework elsewhere --platform cpu`"
    with pytest.raises(RequestError, match=lacking):
        run("pushed,elsewhere")
    assert len(registry.manifests) == 1


# --- why a registry does not take an image --------------------------------------------------------------------

REFERENCE = "us-central1-docker.pkg.dev/my-project/tpu-stack-dev/jax:tpu-0123456789ab"
RESOURCE = '"projects/my-project/locations/us-central1/repositories/tpu-stack-dev" (or it may not exist)'
DOWNLOAD = "artifactregistry.repositories.downloadArtifacts"
MAY_WRITE = (
    f"lacks {UPLOAD}, which roles/artifactregistry.writer on the repository tpu-stack-dev has.*"
    "add-iam-policy-binding tpu-stack-dev --project my-project --location us-central1"
)
LOG_IN = "`gcloud auth configure-docker us-central1-docker.pkg.dev`"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (f'denied: Permission "{UPLOAD}" denied on resource {RESOURCE}', MAY_WRITE),
        (f"denied: Permission '{UPLOAD}' denied on resource (or it may not exist).", MAY_WRITE),
        ("unexpected status from POST request to https://x/v2/: 403 Forbidden", MAY_WRITE),
        ("denied: requested access to the resource is denied", MAY_WRITE),
        (f'denied: Permission "{DOWNLOAD}" denied on resource {RESOURCE}', f"lacks {DOWNLOAD}"),
        (f'denied: Unauthenticated request. They do not have permission "{UPLOAD}" on {RESOURCE}', LOG_IN),
        ("unauthorized: authentication failed", LOG_IN),
        ("no basic auth credentials", LOG_IN),
        ('name unknown: Repository "tpu-stack-dev" not found', "`pulumi up --stack dev` makes it"),
        ("Get https://x/v2/: dial tcp: lookup x: no such host", "cannot be reached"),
    ],
)
def test_a_refusal_names_what_is_missing_and_no_rights_where_it_is_not_rights(said: str, words: str) -> None:
    text = explained(said, REFERENCE, "dev")
    assert re.search(words, text), text
    assert ("roles/" in text) == ("lacks" in words)
    if words == LOG_IN:
        assert "docker login r.example:5000" in explained(said, "r.example:5000/p/jax:tpu-1", "dev")
