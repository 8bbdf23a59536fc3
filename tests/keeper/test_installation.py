"""`fab keeper install` as far as it needs no systemd: what is refused, what is sent, and steps that are broken off."""

import dataclasses
import json
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from backends.vm import python_environment
from backends.vm.deploy import RUNNER
from backends.vm.steps import Step, to_json
from contracts.errors import RequestError
from contracts.inventory import Gateway, NodePool
from keeper import installation
from launch.hosts import HostError
from launch.jobs import CHECKOUT
from tests.keeper.test_gateway_login import inventory
from tests.processes import run_program

GATEWAY = Gateway(
    name="tpu-stack-dev-gateway", zone="us-central1-a", address="10.0.0.2", host_keys=(), user=None
)
KEPT = dataclasses.replace(inventory(), has_keeper=True)
ANSWER = '[{"namespace": "hostkeys", "key": "ssh-ed25519", "value": "AAAA"}]'


def test_a_stack_without_a_keeper_or_a_gateway_is_told_what_to_do() -> None:
    with pytest.raises(RequestError, match="set tpu-stack:keeper: true, then `pulumi up`"):
        installation.install(inventory(), on_this_machine=True)
    pool = NodePool(machine_type="ct5lp-hightpu-4t", accelerator="x", nodes=1)
    pools = tuple(dataclasses.replace(each, pool=pool, hosts=()) for each in KEPT.slices)
    with pytest.raises(RequestError, match="all slices of .* are node pools"):
        installation.install(dataclasses.replace(KEPT, slices=pools), on_this_machine=True)
    with pytest.raises(RequestError, match="`fab keeper install --here` takes this machine"):
        installation.install(KEPT, on_this_machine=False)


@pytest.mark.parametrize(
    ("says", "status", "found"),
    [
        (ANSWER, 0, None),
        ("[]", 0, "it has published no host keys"),
        ("not JSON", 0, "it has published no host keys"),
        ("ERROR: (gcloud) PERMISSION_DENIED", 1, "its host keys cannot be read: ERROR: .* PERMISSION_DENIED"),
    ],
)
def test_the_gateways_host_keys_are_those_that_it_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, status: int, found: str | None
) -> None:
    gcloud = tmp_path / "gcloud"
    gcloud.write_text(
        f"#!/bin/sh\necho \"$@\" >{tmp_path}/asked\necho '{says}' | tee /dev/stderr\nexit {status}\n"
    )
    gcloud.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if found is None:
        assert installation._host_keys(GATEWAY, "my-project") == ("ssh-ed25519 AAAA",)
        asked = (tmp_path / "asked").read_text()
        assert "get-guest-attributes tpu-stack-dev-gateway" in asked and "--query-path=hostkeys/" in asked
        return
    with pytest.raises(HostError, match=found) as error:
        installation._host_keys(GATEWAY, "my-project")
    assert error.value.host == GATEWAY.name


def carry_out(steps: list[Step], home: Path) -> dict[str, tuple[str, str]]:
    argv = [sys.executable, "-S", "-E", "-c", RUNNER.read_text(), to_json(steps)]
    done = run_program(argv, {"HOME": str(home), "PATH": os.environ["PATH"]})
    answers: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    return {each["step"]: (each["state"], each["message"]) for each in answers if each["state"] != "doing"}


def test_on_this_machine_the_code_is_put_under_its_hash_whole_or_not_at_all_and_the_keeper_starts_from_it(
    tmp_path: Path,
) -> None:
    bundle, sent = installation._bundle(), tmp_path / "sent"
    lock = python_environment.read_lock("keeper", CHECKOUT, "")
    place = installation.local_place(KEPT)
    steps = [*installation.steps(place, KEPT, bundle, str(sent), lock)]
    assert [each.name for each in steps] == ["code", "python", "service"]
    assert not any(each.root for each in steps)
    sent.write_bytes(bundle.archive[:-10])
    state, message = carry_out(steps[:1], tmp_path)["code"]
    assert (state, message) == ("failed", f"{sent} is not what was sent")
    folder = tmp_path / place.code(bundle.sha256).removeprefix("~/")
    assert list(folder.parent.iterdir()) == []

    sent.write_bytes(bundle.archive)
    answers = carry_out(steps, tmp_path)
    assert answers["code"][0] == "changed" and answers["python"][0] == "ok"
    if not Path("/run/systemd/system").exists():
        assert answers["service"][0] == "failed"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == bundle.names
    assert {"requirements/tpu.txt", "requirements/uv.txt", "host/agent/__main__.py"} <= names
    assert not [each for each in names if "__pycache__" in each]
    # What resumes a run is all there, and is not taken from this checkout.
    modules = "launch.launching, backends.vm.deploy, backends.vm.transport, infra.slice_apis.lifecycle, keeper.world"
    program = tmp_path / "program.py"
    program.write_text(
        f"import os, sys\nsys.path.insert(0, os.getcwd())\nimport {modules}\n"
        "assert launch.jobs.names() and launch.__file__.startswith(os.getcwd()), launch.__file__\n"
    )
    subprocess.run([place.python, "-W", "ignore", program], cwd=folder, check=True, timeout=60)
    assert carry_out(steps[:1], tmp_path)["code"][0] == "ok"


def test_the_gateways_environment_is_made_from_a_lock_that_is_sent_along(tmp_path: Path) -> None:
    bundle, lock = installation._bundle(), python_environment.read_lock("keeper", CHECKOUT, "")
    place = installation.gateway_place(dataclasses.replace(KEPT, gateway=GATEWAY), lock)
    steps = {each.name: each for each in installation.steps(place, KEPT, bundle, "/var/tmp/sent", lock)}
    change = steps["python"].change
    locks = f"{place.code(bundle.sha256)}/requirements"
    assert f"locks={locks}\n" in change and f"UV_PYTHON_INSTALL_DIR={place.root}/python" in change
    assert {f"requirements/{each}" for each in lock.files} <= bundle.names
    # Another lock is another environment, so that a pass that is under way keeps its own.
    other = installation.gateway_place(KEPT, dataclasses.replace(lock, sha256="1" * 64))
    assert other.python != place.python and lock.sha256[:16] in place.python
    archive = tmp_path / "code.tar.gz"
    archive.write_bytes(bundle.archive)
    with tarfile.open(archive) as packed:
        assert packed.extractfile("requirements/keeper.txt") is not None


def test_values_of_this_shell_reach_the_keeper_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", '/bin:/my "own"/100%\\bin')
    place = installation.local_place(KEPT)
    unit = installation.service_unit(place, place.code("0" * 64), KEPT)
    assert 'Environment="PATH=/bin:/my \\"own\\"/100%%\\\\bin"' in unit.splitlines()
    assert "WorkingDirectory=%h/.local/share/tpu-stack/keeper/dev/code/0000000000000000" in unit.splitlines()
    assert "User=" not in unit


def test_the_units_can_be_read_by_nobody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A proxy's address may have a password in it."""
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:3128")
    place = dataclasses.replace(installation.local_place(KEPT), units=str(tmp_path / "units"))
    change = installation._service(place, place.code("0" * 64), KEPT).change
    before = change[change.index("umask 022") : change.index(f"{place.systemctl} daemon-reload")]
    script = "\n".join(line for line in before.splitlines() if "compileall" not in line)
    subprocess.run(["sh", "-ec", script], check=True)
    units = sorted((tmp_path / "units").iterdir())
    assert len(units) == 2
    assert any("me:secret" in unit.read_text() for unit in units)
    assert [stat.S_IMODE(unit.stat().st_mode) for unit in units] == [0o600, 0o600]
