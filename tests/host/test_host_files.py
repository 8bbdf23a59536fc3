"""Files of a host are read in pieces that fit together, written whole or not at all, and removed without surprises."""

import base64
import hashlib
import io
import json
import os
import signal
import subprocess
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.agent.storage import host_files, staged_bundles
from launch import remote_files
from launch.hosts import Agent
from launch.remote_files import HostFiles
from tests.host.conftest import ONE
from tests.infra.bucket import Bucket, served
from tests.processes import is_alive
from tests.servers import Handler, serving

TEXTS = st.text(st.sampled_from("aø€😀\n"), max_size=60)


@settings(max_examples=40)
@given(text=st.text(max_size=200), limit=st.integers(4, 50))
def test_the_slices_of_a_text_are_the_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, limit: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "slices"
    path.write_bytes(text.encode(errors="ignore"))
    found, offset = "", 0
    while (piece := host_files.read_piece(str(path), offset, limit))["text"]:
        found += piece["text"]
        offset = piece["next_offset"]
    assert found == text.encode(errors="ignore").decode()
    assert offset == piece["size"]


def test_files_are_read_together_each_from_its_offset(agent: Any, tmp_path: Path) -> None:
    contents = {"a": b"first", "b": b"second", "cut": "loss é".encode()[:-1], "wide": "xää€".encode()}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)

    def read(*names: str, **fields: Any) -> list[dict[str, Any]]:
        paths = [str(tmp_path / name) for name in names]
        return list(agent("read", paths=paths, **{"limit_bytes": 100, **fields})["files"])

    assert [each["text"] for each in read("a", "no", "b", "a/below")] == ["first", None, "second", None]
    from_the_end = {"text": "rst", "offset": 2, "next_offset": 5, "size": 5}
    past_the_end = {"text": "", "offset": 6, "next_offset": 6, "size": 6}
    assert read("a", "b", offsets=[-3, 9]) == [from_the_end, past_the_end]
    # The end begins with a whole character; one whose rest is not written yet waits.
    assert read("wide", offsets=[-4]) == [{"text": "€", "offset": 5, "next_offset": 8, "size": 8}]
    assert read("cut") == [{"text": "loss ", "offset": 0, "next_offset": 5, "size": 6}]
    (tmp_path / "large").write_bytes(b"x" * (9 << 20))
    long = read("large", "large", "large", limit_bytes=16 << 20)
    assert [len(each["text"]) >> 20 for each in long] == [9, 7, 0]


def test_what_cannot_be_read_is_refused_and_not_waited_for(agent: Any, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in (f"{tmp_path}/folder", f"{tmp_path}/pipe"):
        assert f"{path} is not a file" in agent.refusal("read", paths=[path], limit_bytes=100)
    assert "2 paths and 1 offsets" in agent.refusal("read", paths=["/a", "/b"], offsets=[0], limit_bytes=9)


def test_a_file_is_written_whole_and_removed_as_often_as_asked(agent: Any, tmp_path: Path) -> None:
    folder, text = tmp_path / "new" / "deeper", "a\r\n\0 $(ls) '\" ä\n"
    agent("write", path=str(folder / "a"), text="before")
    agent("write", path=str(folder / "a"), text=text)
    assert (folder / "a").read_bytes() == text.encode()
    assert agent("list", path=str(folder))["names"] == ["a"]
    (folder / "link").symlink_to("/etc")
    assert "not empty" in agent.refusal("remove", path=str(folder))
    for path in [folder / "a", folder / "link", folder, folder, folder / "a"]:
        agent("remove", path=str(path))
    assert not folder.exists() and Path("/etc").is_dir()
    assert agent("list", path=str(folder))["names"] == []


def test_a_folder_is_removed_with_all_in_it_and_never_what_its_links_lead_to(
    agent: Any, tmp_path: Path
) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    for path in (run / "checkpoints" / "5" / "state", run / "run.json", outside / "data"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("12345")
    (run / "data").symlink_to(outside)
    (run / "file").symlink_to(outside / "data")
    (tmp_path / "link").symlink_to(run)
    assert agent("folder_bytes", path=str(run))["bytes"] == 10 + len(f"{outside}/data")
    agent("remove_folder", path=str(tmp_path / "link"), first="run.json")
    assert (run / "run.json").exists() and not (tmp_path / "link").is_symlink()
    for _ in range(2):
        agent("remove_folder", path=str(run), first="run.json")
    assert [path.name for path in tmp_path.iterdir() if path.name in ("run", "outside")] == ["outside"]
    assert (outside / "data").read_text() == "12345"


def test_a_full_disk_leaves_the_old_file_and_no_half_bundle(agent: Any, small_disk: Path) -> None:
    agent("write", path=str(small_disk / "a"), text="old")
    assert "No space left" in agent.refusal("write", path=str(small_disk / "a"), text="x" * (1 << 20))
    assert [path.name for path in small_disk.iterdir()] == ["a"]
    assert (small_disk / "a").read_text() == "old"
    agent.root = small_disk / "agent"
    request = staging(archive_of(plain("large", bytes(2 << 20))))
    assert "No space left" in agent.refusal("stage", **request)
    assert list((agent.root / "bundles").iterdir()) == []
    assert agent("stage", sha256=request["sha256"], archive_base64=None)["present"] is False


def pieces(data: bytes, limit: int, ended: bool) -> list[bytes]:
    found = []
    while piece := host_files.whole_lines(data[: limit + 1], limit, ended):
        found.append(piece)
        data = data[len(piece) :]
    return found


@given(TEXTS, st.binary(max_size=40), st.integers(4, 20))
def test_the_pieces_of_a_log_are_whole_lines_and_characters(text: str, other: bytes, limit: int) -> None:
    found = pieces(text.encode(), limit, ended=True)
    assert "".join(piece.decode() for piece in found) == text
    assert all(len(piece) <= limit for piece in found)
    for piece in pieces(text.encode(), limit, ended=False):
        assert piece.endswith(b"\n") or (b"\n" not in piece and len(piece) > limit - 4)
    assert b"".join(pieces(other, limit, ended=True)) == other


def test_a_log_is_read_on_and_an_unfinished_line_waits_for_its_end(agent: Any) -> None:
    text = "".join(f"linje {n} på €\n" for n in range(20))
    say = "sys.stdout.reconfigure(encoding='utf-8'); sys.stdout.write({!r}); sys.stdout.flush(); live()"
    started = agent.start_and_hear(say.format(text + "en till"))
    offset, read, size = 0, "", len(text.encode())
    while offset < size:
        piece = agent("logs", **ONE, offset=offset, limit_bytes=100)
        assert piece["text"].endswith("\n") and not piece["ended"]
        read, offset = read + piece["text"], piece["next_offset"]
    assert (read, offset) == (text, size)
    os.kill(started["pid"], signal.SIGKILL)
    agent.ended()
    piece = agent("logs", **ONE, offset=offset, limit_bytes=100)
    assert (piece["text"], piece["size"], piece["ended"]) == ("en till", size + 7, True)
    last = agent("logs", **ONE, offset=-27, limit_bytes=100)  # the end begins with the line it falls into
    assert (last["text"], last["next_offset"]) == ("linje 18 på €\nlinje 19 på €\nen till", size + 7)
    assert agent("logs", **ONE, offset=9999, limit_bytes=10)["next_offset"] == size + 7
    (agent.run_dir / "logs/0/host-0.log").unlink()
    assert agent("logs", **ONE, offset=0, limit_bytes=10)["size"] == 0


def test_a_process_that_can_gives_its_stacks_anew_each_time_and_others_are_not_asked(agent: Any) -> None:
    assert "was never started" in agent.refusal("logs", **ONE, offset=0, limit_bytes=10)
    started = agent.start_and_hear('say("up"); live()')
    assert "no SIGUSR1 handler" in agent.refusal("stacks", **ONE, timeout_s=1)
    assert is_alive(started["pid"])
    agent.start_and_hear('signal.signal(signal.SIGUSR1, lambda *_: None); say("up"); live()', attempt=1)
    assert "did not answer" in agent.refusal("stacks", **{**ONE, "attempt": 1}, timeout_s=0.3)
    answers = """
import faulthandler
file = open(os.environ["RUN_CONTROL_DIR"] + "/stacks.txt", "w")
faulthandler.register(signal.SIGUSR1, file=file)
say("up")
live()
"""
    agent.start_and_hear(answers, attempt=2)
    for _ in range(2):
        found = agent("stacks", **{**ONE, "attempt": 2}, timeout_s=10)
        assert found["text"].count("most recent call first") == 1


@pytest.mark.parametrize("own_command", [True, False])
def test_where_py_spy_is_denied_a_job_writes_its_stacks_itself_and_an_own_command_is_not_signalled(
    agent: Any, own_command: bool
) -> None:
    program = b"#!/bin/sh\necho 'Permission Denied: Try running again' >&2\nexit 1\n"
    member = tarfile.TarInfo("py-spy")
    member.size, member.mode = len(program), 0o755
    archive = archive_of((member, program))
    sha256 = hashlib.sha256(archive).hexdigest()
    agent("stage", sha256=sha256, archive_base64=base64.b64encode(archive).decode())
    answers = """
import faulthandler
file = open(os.environ["RUN_CONTROL_DIR"] + "/stacks.txt", "w")
faulthandler.register(signal.SIGUSR1, file=file)
say("up")
live()
"""
    agent.start_and_hear(answers)
    asked = {**ONE, "timeout_s": 10, "py_spy": sha256, "own_command": own_command}
    if own_command:
        assert "Permission Denied" in agent.refusal("stacks", **asked)
        assert not (agent.state_dir() / "stacks.txt").read_text()
        return
    answer = agent("stacks", **asked)
    assert answer["text"].count("most recent call first") == 1
    assert answer["note"].startswith("Permission Denied")


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def plain(name: str, content: bytes = b"x", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    return member, content


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


def staging(archive: bytes) -> dict[str, str]:
    sha256 = hashlib.sha256(archive).hexdigest()
    return {"sha256": sha256, "archive_base64": base64.b64encode(archive).decode()}


def test_a_bundle_is_unpacked_once_and_then_found(agent: Any) -> None:
    many = (plain(f"file-{n}", bytes(2000)) for n in range(300))
    members = plain("jobs/a.py", b"print(1)\n"), plain("run.sh", b"#!/bin/sh\n", 0o755), *many
    request = staging(archive_of(*members))
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = agent.root / "bundles" / f".{request['sha256']}.{ended.pid}"
    left.mkdir(parents=True)  # by an unpacking that was killed
    asked = agent("stage", sha256=request["sha256"], archive_base64=None)
    assert (asked["present"], asked["sent"]) == (False, False)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: agent("stage", **request), range(4)))
    assert [answer["present"] for answer in answers] == [True] * 4
    assert sum(answer["sent"] for answer in answers) == 1
    path = agent.root / "bundles" / request["sha256"]
    assert {answer["path"] for answer in answers} == {str(path)}
    assert (path / "jobs/a.py").read_text() == "print(1)\n"
    assert (path / "run.sh").stat().st_mode & 0o777 == 0o755
    assert len(list(path.iterdir())) == 302
    assert [path.name for path in (agent.root / "bundles").iterdir()] == [request["sha256"]]


def test_a_bundle_on_a_share_is_unpacked_from_there_by_each_host_and_asked_for_where_it_is_not_seen(
    agent: Any, tmp_path: Path
) -> None:
    request = staging(archive_of(plain("a.py", b"print(1)\n")))
    share = tmp_path / "a.tar.gz.base64"
    on_share = {"sha256": request["sha256"], "archive_path": str(share)}
    assert agent("stage", **on_share)["present"] is False
    share.write_text(request["archive_base64"])
    assert agent("stage", **on_share)["sent"] is True
    assert agent("stage", **on_share)["sent"] is False
    assert (agent.root / "bundles" / request["sha256"] / "a.py").read_text() == "print(1)\n"


def test_a_torn_archive_or_one_of_more_than_plain_files_is_refused_and_gone(agent: Any) -> None:
    for member in (
        plain("/etc/x"),
        plain("a/../../x"),
        special("link", tarfile.SYMTYPE, "/etc"),
        special("hard", tarfile.LNKTYPE, "good"),
        special("pipe", tarfile.FIFOTYPE),
        special("device", tarfile.CHRTYPE),
    ):
        message = agent.refusal("stage", **staging(archive_of(plain("good"), member)))
        assert repr(member[0].name) in message
    whole = archive_of(*(plain(f"{n}", hashlib.sha512(b"%d" % n).digest() * 99) for n in range(9)))
    for cut in (10, 100, -9):
        agent.refusal("stage", **staging(whole[:cut]))
    agent.refusal("stage", **{**staging(whole), "sha256": "0" * 64})
    agent.refusal("stage", **{**staging(whole), "archive_base64": "not base64!"})
    agent.refusal("stage", **staging(b"not an archive"))
    assert list((agent.root / "bundles").iterdir()) == []
    assert agent("stage", **staging(whole))["sent"] is True


def test_a_stage_that_was_killed_can_be_done_again_and_leaves_no_rest(agent: Any) -> None:
    request = staging(archive_of(*(plain(f"file-{n}") for n in range(500))))
    agent.killed("stage", request, 0.1)
    assert agent("stage", **request)["present"] is True
    assert [path.name for path in (agent.root / "bundles").iterdir()] == [request["sha256"]]
    assert len(list((agent.root / "bundles" / request["sha256"]).iterdir())) == 500


def test_a_large_bundle_comes_in_pieces_also_from_two_launches_at_once(agent: Any) -> None:
    archive = archive_of(*(plain(f"{n}", hashlib.sha512(b"%d" % n).digest() * 99) for n in range(9)))
    sha256, size = hashlib.sha256(archive).hexdigest(), 300

    def sent(offset: int) -> dict[str, Any]:
        piece = base64.b64encode(archive[offset : offset + size]).decode()
        fields = {"archive_base64": piece, "offset": offset, "size_bytes": len(archive)}
        return dict(agent("stage", sha256=sha256, **fields))

    offsets = range(0, len(archive), size)
    for offset in (*offsets[:2], *offsets[:-1]):
        assert sent(offset)["present"] is False
    assert sent(offsets[-1])["sent"] is True
    assert (sent(offsets[0])["present"], sent(offsets[-1])["sent"]) == (True, False)  # of the slower launch
    assert [path.name for path in (agent.root / "bundles").iterdir()] == [sha256]
    wrong = {"archive_base64": "AAAA", "offset": 300, "size_bytes": 303}
    assert "sha256 is" in agent.refusal("stage", sha256="0" * 64, **wrong)
    assert [path.name for path in (agent.root / "bundles").iterdir()] == [sha256]


def test_a_bundle_in_the_bucket_is_fetched_by_the_host_and_a_refusal_is_told(
    any_agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = staging(archive_of(plain("a.py", b"print(1)\n")))
    asked = {"sha256": request["sha256"], "archive_path": "gs://runs/.packages/a b.base64"}
    with served() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        answer = any_agent("stage", **asked)
        assert answer["present"] is False
        assert answer["problem"] == "gs://runs/.packages/a b.base64: HTTP Error 404: Not Found"
        Bucket.objects[".packages/a b.base64"] = (1, request["archive_base64"].encode(), None)
        assert any_agent("stage", **asked)["sent"] is True
    assert (any_agent.root / "bundles" / request["sha256"] / "a.py").read_text() == "print(1)\n"


def test_an_object_is_read_with_the_token_of_the_hosts_own_account(monkeypatch: pytest.MonkeyPatch) -> None:
    class Google(Handler):
        def do_GET(self) -> None:
            if self.path == "/computeMetadata/v1/instance/service-accounts/default/token":
                self.reply({"access_token": "ya29.token", "expires_in": 3599, "token_type": "Bearer"})
            else:
                self.reply({"path": self.path, "authorization": self.headers["Authorization"]})

    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    with pytest.raises(OSError, match="no metadata server answers"), staged_bundles.opened("gs://runs/x"):
        pass
    with serving(Google) as address:
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        monkeypatch.setattr(staged_bundles, "GOOGLE", f"http://{address}")
        with staged_bundles.opened("gs://runs/.packages/a b") as file:
            request = json.loads(file.read())
    assert request == {
        "path": "/storage/v1/b/runs/o/.packages%2Fa%20b?alt=media",
        "authorization": "Bearer ya29.token",
    }


def test_bundles_that_no_run_of_the_host_uses_are_removed_after_two_weeks(agent: Any) -> None:
    old, of_run, new = (staging(archive_of(plain(name))) for name in ("old", "of-run", "new"))
    for request in (old, of_run):
        agent("stage", **request)
    agent.start_and_hear("say('up')\nlive()")
    month_ago = time.time() - 30 * 86400
    for place, age_s in (("bundles/" + of_run["sha256"], 60), ("bundles/" + old["sha256"], 3 * 86400)):
        os.utime(agent.root / place, (month_ago - age_s,) * 2)
    os.utime(agent.root / "runs" / "run-1" / "0-0.lock", (month_ago,) * 2)
    agent("stage", **new)
    assert {path.name for path in (agent.root / "bundles").iterdir()} == {of_run["sha256"], new["sha256"]}
    agent.stop()
    agent("stage", sha256=new["sha256"], archive_base64=None)
    agent("stage", **staging(archive_of(plain("newer"))))
    assert not (agent.root / "bundles" / of_run["sha256"]).exists()


def test_a_file_in_pieces_is_there_when_it_is_whole(agent: Any, tmp_path: Path) -> None:
    class Here:
        def ask(self, verb: str, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
            del timeout_s
            return dict(agent(verb, **request))

    files = HostFiles((cast(Agent, Here()),))
    text = "zwölf Boxkämpfer " * 20
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(remote_files, "PIECE_BYTES", 50)
        files.write(str(tmp_path / "share" / "a"), text.encode())
    assert {path.name: path.read_text() for path in (tmp_path / "share").iterdir()} == {"a": text}
