"""Google's discovery documents of the Cloud TPU API: which method a request calls, and whether a message conforms.

Pure: a document in, findings out. The document is the one that google-api-python-client ships. What is required it
says only in words: a field whose description begins with "Required.". Fields marked output-only are dropped from
requests, as https://google.aip.dev/203 asks of every API of Google. Stricter than Google: names of fields in camelCase
only, values of enums by name only.
"""

import dataclasses
import datetime
import functools
import importlib.resources
import json
import re
import urllib.parse
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from contracts.aliases import Json
from rehearsal.simulator.api_error import ApiError

Violation = tuple[str, str]  # where, what is wrong there

# What every method may be asked with (`parameters` of the document), less what this stand-in can't do.
COMMON = {"$.xgafv", "access_token", "alt", "key", "oauth_token", "prettyPrint", "quotaUser"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One method of the document: its id, how it is called and the schemas of request and answer."""

    id: str
    http_method: str
    path: re.Pattern[str]
    parameters: Json
    request: str | None
    response: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A request that the document allows: its query typed, its body cleaned.

    resource: the one named in the path, of APIs whose resources have such names; names: the path's parameters.
    """

    method: Method
    resource: str
    names: Mapping[str, str]
    query: Json
    body: Json


class Document:
    """A discovery document that can be asked. collections: the only ones that can be; None: all."""

    def __init__(self, document: Json, collections: Collection[str] | None = None) -> None:
        self.schemas: Json = document["schemas"]
        self.title = str(document["title"])
        chosen = {
            name: value
            for name, value in document["resources"].items()
            if collections is None or name in collections
        }
        self.methods = list(_methods({"resources": chosen}, str(document["servicePath"])))

    def call(self, http_method: str, target: str, body: bytes) -> Call:
        """The method call of a request; `target` is the path with its query. Raises ApiError with every violation."""
        path, _, query_text = target.partition("?")
        candidates = [
            (method, match) for method in self.methods if (match := method.path.fullmatch(path.lstrip("/")))
        ]
        for method, match in candidates:
            if method.http_method == http_method:
                query, violations = _query(method, query_text)
                cleaned, more = self._body(method, body)
                if violations or more:
                    raise _refusal(violations + more)
                names = {name: urllib.parse.unquote(value) for name, value in match.groupdict().items()}
                return Call(
                    method=method,
                    resource=names.get("resource", ""),
                    names=names,
                    query=query,
                    body=cleaned,
                )
        allowed = ", ".join(sorted(method.http_method for method, _ in candidates))
        problem = f"has {allowed} only" if allowed else f"is no path of this version of the {self.title}"
        raise ApiError("INVALID_ARGUMENT", f"{http_method} {path}: the path {problem}")

    def _body(self, method: Method, body: bytes) -> tuple[Json, list[Violation]]:
        try:
            message = json.loads(body) if body.strip() else {}
        except ValueError as error:
            return {}, [("body", f"is no JSON: {error}")]
        if not isinstance(message, dict):
            return {}, [("body", "is no JSON object")]
        if method.request is None:
            return {}, [("body", f"{method.id} takes none")] if message else []
        # A patch sends only the fields of its mask, so no other is required.
        return self.checked(method.request, message, required="updateMask" not in method.parameters)

    def checked(self, schema: str, message: Json, *, required: bool) -> tuple[Json, list[Violation]]:
        """A request's message without its output-only fields, and what is wrong with it."""
        reader = _Reader(schemas=self.schemas, inbound=True, required=required)
        return reader.read(schema, message, schema), reader.violations

    def wrong(self, schema: str, message: Json) -> list[Violation]:
        """The faults of an answer. The payload of an operation is checked by the schema that its @type names."""
        reader = _Reader(schemas=self.schemas)
        reader.read(schema, message, schema)
        for name in ("response", "metadata") if schema == "Operation" else ():
            payload = dict(message.get(name, {}))
            kind = str(payload.pop("@type", "")).rpartition(".")[2]
            if kind in self.schemas:
                reader.read(kind, payload, f"{schema}.{name}")
        return reader.violations


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reader:
    """Collects the violations of messages that it reads. inbound: output-only fields are left out. required: what the
    document requires has to be there."""

    schemas: Json
    inbound: bool = False
    required: bool = False
    violations: list[Violation] = dataclasses.field(default_factory=list)

    def read(self, schema: str, message: Any, at: str) -> Json:
        """The message's own copy, less what is wrong or left out. at: its place, for violations."""
        if isinstance(message, dict):
            return self._fields(schema, self.schemas[schema].get("properties", {}), message, at)
        self.violations.append((at, f"{message!r} is no {schema} object"))
        return {}

    def _fields(self, schema: str, properties: Json, message: Json, at: str) -> Json:
        cleaned: Json = {}
        for name, value in message.items():
            spec = properties.get(name)
            if spec is None:
                known = ", ".join(sorted(properties)) or "no fields"
                self.violations.append((f"{at}.{name}", f"unknown name; {schema} has {known}"))
            elif value is not None and not (self.inbound and spec.get("readOnly")):
                cleaned[name] = self._value(spec, value, f"{at}.{name}")
        for name, spec in properties.items() if self.required else ():
            if is_required(spec) and cleaned.get(name) in (None, "", 0, {}):
                self.violations.append((f"{at}.{name}", "is required"))
        return cleaned

    def _value(self, spec: Json, value: Any, at: str) -> Any:
        if "$ref" in spec:
            return self.read(spec["$ref"], value, at)
        if spec["type"] == "array" and isinstance(value, list):
            return [self._value(spec["items"], item, f"{at}[{index}]") for index, item in enumerate(value)]
        if spec["type"] == "object" and isinstance(value, dict):
            if "properties" in spec:
                return self._fields(at, spec["properties"], value, at)
            return {
                key: self._value(spec["additionalProperties"], item, f"{at}.{key}")
                for key, item in value.items()
            }
        if fault := scalar_fault(spec, value):
            self.violations.append((at, fault))
        return value


def is_required(spec: Json) -> bool:
    return str(spec.get("description", "")).startswith("Required.")


def _query(method: Method, text: str) -> tuple[Json, list[Violation]]:
    query: Json = {}
    violations: list[Violation] = []
    specs = {name: spec for name, spec in method.parameters.items() if spec["location"] == "query"}
    for name, value in urllib.parse.parse_qsl(text, keep_blank_values=True):
        spec = specs.get(name)
        if name in COMMON:
            if name == "alt" and value != "json":
                violations.append((name, f"{value!r} is not what this stand-in speaks; it speaks json"))
        elif spec is None:
            violations.append(
                (name, f"unknown query parameter; {method.id} has {', '.join(sorted(specs)) or 'none'}")
            )
        elif spec.get("repeated"):
            query.setdefault(name, []).append(value)
        elif name in query:
            violations.append((name, "is given twice"))
        else:
            query[name] = typed_scalar(spec["type"], value)
            if fault := scalar_fault(spec, query[name]):
                violations.append((name, fault))
    for name, spec in specs.items():
        if is_required(spec) and not query.get(name):
            violations.append((name, "is required"))
    return query, violations


_SCALARS: dict[str, type] = {"string": str, "boolean": bool, "integer": int, "any": object}


def scalar_fault(spec: Json, value: Any) -> str | None:
    """What is wrong with a value of a field or query parameter, or None."""
    kind = spec["type"]
    if (
        kind not in _SCALARS
        or not isinstance(value, _SCALARS[kind])
        or (kind == "integer" and isinstance(value, bool))
    ):
        return f"{value!r} is no {kind}"
    if "enum" in spec and value not in spec["enum"]:
        return f"{value!r} is no value of it; choose one of {', '.join(spec['enum'])}"
    if "format" in spec and not _FORMS.get(spec["format"], lambda _: True)(value):
        return f"{value!r} is no {spec['format']}"
    return None


def timestamp(moment: float) -> str:
    """Unix seconds as Google writes them: 2026-11-20T21:45:00.250000Z."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).isoformat().replace("+00:00", "Z")


def _is_time(value: str) -> bool:
    try:
        return datetime.datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


# The document's formats. A duration is seconds with an s, a time RFC 3339, a 64-bit integer a string of digits.
_FORMS: dict[str, Callable[[Any], bool]] = {
    "int32": lambda value: -(2**31) <= value < 2**31,
    "int64": lambda value: re.fullmatch(r"-?\d{1,19}", value) is not None,
    "google-duration": lambda value: re.fullmatch(r"-?\d{1,12}(\.\d{1,9})?s", value) is not None,
    "google-datetime": _is_time,
}


def typed_scalar(kind: str, text: str) -> Any:
    """A query parameter's text as what it should be; as it stands where it is not."""
    if kind == "integer" and re.fullmatch(r"-?\d{1,10}", text):
        return int(text)
    return {"true": True, "false": False}.get(text, text) if kind == "boolean" else text


def _refusal(violations: list[Violation]) -> ApiError:
    details = "; ".join(f"{at}: {text}" for at, text in violations)
    return ApiError("INVALID_ARGUMENT", f"Invalid request: {details}", violations)


def _methods(resource: Json, base: str) -> Iterator[Method]:
    for method in resource.get("methods", {}).values():
        yield Method(
            id=method["id"],
            http_method=method["httpMethod"],
            path=_path(method, base),
            parameters={
                key: spec for key, spec in method["parameters"].items() if spec["location"] != "path"
            },
            request=method.get("request", {}).get("$ref"),
            response=method.get("response", {}).get("$ref", ""),
        )
    for child in resource.get("resources", {}).values():
        yield from _methods(child, base)


def _path(method: Json, base: str) -> re.Pattern[str]:
    if "{+" not in method["path"]:  # a parameter for each part: projects/{project}/zones/{zone}/instances
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/:?]+)", re.escape(method["path"]))
        return re.compile(f"{re.escape(base)}{pattern}")
    # Of flatPath, v2/projects/{projectsId}/…/nodes/{nodesId}:start, path, v2/{+name}:start, tells what the name is.
    version, _, named = method["path"].partition("/{+")
    tail = named.partition("}")[2]
    whole = re.escape(method["flatPath"].removeprefix(f"{version}/").removesuffix(tail))
    flat = re.sub(r"\\\{\w+\\\}", "[^/:?]+", whole)
    return re.compile(f"{version}/(?P<resource>{flat}){re.escape(tail)}")


@functools.cache
def shipped(version: str = "v2", api: str = "tpu", collections: frozenset[str] | None = None) -> Document:
    """The document of a version of an API inside the installed google-api-python-client."""
    folder = importlib.resources.files("googleapiclient") / "discovery_cache" / "documents"
    return Document(json.loads((folder / f"{api}.{version}.json").read_text()), collections)
