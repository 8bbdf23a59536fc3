"""The stack's outputs, as a rehearsal has them and as `pulumi stack output` shows them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rehearsal.state import RehearsalError

REPOSITORY = "image_repository"


def with_registry(outputs: Mapping[str, Any], registry: str | None) -> dict[str, Any]:
    """Those of the program, with the images' repository at the registry that is there (host and port) and not at
    Google's; None: there is none, and Google's name stays."""
    if registry is None:
        return dict(outputs)
    path = str(outputs[REPOSITORY]).partition("/")[2]
    return {**outputs, REPOSITORY: f"{registry}/{path}"}


def shown(outputs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    name = options["name"]
    if name is not None and name not in outputs:
        raise RehearsalError(f"current stack does not have output property '{name}'")
    if name is not None:
        return f"{json.dumps(outputs[name]) if options['json'] else outputs[name]}\n"
    if options["json"]:
        return f"{json.dumps(dict(outputs), indent=2)}\n"
    return "".join(f"{each}: {value}\n" for each, value in sorted(outputs.items()))
