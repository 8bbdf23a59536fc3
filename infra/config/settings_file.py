"""Finds what the engine ignores in a stack's settings file, Pulumi.STACK.yaml, or refuses without naming the key, and
reads its keys where there is no engine yet. Pure.

The engine reads only the first document, and in it only `config` and its own keys. It ignores everything else
silently, and gives the program only what it has read.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

import yaml

from contracts.suggestions import suggestion

CONFIG = "config"
PROJECT = "tpu-stack"
STACK_KEYS = ("encryptionsalt", "encryptedkey", "secretsprovider", "environment")
"""https://www.pulumi.com/docs/iac/concepts/projects/stack-settings-file/ (November 2026)."""


def unread(text: str) -> list[str]:
    """Return the parts of the file that nothing reads, each with its line and a remedy."""
    try:
        documents = [node for node in yaml.compose_all(text, yaml.SafeLoader) if node is not None]
    except (yaml.YAMLError, RecursionError):
        return []  # the engine says what is wrong with it
    problems = [
        f"line {_line(document)}: is in another document of the file, and only the first is read; move it there, and "
        "remove the line ---"
        for document in documents[1:]
        if not _is_null(document)
    ]
    root = documents[0] if documents else None
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value not in (CONFIG, *STACK_KEYS):
            problems.append(f"line {_line(key)}: {key.value}: {_instead(str(key.value))}")
        elif key.value == CONFIG and isinstance(value, yaml.MappingNode):
            problems += _hidden(value)
    return problems


def _hidden(config: yaml.MappingNode) -> Iterator[str]:
    """Yield keys without a name, and keys that the engine takes for another spelling of an earlier key."""
    lines: dict[str, tuple[int, str]] = {}
    for key, _ in config.value:
        if _is_null(key):
            yield f"line {_line(key)}: {key.value or 'a key'}: names no key; put it in quotes, or remove it"
            continue
        written = str(key.value)
        # https://www.pulumi.com/docs/iac/concepts/config/: a key without a namespace is the project's own.
        short = _full_name(written)
        line, first_key = lines.setdefault(short, (_line(key), written))
        if first_key != written:
            yield f"line {_line(key)}: {written}: is the same key as {first_key} in line {line}; remove one"


def _instead(key: str) -> str:
    if ":" in key:
        return f"stands outside {CONFIG}, where nothing reads it; indent it below {CONFIG}:"
    near = suggestion(key, (CONFIG, *STACK_KEYS))
    return "nothing reads it; " + (f"did you mean {near}:?" if near else f"move it below {CONFIG}:")


def refused(text: str) -> list[str]:
    """Return what the engine refuses without naming the place: tabs, and numbers that JSON does not have."""
    try:
        root = next(yaml.compose_all(text, yaml.SafeLoader), None)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        lines = text.splitlines()
        if mark is None or mark.line >= len(lines) or "\t" not in lines[mark.line][: mark.column + 1]:
            return []
        return [f"line {mark.line + 1}: has a tab before its text; indent with spaces"]
    except RecursionError:
        return []
    values = root.value if isinstance(root, yaml.MappingNode) else []
    visited: set[int] = set()
    return [
        f"{path}: {number} is not a number that a configuration can have; write it in digits, or remove the key"
        for key, value in values
        if key.value == CONFIG
        for path, number in _not_finite(value, "", visited)
    ]


def _not_finite(node: yaml.Node, path: str, visited: set[int]) -> Iterator[tuple[str, str]]:
    """Yield the paths of infinite numbers and NaN. visited: ids of nodes, as an alias may refer to its parent."""
    if id(node) in visited:
        return
    visited.add(id(node))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _not_finite(value, f"{path}.{key.value}" if path else str(key.value), visited)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _not_finite(value, f"{path}[{index}]", visited)
    elif node.tag == "tag:yaml.org,2002:float":
        with contextlib.suppress(ValueError):
            if not math.isfinite(yaml.SafeLoader("").construct_yaml_float(node)):
                yield path, node.value


def without_engine(text: str) -> tuple[dict[str, Any], list[str]]:
    """Return the keys below `config` with their namespaces, much as the engine reads them, and which are secrets.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    loader = yaml.SafeLoader(text)
    root = loader.get_node() if loader.check_node() else None
    entries = root.value if isinstance(root, yaml.MappingNode) else []
    config = [
        (_full_name(str(key.value)), value)
        for name, below in entries
        if name.value == CONFIG and isinstance(below, yaml.MappingNode)
        for key, value in below.value
    ]
    values = {key: _plain(loader, value) for key, value in config}
    secrets = [key for key, value in values.items() if isinstance(value, dict) and [*value] == ["secure"]]
    return values, secrets


def _full_name(key: str) -> str:
    return key.replace(":config:", ":", 1) if ":" in key else f"{PROJECT}:{key}"


def _plain(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    """Return a value; only what JSON has too, and whole numbers like 0x10 and 1_000, is more than a text, as yes, 1:30
    and dates are texts to the engine."""
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        return {str(key.value): _plain(loader, value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, value) for value in node.value]
    if _is_null(node):
        return None
    if node.style:
        return node.value
    with contextlib.suppress(ValueError):
        return json.loads(node.value.lower())
    with contextlib.suppress(ValueError):
        return int(node.value, 0)
    return node.value


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
