"""What pushing asks of a Pulumi stack: its image repository; and what it writes down there: an image's digest."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping

from jobs.runtime.errors import RequestError
from launch.jobs import CHECKOUT

OUTPUT = "image_repository"
LIMIT_S = 120.0


def image_repository(stack: str, environ: Mapping[str, str]) -> str:
    """What the names of the stack's images begin with.

    Raises:
        RequestError: Pulumi is not there or does not answer, or the stack was never brought up.
    """
    text = _pulumi(["stack", "output", "--json", "--stack", stack], stack, environ)
    try:
        outputs = json.loads(text)
    except ValueError:
        outputs = None
    found = outputs.get(OUTPUT) if isinstance(outputs, dict) else None
    if not isinstance(found, str) or not found:
        raise RequestError(
            f"--stack {stack}: it has no output `{OUTPUT}` yet; `pulumi up --stack {stack}` makes it"
        )
    return found.rstrip("/")


def key_of(image: str) -> str:
    """Where the configuration names the image of a framework stack."""
    return f"tpu-stack:images.references.{image}"


def set_reference(stack: str, image: str, reference: str, environ: Mapping[str, str]) -> None:
    """Name the image in the stack's configuration; what else is in that file stays as it is, comments too.

    Raises:
        RequestError: Pulumi does not do it; with what a person has to write there.
    """
    try:
        _pulumi(["config", "set", "--path", key_of(image), reference, "--stack", stack], stack, environ)
    except RequestError as error:
        raise RequestError(
            f"{error}; it is pushed: note {key_of(image)}: {reference} in that configuration"
        ) from None


def _pulumi(words: list[str], stack: str, environ: Mapping[str, str]) -> str:
    command = f"pulumi {' '.join(words[:2])}"
    try:
        done = subprocess.run(
            ["pulumi", *words], cwd=CHECKOUT, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise RequestError(
            f"--stack {stack}: `pulumi` is not on PATH; install it, it knows where images go"
        ) from None
    except subprocess.TimeoutExpired:
        raise RequestError(
            f"--stack {stack}: `{command}` gave no answer within {LIMIT_S:.0f} s; see that its backend can be reached "
            "(`pulumi whoami -v`)"
        ) from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RequestError(f"--stack {stack}: `{command}` failed: {said[-1] if said else 'it said nothing'}")
    return done.stdout
