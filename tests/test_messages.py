"""Every message that the launcher and the agent can give has a row in the docs, and every row a message.

A message is the text given to one of MAKERS anywhere under SOURCES: a literal, an f-string, a sum of these,
either side of a choice, or, where a variable or a function of the same file is given, what is assigned to it or what
it returns. It is cut wherever a value stands (`{…}` of an f-string, and an ellipsis, by which the docs show a value).
Of each message the longest piece has to be in the first column of a table of PAGES; and of each quotation in a first
column of docs/messages.md, every piece has to be in a string of the source. Blanks, quotes and markdown do not count,
nor do pieces shorter than LEAST: too many sentences have them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("contracts", "fabfile", "keeper", "console", "backends", "images", "launch", "host")
PAGES = ("docs/messages.md", "docs/images.md", "docs/troubleshooting.md")
LEAST = 8
VALUE = "…"
MAKERS = {
    **dict.fromkeys(("RequestError", "HostsError", "NotJoined", "Failed", "Refused", "Exit", "_error"), 0),
    **dict.fromkeys(("fail", "warn"), 0),  # the doctor's findings
    "check": 1,
    "_stop": 2,  # why an attempt is stopped, and how a host was lost
    "_lose": 3,
    "HostError": -1,  # its fields have names
}
GOOD = {"check": lambda call: len(call.args) < 3}
"""Findings that are in order and need no explanation."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Message(NamedTuple):
    place: str
    text: str


def plain(text: str) -> str:
    return " ".join(re.sub(r"[`*\"'\\]", "", text).split())


def pieces(text: str) -> list[str]:
    """What stands between the values, longest first."""
    found = [plain(piece) for piece in text.split(VALUE)]
    return sorted((piece for piece in found if len(piece) >= LEAST), key=len, reverse=True)


def shown(values: list[ast.expr]) -> str:
    """An f-string with an ellipsis wherever a value stands."""
    return "".join(str(each.value) if isinstance(each, ast.Constant) else VALUE for each in values)


class Texts:
    """The texts that an expression of one file may have."""

    def __init__(self, tree: ast.Module) -> None:
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
        self._asked: set[tuple[int, str]] = set()

    def of(self, node: ast.AST | None, scope: ast.AST) -> list[str]:
        match node:
            case ast.Constant(value=str() as text):
                return [text]
            case ast.JoinedStr(values=values):
                return [shown(values)]
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                ends = self.of(right, scope) or [VALUE]
                return [start + end for start in self.of(left, scope) or [VALUE] for end in ends]
            case ast.IfExp(body=body, orelse=orelse):
                return self.of(body, scope) + self.of(orelse, scope)
            case ast.BoolOp(values=parts) | ast.List(elts=parts):
                return [text for part in parts for text in self.of(part, scope)]
            case ast.Name(id=name):
                return self._assigned(name, scope)
            case ast.Call(func=ast.Name(id="printable") | ast.Attribute(attr="join"), args=[argument]):
                return self.of(argument, scope)
            case ast.Call(func=ast.Name(id=name)) if name in self._functions:
                return self._returned(self._functions[name])
        return []

    def _assigned(self, name: str, scope: ast.AST) -> list[str]:
        if (id(scope), name) in self._asked:
            return []
        self._asked.add((id(scope), name))
        found = []
        for node in ast.walk(scope):
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=each)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=each), value=value)
                    | ast.AugAssign(target=ast.Name(id=each), value=value)
                ) if each == name:
                    found += self.of(value, scope)
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    for target, value in zip(names, values, strict=True):
                        if ast.unparse(target) == name:
                            found += self.of(value, scope)
        self._asked.discard((id(scope), name))
        return found

    def _returned(self, function: Function) -> list[str]:
        returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        return [text for value in returns for text in self.of(value, function)]


def scopes(tree: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.Call, ast.AST]]:
    """Every call, with the innermost function that it stands in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield node, scope
        yield from scopes(node, node if isinstance(node, Function) else scope)


def messages_of(source: str, name: str) -> Iterator[Message]:
    tree = ast.parse(source)
    texts = Texts(tree)
    for call, scope in scopes(tree, tree):
        maker = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if maker not in MAKERS or (maker in GOOD and GOOD[maker](call)):
            continue
        given = call.args[MAKERS[maker] :] if MAKERS[maker] >= 0 else []
        named = [each.value for each in call.keywords if each.arg in ("reason", "message", "what")]
        for value in given[: 2 if maker == "_lose" else 1] + named:
            for text in texts.of(value, scope):
                yield Message(f"{name}:{call.lineno}", text)


def sources() -> dict[str, str]:
    paths = (path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def cells(page: str) -> list[tuple[int, str]]:
    """The first column of a page's tables, with the lines' numbers."""
    rows = enumerate(page.splitlines(), start=1)
    found = [(number, row.split(" | ")[0][2:]) for number, row in rows if row.startswith("| ")]
    return [(number, cell) for number, cell in found if "`" in cell]


def unexplained(found: list[Message], pages: list[str]) -> list[str]:
    """Messages that no row has."""
    told = "\n".join(plain(cell) for page in pages for _, cell in cells(page))
    return sorted(
        {
            f"{each.place}: {longest}"
            for each in found
            if (longest := (pieces(each.text) or [""])[0]) not in told
        }
    )


def outdated(page: str, texts: dict[str, str]) -> list[str]:
    """Quotations of a page that no string of the source has."""
    said: list[str] = []
    for text in texts.values():
        nodes = list(ast.walk(ast.parse(text)))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            match node:
                case ast.JoinedStr(values=values):
                    said.append(shown(values))
                case ast.Constant(value=str() as words) if id(node) not in docstrings:
                    said.append(words)
    all_said = "\n".join(plain(piece) for words in said for piece in words.split(VALUE))
    return [
        f"line {number}: {piece}"
        for number, cell in cells(page)
        for quotation in re.findall(r"`([^`]+)`", cell)
        for piece in pieces(quotation)
        if piece not in all_said
    ]


# --- the pages ------------------------------------------------------------------------------------------------


def test_every_message_of_the_launcher_and_the_agent_is_explained() -> None:
    found = [message for name, text in sources().items() for message in messages_of(text, name)]
    assert len(found) > 200, "the collector finds next to nothing"
    lacking = unexplained(found, [(ROOT / page).read_text() for page in PAGES])
    assert not lacking, "add a row to docs/messages.md for\n" + "\n".join(lacking)


def test_no_row_explains_a_message_that_is_gone() -> None:
    gone = outdated((ROOT / "docs/messages.md").read_text(), sources())
    assert not gone, "in docs/messages.md, no source says\n" + "\n".join(gone)
