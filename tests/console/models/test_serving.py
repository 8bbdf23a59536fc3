"""`fab serve`: a server is a run like any other, and the command that it prints asks it."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from console.models import serving as serving
from console.models.serving import Options
from console.summary import summary
from contracts.errors import RequestError
from jobs.runtime.prediction import answer
from launch import jobs, runs
from launch.jobs import CHECKOUT
from tests.jobs.samples import write_export
from tests.launch.slices import WriteRun, here, ssh_backend

FAB = str(Path(sys.executable).with_name("fab"))
FEW_SHAPES = ("--batch-sizes", "1,4", "--lengths", "32")
TEXTS = ["the <mask> sat", "<mask> on the <mask> mat"]


@pytest.fixture
def fab(runs_dir: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `fab`; what is left of it at the end is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [FAB, *words],
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def read_until(process: subprocess.Popen[str], words: str) -> str:
    said = ""
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(said)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_answers_as_the_export_does_leads_who_comes_later_to_it_and_ends_with_ctrl_c(
    two_devices: None, write_run: WriteRun, fab: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    from jobs.flax_mlm.predict import load

    run = write_run(result={"outcome": "done", "time": 5.0})
    export = write_export(Path(run.directory.path("export")))
    first = fab("serve", "latest", "--address", "0.0.0.0", "--port", "0", "--", *FEW_SHAPES)
    said = read_until(first, "Ctrl-C stops the server")
    assert f"serving {run.run_id} (fill-mask) at http://127.0.0.1:" in said
    (command,) = (line.strip() for line in said.splitlines() if line.startswith("  curl"))
    asked = json.dumps({"inputs": TEXTS})
    curl = f"{command.rpartition(' -d ')[0]} -s -d '{asked}'"
    told = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=30, check=True).stdout
    found = [[each["probability"] for each in one["best"]] for one in json.loads(told)["answers"]]
    expected = answer(load(export, tmp_path / "cache"), TEXTS)
    assert len(found) == 3
    for mine, its in zip(found, expected, strict=True):
        assert mine == pytest.approx([guess.probability for guess in its.best], abs=1e-4)

    url = command.split()[1]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(
            urllib.request.Request(url, b"{}", {"content-type": "application/json"}), timeout=20
        )
    (token,) = (tmp_path / "cache").glob("*/serve-token")
    assert token.stat().st_mode & 0o777 == 0o600
    secret = token.read_text().split()[-1].encode()
    server = runs.find(here("1").runs, "latest")
    kept = [path.read_bytes() for path in Path(server.directory.url).rglob("*") if path.is_file()]
    assert not any(secret in text for text in [*kept, said.encode()])
    assert server.described["job"] == jobs.SERVER

    second = fab("serve", server.run_id)
    assert command in read_until(second, "Ctrl-C leaves the server running")
    second.send_signal(signal.SIGINT)
    assert second.wait(30) == 0
    first.send_signal(signal.SIGINT)
    out, _ = first.communicate(timeout=60)
    assert (first.returncode, f"{server.run_id} is done" in out) == (0, True), out
    assert (runs.find(here("1").runs, server.run_id).result or {})["requests"] == 2
    with pytest.raises(RequestError, match="is a server that has ended; name the run whose export"):
        serving.serve(here("1"), server.run_id, Options())


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("number", "when"), [(signal.SIGTERM, "started serve-"), (signal.SIGHUP, "Ctrl-C stops the server")]
)
def test_a_signal_to_the_command_ends_the_server_while_it_starts_too(
    two_devices: None,
    write_run: WriteRun,
    fab: Callable[..., subprocess.Popen[str]],
    number: signal.Signals,
    when: str,
) -> None:
    write_export(Path(write_run(result={"outcome": "done", "time": 5.0}).directory.path("export")))
    process = fab("serve", "latest", "--port", "0", "--", *FEW_SHAPES)
    read_until(process, when)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    server = runs.find(here("1").runs, "latest")
    assert (f"{server.run_id} was stopped" in out) or (f"{server.run_id} is done" in out), out
    state = here("1").run_state(server)
    assert state in ("stopped", "done")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_export_that_cannot_be_loaded_is_told_and_nothing_is_resumed(
    write_run: WriteRun, fab: Callable[..., subprocess.Popen[str]]
) -> None:
    run = write_run()
    run.directory.write_text("export/config.json", "{}")
    process = fab("serve", run.run_id, "--port", "0")
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 2, out
    assert "has no model.safetensors" in out and "--resume" not in out and "Traceback" not in out


@pytest.mark.parametrize(
    ("changed", "options", "said"),
    [
        (
            {"platform": "tpu", "name": "dev", "backend": ssh_backend()},
            {"address": "10.0.0.1"},
            "a server on dev listens on its host's loopback",
        ),
        (
            {"name": "dev", "backend": ssh_backend()},
            {"port": 80},
            "--port 80: through a tunnel it is a free one",
        ),
        ({}, {"address": "203.0.113.9"}, "--address 203.0.113.9 --port 8000: cannot be listened on"),
        ({}, {"address": "203.0.113.9"}, "; name an address that this machine has"),
        ({}, {"address": "0.0.0.0:80"}, "--address 0.0.0.0:80: is no address; write one of this machine's"),
        ({}, {"port": 0, "token_file": "/no/file"}, "--token-file /no/file: there is no such file"),
        (
            {},
            {"port": 0, "token_file": "/etc/hostname"},
            "--token-file /etc/hostname: must be a file that only you",
        ),
    ],
)
def test_what_cannot_be_served_so_is_refused_before_anything_is_started(
    write_run: WriteRun, changed: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    run = write_run()
    run.directory.write_text("export/config.json", "{}")
    with pytest.raises(RequestError) as error:
        serving.serve(dataclasses.replace(here("1"), **changed), run.run_id, Options(**options))
    assert said in str(error.value)


def test_a_tpu_serves_what_jax_has_trained_and_only_one_of_a_single_host(write_run: WriteRun) -> None:
    run = write_run()
    torch = write_run("torch_glue-20261120-214500-aaaa", job="torch_glue")
    for each in (run, torch):
        each.directory.write_text("export/config.json", "{}")
    slice_ = dataclasses.replace(here("1").slice, accelerator_type="v5litepod-16", name="main")
    tpu = dataclasses.replace(here("1"), name="dev", backend=ssh_backend(), platform="tpu")
    with pytest.raises(RequestError, match="exports of torch_glue are served on CPUs; add --platform cpu"):
        serving.serve(tpu, torch.run_id, Options())
    with pytest.raises(RequestError, match="one process on one host, and the TPU of main has"):
        serving.serve(dataclasses.replace(tpu, slice=slice_), run.run_id, Options())


def test_the_lines_have_a_command_for_every_kind_of_input_and_address(write_run: WriteRun) -> None:
    run = write_run("serve-20261120-214500-abcd", job="serve", config={"run": "r", "token_file": "/t"})
    told: dict[str, Any] = {"task": "fill-mask", "takes": "text", "example": {"inputs": ["it's <mask>"]}}
    _, command, end = serving.lines(run, told, "::1", 80, stops=False)
    asked = '\'{"inputs": ["it\'"\'"\'s <mask>"]}\''
    assert (
        command
        == f"  curl 'http://[::1]:80/v1/predict' -H 'content-type: application/json' -H @/t -d {asked}"
    )
    assert end.startswith("Ctrl-C leaves the server running")
    told = {"task": "image-classification", "takes": "picture", "example": None}
    _, command, _ = serving.lines(run, told, "0.0.0.0", 80, stops=True)
    assert command.startswith("""  (printf '{"inputs": ["'; base64 -w0 photo.jpg; printf '"]}') | curl """)
    (line,) = summary(run, "stopped")
    assert line == "serve-20261120-214500-abcd was stopped; start another with `fab serve r`"
