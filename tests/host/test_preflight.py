"""A preflight finds everything that would keep a job from starting here, and says what to do about it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from host.agent.host_facts import agent_sha256
from host.agent.preflight import check_peers, check_python
from host.agent.proc import parse_listeners


def test_a_host_in_order_passes_every_check_and_tells_its_facts(host: Any) -> None:
    response = host.response(port=free_port())
    assert [check for check in response["checks"] if not check["ok"]] == []
    names = [check["name"] for check in response["checks"]]
    assert names == ["python", "root", "run_dir", "cache_dir", "disk", "port", "clock", "device"]
    facts = response["facts"]
    assert facts["hostname"] == socket.gethostname()
    assert facts["cpus"] == len(os.sched_getaffinity(0))
    assert facts["memory_bytes"] > 2**27
    assert facts["agent_sha256"] == agent_sha256()
    assert len(set(facts["free_ports"])) == 2
    assert (facts["home"], facts["docker"]) == (str(Path.home()), shutil.which("docker") is not None)
    assert facts["user"] and facts["kernel"] == os.uname().release
    assert facts["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert facts["bundle_present"] is False
    assert list(facts["free_bytes"]) == [str(host.agent.root)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


def test_missing_modules_are_named(host: Any) -> None:
    ok, message = host.finding("python", modules=["json", "no_such_a", "no_such.b"])
    assert not ok
    assert "lacks no_such_a, no_such.b" in message


def test_an_interpreter_that_is_missing_old_or_none_at_all_is_named(host: Any) -> None:
    assert "/no/python: no such interpreter" in host.finding("python", python="/no/python")[1]
    ok, message = host.finding("python", python="true")
    assert not ok and "no working Python" in message
    if host.agent.python != sys.executable:
        ok, message = host.finding("python", python=host.agent.python)
        assert not ok and "needs 3.12" in message


def test_an_interpreter_that_hangs_is_given_up(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    finding = check_python(str(program), [], timeout_s=0.2)()
    assert not finding["ok"]
    assert "did not answer" in finding["message"]


def test_a_taken_port_names_who_has_it(host: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ok, message = host.finding("port", port=port)
    assert not ok
    assert f"port {port} is taken by pid {os.getpid()}" in message
    assert host.finding("port", port=port)[0]


def test_a_listener_is_found_in_the_kernel_s_table() -> None:
    header = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
    )
    row = (
        "   {0}: 0100007F:1F90 00000000:0000 {1} 00000000:00000000 00:00000000 00000000     0        0 {2} 1"
    )
    text = "\n".join([header, row.format(0, "0A", 11), row.format(1, "01", 12)])
    assert parse_listeners(text, 8080) == ["socket:[11]"]
    assert parse_listeners(text, 8081) == []


@pytest.mark.parametrize("offset_s", [-60, 60])
def test_a_clock_that_is_off_is_told_with_its_offset(host: Any, offset_s: float) -> None:
    ok, message = host.finding("clock", time=time.time() - offset_s)
    assert not ok
    assert abs(float(message.split()[3]) - offset_s) < 5


def test_what_an_earlier_run_left_alive_is_named_where_the_host_is_to_be_alone(host: Any) -> None:
    assert host.finding("leftovers", alone=True)[0]
    started = host.agent.start_and_hear(
        'import subprocess; subprocess.Popen(["sleep", "600"]); say("up"); live()'
    )
    assert "leftovers" not in [check["name"] for check in host.response()["checks"]]
    (found,) = [check for check in host.response(alone=True)["checks"] if check["name"] == "leftovers"]
    assert not found["ok"]
    assert f"run-1 is still alive here: pid {started['pid']} (" in found["message"]
    assert " s and 1 more" in found["message"]
    assert found["remedy"] == "`fab stop --run run-1`"
    host.agent("stop", run_id="run-1", grace_s=0)
    assert host.finding("leftovers", alone=True)[0]


def test_another_agent_s_runs_are_no_leftovers_of_this_one(host: Any, tmp_path: Path) -> None:
    host.agent.start_and_hear('say("up"); live()')
    elsewhere = str(tmp_path / "elsewhere")
    checks = host.response(alone=True, root=elsewhere)["checks"]
    assert [check["ok"] for check in checks if check["name"] == "leftovers"] == [True]


def test_a_peer_that_cannot_be_reached_is_named_with_its_address(host: Any) -> None:
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        there.listen()
        good = {"name": "host-1", "host": "127.0.0.1", "port": there.getsockname()[1]}
        assert host.finding("peers", peers=[good]) == (True, "reaches all of 1 peers")
        gone = {"name": "host-2", "host": "127.0.0.1", "port": free_port()}
        ok, message = host.finding("peers", peers=[good, gone])
    assert (ok, message) == (False, f"cannot reach host-2 (127.0.0.1:{gone['port']}): Connection refused")
    assert "peers" not in [check["name"] for check in host.response(peers=[])["checks"]]


def test_a_peer_that_is_silent_is_not_waited_for_longer_than_the_limit() -> None:
    with contextlib.ExitStack() as open_sockets:
        silent = open_sockets.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(4):  # its queue is full: the kernel answers nobody any more
            waiting = open_sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        peer = {"name": "host-3", "host": "127.0.0.1", "port": silent.getsockname()[1]}
        before = time.monotonic()
        (finding,) = check_peers([peer], timeout_s=0.3)
    assert time.monotonic() - before < 3
    assert "no answer within 0.3 s" in finding["message"]


def test_the_remedy_for_an_interpreter_is_the_launcher_s_where_it_has_one(host: Any) -> None:
    (found,) = [
        check
        for check in host.response(python="/no/python", python_remedy="`fab deploy`")["checks"]
        if not check["ok"]
    ]
    assert found["remedy"] == "`fab deploy`"


def test_a_bundle_that_is_there_is_said_to_be(host: Any) -> None:
    (host.agent.root / "bundles" / ("a" * 64)).mkdir(parents=True)
    assert host.response(bundle="a" * 64)["facts"]["bundle_present"] is True
    assert host.response(bundle="b" * 64)["facts"]["bundle_present"] is False


def test_what_a_host_describes_of_itself_is_texts_and_of_settings_the_names_alone(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_SECRET_SETTING", "s3cret-value")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    found = host.agent("describe")["found"]
    assert all(isinstance(each, str) and each for each in found.values())
    assert f"user {os.getuid()}, group {os.getgid()}" in found["ids"]
    assert "memlock " in found["limits"] and "none of /dev/accel*" in found["device nodes"]
    assert found["guest attributes"].startswith("no metadata server answers")
    assert "TPU_SECRET_SETTING" in found["settings in the environment"].split(", ")
    assert "s3cret-value" not in str(found)


def test_of_what_an_instance_publishes_the_names_are_told_and_no_value(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = {"hostkeys": {"ssh-ed25519": "AAAA"}, "tpu-stack": {"ready": "yes"}}
    told = {"startup-script": "s3cret", "agent-worker-number": "3"}

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(guest if "guest-attributes" in self.path else told).encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        found = host.agent("describe")["found"]
        server.shutdown()
        thread.join()
    assert found["guest attributes"] == "hostkeys/ssh-ed25519, tpu-stack/ready"
    assert found["instance attributes"] == "agent-worker-number, startup-script"
    assert (found["agent-worker-number"], found["accelerator-type"]) == ("3", "none")
    assert "s3cret" not in str(found) and "AAAA" not in str(found)
