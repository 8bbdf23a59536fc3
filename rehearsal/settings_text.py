"""A stack's settings file, Pulumi.NAME.yaml, as text: what an offline engine needs is put in, the rest stays as it is.

The engine's own reader of YAML decides what the file says. Here it is only asked where each key stands; a file that
cannot be read for that is handed over unchanged, since the engine will refuse it with better words.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

# How the stack of the file keeps its secrets: the offline engine has its own way.
OF_THE_STACK = frozenset({"encryptionsalt", "encryptedkey", "secretsprovider"})

Change = tuple[int, int, str]
"""From, to, and what is to stand there instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapted:
    """`encrypted`: the paths of values that only the file's own stack can read."""

    text: str
    encrypted: tuple[str, ...]


def adapted(text: str, own: Mapping[str, Any]) -> Adapted:
    """The text with the settings `own` (keys of `config` and others) in place of those that need a user's account.

    No line moves that holds a key of the configuration, so that the engine's line numbers are those of the file."""
    text = text if text.endswith("\n") else f"{text}\n"
    try:
        # The first document alone, as the engine reads it, and no value made of it: 2026-13-45 is a text here.
        loader = yaml.SafeLoader(text)
        root = loader.get_node() if loader.check_node() else None
    except yaml.YAMLError:
        return Adapted(text=text, encrypted=())
    if root is None:
        return Adapted(text=f"{text}{json.dumps(own)}\n", encrypted=())
    if not isinstance(root, yaml.MappingNode):
        return Adapted(text=text, encrypted=())
    outside = {key: value for key, value in own.items() if key != "config"}
    values = [value for key, value in root.value if key.value == "config"]
    changes: list[Change] = []
    encrypted: tuple[str, ...] = ()
    if not values:
        outside["config"] = own["config"]
    elif isinstance(values[0], yaml.MappingNode):
        changes += _replaced(text, values[0], own["config"], is_for_google_alone)
        encrypted = tuple(_encrypted(values[0]))
    elif values[0].tag == "tag:yaml.org,2002:null":
        begin, end = values[0].start_mark.index, values[0].end_mark.index
        changes.append((begin, end, f" {json.dumps(own['config'])}"))
    changes += _replaced(text, root, outside, OF_THE_STACK.__contains__)
    # From the last to the first, so that the places of the others hold; where two are one, the inner one goes first.
    for begin, end, instead in sorted(changes, key=lambda change: change[:2])[::-1]:
        text = text[:begin] + instead + text[end:]
    return Adapted(text=text, encrypted=encrypted)


def is_for_google_alone(key: str) -> bool:
    """Credentials and endpoints, gcp:NAME or gcp:config:NAME."""
    name = key.removeprefix("gcp:").removeprefix("config:")
    return key.startswith("gcp:") and (
        name in ("accessToken", "credentials") or name.endswith("CustomEndpoint")
    )


def _replaced(
    text: str, mapping: yaml.MappingNode, own: Mapping[str, Any], is_out: Callable[[str], bool]
) -> list[Change]:
    """The changes that take entries out of a mapping, each for as many empty lines, and put `own` in."""
    changes = []
    starts = [key.start_mark.index for key, _value in mapping.value]
    for (key, value), following in zip(mapping.value, [*starts[1:], None], strict=True):
        if is_out(str(key.value)):
            begin, end = key.start_mark.index, _end_of(text, value)
            if mapping.flow_style:
                end = mapping.end_mark.index - 1 if following is None else following
            changes.append((begin, end, "\n" * text[begin:end].count("\n")))
    entries = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in own.items()]
    if mapping.flow_style:
        begin = mapping.start_mark.index + 1
        return [*changes, (begin, begin, "".join(f"{entry}, " for entry in entries))]
    end = _end_of(text, mapping.value[-1][1])
    indent = " " * mapping.start_mark.column
    return [*changes, (end, end, "".join(f"{indent}{entry}\n" for entry in entries))]


def _end_of(text: str, value: yaml.Node) -> int:
    """Where the line ends on which an entry of a block mapping ends, its line break included."""
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
    """The paths of values that are kept as {secure: …}, those left out that are taken out anyhow."""
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
