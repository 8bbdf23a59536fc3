"""`fab push`: images that were built here go to a stack's repository, and their digests into its configuration.

Why a registry does not take one is told in our words. Artifact Registry says `denied: Permission
"artifactregistry.repositories.uploadArtifacts" denied on resource "projects/P/locations/L/repositories/R" (or it may
not exist)`, to somebody unknown `denied: Unauthenticated request.` and more, and of a repository that is not there
`name unknown: Repository "R" not found`.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Mapping

import docker
import docker.auth

from contracts.errors import RequestError
from images import local_images
from images.docker_client import (
    AWAY,
    ImageError,
    ImageUnreachable,
    asking,
    away_line,
    buildkit,
    command_environment,
    connect,
    exit_code_of,
    shown,
)
from images.local_images import Image
from images.recipe import Recipe, chosen, image_platform, read
from launch import inventories
from launch.output import say, terminal

LOCAL = "local"
OUTPUT = "image_repository"
OTHERWISE = "it knows where images go"
DIGEST = re.compile(r"digest: (sha256:[0-9a-f]{64})")

ROLE = "roles/artifactregistry.writer"
PERMISSION = re.compile(r"artifactregistry\.\w+\.\w+")
GOOGLES = re.compile(r"(?P<region>[a-z0-9-]+)-docker\.pkg\.dev/(?P<project>[^/]+)/(?P<name>[^/]+)")
UNKNOWN_USER = (
    "unauthenticated",
    "unauthorized",
    "no basic auth credentials",
    "authentication required",
    "401",
)
REFUSED = ("denied", "forbidden", "403")
NOT_THERE = ("name unknown", "name_unknown", "not found", "does not exist", "404")
UNREACHABLE = (*AWAY, "timeout", "tls: ", "x509", "server gave http response", "proxyconnect")


def push(*, stack: str, framework: str, platform: str, environ: Mapping[str, str]) -> int:
    """Push the named images (default: all that are built), and write their digests into the stack's configuration.

    Raises:
        RequestError: no stack is named, an image is not built, or there is no Docker; nothing was pushed.
    """
    if stack == LOCAL:
        raise RequestError("--stack: say to which stack's repository; `pulumi stack ls` lists them")
    names, on = chosen("--framework", framework), image_platform(platform)
    tell = say(terminal())
    failed: list[ImageError] = []
    pushed: dict[str, str] = {}
    with contextlib.closing(connect(environ)) as client:
        command = buildkit(client, environ)
        recipes = built(client, [read(name, on, environ) for name in names], all_of_them=bool(framework))
        repository = inventories.output(OUTPUT, stack, otherwise=OTHERWISE, environ=environ).rstrip("/")
        for recipe in recipes:
            name = recipe.framework
            try:
                tell(f"{name}  pushing {recipe.tag}")
                reference = send(client, command, recipe, repository, stack, environ)
                set_reference(stack, name, reference, environ)
                pushed[name] = reference
                tell(f"{name}  pushed")
            except ImageError as error:
                failed.append(error)
    for name, reference in pushed.items():
        tell(f"{reference_key(name)}: {reference}")
    if pushed:
        tell(f"Now `pulumi up --stack {stack}`: then hosts pull {'this' if len(pushed) == 1 else 'these'}.")
    for trouble in failed:
        tell(f"error: {trouble}")
    return exit_code_of(failed)


def built(client: docker.DockerClient, recipes: list[Recipe], *, all_of_them: bool) -> list[Recipe]:
    """Return the recipes whose image is here. all_of_them: they were named by the user, so each has to be here.

    Raises:
        RequestError: a required image is not here, or none is.
    """
    images: dict[str, Image | None] = {
        recipe.framework: local_images.find(client, recipe) for recipe in recipes
    }
    lacking = [name for name, image in images.items() if image is None]
    if lacking and (all_of_them or len(lacking) == len(images)):
        on = recipes[0].platform
        raise RequestError(
            f"{', '.join(lacking)} for {on}: not built here, or the recipe has changed since; "
            f"`fab build --framework {','.join(lacking)} --platform {on}`, or push another --platform"
        )
    return [recipe for recipe in recipes if images[recipe.framework] is not None]


def send(
    client: docker.DockerClient,
    command: str,
    recipe: Recipe,
    repository: str,
    stack: str,
    environ: Mapping[str, str],
) -> str:
    """Push one image with this machine's `docker`, which shows its progress. Returns the reference by digest.

    Raises:
        ImageError: the registry does not take it; the message has the remedy.
    """
    name = f"{repository}/{recipe.framework}"
    reference = f"{name}:{recipe.version}"
    with asking(f"pushing {reference}"):
        # `docker push` passes over a program that it cannot ask for a password.
        docker.auth.load_config().resolve_authconfig(name.partition("/")[0])
        client.api.tag(recipe.tag, name, recipe.version)
    code, output = shown([command, "push", reference], subprocess.DEVNULL, command_environment(environ))
    digest = DIGEST.search(output)
    if code != 0 or digest is None:
        _untag(client, reference)
        lines = output.split("\n")
        problem = next((line.strip() for line in reversed(lines) if line.strip()), "it gave no digest")
        kind = ImageUnreachable if away_line(problem) else ImageError
        raise kind(explained(problem, reference, stack))
    return f"{name}@{digest[1]}"


def _untag(client: docker.DockerClient, reference: str) -> None:
    """A name in a repository that does not have the image would be a lie."""
    with asking(f"taking the name {reference} away"):
        client.api.remove_image(reference, noprune=True)


def reference_key(framework: str) -> str:
    """The configuration key of a framework's image."""
    return f"tpu-stack:images.references.{framework}"


def set_reference(stack: str, framework: str, reference: str, environ: Mapping[str, str]) -> None:
    """Write the image into the stack's configuration. The rest of that file, comments too, stays as it is.

    Raises:
        RequestError: Pulumi fails; the message says what to write by hand.
    """
    try:
        arguments = ["config", "set", "--path", reference_key(framework), reference]
        inventories.ask(arguments, stack, otherwise=OTHERWISE, environ=environ)
    except RequestError as error:
        raise RequestError(
            f"{error}; it is pushed: note {reference_key(framework)}: {reference} in that configuration"
        ) from None


def explained(problem: str, reference: str, stack: str) -> str:
    """Why a push failed, and the remedy. reference: what was pushed. stack: the stack that owns the repository."""
    host, problem_lower = reference.partition("/")[0], problem.lower()
    if any(word in problem_lower for word in UNKNOWN_USER):
        login = (
            f"gcloud auth configure-docker {host}" if host.endswith(".pkg.dev") else f"docker login {host}"
        )
        return f"{reference}: {host} does not know who pushes: {problem}; `{login}`" + (
            " (and `gcloud auth login` where that has expired)" if "gcloud" in login else ""
        )
    if PERMISSION.search(problem) or any(word in problem_lower for word in REFUSED):
        return f"{reference}: pushing is refused: {problem}; {_grant(problem, reference, stack)}"
    if any(word in problem_lower for word in NOT_THERE):
        return (
            f"{reference}: there is no such repository: {problem}; `pulumi up --stack {stack}` makes it, and an older "
            "stack may still name one that was deleted"
        )
    if any(word in problem_lower for word in UNREACHABLE):
        return (
            f"{reference}: {host} cannot be reached: {problem}; Docker's daemon needs a way there, and its proxy if "
            "any"
        )
    if "no space left" in problem_lower:
        return f"{reference}: a disk is full: {problem}; `fab images --prune`"
    return f"{reference}: pushing failed: {problem}; pushed again, it goes on where it stopped"


def _grant(problem: str, reference: str, stack: str) -> str:
    match = PERMISSION.search(problem)
    lacking = match[0] if match else "artifactregistry.repositories.uploadArtifacts"
    google = GOOGLES.match(reference)
    if google is None:
        return "whose account it is has to be allowed to push there"
    return (
        f"your account lacks {lacking}, which {ROLE} on the repository {google['name']} has: `gcloud artifacts "
        f"repositories add-iam-policy-binding {google['name']} --project {google['project']} --location "
        f"{google['region']} --role {ROLE} --member user:YOU`; where the repository is not there yet, "
        f"`pulumi up --stack {stack}`"
    )
