"""What a project of the user's own says that it needs: read from its files."""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.errors import RequestError

FRAMEWORK_PACKAGES = {
    "jax": ("jax", "jaxlib", "flax", "optax"),
    "pytorch": ("torch", "torchvision", "torchaudio", "accelerate", "lightning", "pytorch-lightning"),
    "pytorch_xla": ("torch-xla",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-keras"),
}
"""Packages that only a project of that framework asks for."""
SCRIPT = re.compile(r"(?m)^# /// script\s*$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
"""As in PEP 723."""
NAME = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?")
INCLUDE = re.compile(r"(-r|-c|--requirements?|--constraints?)[ \t=]*(\S+)")
USER = re.compile(r"(?P<scheme>[\w+.-]+)://(?P<user>[^/\s@:\"']+)(?::(?P<password>[^/\s@\"']*))?@")
"""Of a URL: who it is read as."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """What says which packages a project needs.

    path: a script with a PEP 723 block, a pyproject.toml or a requirements.txt. texts: its content, that of the files
    it includes, and of a lock, by their paths. requirements: lines of requirements and options. python: the versions of
    Python that it allows. has_lock: a uv.lock is beside it.
    """

    path: Path
    texts: Mapping[str, str]
    requirements: tuple[str, ...]
    python: str = ""
    has_lock: bool = False

    @property
    def names(self) -> frozenset[str]:
        """Of the packages that it asks for."""
        return frozenset(normal(match[0]) for line in self.requirements if (match := NAME.match(line)))

    @property
    def name(self) -> str:
        return "uv.lock" if self.has_lock else self.path.name

    @property
    def is_script(self) -> bool:
        return self.path.suffix == ".py"


def normal(name: str) -> str:
    """Return the normalized name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find(workdir: Path, script: str | None = None) -> Source | None:
    """Return what says which packages a project needs: the script's own block, else uv.lock, requirements.txt or
    pyproject.toml of the folder. None: nothing does.

    script: a file of the folder.

    Raises:
        RequestError: it cannot be read, or has a password in it.
    """
    places = {name: workdir / name for name in ("uv.lock", "requirements.txt", "pyproject.toml")}
    source = _script_requirements(workdir / script) if script is not None else None
    if source is None and places["uv.lock"].is_file():
        source = _project_requirements(places["pyproject.toml"], places["uv.lock"])
    if source is None and places["requirements.txt"].is_file():
        texts: dict[str, str] = {}
        lines = tuple(_requirements(places["requirements.txt"], texts))
        source = Source(path=places["requirements.txt"], texts=texts, requirements=lines)
    if source is None and places["pyproject.toml"].is_file():
        source = _project_requirements(places["pyproject.toml"], None)
    for path, text in source.texts.items() if source is not None else ():
        for number, line in enumerate(text.splitlines(), 1):
            if _has_password(line):
                raise RequestError(
                    f"{path}, line {number}: a URL with a user or password in it, which would be sent to the hosts "
                    "with the folder; name the index by UV_INDEX or UV_DEFAULT_INDEX in this shell, or write ${NAME} "
                    "for a variable"
                )
    return source


def _has_password(line: str) -> bool:
    """Whether a URL in a line has a password or token in it, and not only the name of a variable: ${TOKEN}."""
    for url in USER.finditer(line):
        secret = url["password"] or (url["user"] if "http" in url["scheme"] else "")
        if secret and not secret.startswith("${"):
            return True
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8"
        raise RequestError(f"{path}: cannot be read: {reason}; correct it, or add --no-install") from None


def _toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"{path}: is no TOML: {error}; correct it, or add --no-install") from None


def _script_requirements(path: Path) -> Source | None:
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")  # Python reads a script by its own declaration
    blocks = [*SCRIPT.finditer(text)]
    if not blocks:
        return None
    if len(blocks) > 1:
        raise RequestError(f"{path}: has {len(blocks)} blocks `# /// script`; PEP 723 allows one")
    lines = blocks[0]["content"].splitlines(keepends=True)
    content = "".join(line[2:] if line.startswith("# ") else line[1:] for line in lines)
    return _declared(path, _toml(path, content), {str(path): content})


def _project_requirements(path: Path, lock: Path | None) -> Source | None:
    if not path.is_file():
        return None
    text = _read(path)
    project = _toml(path, text).get("project", {})
    if "dependencies" not in project:  # a file of tools' settings; or only a build would tell
        return None
    texts = {str(path): text, **({str(lock): _read(lock)} if lock is not None else {})}
    return dataclasses.replace(_declared(path, project, texts), has_lock=lock is not None)


def _declared(path: Path, table: Mapping[str, Any], texts: Mapping[str, str]) -> Source:
    requirements, python = table.get("dependencies", ()), table.get("requires-python", "")
    if not isinstance(requirements, Sequence) or not all(
        isinstance(text, str) for text in [*requirements, python]
    ):
        raise RequestError(f"{path}: dependencies is no list of texts; correct it, or add --no-install")
    return Source(path=path, texts=texts, requirements=tuple(requirements), python=python)


def _requirements(path: Path, texts: dict[str, str]) -> Iterator[str]:
    """Yield the lines of a requirements file, with those of files that it includes, and add their contents."""
    texts[str(path)] = text = _read(path)
    for line in re.sub(r"\\\n", " ", text).splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        included = INCLUDE.match(line)
        is_constraint = included is not None and included[1].startswith(("-c", "--c"))
        if line and (included is None or is_constraint):
            yield line
        place = str(path.parent / included[2]) if included and "://" not in included[2] else str(path)
        if place not in texts:
            lines = [*_requirements(Path(place), texts)]
            yield from () if is_constraint else lines


def required_framework(source: Source) -> str | None:
    """Return the framework whose packages a project asks for; None: it asks for none's.

    Raises:
        RequestError: it asks for those of several.
    """
    named = _packages_by_framework(source.names)
    if len(named) > 1:
        both = " and ".join(f"{packages[0]} ({name})" for name, packages in named.items())
        raise RequestError(
            f"{source.name}: asks for {both}; say which one the command runs in with --framework"
        )
    return next(iter(named), None)


def imported_framework(script: Path) -> str | None:
    """Return the framework that a script imports; None: none, several, or it cannot be read."""
    try:
        nodes = [*ast.walk(ast.parse(script.read_bytes()))]
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    named = _packages_by_framework({module.partition(".")[0].replace("_", "-") for module in modules})
    return next(iter(named)) if len(named) == 1 else None


def _packages_by_framework(packages: Collection[str]) -> dict[str, list[str]]:
    """The packages that only projects of a framework ask for, by framework."""
    named = {name: sorted({*packages} & {*own}) for name, own in FRAMEWORK_PACKAGES.items()}
    if named["pytorch_xla"]:
        del named["pytorch"]
    return {name: own for name, own in named.items() if own}


def masked(text: str) -> str:
    """Return a text without the users and passwords of URLs in it."""
    return USER.sub(r"\g<scheme>://***@", text)
