"""A notebook server is there for this user alone: its token is on no command line, and nothing of it stays."""

import concurrent.futures
import contextlib
import dataclasses
import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.local.local_backend import local
from console.hosts import notebook
from launch.hosts import HostError
from launch.targets import PYTHON, Target
from tests.processes import all_end

Captured = pytest.CaptureFixture[str]

STAND_IN = """
import http.server, json, os, sys
options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:] if "=" in word)
token = os.environ["JUPYTER_TOKEN"]
with open(os.environ["NOTED"], "w") as file:
    json.dump({"pid": os.getpid(), "argv": sys.argv, "environ": token}, file)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api" or f"token={token}" in self.path else 403)
        self.end_headers()
    def log_message(self, *words):
        pass
address = (options["ServerApp.ip"], int(options["ServerApp.port"]))
http.server.HTTPServer(address, Handler).serve_forever()
"""


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a stand-in server `fakelab` on the path, and one that ends; what the first was told is noted."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/fakelab.py").write_text(STAND_IN)
    (tmp_path / "modules/brokenlab.py").write_text(
        "print('first'); raise SystemExit('no space \\x1b[2J left')"
    )
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    return tmp_path / "noted"


@pytest.fixture
def target() -> Target:
    return local(1, "cpu", [0])


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Calls a function when the server is up, and then is the user's Ctrl-C."""

    def set_up(look: Callable[[], None]) -> None:
        real = concurrent.futures.wait

        def wait(futures: Any, timeout: float, **named: Any) -> object:
            if timeout == 1.0:
                look()
                raise KeyboardInterrupt
            return real(futures, timeout=timeout, **named)

        monkeypatch.setattr("concurrent.futures.wait", wait)

    yield set_up


def command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


def test_the_server_answers_at_the_address_printed_until_it_is_interrupted(
    target: Target, noted: Path, capsys: Captured, interrupt: Callable[[Callable[[], None]], None]
) -> None:
    seen: dict[str, Any] = {}

    def look() -> None:
        seen["url"] = url = capsys.readouterr().out.splitlines()[1]
        seen["answer"] = urllib.request.urlopen(url, timeout=10).status
        pid = json.loads(noted.read_text())["pid"]
        seen["commands"] = list(command_lines())
        seen["pid"] = pid

    interrupt(look)
    with pytest.raises(KeyboardInterrupt):
        notebook.serve(target, "fakelab", browser=False)
    told = json.loads(noted.read_text())
    assert seen["url"] == f"http://127.0.0.1:{told['argv'][3].split('=')[1]}/lab?token={told['environ']}"
    assert seen["answer"] == 200
    assert len(told["environ"]) >= 40
    assert not any(told["environ"].encode() in command for command in seen["commands"])
    assert "--ServerApp.ip=127.0.0.1" in told["argv"]
    assert all_end([seen["pid"]])
    assert list((noted.parent / "tmp").iterdir()) == []


def test_a_server_that_cannot_be_started_is_told_with_the_reason_and_the_remedy(
    target: Target, noted: Path
) -> None:
    def refused(module: str, **changed: Any) -> HostError:
        with pytest.raises(HostError) as raised:
            notebook.serve(dataclasses.replace(target, **changed), module, browser=False)
        return raised.value

    missing = refused("nolab")
    assert missing.reason == f"{sys.executable} has no module nolab"
    assert missing.remedy.startswith(f"`fab run --hosts 0 --command '{sys.executable} -m pip install nolab'`")
    # What `fab deploy` makes has no pip, and uv beside it.
    base = "~/.local/share/tpu-stack"
    assert f"{base}/venv/bin/python" == PYTHON
    assert notebook.installation(PYTHON, "x") == f"{base}/uv/bin/uv pip install --python {PYTHON} x"
    broken = refused("brokenlab")
    assert "brokenlab has ended with exit code 1" in broken.reason
    assert broken.reason.splitlines()[-1].strip() == "no space ␛[2J left"
    nowhere = refused("fakelab", python="~/no/python")
    assert "did not start with exit code 127" in nowhere.reason
    assert nowhere.remedy.startswith("`fab deploy` makes ~/no/python")


def test_a_server_that_never_answers_is_ended_after_its_time(
    target: Target, noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = noted.parent / "modules/silentlab.py"
    module.write_text(
        "import os, time; open(os.environ['NOTED'], 'w').write(str(os.getpid())); time.sleep(600)"
    )
    monkeypatch.setattr(notebook, "START_LIMIT_S", 1.5)
    with pytest.raises(HostError, match="silentlab does not answer after 2 s"):
        notebook.serve(target, "silentlab", browser=False)
    assert all_end([int(noted.read_text())])
