"""Does this docstring belong to this function? Rows from Python's standard library, which every machine has.

A function of a module is there twice: with its own docstring and with that of another function of the module. So every
text is as often in a row of one label as of the other: 50 % is what can be had without comparing the two.
"""

from __future__ import annotations

import ast
import hashlib
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

from jobs.runtime.text_files import stdlib_modules, stdlib_root

FIELDS = ("docstring", "function", "label")
LABELS = ("other", "belongs")
LEAST_CHARACTERS = 40
"""A shorter docstring says too little to tell whose it is."""
MOST_CHARACTERS = 160
"""Of a docstring and of a function, which are cut after these: what comes later tells less of the other. By the words
in common, weighted by how rare they are, 74 % of such held-out rows can be told, and 72 % with 1,000 characters."""


def modules() -> Iterator[tuple[str, list[tuple[str, str, int]]]]:
    """Each module by its path in the library, with its rows: docstring, function without it, index of the label.

    A module with fewer than two functions to tell apart has none. The same on every machine with this Python version.
    """
    root = stdlib_root()
    seen: set[str] = set()
    for path in sorted(stdlib_modules()):
        module = path.relative_to(root).as_posix()
        # Modules have copied from each other, and what is held out must not be among what is trained on.
        new = []
        for docstring, source in _functions(path):
            if not {docstring, source} & seen:
                new.append((docstring, source))
            seen |= {docstring, source}
        # In an order by hash, so that neighbours in the source are no neighbours here.
        found = sorted(new, key=lambda each: _hash(f"{module} {each[0]}"))
        following = found[1:] + found[:1]
        if len(found) > 1:
            yield (
                module,
                [
                    row
                    for (own, source), (another, _) in zip(found, following, strict=True)
                    for row in ((own, source, 1), (another, source, 0))
                ],
            )


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _functions(path: Path) -> list[tuple[str, str]]:
    """A module's functions, in source order: the docstring, and the source without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            text = path.read_text("utf-8")
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return []  # a template, or code of other Python versions
    lines = text.split("\n")
    found = []
    for node in _nodes(tree):
        # "\ud800" in a docstring is no text that can be encoded.
        docstring = (ast.get_docstring(node) or "").encode("utf-8", "replace").decode()
        first = node.body[0]
        if (
            len(docstring) >= LEAST_CHARACTERS and first.lineno > node.lineno
        ):  # else it cannot be cut by lines
            kept = lines[node.lineno - 1 : first.lineno - 1] + lines[first.end_lineno : node.end_lineno]
            source = textwrap.dedent("\n".join(kept))
            found.append((docstring[:MOST_CHARACTERS], source[:MOST_CHARACTERS]))
    return found


def _nodes(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function, in source order. Only statements are looked into, which is much faster than ast.walk."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for node in getattr(tree, name, ()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node
            yield from _nodes(node)
