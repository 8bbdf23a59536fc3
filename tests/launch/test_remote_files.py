"""A bucket that cannot be used is told of soon, by name, with the reason. A server here takes Google's part."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google.auth
import google.auth.exceptions
import pytest

from jobs.runtime.storage.bucket_files import BucketFiles
from launch import remote_files
from launch.hosts import HostError
from launch.remote_files import Buckets, HostFiles, reach
from tests.launch.slices import MakeAgent
from tests.servers import Handler, serving

NoneFound: Callable[[str], Exception] = google.auth.exceptions.DefaultCredentialsError
Expired: Callable[[str], Exception] = google.auth.exceptions.RefreshError
NoWay: Callable[[str], Exception] = google.auth.exceptions.TransportError
SAID = "ann@example.com does not have storage.objects.list access."
KEY = "Bearer of-ann"


class Google(Handler):
    """Each bucket is named by how it answers: to all, and to those with a key."""

    def do_GET(self) -> None:
        bucket, _, name = self.path.partition("/b/")[2].partition("/o")
        anybody, known = {
            "public": (200, 200),
            "mine": (401, 200),
            "none": (404, 404),
            "theirs": (401, 403),
            "one-object": (401, 200 if name.startswith("/a%2Fb.txt") else 403),
            "busy": (503, 503),
            "hidden": (401, 404),
        }[bucket]
        status = known if self.headers["Authorization"] == KEY else anybody
        self.reply({"error": {"message": f"{SAID}\nMore."}}, status)


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(Google) as here:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{here}")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        yield here


class Ann:
    """Credentials; or what refreshing them comes to."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def refresh(self, request: object) -> None:
        if self._error:
            raise self._error

    def apply(self, headers: dict[str, str]) -> None:
        headers["Authorization"] = KEY


Log = Callable[[Ann | Exception], None]


@pytest.fixture
def logged_in(monkeypatch: pytest.MonkeyPatch) -> Log:
    def log_in(found: Ann | Exception) -> None:
        def default(scopes: object) -> tuple[Ann, None]:
            if isinstance(found, Exception):
                raise found
            return found, None

        monkeypatch.setattr(google.auth, "default", default)

    log_in(Ann())
    return log_in


def refused(url: str, **options: Any) -> HostError:
    with pytest.raises(HostError) as error:
        reach(url, **options)
    return error.value


def test_a_bucket_that_may_be_read_is_reached_with_credentials_or_without(logged_in: Log) -> None:
    reach("gs://mine/runs")
    reach("gs://one-object/a/b.txt", one_object=True)
    logged_in(NoneFound("none"))
    for url in ("gs://public/runs", "memory://whatever", "/a/path"):
        reach(url)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("gs://none/runs", "there is no bucket none"),
        ("gs://hidden/runs", "there is no bucket hidden"),
        ("gs://theirs/runs", f"no permission in the bucket theirs: {SAID}"),
        ("gs://one-object/a", f"no permission in the bucket one-object: {SAID}"),
        ("gs://busy/runs", f"ADDRESS answers 503: {SAID}"),
    ],
)
def test_it_is_said_what_is_wrong_with_which_bucket(
    logged_in: Log, address: str, url: str, reason: str
) -> None:
    error = refused(url, label=f"--data {url}", one_object=True)
    assert (error.host, error.reason) == (f"--data {url}", reason.replace("ADDRESS", address))
    assert error.remedy


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (NoneFound("File /k.json was not found. See more"), "the bucket mine is not public"),
        (
            Ann(Expired("invalid_grant: expired\n{}")),
            "Google refuses this machine's credentials (invalid_grant",
        ),
        (Ann(NoWay("no route")), "Google cannot be asked for a token (no route)"),
    ],
)
def test_missing_credentials_and_refused_ones_are_told_apart(
    logged_in: Log, found: Ann | Exception, reason: str
) -> None:
    logged_in(found)
    error = refused("gs://mine/runs")
    assert error.reason.startswith(reason)
    assert "gcloud auth application-default login" in error.remedy or "oauth2.googleapis.com" in error.remedy


@pytest.mark.parametrize(("path", "why"), [("refused", "Connection refused"), ("silent", "timed out")])
def test_without_a_network_it_is_the_network_that_is_named_soon(
    path: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "ANSWER_LIMIT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:  # which nobody answers at
        host = f"127.0.0.1:{server.getsockname()[1] if path == 'silent' else 9}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        error = refused("gs://mine/runs")
    assert error.reason == f"{host} cannot be reached from this machine ({why})"


def test_whoever_hangs_is_given_up_and_the_credentials_that_do_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_s = remote_files.REACH_LIMIT_S
    assert max(remote_files.ANSWER_LIMIT_S, remote_files.CREDENTIALS_LIMIT_S) < limit_s <= 13
    stop = threading.Event()
    monkeypatch.setattr(google.auth, "default", lambda scopes: stop.wait(60))
    monkeypatch.setattr(remote_files, "CREDENTIALS_LIMIT_S", 0.1)
    assert "this machine has no credentials" in refused("gs://mine/runs").reason
    monkeypatch.setattr(remote_files, "CREDENTIALS_LIMIT_S", 60.0)
    monkeypatch.setattr(remote_files, "REACH_LIMIT_S", 0.2)
    began_s = time.monotonic()
    assert refused("gs://mine/runs").reason == "no answer within 0 s"
    assert time.monotonic() - began_s < 5
    stop.set()


def test_what_the_driver_raises_names_the_bucket_and_its_own_tries_are_silent(
    logged_in: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("Bad Request: b/mine\nmore")

    monkeypatch.setattr(BucketFiles, "list", fail)
    with pytest.raises(HostError, match=r"^gs://mine/runs: ValueError: Bad Request: b/mine → check"):
        Buckets().list("gs://mine/runs")
    assert not logging.getLogger("gcsfs").isEnabledFor(logging.ERROR)
    with pytest.raises(HostError, match="^gs://none: there is no bucket none → "):
        Buckets().read(["gs://none/runs/r/run.json"])
    with pytest.raises(HostError, match=r"^nonsense://b/runs: ValueError: Protocol not known: nonsense"):
        Buckets().read_from("nonsense://b/runs", 0)


def test_a_bucket_is_asked_once_and_then_used_as_any_files_are(
    logged_in: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = []
    monkeypatch.setattr(remote_files, "reach", lambda url, asked: reached.append(asked))
    files = Buckets()
    for data in (b"one", b"two"):
        files.write("memory://launch-buckets/runs/r/file", data)
    assert files.read(["memory://launch-buckets/runs/r/file", "memory://launch-buckets/none"]) == [
        b"two",
        None,
    ]
    assert files.read_from("memory://launch-buckets/runs/r/file", -1) == (b"o", 2)
    assert files.list("memory://launch-buckets/runs") == ["r"]
    files.remove("memory://launch-buckets/runs/r/file")
    assert files.read([]) == [] and reached == ["memory://launch-buckets"]


class Reading:
    """An agent's answers to `read`, of a folder's real files; how often it was asked."""

    def __init__(self, limit_bytes: int) -> None:
        self.asked, self._limit = 0, limit_bytes

    def __call__(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        offsets = request["offsets"] or [0] * len(request["paths"])
        pairs = zip(request["paths"], offsets, strict=True)
        return {"files": [self._read(Path(path), offset) for path, offset in pairs]}

    def _read(self, path: Path, offset: int) -> dict[str, Any]:
        if not path.exists():
            return {"text": None, "offset": 0, "next_offset": 0, "size": 0}
        data = path.read_bytes()
        begin = max(0, len(data) + offset) if offset < 0 else min(offset, len(data))
        piece = data[begin : begin + self._limit]
        return {"text": piece.decode(), "offset": begin, "next_offset": begin + len(piece), "size": len(data)}


def test_several_files_are_read_in_one_journey_and_a_file_longer_than_an_answer_whole(
    make_agent: MakeAgent, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("one")
    (tmp_path / "c").write_text("zwölf")
    answer = Reading(100)
    paths = [str(tmp_path / name) for name in "abc"]
    assert HostFiles((make_agent(answer),)).read(paths) == [b"one", None, "zwölf".encode()]
    assert answer.asked == 1
    assert HostFiles((make_agent(answer),)).read([]) == []
    (tmp_path / "a").write_text("0123456789" * 10)
    files = HostFiles((make_agent(Reading(7)),))
    assert files.read(paths[:1]) == [b"0123456789" * 10]
    # From where a reader was, and from the beginning of a file that is shorter than that now.
    assert [files.read_from(paths[0], offset) for offset in (95, 36_000)] == [(b"56789", 95), (b"0123456", 0)]


def test_where_the_first_host_does_not_answer_the_next_is_asked(
    make_agent: MakeAgent, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("here")

    def gone(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        return {"ok": False, "error": {"message": "no route"}}

    silent, well = make_agent(gone, host="w-0"), make_agent(Reading(9), host="w-1")
    assert HostFiles((silent, well)).read([str(tmp_path / "a")]) == [b"here"]
    with pytest.raises(HostError, match="w-0: no route"):
        HostFiles((silent, silent)).list(str(tmp_path))
