"""`make preview`: what `pulumi preview` would say of a configuration, with the real engine and no account.

    python -m rehearsal.preview [CONFIG]      CONFIG: a Pulumi.NAME.yaml; by default Pulumi.example.yaml

Exit codes: 0 it would be made; 2 it would not, and the reasons are told."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rehearsal import settings_text
from rehearsal.engine import ROOT, Engine, Program
from rehearsal.engine_report import Report, Step
from rehearsal.tpu_api import TpuApi
from tools import pulumi_cli

MARKS = {"create": "+", "update": "~", "delete": "-", "replace": "+-", "same": " ", "read": ">"}
ENGINES_OWN = "pulumi:providers:"


class PreviewError(Exception):
    """The configuration cannot be tried; the message says why."""


def read_settings(path: Path) -> bytes:
    """The file. Raises PreviewError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise PreviewError(
            f"{path}: {error.strerror}; name a file: make preview CONFIG=Pulumi.dev.yaml"
        ) from None


def for_the_engine(path: Path, own: Mapping[str, Any]) -> bytes:
    """The file as it is, with `own` settings in place of those that need an account. Raises PreviewError."""
    content = read_settings(path)
    try:
        made = settings_text.adapted(content.decode(), own)
    except UnicodeDecodeError:
        return content  # the engine says what is wrong with it
    if made.encrypted:
        raise PreviewError(
            f"{path}: {', '.join(made.encrypted)} is encrypted, and only its stack can read it; nothing of"
            " tpu-stack is a secret: `pulumi config set` it anew without --secret"
        )
    return made.text.encode()


def stack_of(path: Path) -> str:
    """dev of Pulumi.dev.yaml, as Pulumi names them."""
    match = re.fullmatch(r"Pulumi\.([A-Za-z0-9_.-]+)\.ya?ml", path.name)
    return match[1] if match else "preview"


def tree(steps: Sequence[Step]) -> list[str]:
    """One line a resource, below what it belongs to. Providers are left out."""
    shown = {step.urn: step for step in steps if not step.type.startswith(ENGINES_OWN)}
    children: dict[str, list[Step]] = {}
    for step in shown.values():
        children.setdefault(step.parent if step.parent in shown else "", []).append(step)
    lines: list[tuple[str, str, str]] = []

    def add(step: Step, depth: int) -> None:
        mark = MARKS.get(step.op, "?")
        lines.append((f" {mark:<2} {'   ' * depth}{_short(step.type)}", step.name, step.op))
        for child in children.get(step.urn, []):
            add(child, depth + 1)

    for root in children.get("", []):
        add(root, 0)
    wide = max((len(line[0]) for line in lines), default=0)
    long = max((len(line[1]) for line in lines), default=0)
    return [f"{kind:<{wide}}  {name:<{long}}  {op}".rstrip() for kind, name, op in lines]


def remarks(report: Report) -> list[str]:
    """What the engine prints below its own list of resources: diagnostics, outputs, counts."""
    starts = ("Diagnostics:", "Outputs:", "Resources:", "error:", "Policies:")
    for index, line in enumerate(report.lines):
        if _without_colours(line).startswith(starts):
            return list(report.lines[index:])
    return list(report.lines)


def preview(path: Path, *, program: Program, cli: pulumi_cli.PulumiCli, project_file: Path) -> int:
    """Prints it and returns the exit code. Raises PreviewError."""
    print(f"previewing {path} with Pulumi {cli.version} …", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="tpu-stack-preview-") as folder,
        TpuApi() as api,
        Engine(
            folder=Path(folder) / "engine",
            cli=cli,
            program=program,
            tpu_url=api.url,
            project_file=project_file,
            stack=stack_of(path),
        ) as engine,
    ):
        engine.adopt(for_the_engine(path, engine.own_settings))
        report = engine.preview(color="always" if sys.stdout.isatty() else "never")
    parts = ("\n".join(lines).strip("\n") for lines in (tree(report.steps), remarks(report)))
    for part in filter(None, parts):
        print(f"\n{part}".replace(str(engine.settings_file), str(path)))
    print(
        "\nSimulated: Google Cloud (a stand-in for Pulumi's gcp provider) and the Cloud TPU API. Real: Pulumi's engine"
        f"\nand the program, with {path}. No account was used, nothing was made."
    )
    return 0 if report.ok else 2


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rehearsal.preview", description="A preview without an account."
    )
    parser.add_argument("config", nargs="?", default="Pulumi.example.yaml", metavar="CONFIG")
    path = Path(parser.parse_args(arguments).config)
    try:
        read_settings(path)
        from infra.program import declare  # only now, because loading pulumi_gcp takes its time

        cli = pulumi_cli.find_or_build(environ, lambda line: print(line, file=sys.stderr, flush=True))
        return preview(path, program=declare, cli=cli, project_file=ROOT / "Pulumi.yaml")
    except (PreviewError, pulumi_cli.PulumiCliError) as problem:
        print(f"preview: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\npreview: interrupted", file=sys.stderr)
        return 130


def _short(type_token: str) -> str:
    """gcp:compute:Network of gcp:compute/network:Network, as the engine shows types."""
    return re.sub(r"/[^:]*:", ":", type_token)


def _without_colours(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
