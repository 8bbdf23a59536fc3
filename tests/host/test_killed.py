"""A session that is killed at any moment, as when its launcher's machine is cut off, leaves nothing half done."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

MAIN = Path(__file__).parents[2] / "host" / "agent" / "__main__.py"


def killed(agent: Any, verb: str, request: dict[str, Any], after_s: float) -> None:
    """Send a request and kill the agent, and nothing else, in the middle of it."""
    body = json.dumps({"version": 1, "root": str(agent.root), **request}).encode()
    with subprocess.Popen(
        [agent.python, "-S", "-E", str(MAIN), verb], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as asked:
        assert asked.stdin is not None
        asked.stdin.write(body)
        asked.stdin.close()
        time.sleep(after_s)
        asked.kill()


@pytest.mark.parametrize("after_s", [0.02, 0.04, 0.06, 0.08, 0.1, 0.13, 0.16])
def test_a_start_that_was_killed_has_started_one_process_or_none(
    agent: Any, until: Any, after_s: float
) -> None:
    request = agent.start_request('say("up"); live()')
    killed(agent, "start", request, after_s)
    until(lambda: all(one["state"] != "starting" for one in agent("status")["processes"]))
    pids = {one["pid"] for one in agent("status")["processes"] if one["state"] == "running"}
    again = agent("start", **request)
    assert pids in (set(), {again["pid"]})
    log = Path(request["log_path"])
    until(lambda: log.exists() and log.read_text() == "up\n")
    assert len(agent("stop", run_id="run-1", grace_s=5)["stopped"]) == 1
    assert log.read_text() == "up\n"


@pytest.mark.parametrize("after_s", [0.03, 0.06, 0.1, 0.15])
def test_a_stage_that_was_killed_can_be_done_again_and_leaves_no_rest(agent: Any, after_s: float) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for number in range(500):
            tar.addfile(tarfile.TarInfo(f"file-{number}"))
    archive = packed.getvalue()
    sha256 = hashlib.sha256(archive).hexdigest()
    request = {"sha256": sha256, "archive_base64": base64.b64encode(archive).decode()}
    killed(agent, "stage", request, after_s)
    assert agent("stage", **request)["present"] is True
    assert [path.name for path in (agent.root / "bundles").iterdir()] == [sha256]
    assert len(list((agent.root / "bundles" / sha256).iterdir())) == 500
