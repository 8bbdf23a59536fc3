"""The inventory of a Pulumi stack, or of a file that somebody wrote."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from infra.inventory import Inventory, InventoryError, from_json
from jobs.runtime.errors import RequestError
from launch.jobs import CHECKOUT

OUTPUT = "inventory"
PULUMI_LIMIT_S = 120.0


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
    try:
        done = subprocess.run(
            ["pulumi", "stack", "output", "--json", "--stack", stack],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PULUMI_LIMIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise RequestError(
            f"--stack {stack}: `pulumi` is not on PATH; install it, or give a file with an inventory"
        ) from None
    except subprocess.TimeoutExpired:
        raise RequestError(
            f"--stack {stack}: `pulumi stack output` gave no answer within {PULUMI_LIMIT_S:.0f} s; "
            "see that its backend can be reached (`pulumi whoami -v`)"
        ) from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RequestError(
            f"--stack {stack}: `pulumi stack output` failed: {said[-1] if said else 'it said nothing'}"
        )
    try:
        outputs = json.loads(done.stdout)
    except ValueError:
        outputs = None
    if not isinstance(outputs, dict) or not isinstance(outputs.get(OUTPUT), str):
        raise RequestError(
            f"--stack {stack}: it has no output `{OUTPUT}` yet; `pulumi up --stack {stack}` makes it"
        )
    return str(outputs[OUTPUT])
