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

import yaml

from rehearsal.engine import ROOT, Engine, Program
from rehearsal.engine_report import Report, Step
from rehearsal.tpu_api import TpuApi
from tools import pulumi_cli

MARKS = {"create": "+", "update": "~", "delete": "-", "replace": "+-", "same": " ", "read": ">"}
ENGINES_OWN = "pulumi:providers:"


class PreviewError(Exception):
    """The configuration cannot be tried; the message says why."""


def read_configuration(path: Path) -> dict[str, object]:
    """The keys and values of a stack's file, less what only a real run needs. Raises PreviewError."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PreviewError(
            f"{path}: {error.strerror}; name a file: make preview CONFIG=Pulumi.dev.yaml"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PreviewError(f"{path} is no YAML: {error}") from None
    config = settings.get("config") if isinstance(settings, dict) else None
    if not isinstance(config, dict):
        raise PreviewError(f'{path} has no "config:" with keys below it; see Pulumi.example.yaml')
    kept = {str(key): value for key, value in config.items() if not _is_for_google_alone(str(key))}
    secret = [key for key, value in kept.items() if isinstance(value, dict) and "secure" in value]
    if secret:
        raise PreviewError(f"{path}: {', '.join(secret)} is encrypted, and only its stack can read it")
    return kept


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
    configuration = read_configuration(path)
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
        engine.configure(configuration)
        report = engine.preview(color="always" if sys.stdout.isatty() else "never")
    print("\n".join(["", *tree(report.steps), "", *remarks(report)]).rstrip())
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
        read_configuration(path)
        from infra.program import declare  # only now, because loading pulumi_gcp takes its time

        cli = pulumi_cli.find_or_build(environ, lambda line: print(line, file=sys.stderr, flush=True))
        return preview(path, program=declare, cli=cli, project_file=ROOT / "Pulumi.yaml")
    except (PreviewError, pulumi_cli.PulumiCliError) as problem:
        print(f"preview: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\npreview: interrupted", file=sys.stderr)
        return 130


def _is_for_google_alone(key: str) -> bool:
    """Credentials and endpoints: a preview has its own."""
    name = key.removeprefix("gcp:")
    return name != key and (name in ("accessToken", "credentials") or name.endswith("CustomEndpoint"))


def _short(type_token: str) -> str:
    """gcp:compute:Network of gcp:compute/network:Network, as the engine shows types."""
    return re.sub(r"/[^:]*:", ":", type_token)


def _without_colours(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
