"""Values that are no messages, lists or maps: whether one is as the discovery document's type, format and enum say."""

import re
from collections.abc import Callable
from typing import Any

from rehearsal import clock

Json = dict[str, Any]

_WANTED: dict[str, type] = {"string": str, "boolean": bool, "integer": int, "any": object}


def fault(spec: Json, value: Any) -> str | None:
    """What is wrong with a value of a field or query parameter; None: nothing."""
    kind = spec["type"]
    if (
        kind not in _WANTED
        or not isinstance(value, _WANTED[kind])
        or (kind == "integer" and isinstance(value, bool))
    ):
        return f"{value!r} is no {kind}"
    if "enum" in spec and value not in spec["enum"]:
        return f"{value!r} is no value of it; choose one of {', '.join(spec['enum'])}"
    if "format" in spec and not _FORMS.get(spec["format"], lambda _: True)(value):
        return f"{value!r} is no {spec['format']}"
    return None


def _is_time(value: str) -> bool:
    try:
        clock.from_timestamp(value)
    except ValueError:
        return False
    return True


# The document's formats. A duration is seconds with an s, a time RFC 3339, a 64-bit integer a string of digits.
_FORMS: dict[str, Callable[[Any], bool]] = {
    "int32": lambda value: -(2**31) <= value < 2**31,
    "int64": lambda value: re.fullmatch(r"-?\d{1,19}", value) is not None,
    "google-duration": lambda value: re.fullmatch(r"-?\d{1,12}(\.\d{1,9})?s", value) is not None,
    "google-datetime": _is_time,
}


def typed(kind: str, text: str) -> Any:
    """A query parameter's text as what it should be; as it stands where it is not."""
    if kind == "integer" and re.fullmatch(r"-?\d{1,10}", text):
        return int(text)
    return {"true": True, "false": False}.get(text, text) if kind == "boolean" else text
