"""When slices of a stack were deleted while they ran: one small document, so that `fab costs` counts to that moment.

`infra.slice_apis.lifecycle` writes it. Of a slice that Google took back nobody knows the moment, and it has no record.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from infra.documents import ContentError, Documents

NAME = "deleted.json"
MOST = 2000
"""Records that are kept, the latest ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeletedSlice:
    """created, active_at, deleted: RFC 3339, by Google's clock. active_at: since when it cost; "": not known.

    accelerator_type: "" where a topology was asked for."""

    created: str
    deleted: str
    accelerator_type: str
    count: int
    zone: str
    capacity: str
    active_at: str = ""


def remember(documents: Documents, record: DeletedSlice) -> None:
    """Add a record. Raises DocumentsError where the documents cannot be read or written."""

    def added(before: Any) -> Any:
        records = [*_parsed(before, documents.url), record]
        return [dataclasses.asdict(each) for each in records[-MOST:]]

    documents.change(NAME, added)


def read(documents: Documents) -> list[DeletedSlice]:
    """Everything that is known. Raises DocumentsError."""
    return _parsed(documents.read(NAME).value, documents.url)


def _parsed(value: Any, url: str) -> list[DeletedSlice]:
    names = {field.name for field in dataclasses.fields(DeletedSlice)}
    try:
        return [DeletedSlice(**{name: each[name] for name in names & each.keys()}) for each in value or []]
    except (TypeError, LookupError, AttributeError):
        raise ContentError(
            f"{url}/{NAME} is not a record of deleted slices; remove it, and it begins anew"
        ) from None
