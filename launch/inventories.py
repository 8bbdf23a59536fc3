"""Where an inventory comes from: the output of a Pulumi stack, or a file that somebody wrote."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from contracts.errors import RequestError
from contracts.inventory import Inventory, InventoryError, from_json
from launch.jobs import CHECKOUT

OUTPUT = "inventory"


def read(stack: str) -> Inventory:
    """The inventory that `stack` means: a file where it looks like a path, else the output of that Pulumi stack.

    Raises:
        RequestError: there is none, or this version cannot read it.
    """
    return read_file(Path(stack)) if is_file(stack) else parse(of_pulumi(stack), f"the stack {stack}")


def is_file(stack: str) -> bool:
    """Whether a --stack names a file: it has a slash in it, or ends as one."""
    return os.sep in stack or stack.endswith(".json")


def read_file(path: Path) -> Inventory:
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--stack {path}: {getattr(error, 'strerror', None) or error}") from None


def parse(text: str, where: str) -> Inventory:
    try:
        return from_json(text)
    except InventoryError as error:
        raise RequestError(f"{where}: {error}") from None


def of_pulumi(stack: str) -> str:
    """The text of a stack's `inventory`, asked of Pulumi.

    Raises:
        RequestError: Pulumi is not installed, knows no such stack, or the stack was never brought up.
    """
    return output(OUTPUT, stack, otherwise="or give a file with an inventory")


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
