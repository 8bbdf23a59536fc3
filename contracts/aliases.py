"""Type aliases that all packages share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
"""A JSON object."""

Say = Callable[[str], None]
"""Shows a message to a person; it comes without a line break at its end."""
