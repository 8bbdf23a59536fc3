"""The keeper's installation on a gateway: its steps, its units and what its service may touch, on a Debian under QEMU.

In the keeper's place a program that writes down what it finds; its environment is Debian's Python.
"""

import base64
import dataclasses
import gzip
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from backends.vm.deploy import RUNNER
from backends.vm.python_environment import Lock
from backends.vm.steps import to_json
from contracts.inventory import Gateway, Inventory, Storage
from keeper import installation
from launch.code import bundles
from tests.machine import debian
from tests.machine.guest import Guest, started

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

INVENTORY = Inventory(
    stack="dev",
    project="my-project",
    storage=Storage(
        bucket_url="gs://b",
        bucket_region=None,
        nfs_source="10.0.0.2:/srv/share",
        nfs_mount="/mnt/share",
    ),
    images={},
    gateway=Gateway(name="gateway", zone="us-central1-a", address="10.0.0.2", host_keys=(), user=None),
    slices=(),
    has_keeper=True,
)
LOCK = Lock(name="keeper", files={}, sha256="0" * 64, folder="")
PLACE = dataclasses.replace(installation.gateway_place(INVENTORY, LOCK), python="/usr/bin/python3")
PROGRAM = """
import json, os, pathlib, sys, time
def may(path):
    try:
        pathlib.Path(path).write_text("here")
        return True
    except OSError:
        return False
key = pathlib.Path(os.environ["TPU_STACK_SSH_KEY"])
known = key.exists()
home = os.environ["HOME"]
found = {
    "words": sys.argv[1:], "uid": os.getuid(), "home": home, "login": os.environ["TPU_STACK_KEEPER_LOGIN"],
    "key_was_there": known, "key_folder": oct(key.parent.stat().st_mode & 0o777),
    "writes": {path: may(path + "/trial") for path in ("/etc", "/opt/tpu-stack-keeper", "/srv", "/mnt/share", home)},
    "sees_root": os.access("/root", os.X_OK), "privileges": "NoNewPrivs:\\t1" in open("/proc/self/status").read(),
}
key.write_text("key")
with open(os.environ["HOME"] + "/passes", "a") as file:
    file.write(json.dumps({**found, "time": time.clock_gettime(time.CLOCK_BOOTTIME)}) + "\\n")
sys.exit(FAILS)
"""  # fmt: skip


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    with started(debian.image(installed=True), (), tmp_path_factory.mktemp("vm")) as guest:
        guest.read("install", "--directory", "--owner=1000", "--group=1000", "/srv/share")
        yield guest


def installed(guest: Guest, fails: str = "0") -> dict[str, tuple[str, str]]:
    """What became of each step."""
    program = PROGRAM.replace("FAILS", fails).encode()
    packed = gzip.compress(bundles.tar({"keeper/__init__.py": b"", "keeper/__main__.py": program}), mtime=0)
    bundle = bundles.Bundle(sha256=hashlib.sha256(packed).hexdigest(), archive=packed)
    steps = installation.steps(PLACE, INVENTORY, bundle, "/var/tmp/sent.tar.gz", LOCK)
    guest.put("/root/sent", base64.b64encode(packed).decode())
    guest.read("sh", "-c", "base64 --decode /root/sent >/var/tmp/sent.tar.gz")
    guest.put("/root/steps", to_json([each for each in steps if each.name not in ("python", "certificates")]))
    guest.put("/root/runner.py", RUNNER.read_text())
    ended = guest.run("sh", "-c", 'python3 -S -E /root/runner.py "$(cat /root/steps)"', limit_s=240)
    answers = [json.loads(line) for line in ended.output.splitlines()]
    return {each["step"]: (each["state"], each["message"]) for each in answers if each["state"] != "doing"}


def passes(guest: Guest) -> list[dict[str, Any]]:
    text = guest.read("cat", "/var/lib/tpu-stack-keeper/passes")
    return [json.loads(line) for line in text.splitlines()]


def test_a_keeper_is_installed_looks_every_minute_survives_a_reboot_and_may_touch_little(
    guest: Guest,
) -> None:
    first = installed(guest)
    assert {name: state for name, (state, _) in first.items()} == {
        "user": "changed", "code": "changed", "service": "changed"
    }, first  # fmt: skip
    again = installed(guest)
    assert {state for state, _ in again.values()} == {"ok"}, again

    found = passes(guest)[0]
    assert found["words"] == ["--store", "gs://b/control"]
    assert (found["uid"], found["home"], found["login"]) == (1000, "/var/lib/tpu-stack-keeper", "metadata")
    assert (found["key_was_there"], found["key_folder"]) == (False, "0o700")
    assert (found["sees_root"], found["privileges"]) == (False, True)
    assert found["writes"] == {
        "/etc": False, "/opt/tpu-stack-keeper": False, "/srv": False, "/mnt/share": True,
        "/var/lib/tpu-stack-keeper": True,
    }  # fmt: skip
    assert guest.read("stat", "--format", "%u %n", "/srv/share/trial") == "1000 /srv/share/trial"

    # The time of day is set an hour back: the next look comes all the same.
    guest.read("date", "--set", "1 hour ago")
    before = until_another(guest)
    *_, last = passes(guest)
    assert 59 < last["time"] - before["time"] < 65
    assert last["key_was_there"]

    guest.reboot()
    until_another(guest, count=2)
    assert not passes(guest)[2]["key_was_there"]


def until_another(guest: Guest, count: int = 1) -> dict[str, Any]:
    """Wait for one more pass than `count`; return the one before it."""
    more = f"[ $(wc -l </var/lib/tpu-stack-keeper/passes) -gt {count} ]"
    guest.until("sh", "-c", more, limit_s=80)
    return passes(guest)[count - 1]


def test_a_keeper_that_does_not_work_is_told_and_the_next_installation_mends_it(guest: Guest) -> None:
    state, message = installed(guest, fails="'boom: no such bucket'")["service"]
    assert (state, message) == ("failed", "the first pass failed: boom: no such bucket")
    assert installed(guest, fails="1 - 1")["service"][0] == "changed"
    for number in range(2, 5):
        installed(guest, fails=f"{number} - {number}")
    kept = guest.read("ls", "/opt/tpu-stack-keeper/code").split()
    assert len(kept) == 3
    unit = guest.read("cat", "/etc/systemd/system/tpu-stack-keeper.service")
    assert sum(each in unit for each in kept) == 1
