"""What each resource of pulumi_gcp may be declared with, read from the SDK's own source.

The source is read and not imported: importing only `pulumi_gcp.compute` takes seconds, and the engine waits for it."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

# What stands for a value that a preview cannot know yet, sdk/go/common/resource/plugin/rpc.go.
UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"

SCALARS: Mapping[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": (int, float), "bool": bool}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A value's shape: a scalar (`str`, `int`, `float`, `bool`), a list or map of `item`, an object, or any."""

    kind: Literal["str", "int", "float", "bool", "list", "map", "object", "any"]
    item: Shape | None = None
    class_name: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """One property."""

    shape: Shape
    required: bool


Arguments = Mapping[str, Argument]
"""Arguments by the engine's names."""


Mistake = tuple[str, str]
"""A property that the SDK would refuse: its path, such as allows[0].ports, and the reason."""


def resource_arguments(type_token: str) -> Arguments:
    """The inputs of a resource of a type, such as gcp:compute/network:Network. Raises KeyError for no such type."""
    module, _, class_name = type_token.removeprefix("gcp:").partition(":")
    folder = module.partition("/")[0]
    file_stem = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name).lower()
    return _arguments(folder, f"{file_stem}.py", f"{class_name}Args")


def mistakes(type_token: str, values: Mapping[str, object]) -> list[Mistake]:
    """Everything in a resource's inputs that pulumi_gcp does not know, misses or has another type for."""
    folder = type_token.removeprefix("gcp:").partition("/")[0]
    return list(_object_mistakes(folder, resource_arguments(type_token), values, ""))


def _object_mistakes(
    folder: str, declared: Arguments, values: Mapping[str, object], at: str
) -> Iterator[Mistake]:
    for name, value in values.items():
        if name not in declared:
            choices = ", ".join(sorted(declared))
            yield at + name, f"pulumi_gcp knows no such property; it knows {choices}"
        else:
            yield from _value_mistakes(folder, declared[name].shape, value, at + name)
    for name, argument in declared.items():
        if argument.required and values.get(name) is None:
            yield at + name, "required, and not given"


def _value_mistakes(folder: str, shape: Shape, value: object, at: str) -> Iterator[Mistake]:
    if value is None or value == UNKNOWN or shape.kind == "any":
        return
    if shape.kind in ("map", "object"):
        if not isinstance(value, Mapping):
            yield at, f"{_type_name(value)} where {shape.kind} is wanted"
        elif shape.item is not None:
            for name, item in value.items():
                yield from _value_mistakes(folder, shape.item, item, f"{at}.{name}")
        else:
            yield from _object_mistakes(
                folder, _arguments(folder, "_inputs.py", shape.class_name), value, f"{at}."
            )
    elif shape.kind == "list":
        if not isinstance(value, list):
            yield at, f"{_type_name(value)} where a list is wanted"
        elif shape.item is not None:
            for index, item in enumerate(value):
                yield from _value_mistakes(folder, shape.item, item, f"{at}[{index}]")
    elif not _is_scalar(shape.kind, value):
        yield at, f"{_type_name(value)} where {shape.kind} is wanted"


def _is_scalar(kind: str, value: object) -> bool:
    # Numbers come over the wire as floating point, whole ones too.
    if kind == "int" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, SCALARS[kind]) and (kind == "bool" or not isinstance(value, bool))


def _type_name(value: object) -> str:
    return type(value).__name__


@functools.cache
def _arguments(folder: str, file: str, class_name: str) -> Arguments:
    """The arguments of one generated class. Raises KeyError where the SDK has no such class."""
    match = re.search(rf"^class {class_name}:\n(?:[ ].*\n|\n)*", _source(folder, file), flags=re.MULTILINE)
    if match is None:
        raise KeyError(f"pulumi_gcp.{folder} has no {class_name}")
    (definition,) = ast.parse(match[0]).body
    assert isinstance(definition, ast.ClassDef)
    methods = [member for member in definition.body if isinstance(member, ast.FunctionDef)]
    names = {method.name: name for method in methods if (name := _wire_name(method)) is not None}
    init = next(method for method in methods if method.name == "__init__")
    arguments = {}
    for parameter, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True):
        assert parameter.annotation is not None
        shape = _shape(parameter.annotation)
        arguments[names[parameter.arg]] = Argument(shape=shape, required=default is None)
    return arguments


def _wire_name(method: ast.FunctionDef) -> str | None:
    """runtimeVersion for a method decorated @pulumi.getter(name="runtimeVersion"); None for one that is no property."""
    for decorator in method.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(call, ast.Attribute) and call.attr == "getter":
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            names = [keyword.value.value for keyword in keywords if isinstance(keyword.value, ast.Constant)]
            return str(names[0]) if names else method.name
    return None


def _shape(annotation: ast.expr) -> Shape:
    """An annotation's shape; pulumi.Input[Optional[Sequence[pulumi.Input['V2VmDataDiskArgs']]]]: a list of objects."""
    match annotation:
        case ast.Subscript(value=ast.Attribute(attr="Input") | ast.Name(id="Optional"), slice=inner):
            return _shape(inner)
        case ast.Subscript(value=ast.Name(id="Sequence"), slice=inner):
            return Shape(kind="list", item=_shape(inner))
        case ast.Subscript(value=ast.Name(id="Mapping"), slice=ast.Tuple(elts=[_, inner])):
            return Shape(kind="map", item=_shape(inner))
        case ast.Attribute(value=ast.Name(id="_builtins"), attr="str" | "int" | "float" | "bool" as scalar):
            return Shape(kind=scalar)
        case ast.Constant(value=str(name)) if name.endswith("Args"):
            return Shape(kind="object", class_name=name)
    return Shape(kind="any")


@functools.cache
def _source(folder: str, file: str) -> str:
    spec = importlib.util.find_spec("pulumi_gcp")
    if spec is None or not spec.submodule_search_locations:
        raise KeyError("pulumi_gcp is not installed: run `make install`")
    path = Path(spec.submodule_search_locations[0]) / folder / file
    if not path.is_file():
        raise KeyError(f"pulumi_gcp has no {folder}/{file}")
    return path.read_text(encoding="utf-8")
