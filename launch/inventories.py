"""Where an inventory comes from: the output of a Pulumi stack, or a file that somebody wrote."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts import atomic
from contracts.errors import RequestError
from contracts.files import is_url
from contracts.inventory import (
    MOMENTS,
    RECORDED,
    Host,
    Inventory,
    InventoryError,
    Slice,
    from_json,
    slices_from_json,
)
from launch.hosts import HostError
from launch.jobs import CHECKOUT
from launch.output import last_line
from launch.programs import run_program


def read(stack: str) -> Inventory:
    """Read the inventory of `stack`: a file if it looks like a path, else the output of that Pulumi stack.

    Raises:
        RequestError: there is none, or this version cannot read it.
    """
    if is_file(stack):
        return read_file(Path(stack))
    text = output("inventory", stack, otherwise="or give a file with an inventory")
    return parse(text, f"the stack {stack}")


def is_file(stack: str) -> bool:
    """Return whether a --stack names a file: it contains a slash, or ends in .json."""
    return os.sep in stack or stack.endswith(".json")


def read_file(path: Path) -> Inventory:
    try:
        return parse(path.read_text(encoding="utf-8"), f"--stack {path}")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise RequestError(
            f"--stack {path}: {reason}; name a file with an inventory, as `pulumi stack output inventory` prints it, "
            "or a stack"
        ) from None


def parse(text: str, source: str) -> Inventory:
    try:
        return from_json(text)
    except InventoryError as error:
        raise RequestError(f"{source}: {error}") from None


def renewed(inventory: Inventory) -> Inventory:
    """Return the inventory with the slices that were made again since `pulumi up` wrote it."""
    if inventory.control is None or not is_url(inventory.control):
        return inventory
    from launch.remote_files import Buckets  # a file with an inventory does without

    try:
        (recorded,) = Buckets().read([f"{inventory.control}/{RECORDED}"])
        return with_kept(inventory, recorded)
    except (HostError, InventoryError) as error:
        print(f"warning: which slices were made again is not known: {error}", file=sys.stderr)
        return inventory


def with_kept(inventory: Inventory, text: bytes | None) -> Inventory:
    """Return the inventory with the hosts of those kept slices that are newer, or that alone have hosts. Pure.

    Of a kept slice only what changes when it is made again is taken; the rest is as the stack declares it now.

    Raises:
        InventoryError: the text is no list of slices.
    """
    recorded = {
        one_slice.name: one_slice for one_slice in slices_from_json((text or b'{"slices": []}').decode())
    }

    def newest(ours: Slice) -> Slice:
        theirs = recorded.get(ours.name, ours)
        newer = (_moment(theirs), bool(theirs.hosts)) > (_moment(ours), bool(ours.hosts))
        return (
            dataclasses.replace(ours, **{name: getattr(theirs, name) for name in ("hosts", "zone", *MOMENTS)})
            if newer
            else ours
        )

    return dataclasses.replace(inventory, slices=tuple(newest(one_slice) for one_slice in inventory.slices))


def _moment(one_slice: Slice) -> datetime.datetime:
    try:
        return datetime.datetime.fromisoformat(one_slice.created)
    except ValueError:
        return datetime.datetime.min.replace(tzinfo=datetime.UTC)


LIMIT_S = 120.0


def output(name: str, stack: str, *, otherwise: str, environ: Mapping[str, str] | None = None) -> str:
    """Return an output of a stack that is text.

    Raises:
        RequestError: as `ask`, or the stack has no such output.
    """
    text = ask(["stack", "output", "--json"], stack, otherwise=otherwise, environ=environ)
    try:
        outputs = json.loads(text)
    except ValueError:
        outputs = None
    value = outputs.get(name) if isinstance(outputs, dict) else None
    if not isinstance(value, str) or not value:
        raise RequestError(
            f"--stack {stack}: it has no output `{name}` yet; `pulumi up --stack {stack}` makes it"
        )
    return value


def ask(
    arguments: Sequence[str], stack: str, *, otherwise: str, environ: Mapping[str, str] | None = None
) -> str:
    """Return what a Pulumi command prints about a stack. otherwise: what to do if there is no Pulumi.

    Raises:
        RequestError: Pulumi is not installed, does not answer, or refuses.
    """
    command = f"pulumi {' '.join(arguments[:2])}"
    done = run_program(
        ["pulumi", *arguments, "--stack", stack],
        cwd=CHECKOUT,
        environ=environ,
        limit_s=LIMIT_S,
        missing=f"--stack {stack}: `pulumi` is not on PATH; install it, {otherwise}",
        late=f"--stack {stack}: `{command}` gave no answer within {LIMIT_S:.0f} s; "
        "see that its backend can be reached (`pulumi whoami -v`)",
    )
    if done.returncode != 0:
        raise RequestError(f"--stack {stack}: `{command}` failed: {last_line(done.stderr or done.stdout)}")
    return done.stdout


KEYS_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trusted:
    """A host's key that somebody confirmed. name: the instance's, which its successor does not have."""

    slice: str
    index: int
    name: str
    internal_address: str
    host_key: str
    confirmed: str

    def belongs_to(self, one_slice: Slice, host: Host) -> bool:
        """Return whether it is this very host's; one that was made again has another name."""
        place = (one_slice.name, host.index, host.internal_address)
        return (self.slice, self.index, self.internal_address) == place and host.name in ("", self.name)


def read_keys(path: Path) -> tuple[Trusted, ...]:
    """Read the confirmed keys; none if there is no such file.

    Raises:
        RequestError: the file cannot be read.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != KEYS_VERSION:
            raise ValueError(f"its version is {content['version']!r}, and {KEYS_VERSION} is read")
        return tuple(Trusted(**entry) for entry in content["hosts"])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RequestError(
            f"{path}: cannot be read as confirmed host keys ({error}); remove it, and `fab trust` asks again"
        ) from None


def write_keys(path: Path, entries: Sequence[Trusted]) -> None:
    text = json.dumps(
        {"version": KEYS_VERSION, "hosts": [dataclasses.asdict(entry) for entry in entries]}, indent=2
    )
    atomic.write(path, text + "\n")


def with_keys(inventory: Inventory, entries: Sequence[Trusted]) -> Inventory:
    """Return the inventory with the confirmed keys in place of the published ones, and a name for every host. Pure."""
    slices = tuple(
        dataclasses.replace(
            one_slice,
            hosts=_named(one_slice, [_confirmed(one_slice, host, entries) for host in one_slice.hosts]),
        )
        for one_slice in inventory.slices
    )
    return dataclasses.replace(inventory, slices=slices)


def _confirmed(one_slice: Slice, host: Host, entries: Sequence[Trusted]) -> Host:
    for entry in entries:
        if entry.belongs_to(one_slice, host):
            return dataclasses.replace(host, name=entry.name, host_keys=(entry.host_key,))
    return host


def _named(one_slice: Slice, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Hosts that have published no instance name: a TPU's first host says how the others are called."""
    first = re.fullmatch(r"(.+-w-)0", hosts[0].name) if hosts and one_slice.count == 1 else None
    return tuple(
        host
        if host.name
        else dataclasses.replace(
            host, name=f"{first[1]}{host.index}" if first else f"{one_slice.name}-{host.index}"
        )
        for host in hosts
    )
