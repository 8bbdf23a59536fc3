"""The `pulumi` command as the launcher asks it: with a limit, and with its refusals in the words of a message."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence

from contracts.errors import RequestError
from launch.jobs import CHECKOUT

LIMIT_S = 120.0


def output(name: str, stack: str, *, otherwise: str, environ: Mapping[str, str] | None = None) -> str:
    """An output of a stack that is text.

    Raises:
        RequestError: as `ask`, or the stack has no such output.
    """
    text = ask(["stack", "output", "--json"], stack, otherwise=otherwise, environ=environ)
    try:
        outputs = json.loads(text)
    except ValueError:
        outputs = None
    found = outputs.get(name) if isinstance(outputs, dict) else None
    if not isinstance(found, str) or not found:
        raise RequestError(
            f"--stack {stack}: it has no output `{name}` yet; `pulumi up --stack {stack}` makes it"
        )
    return found


def ask(words: Sequence[str], stack: str, *, otherwise: str, environ: Mapping[str, str] | None = None) -> str:
    """What the command prints about a stack. otherwise: what to do where there is no Pulumi.

    Raises:
        RequestError: Pulumi is not installed, does not answer, or refuses.
    """
    command = f"pulumi {' '.join(words[:2])}"
    try:
        done = subprocess.run(
            ["pulumi", *words, "--stack", stack],
            cwd=CHECKOUT,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise RequestError(f"--stack {stack}: `pulumi` is not on PATH; install it, {otherwise}") from None
    except subprocess.TimeoutExpired:
        raise RequestError(
            f"--stack {stack}: `{command}` gave no answer within {LIMIT_S:.0f} s; "
            "see that its backend can be reached (`pulumi whoami -v`)"
        ) from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RequestError(f"--stack {stack}: `{command}` failed: {said[-1] if said else 'it said nothing'}")
    return done.stdout
