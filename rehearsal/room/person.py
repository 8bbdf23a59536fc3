"""What a person types behind `fab rehearsal`: up, down, status, env, acts, or an act."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rehearsal import state
from rehearsal.machines import Kind
from rehearsal.room import begin
from rehearsal.room.acts import Asked
from rehearsal.room.door import ask
from rehearsal.room.repertoire import ACTS
from rehearsal.state import RehearsalError

Say = Callable[[str], None]

READY = (
    "the rehearsal is up. Now: fab deploy --stack rehearsal; fab train --job flax_mlm --stack rehearsal; and play: "
    "fab rehearsal acts. It goes by itself after a day; fab rehearsal down ends it"
)
READY_FOR_IMAGES = (
    "the rehearsal is up, with an image registry. Now: fab build --framework jax --platform cpu; fab push --stack"
    ' rehearsal --framework jax --platform cpu; eval "$(fab rehearsal env)"; pulumi up --yes; fab deploy; fab train'
    " --job flax_mlm; and play: fab rehearsal acts. It goes by itself after a day; fab rehearsal down ends it"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Typed:
    """kind: of the hosts that `up` makes. amount: as it was typed; empty: it was not."""

    action: str
    hosts: int
    kind: Kind = "plain"
    host: str = ""
    amount: str = ""
    for_good: bool = False


def carry_out(typed: Typed, environ: Mapping[str, str], say: Say) -> None:
    """Raises RehearsalError."""
    folder = state.folder_of(environ)
    if typed.action == "up":
        owner = environ.get(begin.OWNER_VARIABLE)
        begin.up(folder, typed.hosts, say, kind=typed.kind, owner=int(owner) if owner else None)
        say(READY if typed.kind == "plain" else READY_FOR_IMAGES)
    elif typed.action == "down":
        say(
            "the rehearsal is down"
            if begin.down(folder, say)
            else "no rehearsal is up, and nothing of one is left"
        )
    elif typed.action in LISTINGS:
        for line in LISTINGS[typed.action](folder):
            say(line)
    elif typed.action in ACTS:
        asked = Asked(host=typed.host, amount=_number(typed), for_good=typed.for_good)
        door = state.require(folder).door
        say(str(ask(door, "act", {"name": typed.action, "asked": dataclasses.asdict(asked)})))
    else:
        raise RehearsalError(
            f'"{typed.action}" is nothing that a rehearsal can do; choose one of '
            + ", ".join(["up", "down", *LISTINGS, *ACTS])
        )


def status(folder: Path) -> Iterator[str]:
    """How a rehearsal is, line by line. Raises RehearsalError where none is up."""
    found = state.read(folder)
    if found is None or not state.is_alive(folder):
        state.require(folder)
        return
    told: Mapping[str, Any] = ask(found.door, "status", {})
    yield f"rehearsal: {told['phase']}, {told['accelerator']} in {told['zone']}"
    yield f"  daemon: process {found.pid}, log {folder / begin.LOG}"
    if told["registry"]:
        yield f"  image registry: {told['registry']}, here and on every host"
    for node in told["nodes"]:
        yield f"  slice {node['name'].rpartition('/')[2]}: {node['state']}"
    for index, host in enumerate(told["hosts"]):
        yield f"  host {index}: {host['name']} {host['address']} {host['is']}"
    for name, why in told["failed"].items():
        yield f"  {name}: {why}"
    if told["phase"] == "ready" and not told["nodes"]:
        yield "  no slice now; `fab recover`, or `pulumi up --refresh`, makes it again"


def acts(_folder: Path) -> Iterator[str]:
    """Every act, with what it does and needs."""
    wide = max(map(len, ACTS))
    for name, act in ACTS.items():
        needs = "".join(f" --{each}" for each in act.needs)
        yield f"  {name:<{wide}}  {act.help}{f'  [{needs.strip()}]' if needs else ''}"


def exports(folder: Path) -> Iterator[str]:
    """For a shell, so that its own `gcloud` and `pulumi` are the rehearsal's. Raises RehearsalError."""
    opened = state.open_rehearsal({**os.environ, state.FOLDER_VARIABLE: str(folder)})
    for name, value in {**opened.environment, "TPU_STACK": state.STACK}.items():
        yield f"export {name}={shlex.quote(value)}"


LISTINGS: Mapping[str, Callable[[Path], Iterator[str]]] = {"status": status, "env": exports, "acts": acts}


def _number(typed: Typed) -> float | None:
    if not typed.amount:
        return None
    try:
        return float(typed.amount)
    except ValueError:
        raise RehearsalError(f'--amount: "{typed.amount}" is no number') from None
