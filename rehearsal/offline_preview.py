"""`make preview`: what `pulumi preview` would say of a configuration, with the real engine and no account.

    python -m rehearsal.offline_preview [CONFIG]      CONFIG: a Pulumi.NAME.yaml; by default Pulumi.example.yaml

Exit codes: 0 it would be made; 2 it would not, and the reasons are told."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from infra.config import ConfigError, settings_file
from rehearsal.engine import ROOT, Engine, Program, Report, Step
from rehearsal.simulated_cloud import SimulatedCloud
from tools import pulumi_cli

MARKS = {"create": "+", "update": "~", "delete": "-", "replace": "+-", "same": " ", "read": ">"}
ENGINES_OWN = "pulumi:providers:"
# How the stack of the file keeps its secrets: the offline engine has its own way.
STACK_KEYS = frozenset({"encryptionsalt", "encryptedkey", "secretsprovider"})


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


def for_the_engine(path: Path) -> bytes:
    """The file as it is, without the settings that need an account. Raises PreviewError."""
    content = read_settings(path)
    try:
        text, encrypted = without_account(content.decode())
    except (UnicodeDecodeError, RecursionError):
        return content  # the engine says what is wrong with it
    if encrypted:
        raise PreviewError(
            f"{path}: {', '.join(encrypted)} is encrypted, and only its stack can read it; nothing of"
            " tpu-stack is a secret: `pulumi config set` it anew without --secret"
        )
    return text.encode()


def stack_name(path: Path) -> str:
    """dev of Pulumi.dev.yaml, as Pulumi names them."""
    match = re.fullmatch(r"Pulumi\.([A-Za-z0-9_.-]+)\.ya?ml", path.name)
    return match[1] if match else "preview"


def tree(steps: Sequence[Step]) -> list[str]:
    """The tree of resources: one line each, below its parent. Providers are left out."""
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


REPEATED = "error: an unhandled error occurred: "
"""Before an error of an inline program that the engine has shown already, by a line of its own."""


def remarks(report: Report) -> list[str]:
    """The lines that the engine prints below its list of resources: diagnostics, outputs, counts."""
    starts = ("Diagnostics:", "Outputs:", "Resources:", "error:", "Policies:")
    for index, line in enumerate(report.lines):
        if _without_colours(line).startswith(starts):
            return [remark for remark in report.lines[index:] if REPEATED not in _without_colours(remark)]
    return list(report.lines)


def mistakes(path: Path) -> list[str]:
    """Return what is wrong with the file, as far as that can be told without the engine. Raises PreviewError."""
    from infra import pulumi_program

    try:
        text = read_settings(path).decode()
    except UnicodeDecodeError:
        return ["is no text in UTF-8; name a settings file, Pulumi.NAME.yaml"]
    try:
        values, secrets = settings_file.without_engine(text)
    except RecursionError:
        return []  # the engine's to judge
    except yaml.YAMLError as error:
        return settings_file.refused(text) or [f"is not YAML: {' '.join(str(error).split())}; mend that line"]
    problems = [*settings_file.refused(text), *settings_file.unread(text)]
    try:
        project = values.get("gcp:project")
        project = project if isinstance(project, str) else None
        pulumi_program.read_configuration(values, secrets, project=project, stack=stack_name(path))
    except ConfigError as error:
        problems += error.problems
    return problems


def preview(path: Path, *, program: Program, cli: pulumi_cli.PulumiCli, project_file: Path) -> int:
    """Prints it and returns the exit code. Raises PreviewError."""
    print(f"previewing {path} with Pulumi {cli.version} …", flush=True)
    text = read_settings(path).decode(errors="replace")
    refused = settings_file.refused(text)
    problems = [*refused, *settings_file.unread(text)]
    for problem in problems:
        print(f"error: {path}: {problem}", flush=True)
    if refused:
        return 2  # the engine would say so again, in words that name no place
    with (
        tempfile.TemporaryDirectory(prefix="tpu-stack-preview-") as folder,
        SimulatedCloud() as api,
        Engine(
            folder=Path(folder) / "engine",
            cli=cli,
            program=program,
            tpu_url=api.url,
            project_file=project_file,
            stack=stack_name(path),
        ) as engine,
    ):
        engine.adopt(for_the_engine(path))
        report = engine.preview(color="always" if sys.stdout.isatty() else "never")
    parts = ("\n".join(lines).strip("\n") for lines in (tree(report.steps), remarks(report)))
    # Of a file that is refused for what the engine does not read, nothing would be made.
    for part in () if problems and report.ok else filter(None, parts):
        print(f"\n{part}".replace(str(engine.settings_file), str(path)))
    print(
        "\nSimulated: Google Cloud (a stand-in for Pulumi's gcp provider) and the APIs of TPUs. Real: Pulumi's engine"
        f"\nand the program, with {path}. No account was used, nothing was made."
    )
    return 0 if report.ok and not problems else 2


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rehearsal.offline_preview", description="A preview without an account."
    )
    parser.add_argument("config", nargs="?", default="Pulumi.example.yaml", metavar="CONFIG")
    path = Path(parser.parse_args(arguments).config)
    try:
        read_settings(path)
        from infra.pulumi_program import declare  # only now, because loading pulumi_gcp takes its time

        cli = pulumi_cli.find(environ, _say)
        if cli is None and (problems := mistakes(path)):  # told before the minutes that building it takes
            for problem in problems:
                print(f"error: {path}: {problem}")
            return 2
        cli = cli or pulumi_cli.build(environ, _say)
        return preview(path, program=declare, cli=cli, project_file=ROOT / "Pulumi.yaml")
    except (PreviewError, pulumi_cli.PulumiCliError) as problem:
        print(f"preview: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\npreview: interrupted", file=sys.stderr)
        return 130


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _short(type_token: str) -> str:
    """gcp:compute:Network of gcp:compute/network:Network, as the engine shows types."""
    return re.sub(r"/[^:]*:", ":", type_token)


def _without_colours(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


# --- a settings file, Pulumi.NAME.yaml, as text: what only its own stack can use is taken out, the rest stays -------
#
# The engine's own reader of YAML decides what the file says. Here it is only asked where each key stands; a file that
# cannot be read for that is handed over unchanged, since the engine will refuse it with better words.


def without_account(text: str) -> tuple[str, list[str]]:
    """The text without the settings that need a user's account, and the paths of values that only the file's own stack
    can read.

    No line moves, so that the engine's line numbers are those of the file."""
    try:
        # Only the first document, as the engine reads it, and no values are made of it: 2026-13-45 is a text here.
        loader = yaml.SafeLoader(text)
        root = loader.get_node() if loader.check_node() else None
    except yaml.YAMLError:
        return text, []
    if not isinstance(root, yaml.MappingNode):
        return text, []
    places = list(_entries(text, root, STACK_KEYS.__contains__))
    encrypted: list[str] = []
    for key, value in root.value:
        if key.value == "config" and isinstance(value, yaml.MappingNode):
            places += _entries(text, value, is_for_google_alone)
            encrypted += _encrypted(value)
    for begin, end in sorted(places, reverse=True):  # so that the places of the others hold
        text = text[:begin] + "\n" * text[begin:end].count("\n") + text[end:]
    return text, encrypted


def is_for_google_alone(key: str) -> bool:
    """Credentials and endpoints, gcp:NAME or gcp:config:NAME."""
    name = key.removeprefix("gcp:").removeprefix("config:")
    return key.startswith("gcp:") and (
        name in ("accessToken", "credentials") or name.endswith("CustomEndpoint")
    )


def _entries(
    text: str, mapping: yaml.MappingNode, is_out: Callable[[str], bool]
) -> Iterator[tuple[int, int]]:
    """Start and end of the entries of a mapping whose keys are out."""
    starts = [key.start_mark.index for key, _value in mapping.value]
    last = mapping.end_mark.index - 1  # the brace, where there is one
    for (key, value), following in zip(mapping.value, [*starts[1:], last], strict=True):
        if is_out(str(key.value)):
            yield key.start_mark.index, following if mapping.flow_style else _entry_end(text, value)


def _entry_end(text: str, value: yaml.Node) -> int:
    """The index after the last line of an entry of a block mapping, including its line break."""
    end: int = value.end_mark.index
    scalar_or_flow = isinstance(value, yaml.ScalarNode) or value.flow_style
    if value.end_mark.column == 0 and end > value.start_mark.index:
        return end
    if not scalar_or_flow and end < len(text):
        # A block ends where the next thing begins, which may be indented.
        return text.rfind("\n", 0, end) + 1
    line_break = text.find("\n", end)
    return len(text) if line_break < 0 else line_break + 1


def _encrypted(node: yaml.Node, path: str = "") -> Iterator[str]:
    """The paths of values that are kept as {secure: …}, but for those that are taken out anyhow."""
    if isinstance(node, yaml.MappingNode):
        if path and [key.value for key, _value in node.value] == ["secure"]:
            yield path
            return
        for key, value in node.value:
            if path or not is_for_google_alone(str(key.value)):
                yield from _encrypted(value, f"{path}.{key.value}" if path else str(key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _encrypted(value, f"{path}[{index}]")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
