"""What a supervisor says of a run whose directory is a bucket goes there from a container of the job's own image."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
# Stands for jobs.runtime.deliver, whose libraries the small image lacks: says to a socket what it was given and sees.
DELIVER = """
import json, os, socket, sys
asked = json.load(sys.stdin)
log = [open(each["path"]).read() for each in asked["files"] if "path" in each]
said = {"url": sys.argv[1], "files": [each["name"] for each in asked["files"]], "log": log, "uid": os.getuid(),
        "token": os.environ["RUN_TOKEN"], "controlled": "RUN_CONTROL_DIR" in os.environ}
with socket.create_connection(("127.0.0.1", int(os.environ["RUN_PORT"]))) as to:
    to.sendall(json.dumps(said).encode())
"""


def test_the_end_of_a_run_in_a_bucket_is_delivered_from_a_container(boxed: Any, tmp_path: Path) -> None:
    runtime = tmp_path / "code/jobs/runtime"
    runtime.mkdir(parents=True)
    (runtime / "deliver.py").write_text(DELIVER)
    log = tmp_path / "logs" / "host-0.log"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        request = boxed.start_request(
            'say("up"); sys.exit(3)',
            run_dir=None,
            log_path=str(log),
            num_processes=1,
            boxed={"mounts": [str(tmp_path)], "read_only_mounts": [str(tmp_path / "code")]},
        )
        request["env"].update(
            RUN_DIR="gs://bucket/run",
            RUN_TOKEN="token",
            RUN_PORT=str(server.getsockname()[1]),
            PYTHONPATH=str(tmp_path / "code"),
        )
        # The job itself writes to a directory: the bucket is the supervisor's alone here.
        boxed("start", **request)
        connection, _ = server.accept()
        with connection, connection.makefile() as told:
            said = json.load(told)
    assert said["url"] == "gs://bucket/run"
    assert "heartbeats/host-0.json" in said["files"] and said["log"] == ["up\n"]
    assert (said["token"], said["controlled"]) == ("token", False)
    boxed.ended()
    assert boxed.containers() == []
