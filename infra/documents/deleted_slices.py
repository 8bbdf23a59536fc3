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
    """created, deleted: RFC 3339, by Google's clock. accelerator_type: "" where a topology was asked for."""

    created: str
    deleted: str
    accelerator_type: str
    count: int
    zone: str
    capacity: str


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
    try:
        return [
            DeletedSlice(**{field.name: each[field.name] for field in dataclasses.fields(DeletedSlice)})
            for each in value or []
        ]
    except (TypeError, LookupError):
        raise ContentError(
            f"{url}/{NAME} is not a record of deleted slices; remove it, and it begins anew"
        ) from None
