"""The rehearsal's stack: the program of `infra/` on the real engine, with a configuration for so many hosts.

The real command line would start the program through its language host; here the program runs in the daemon. So the
commands that need the program (up, preview, refresh, destroy) are run here, and the command line runs all others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from contracts.aliases import Say
from infra import catalogue
from infra.pulumi_program import declare
from rehearsal.daemon.cli import Provisioning
from rehearsal.engine import ROOT, Engine, OperationKind, Report
from rehearsal.machines.host_image import SHARE
from rehearsal.simulated_cloud import families
from rehearsal.state import SLICE, STACK, RehearsalError
from tools.pulumi_cli import PulumiCli

PROJECT = "my-rehearsal"
BUCKET = f"{PROJECT}-runs"
ACCOUNT = "you@rehearsal.example"
# The wait for a slice that has no capacity; long enough for a person to bring it back, short enough to see it end.
WAIT = "10m"
REPOSITORY = "image_repository"

UP_LIMIT_S = 900.0
LOOK_AGAIN_S = 0.2
PASSING = re.compile(
    r"^@ |^ .*(?:refreshing|refresh|creating|replacing|deleting|running)(?: original| replacement)? \(\d"
    r"|^    (?!pulumi:pulumi:Stack )[\w-]+(?::[\w/]+)+ "
    r"|^The resources in the stack have been deleted|^If you want to remove the stack"  # it goes with the rehearsal
)

HasLeft = Callable[[], bool]


def accelerator_with(hosts: int, provisioning: Provisioning = "queued") -> catalogue.Accelerator:
    """A type with so many hosts: of v5e if it has one, else of the first generation that has; of what that makes.

    Raises:
        RehearsalError: there is none.
    """
    offered = list(catalogue.ACCELERATORS.values())
    if provisioning == "compute":
        made = families().values()
        offered = [tpu for tpu in catalogue.OFFERS["any"].values() if tpu.generation.type_prefix in made]
    candidates = [tpu for tpu in offered if tpu.hosts == hosts]
    if not candidates:
        sizes = sorted({tpu.hosts for tpu in offered if tpu.hosts <= 64})
        raise RehearsalError(
            f"--hosts {hosts}: no TPU slice has so many hosts; choose one of {', '.join(map(str, sizes))}"
        )
    return next((tpu for tpu in candidates if tpu.generation.name == "v5e"), candidates[0])


def default_zone(accelerator: catalogue.Accelerator) -> str:
    return accelerator.generation.zones[0]


def configuration(
    accelerator: catalogue.Accelerator, *, keeper: bool = False, provisioning: Provisioning = "queued"
) -> dict[str, Any]:
    """The configuration of a user's Pulumi.rehearsal.yaml: one spot slice, a bucket, NFS from a gateway."""
    on_compute = {"provisioning": "compute"} if provisioning == "compute" else {}
    return {
        **({"tpu-stack:keeper": True} if keeper else {}),
        "gcp:project": PROJECT,
        "tpu-stack:zone": default_zone(accelerator),
        "tpu-stack:slices": [
            {
                "name": SLICE,
                "accelerator": accelerator.type_name,
                "capacity": "spot",
                "wait": WAIT,
                **on_compute,
            }
        ],
        "tpu-stack:storage": {"bucket": {"name": BUCKET}, "nfs": {"kind": "gateway", "mount": SHARE}},
        "tpu-stack:access": {"members": [f"user:{ACCOUNT}"]},
        "tpu-stack:protect": False,
    }


class RehearsalStack:
    """The rehearsal's stack; one operation at a time, as with any stack. folder: a new one."""

    def __init__(
        self,
        *,
        folder: Path,
        cli: PulumiCli,
        tpu_url: str,
        accelerator: catalogue.Accelerator,
        registry: str | None = None,
        keeper: bool = False,
        provisioning: Provisioning = "queued",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """registry: host and port of the one that stands for Google's; None: there is none. keeper: whether the stack
        has one. variables: of the engine's environment."""
        self.inventory = ""
        self.outputs: dict[str, Any] = {}
        self._registry = registry
        self._engine = Engine(
            folder=folder,
            cli=cli,
            program=declare,
            tpu_url=tpu_url,
            project_file=ROOT / "Pulumi.yaml",
            stack=STACK,
            variables=variables,
        )
        self._engine.configure(configuration(accelerator, keeper=keeper, provisioning=provisioning))
        self._busy = threading.Lock()

    def carry_out(self, kind: OperationKind, say: Say, has_left: HasLeft, **options: Any) -> Report:
        """has_left: whether the client has hung up; the operation is then interrupted, as by Ctrl-C.

        Raises:
            RehearsalError: another operation is going on.
        """
        if not self._busy.acquire(blocking=False):
            raise RehearsalError(
                "the stack is locked: another `pulumi` command of this rehearsal is running; wait for it to end"
            )
        if kind == "up":
            options = {"suppress_outputs": True, **options}
        try:
            operation = self._engine.begin(kind, say=lambda line: _tell_news(line, say), **options)
            interrupted = False
            while not operation.wait(LOOK_AGAIN_S):
                if has_left() and not interrupted:
                    operation.interrupt()
                    interrupted = True
            report = operation.report(UP_LIMIT_S)
        finally:
            self._busy.release()
        if kind == "up" and report.ok:
            self.outputs = with_registry(report.outputs, self._registry)
            self.inventory = str(report.outputs["inventory"])
        return report

    def type(self, *arguments: str) -> tuple[bool, str]:
        """Run a `pulumi` command that needs no program. Returns whether it succeeded, and its output."""
        return self._engine.type(*arguments)

    def close(self) -> None:
        """Ends what the engine has left running."""
        self._engine.end_orphans()


def _tell_news(line: str, say: Say) -> None:
    """Less what a terminal would show and take away again: signs of life, what begins, what stays as it is."""
    if line.strip() and not PASSING.search(line):
        say(line)


# --- its outputs ----------------------------------------------------------------------------------


def with_registry(outputs: Mapping[str, Any], registry: str | None) -> dict[str, Any]:
    """The program's outputs, with the images' repository at a registry (host and port) instead of Google's; None: there
    is no registry, and Google's name stays."""
    if registry is None:
        return dict(outputs)
    path = str(outputs[REPOSITORY]).partition("/")[2]
    return {**outputs, REPOSITORY: f"{registry}/{path}"}


def shown_outputs(outputs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    name = options["name"]
    if name is not None and name not in outputs:
        raise RehearsalError(f"current stack does not have output property '{name}'")
    if name is not None:
        return f"{json.dumps(outputs[name]) if options['json'] else outputs[name]}\n"
    if options["json"]:
        return f"{json.dumps(dict(outputs), indent=2)}\n"
    return "".join(f"{output_name}: {value}\n" for output_name, value in sorted(outputs.items()))


# --- what is typed behind `pulumi` ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PulumiCommand:
    """kind: an operation of the engine with its options, "output", or "other", for the command line itself."""

    kind: OperationKind | Literal["output", "other"]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arguments: tuple[str, ...] = ()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RehearsalError(
            f"{self.prog}: {message}; the rehearsal's pulumi takes {self.format_usage()}".strip()
        )


def parse_pulumi(arguments: Sequence[str]) -> PulumiCommand:
    """Raises RehearsalError, in Pulumi's own words where it has some."""
    is_output = list(arguments[:2]) == ["stack", "output"]
    kind: OperationKind | None = next(
        (operation for operation in get_args(OperationKind) if arguments[:1] == [operation]), None
    )
    if kind is None and not is_output:
        return PulumiCommand(kind="other", arguments=tuple(arguments))
    parser = _Parser(prog=f"pulumi {kind or 'stack output'}", add_help=False, allow_abbrev=False)
    parser.add_argument("--stack", "-s", default=STACK)
    if kind is None:
        parser.add_argument("--json", "-j", action="store_true")
        parser.add_argument("--show-secrets", action="store_true")
        parser.add_argument("name", nargs="?")
    else:
        for names in (("--refresh", "-r"), ("--yes", "-y"), ("--skip-preview", "-f"), ("--diff",)):
            parser.add_argument(*names, action="store_true")
        if kind == "refresh":
            parser.add_argument("--clear-pending-creates", action="store_true")
        parser.add_argument("--target", "-t", action="append")
        parser.add_argument("--replace", action="append")
    given_options = vars(parser.parse_args(list(arguments[2 if is_output else 1 :])))
    if (stack := given_options.pop("stack")) != STACK:
        raise RehearsalError(f"no stack named '{stack}' found; the rehearsal's is called {STACK}")
    if kind is None:
        return PulumiCommand(
            kind="output", options={"json": given_options["json"], "name": given_options["name"]}
        )
    confirmed = [given_options.pop("yes"), given_options.pop("skip_preview")]
    if kind != "preview" and not any(confirmed):
        raise RehearsalError(
            "--yes or --skip-preview must be passed in to proceed when running in non-interactive mode"
        )
    if given_options["replace"] and kind not in ("up", "preview"):
        raise RehearsalError(f"pulumi {kind}: unknown flag: --replace")
    if kind == "refresh":
        given_options |= {"refresh": False, "diff": False}  # what it does anyway, and what it does not know
    return PulumiCommand(kind=kind, options={name: value for name, value in given_options.items() if value})
