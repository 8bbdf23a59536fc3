"""What `fab submit` writes of a run, and the request that becomes of it. Its code is kept beside, by its hash."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from contracts.errors import RequestError
from infra.documents import ABSENT, ChangedError, Documents
from launch.code.bundles import Bundle
from launch.code.precompiled import DOCUMENTS as NOTES
from launch.control.control_documents import Run
from launch.control.store import BUNDLES, Store
from launch.jobs import Submitted
from launch.request.run_environment import require_references
from launch.request.run_request import Request
from launch.targets import Secret

LARGEST_BYTES = 256 * 2**20
"""Of a bundle. Whoever starts the run holds it in memory in four times its size (795 MiB of a bundle of 190 were
measured), and a gateway with the keeper has 2 GiB."""


def described(template: Request, submitted: Submitted) -> dict[str, Any]:
    """Return the fields of a Submission that say what is run."""
    require_references(
        sources := {name: secret.source for name, secret in template.secrets.items()}, "the queue"
    )
    left_out = ("command", "resume", "submitted", "bundles", "run_id", "precompiled", "secrets")
    request, fields = (
        {name: value for name, value in vars(part).items() if name not in left_out}
        for part in (template, submitted)
    )
    bundles = tuple(bundle.sha256 for bundle in submitted.bundles)
    request["secrets"] = sources
    return {"request": request, "submitted": fields, "bundles": bundles}


def request(documents: Documents, run: Run) -> Request:
    """Return the request of a submitted run, with the code as it was submitted.

    Raises:
        RequestError: its code is gone, or another version of tpu-stack has written it.
    """
    assert run.submission is not None
    submission = run.submission
    fields, submitted = dict(submission.request), dict(submission.submitted)
    try:
        for name in ("arguments", "track"):
            fields[name] = tuple(fields[name])
        fields["secrets"] = {name: Secret(source=text) for name, text in fields.get("secrets", {}).items()}
        submitted["arguments"] = tuple(submitted["arguments"])
        bundles = tuple(_bundle(documents, sha256) for sha256 in submission.bundles)
        return Request(
            **{
                **fields,
                "resume": None,
                "run_id": run.run_id,
                "submitted": Submitted(**submitted, bundles=bundles),
            }
        )
    except (TypeError, KeyError) as error:
        raise RequestError(
            f"entry {submission.number} was submitted by another version of tpu-stack ({error}); submit it again, or "
            "run `fab queue work` in that checkout"
        ) from None


def require_small(bundles: Iterable[Bundle]) -> None:
    """Raises RequestError: the code of a submission is more than the queue keeps."""
    for bundle in bundles:
        if len(bundle.archive) > LARGEST_BYTES:
            raise RequestError(
                f"the folder or its packages are {len(bundle.archive) / 2**20:,.0f} MiB compressed, and the queue "
                f"keeps at most {LARGEST_BYTES / 2**20:.0f} MiB of a run, as a keeper's machine is small. Name what "
                "is large in .gitignore or .fabignore and read it from the bucket or the share; `fab train` sends up "
                "to 1 GiB"
            )


def keep_code(documents: Documents, bundles: Iterable[Bundle]) -> None:
    """Write the code of a submission, where it is not there."""
    existing = {*documents.names(BUNDLES)}
    for bundle in bundles:
        if _place(bundle.sha256) not in existing:
            with contextlib.suppress(ChangedError):  # somebody else has written the same code
                documents.write(_place(bundle.sha256), {"archive": bundle.text}, version=ABSENT)


def remove_code(store: Store) -> None:
    """Remove the code that no run needs any more, also that of a submission that was broken off."""
    documents = store.documents
    for name in documents.names(BUNDLES):
        if name in _needed(store.read().runs.values()):
            continue
        content = documents.read(name)
        with contextlib.suppress(ChangedError):
            documents.delete(name, version=content.version)
            # Submitted just now.
            if content.value is not None and name in _needed(store.read().runs.values()):
                documents.write(name, content.value, version=ABSENT)
    for name in () if pending(store.read().runs.values()) else documents.names(NOTES):
        with contextlib.suppress(ChangedError):
            documents.delete(name, version=documents.read(name).version)


def pending(runs: Collection[Run]) -> Sequence[Run]:
    """Return the submitted runs that have not ended."""
    return [run for run in runs if run.submission is not None and run.end is None]


def _needed(runs: Collection[Run]) -> set[str]:
    return {_place(sha256) for run in pending(runs) if run.submission for sha256 in run.submission.bundles}


def _bundle(documents: Documents, sha256: str) -> Bundle:
    content = documents.read(_place(sha256)).value
    bundle = Bundle.from_text(content["archive"], sha256) if content else None
    if bundle is None:
        raise RequestError(f"{documents.url}/{_place(sha256)}: the code is not there; submit it again")
    return bundle


def _place(sha256: str) -> str:
    return f"{BUNDLES}{sha256}.json"
