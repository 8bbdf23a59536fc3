"""Who may change a slice now, or start a run on it: `pulumi up`, `fab` or the keeper, one at a time.

A lease is a document that its holder writes anew every RENEW_S. Whoever wants it takes it over once he has seen the
same version for STALE_S by his own clock: no two clocks are ever compared, so none has to be right. A holder that was
stopped for longer than that finds the document changed at his next write, and stops.

The document also says whether Pulumi has removed the slice, so that nobody else makes it again. Who destroys marks it
first and deletes then. What was asked for before the mark is there to be deleted; after it nothing is asked for, as
everybody makes sure of the lease before each request.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from infra.documents import ABSENT, ChangedError, Documents, DocumentsError, MissingError

RENEW_S = 15.0
STALE_S = 60.0
SURE_S = 10.0
"""How long after a renewal the holder may act without another one."""
LOOK_S = 5.0
OUTAGE_LIMIT_S = 900.0
"""How long a holder waits for documents that do not answer."""
PATIENCE_S = 3600.0
"""Of `pulumi`, for a keeper to end what it has begun: it prepares hosts and starts a run."""
FOLDER = "leases"


class LeaseLostError(Exception):
    """Somebody else has the lease now, or may have it: nothing must be changed any more."""


class LeaseHeldError(Exception):
    """Somebody else has the lease and renews it. The message says who."""


def clock_s() -> float:
    """Seconds that go on while the machine is suspended, as time.monotonic does not on Linux."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def document_url(store_url: str, slice_name: str) -> str:
    """Return the URL of a slice's lease."""
    return f"{store_url.rstrip('/')}/{FOLDER}/{slice_name}.json"


def from_url(url: str, holder: str) -> Lease:
    """Return the lease at a URL that `document_url` has made."""
    store, _, name = url.rpartition(f"/{FOLDER}/")
    return Lease(Documents(store), name.removesuffix(".json"), holder)


def myself(program: str) -> str:
    """Return what tells this process from others, for people."""
    return f"{program} on {socket.gethostname()} (process {os.getpid()})"


class Lease:
    """The lease of one slice. Thread-safe once it is held.

    holder: our name, which those who wait are shown. now, sleep: seconds, see `clock_s`.
    """

    def __init__(
        self,
        documents: Documents,
        slice_name: str,
        holder: str,
        *,
        now: Callable[[], float] = clock_s,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = f"{FOLDER}/{slice_name}.json"
        self.slice_name = slice_name
        self.removed = False
        """Whether `pulumi destroy` has removed the slice: as it was when the lease was taken, or as it is to be."""
        self._documents, self._holder = documents, holder
        self._now, self._sleep = now, sleep
        self._token = uuid.uuid4().hex
        self._version = ABSENT
        self._count = 0
        self._sure_s = 0.0
        self._lost = True
        self._lock = threading.Lock()

    def take(
        self,
        *,
        patience_s: float = 0.0,
        outage_s: float = 0.0,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Take the lease: one that is free at once, one whose holder is gone after STALE_S.

        patience_s: for how long one that is renewed is waited for, at most. outage_s: for how long documents that do
        not answer are. waiting: told once who has it.

        Raises:
            LeaseHeldError: somebody else has it and renews it.
            DocumentsError: the documents do not answer.
        """
        began_s = since_s = self._now()
        seen_version: int | None = None
        is_renewed = False
        while True:
            try:
                document = self._documents.read(self.name)
                value = document.value if isinstance(document.value, dict) else {}
                about = f"{value.get('who')} is changing the slice {self.slice_name}"
                if seen_version is None and value.get("token") and patience_s:
                    waiting(f"{about}; waiting for that, or for a minute in which it gives no sign of life")
                if document.version != seen_version:
                    seen_version, since_s, is_renewed = (
                        document.version,
                        self._now(),
                        seen_version is not None,
                    )
                if not value.get("token") or self._now() - since_s >= STALE_S:
                    self._write(document.version, removed=bool(value.get("removed")))
                    return
                if is_renewed and self._now() - began_s >= patience_s:
                    raise LeaseHeldError(about)
            except ChangedError:
                pass  # somebody was quicker
            except DocumentsError as error:
                if isinstance(error, MissingError) or self._now() - began_s >= outage_s:
                    raise
                since_s = self._now()  # a holder cannot renew it meanwhile either
            self._sleep(LOOK_S)

    def mark(self, *, removed: bool) -> None:
        """Write whether the slice is to be made again. Raises as `renew`."""
        self.removed = removed
        self.renew()

    def renew(self) -> None:
        """Write it anew.

        Raises:
            LeaseLostError: somebody else has it.
            DocumentsError: the documents do not answer; it may be ours or not.
        """
        with self._lock:
            if not self._lost:
                try:
                    self._write(self._version, removed=self.removed)
                except ChangedError:
                    document = self._documents.read(self.name)
                    # Our own earlier write may have got through, and only its answer did not.
                    if isinstance(document.value, dict) and document.value.get("token") == self._token:
                        self._version = document.version
                    else:
                        self._lost = True
            if self._lost:
                raise LeaseLostError(
                    f"somebody else has taken over the lease of the slice {self.slice_name}, as this process did not "
                    f"renew it for {STALE_S:.0f} s; nothing more is changed here"
                )

    def require(self) -> bool:
        """Make sure that it is still ours, before something is made or deleted; True.

        Raises:
            LeaseLostError: it is not, or nobody can tell for OUTAGE_LIMIT_S.
        """
        began_s = self._now()
        while self._lost or self._now() - self._sure_s > SURE_S:
            try:
                self.renew()
            except DocumentsError as error:
                if self._now() - began_s > OUTAGE_LIMIT_S:
                    raise LeaseLostError(
                        f"the lease of the slice {self.slice_name} cannot be renewed: {error}"
                    ) from None
                self._sleep(LOOK_S)
        return True

    def patiently[T](self, act: Callable[[], T]) -> T:
        """Carry out what needs the documents, again until they answer, for OUTAGE_LIMIT_S at most."""
        began_s = self._now()
        while True:
            try:
                return act()
            except DocumentsError as error:
                if isinstance(error, MissingError) or self._now() - began_s >= OUTAGE_LIMIT_S:
                    raise
            self._sleep(LOOK_S)

    def release(self) -> None:
        """Give it back; nothing happens where it is not ours. One that cannot be given back is stale in STALE_S."""
        with self._lock, contextlib.suppress(DocumentsError):
            if not self._lost:
                self._lost = True
                self._documents.write(
                    self.name, {"who": "", "token": "", "count": self._count, "removed": self.removed},
                    version=self._version,
                )  # fmt: skip

    def _write(self, version: int, *, removed: bool) -> None:
        began_s = self._now()
        value: dict[str, Any] = {"who": self._holder, "token": self._token, "count": self._count + 1}
        self._version = self._documents.write(self.name, {**value, "removed": removed}, version=version)
        # What counts is when the write was begun: others may have seen it since then.
        self._count, self._sure_s, self._lost, self.removed = self._count + 1, began_s, False, removed


@contextlib.contextmanager
def held(
    lease: Lease,
    *,
    patience_s: float = 0.0,
    outage_s: float = 0.0,
    waiting: Callable[[str], None] = lambda _: None,
) -> Iterator[Lease]:
    """Hold a lease to the end of the block, and renew it meanwhile, by a thread.

    Raises:
        LeaseHeldError, DocumentsError: as `Lease.take`.
    """
    lease.take(patience_s=patience_s, outage_s=outage_s, waiting=waiting)
    over = threading.Event()

    def renew() -> None:
        while not over.wait(RENEW_S):
            with contextlib.suppress(DocumentsError):
                try:
                    lease.renew()
                except LeaseLostError:
                    return

    thread = threading.Thread(target=renew, name=f"lease {lease.slice_name}", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        over.set()
        thread.join()
        lease.release()


def mark_all_removed(store_url: str, holder: str, waiting: Callable[[str], None]) -> None:
    """Mark every slice that has a lease as removed, once its holder is done. No slice is requested after that.

    Raises:
        LeaseHeldError, LeaseLostError, DocumentsError: not all are marked.
    """
    documents = Documents(store_url)
    for name in from_url(document_url(store_url, ""), holder).patiently(
        lambda: documents.names(f"{FOLDER}/")
    ):
        lease = from_url(f"{store_url.rstrip('/')}/{name}", holder)
        document = lease.patiently(functools.partial(documents.read, name))
        if (document.value or {}).get("removed", False):
            continue
        with held(lease, patience_s=PATIENCE_S, outage_s=OUTAGE_LIMIT_S, waiting=waiting):
            lease.patiently(functools.partial(lease.mark, removed=True))
