"""Does this function return a value? Rows from Python's standard library, which every machine has.

A row is a function's docstring, its name and arguments, and whether its body returns or yields a value.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

from jobs.runtime.storage.standard_library import stdlib_modules, stdlib_root

FIELDS = ("docstring", "function", "label")
LABELS = ("nothing", "value")
LEAST_CHARACTERS = 20
"""A shorter docstring says too little."""
MOST_CHARACTERS = 160
"""Of a docstring, which is cut after these: what comes later tells less."""


def modules() -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Each module by its path in the library, with its rows: docstring, function, label.

    A module without such functions has none. The same on every machine with this Python version.
    """
    root = stdlib_root()
    used: set[str] = set()
    for path in sorted(stdlib_modules()):
        # Modules copy from each other, and no docstring may be in both splits.
        new = []
        for row in _functions(path):
            if row[0] not in used:
                used.add(row[0])
                new.append(row)
        if new:
            yield path.relative_to(root).as_posix(), new


def _functions(path: Path) -> list[tuple[str, str, str]]:
    """A module's rows, in source order, without functions that only say what others are to do, as abstract ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, ValueError):
            return []  # a template, or code of other Python versions
    functions = []
    for node in _nodes(tree):
        # "\ud800" in a docstring is no text that can be encoded.
        docstring = (ast.get_docstring(node) or "").encode("utf-8", "replace").decode()
        does = [statement for statement in node.body[1:] if not isinstance(statement, ast.Pass | ast.Raise)]
        if len(docstring) >= LEAST_CHARACTERS and does:
            function = f"def {node.name}({ast.unparse(node.args)})"
            functions.append((docstring[:MOST_CHARACTERS], function, LABELS[_gives_value(node)]))
    return functions


def _nodes(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function, in source order. Only statements are looked into, which is much faster than ast.walk."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for node in getattr(tree, name, ()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node
            yield from _nodes(node)


def _gives_value(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its own body, without the functions in it, has a `yield` or a `return` of anything but None."""
    nodes: list[ast.AST] = [*function.body]
    while nodes:
        node = nodes.pop()
        match node:
            case ast.Yield() | ast.YieldFrom():
                return True
            case ast.Return(value=None | ast.Constant(value=None)):
                pass
            case ast.Return():
                return True
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                pass
            case _:
                nodes += ast.iter_child_nodes(node)
    return False
