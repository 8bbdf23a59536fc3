"""`fab serve` on a host that is reached over SSH: a real agent there, and a tunnel that leads to the server."""

import dataclasses
import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.local.local_backend import on_this_machine
from backends.vm.agent_session import AGENT_ROOT
from backends.vm.connection import Ssh
from backends.vm.transport import SshTransport
from console.display import Plain
from console.models import serving as serving
from console.models.serving import Options
from contracts.run_directory import ACTIVE
from launch import runs
from launch.hosts import Agent
from launch.output import terminal
from tests.backends.vm.conftest import Server
from tests.jobs.samples import write_export
from tests.launch.slices import ssh_backend

FEW_SHAPES = ("--batch-sizes", "1", "--lengths", "32")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_on_a_host_answers_through_the_tunnel_and_ends_with_it(
    two_devices: None,
    serve: Callable[..., Server],
    ssh: Ssh,
    write_run: Callable[..., runs.Run],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = serve()
    transport = SshTransport(there.access, ssh)
    agent = Agent(host="h", link=transport, root=AGENT_ROOT)
    here = on_this_machine(hosts="1", platform="cpu")
    stack = dataclasses.replace(
        here, name="dev", backend=ssh_backend([agent], [transport]), transports=(transport,), agents=(agent,),
        agent_root=AGENT_ROOT, cache_dir="~/.cache/tpu-stack", cpus=(None,),
    )  # fmt: skip
    run = write_run()
    write_export(Path(run.directory.path("export")))
    assert serving.serve(stack, run.run_id, Options(detach=True, server_arguments=FEW_SHAPES)) == 0
    said = capsys.readouterr().out
    server = runs.find(stack.runs, re.findall(r"serve-\d{8}-\d{6}-\w{4}", said)[0])
    assert f"`fab serve --stack dev {server.run_id}` leads to it" in said
    assert Path(there.home / ".cache/tpu-stack/agent/runs" / server.run_id).is_dir()
    found: dict[str, Any] = {}

    def asked(line: str) -> None:
        url = re.search(r"http://\S+/v1/predict", line)
        if url is not None:
            request = urllib.request.Request(
                url[0], b'{"inputs": ["a <mask>"]}', {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
                found.update(json.load(answer), url=url[0])
            raise KeyboardInterrupt

    monkeypatch.setattr(Plain, "note", lambda _plain, text: asked(text))
    assert serving.serve(stack, server.run_id, Options()) == 0
    assert [each["input"] for each in found["answers"]] == ["a <mask>"]
    served = json.loads(server.directory.read_text("serving.json") or "")
    assert (served["address"], f":{served['port']}/" in str(found["url"])) == ("127.0.0.1", False)
    assert stack.run_state(runs.find(stack.runs, server.run_id)) in ACTIVE
    assert serving._lead(terminal(), stack, server, stops=True) == 0
    ended = runs.find(stack.runs, server.run_id)
    assert (stack.run_state(ended), (ended.result or {})["requests"]) == ("done", 2)
