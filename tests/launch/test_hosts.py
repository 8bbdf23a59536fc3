"""Hosts and their agents as the launcher sees them; a transport's commands are tested in `ssh/test_transport.py`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.hosts import (
    Agent,
    Completed,
    HostError,
    HostsError,
    LocalTransport,
    all_or_error,
    ask_all,
    copy_folder,
)


def test_a_copy_is_whole_under_its_name_or_what_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\x00\xff")
    (tmp_path / "file").chmod(0o750)
    (tmp_path / "tree/below").mkdir(parents=True)
    (tmp_path / "tree/below/file").write_text("x")
    (tmp_path / "tree/link").symlink_to("below/file")
    there, host = tmp_path / "there", LocalTransport()
    host.put(tmp_path / "file", str(there / "file"))
    host.put(tmp_path / "tree/below/file", str(there / "file"))
    host.get(str(tmp_path / "tree"), there / "tree")
    assert ((there / "file").read_text(), os.readlink(there / "tree/link")) == ("x", "below/file")
    for source, target in (("tree", "tree"), ("tree", "file"), ("missing", "file")):
        with pytest.raises((FileExistsError, FileNotFoundError)):
            host.put(tmp_path / source, str(there / target))
    assert sorted(os.listdir(there)) == ["file", "tree"]
    assert ((there / "file").read_text(), sorted(os.listdir(there / "tree"))) == ("x", ["below", "link"])


def test_what_cannot_be_copied_is_named_and_neither_a_device_nor_a_circle_of_links_is_read_for_ever(
    tmp_path: Path,
) -> None:
    tree = tmp_path / "tree"
    (tree / "a").mkdir(parents=True)
    odd = os.fsdecode(b"caf\xe9\n")
    (tree / "a" / odd).write_text("x")
    (tree / "link").symlink_to("a")
    (tree / "dangling").symlink_to("nowhere")
    host = LocalTransport()
    host.put(tree, str(tmp_path / "there"))
    assert (tmp_path / "there" / "a" / odd).read_text() == "x"
    assert os.readlink(tmp_path / "there" / "dangling") == "nowhere"
    with pytest.raises(OSError, match=r"^\[Errno 2\] No such file or directory: '.*/dangling'$"):
        copy_folder(tree, tmp_path / "followed", follow_links=True)
    (tree / "dangling").unlink()
    copy_folder(tree, tmp_path / "followed", follow_links=True)
    assert (tmp_path / "followed" / "link" / odd).read_text() == "x"
    for name in ("x", "y"):
        (tree / "a" / name).symlink_to("..")
    with pytest.raises(OSError, match=r"tree/a/[xy] is a link that leads in a circle$"):
        copy_folder(tree, tmp_path / "circle", follow_links=True)
    os.mkfifo(tree / "pipe")
    for source in (tree, tree / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match=r"^[^\[]* is neither a file nor a folder nor a link$"):
            host.put(source, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


MakeAgent = Callable[..., Agent]


def answered(make_agent: MakeAgent, answer: Any) -> str:
    def give(verb: str, request: dict[str, Any]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(HostError) as error:
        make_agent(give, host="w-3").ask("start", {}, timeout_s=7)
    return str(error.value)


def said(stdout: str, stderr: str = "", exit_code: int | None = 1) -> Completed:
    return Completed(exit_code=exit_code, stdout=stdout, stderr=stderr)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (OSError(2, "No such file"), "w-3: cannot run the agent: [Errno 2] No such file"),
        (said("", exit_code=None), "w-3: no answer to start within 7 s"),
        (said("", "a\nbash: python3: not found\n", 127), "(exit code 127): bash: python3: not found"),
        (said(""), "w-3: start was not answered by an agent (exit code 1): "),
        (said("5"), "w-3: start was not answered by an agent (exit code 1): 5"),
        (said("[]"), "w-3: start was not answered by an agent (exit code 1): []"),
        (said("welcome\n{}"), "w-3: start was not answered by an agent (exit code 1): {}"),
        ({"ok": False, "error": {"message": "m", "remedy": "r"}}, "w-3: m → r"),
        ({"ok": False, "error": {"message": "m", "remedy": None}}, "w-3: m"),
        ({"ok": False}, "w-3: unknown error"),
    ],
)
def test_what_is_no_good_answer_is_an_error_that_names_the_host(
    make_agent: MakeAgent, answer: Any, message: str
) -> None:
    assert message in answered(make_agent, answer)


def test_hosts_are_asked_all_at_once_in_their_order_and_one_hosts_error_hides_no_others(
    make_agent: MakeAgent,
) -> None:
    everyone = threading.Barrier(4)

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        everyone.wait(timeout=30)  # would break if one were asked after another
        error = {"message": f"reason {request['index']}", "remedy": "mend it"}
        return {"ok": request["index"] % 2 == 1, "error": error, "asked": (verb, request)}

    agents = [make_agent(give, host=f"w-{index}", root="/var/agent") for index in range(4)]
    answers = ask_all(agents, "status", [{"index": index} for index in range(4)])
    assert [answer["asked"] for answer in all_or_error("odd:", answers[1::2])] == [
        ["status", {"version": 1, "root": "/var/agent", "index": index}] for index in (1, 3)
    ]
    with pytest.raises(HostsError) as error:
        all_or_error("not started:", answers)
    assert str(error.value).splitlines() == [
        "not started:",
        "  w-0: reason 0 → mend it",
        "  w-2: reason 2 → mend it",
    ]
