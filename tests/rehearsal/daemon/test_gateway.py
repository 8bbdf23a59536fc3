"""What stands for the gateway of a rehearsal and for its bucket: a timer, power that goes, objects that are there."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rehearsal.daemon import gateway
from rehearsal.daemon.gateway import Gateway
from rehearsal.gcp_stand_in import bucket_server
from rehearsal.gcp_stand_in.world import WorldError
from tests.rehearsal.waiting import until

LIMIT_S = 20.0


def test_a_pass_follows_the_other_and_a_gateway_without_power_has_killed_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = "import os, time; print(os.getpid(), flush=True); os.path.exists(os.environ['HANG']) and time.sleep(60)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    monkeypatch.setattr(gateway, "COMMAND", (sys.executable, "-c", script))
    log, hang = tmp_path / "log", tmp_path / "hang"
    made = Gateway(environ=lambda: {**os.environ, "HANG": str(hang)}, log=log, period_s=0.01)
    assert not made.is_on
    made.power_on()
    made.power_on()
    until(lambda: log.exists() and len(log.read_text().split()) > 2, LIMIT_S)
    before = len(log.read_text().split())
    hang.touch()
    until(lambda: len(log.read_text().split()) > before, LIMIT_S)
    made.power_off()
    last = int(log.read_text().split()[-1])
    until(
        lambda: not Path(f"/proc/{last}").exists() or "Z" in Path(f"/proc/{last}/stat").read_text(), LIMIT_S
    )
    said = log.read_text()
    assert not made.is_on
    hang.unlink()
    made.power_on()
    until(lambda: log.read_text() != said, LIMIT_S)
    made.power_off()


class Server(http.server.BaseHTTPRequestHandler):
    asked: list[tuple[str, str, bytes]]

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.asked.append((self.command, urllib.parse.unquote(self.path), data))
        status = 409 if "b?project" in self.path else 500 if "broken" in self.path else 200
        self.send_response(404 if self.command == "DELETE" else status)
        self.send_header("content-length", "0")
        self.end_headers()

    do_DELETE = do_POST

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, bytes]]]:
    monkeypatch.setattr(Server, "asked", [], raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv(bucket_server.SERVER, f"http://127.0.0.1:{server.server_port}")
        yield Server.asked
        server.shutdown()
        thread.join()


def test_an_object_of_the_program_is_in_the_bucket_and_the_keepers_description_says_what_hosts_are(
    asked: list[tuple[str, str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(bucket_server.HOSTS, json.dumps({"platform": "cpu"}))
    bucket_server.write(bucket_server.BUCKET, {"name": "b"})  # 409: it is there
    inputs = {"bucket": "b", "name": bucket_server.DESCRIPTION, "content": '{"project": "p"}'}
    bucket_server.write(bucket_server.OBJECT, inputs)
    bucket_server.remove(bucket_server.OBJECT, inputs)  # 404: it is gone
    bucket_server.remove(bucket_server.BUCKET, {"name": "b"})
    (_, made, _), (_, place, data), (method, gone, _) = asked
    assert made.startswith("/storage/v1/b?") and place.endswith(
        "/b/b/o?uploadType=media&name=control/stack.json"
    )
    assert json.loads(data) == {"project": "p", "platform": "cpu"}
    assert (method, gone) == ("DELETE", "/storage/v1/b/b/o/control/stack.json")
    with pytest.raises(WorldError, match="Error 500"):
        bucket_server.write(bucket_server.OBJECT, {"bucket": "broken", "name": "x", "content": ""})
    monkeypatch.delenv(bucket_server.SERVER)
    bucket_server.write(bucket_server.BUCKET, {"name": "b"})
    assert len(asked) == 4
