"""What the dashboard's server answers, to whom, and what it never does."""

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backends.local.local_backend import local
from console.dashboard import dashboard_server
from contracts.errors import RequestError
from launch.jobs import CHECKOUT
from tests.console.dashboard.conftest import Serve
from tests.console.dashboard.run_directories import make_run, run_id


def ask(base: str, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(base.removeprefix("http://"), timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def told(base: str, path: str) -> Any:
    status, _, body = ask(base, path)
    assert status == 200, body
    return json.loads(body)


def test_every_page_forbids_what_is_not_of_this_server_and_other_names_of_it_are_refused(
    tmp_path: Path, serve: Serve
) -> None:
    run = make_run(tmp_path / "here", run_id(0))
    base = serve(tmp_path / "here")
    of_run = f"here/{run.name}"
    for path in (
        "/",
        f"/run/{of_run}",
        "/static/dashboard.js",
        "/static/report/charts.js",
        "/api/runs",
        "/api/run/here/none",
        "/no/such",
    ):
        _, headers, _ = ask(base, path)
        policy = headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        )
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
    for path in ("/", "/api/runs"):
        assert ask(base, path, Host="attacker.example:80")[0] == 400
        assert ask(base, path, Host="localhost:1234")[0] == 200
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert ask(base, path, method)[0] == 405


def test_paths_never_leave_a_run(tmp_path: Path, serve: Serve) -> None:
    folder = tmp_path / "here"
    run = make_run(folder, run_id(0))
    (tmp_path / "secret").write_text("the secret")
    (tmp_path / "secret.json").write_text('{"pictures": [], "the": "secret"}')
    for name, to in (
        ("samples.json", tmp_path / "secret.json"),
        ("logs/1", tmp_path),
        ("hosts", tmp_path),
    ):
        (run / name).symlink_to(to)
    (run / "logs" / "0" / "host-0.log").unlink()
    (run / "logs" / "0" / "host-0.log").symlink_to(tmp_path / "secret")
    (tmp_path / "host-0.log").write_text("the secret")
    base = serve(folder)
    of_run = f"/api/run/here/{run.name}"
    asked = [
        *(f"{of_run}/log?attempt={attempt}&host=0" for attempt in (0, 1, -1, "../0", "%2e%2e")),
        f"{of_run}/log?host=..%2F..%2Fsecret",
        *(f"{of_run}/{each}" for each in ("samples", "hosts/curves", "curves")),
        *(
            f"/api/run/here/{each}"
            for each in ("..", "%2e%2e", "..%2Fsecret", "%2e%2e%2f%2e%2e%2fsecret", "x%00")
        ),
        *(
            f"/static/{each}"
            for each in ("../server.py", "..%2fserver.py", "%2e%2e/server.py", "/etc/passwd")
        ),
        *(f"/run/here/{each}" for each in ("../../secret",)),
    ]
    for path in asked:
        status, _, body = ask(base, path)
        assert b"the secret" not in body and b"root:" not in body and b"import " not in body, path
        assert status < 500, (path, body)


def test_a_log_is_told_from_its_end_in_whole_lines_and_read_on_and_back_without_a_loss(
    tmp_path: Path, serve: Serve
) -> None:
    run = make_run(tmp_path / "here", run_id(0))
    path = run / "logs" / "0" / "host-1.log"
    lines = [f"line {number} \x1b[31mred\x1b[0m é\n" for number in range(10_000)]
    path.write_text("".join(lines))
    base = serve(tmp_path / "here")
    log = f"/api/run/here/{run.name}/log?host=1&"
    end = told(base, f"{log}offset=-65536")
    text, first, after = end["text"], end["offset"], end["next_offset"]
    assert text.startswith("line ") and text.endswith("line 9999 red é\n")
    while first > 0:
        piece = told(base, f"{log}offset={max(0, first - 65536)}&to={first}")
        text, first = piece["text"] + text, piece["offset"]
    assert next(line for line in text.splitlines() if "\ufffd" not in line) == "line 0 red é"
    assert text.count("\n") == 10_000
    with path.open("a") as file:
        file.write("whole\ntorn")
    assert told(base, f"{log}offset={after}")["text"] == "whole\n"
    assert "is not there" in told(base, f"/api/run/here/{run.name}/log?host=7")["error"]


def test_the_command_prints_its_address_says_what_port_is_taken_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    make_run(tmp_path / "here", run_id(0))
    places = f"{tmp_path / 'here'},{tmp_path / 'none'}"
    command = [str(Path(sys.executable).with_name("fab")), "dashboard", "--port", "0", "--runs", places]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with subprocess.Popen(
        command, cwd=CHECKOUT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as fab:
        assert fab.stdout is not None
        said = fab.stdout.readline()
        base = said.split()[-1].rstrip("/")
        found = told(base, "/api/runs")
        assert [each["key"] for each in found["places"]] == ["local", "local-2"]
        assert [each["id"] for each in found["runs"]] == [run_id(0)]
        port = int(base.rpartition(":")[2])
        with pytest.raises(
            RequestError, match=f"--port {port}: cannot be listened on .*Address already in use"
        ):
            dashboard_server.serve([local(1, "cpu", [0])], port=port)
        fab.send_signal(signal.SIGINT)
        _, errors = fab.communicate(timeout=20)
    assert (fab.returncode, errors) == (0, "")
