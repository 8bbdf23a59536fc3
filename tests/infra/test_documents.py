"""Documents that several programs change: in a folder, and in a bucket whose server here takes Google's part."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.errors import WRONG_REQUEST, exit_code_for
from infra.documents import ABSENT, ChangedError, Documents, DocumentsError, OutageError
from tests.infra.bucket import Bucket, served


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Bucket]]:
    with served() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield Bucket


@pytest.fixture(params=["folder", "bucket"])
def url(request: pytest.FixtureRequest, tmp_path: Path, bucket: type[Bucket]) -> str:
    return str(tmp_path / "store") if request.param == "folder" else "gs://a-bucket/store"


def count(url: str, times: int) -> None:
    for _ in range(times):
        Documents(url).change("count", lambda value: (value or 0) + 1)


def test_of_two_writers_one_succeeds_and_no_change_is_lost(url: str) -> None:
    store = Documents(url)
    assert store.read("leases/a.json").value is None and store.names() == []
    first = store.write("leases/a.json", {"n": 1}, version=ABSENT)
    for version in (ABSENT, first + 1):
        with pytest.raises(ChangedError, match=r"leases/a\.json: somebody else has changed it"):
            store.write("leases/a.json", {"n": 2}, version=version)
    second = store.write("leases/a.json", {"n": 1}, version=first)  # the same value is another version
    assert second > first and store.read("leases/a.json").version == second
    workers = [multiprocessing.get_context("spawn").Process(target=count, args=(url, 8)) for _ in range(3)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert store.read("count").value == 24
    assert (store.names(), store.names("leases/")) == (["count", "leases/a.json"], ["leases/a.json"])


def test_a_change_that_changes_nothing_writes_nothing_and_a_raise_ends_it(tmp_path: Path) -> None:
    store = Documents(str(tmp_path))
    before = store.write("a", [1], version=ABSENT)
    assert store.change("a", lambda value: value) == [1] and store.read("a").version == before
    with pytest.raises(KeyError):
        store.change("a", lambda value: value["missing"] if isinstance(value, dict) else {"a": 1}["missing"])
    assert store.read("a").version == before
    store.delete("a", version=before)
    # A version does not come again.
    assert store.write("a", [1], version=ABSENT) > before
    with pytest.raises(ChangedError):
        store.delete("a", version=before)


def test_a_write_whose_answer_was_lost_has_succeeded_and_one_of_somebody_elses_has_not(
    bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Documents("gs://a-bucket/store")
    bucket.faults[:] = ["busy", "lost"]
    version = store.write("a", {"n": 1}, version=ABSENT)
    assert store.read("a").version == version
    # The same value by another hand is not ours.
    with pytest.raises(ChangedError):
        store.write("a", {"n": 1}, version=ABSENT)
    bucket.faults[:] = ["busy"] * 50
    with pytest.raises(OutageError, match=r"gs://a-bucket/store: it answers 503: busy; see that"):
        Documents("gs://a-bucket/store", patience_s=0.5).read("a")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    with pytest.raises(OutageError, match=r"it does not answer \(Connection refused\); see that this mach"):
        Documents("gs://a-bucket/store", patience_s=0.1).read("a")


def test_a_refusal_is_told_at_once_with_who_may_grant_it_and_a_rate_limit_passes(
    bucket: type[Bucket],
) -> None:
    store = Documents("gs://a-bucket/store")
    store.write("a", 1, version=ABSENT)
    bucket.faults[:] = ["rate limit", "rate limit"]
    assert store.read("a").value == 1
    bucket.faults[:] = ["rate limit"] * 50
    with pytest.raises(OutageError, match="it answers 403: slow down; see that this machine reaches"):
        Documents("gs://a-bucket/store", patience_s=0.5).read("a")
    bucket.faults[:] = ["forbidden", "forbidden"]
    with pytest.raises(
        DocumentsError, match=r"403: me may not; have roles/storage\.objectUser on a-b"
    ) as refused:
        store.read("a")
    assert exit_code_for(refused.value) == WRONG_REQUEST and bucket.faults == ["forbidden"], (
        "it was asked once"
    )
    bucket.faults.clear()


def test_what_is_no_document_and_no_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("torn")
    with pytest.raises(DocumentsError, match=r"a\.json has no version in its first line; remove it"):
        Documents(str(tmp_path)).read("a.json")
    (tmp_path / "b.json").write_text("5\n{")
    with pytest.raises(DocumentsError, match=r"b\.json is not JSON .*; remove it"):
        Documents(str(tmp_path)).read("b.json")
    with pytest.raises(DocumentsError, match=r"s3://x/y: only buckets of Cloud Storage"):
        Documents("s3://x/y")
    with pytest.raises(DocumentsError, match=r"cannot be written: File exists"):
        Documents(str(tmp_path / "a.json")).write("x", 1, version=ABSENT)
