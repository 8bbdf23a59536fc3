"""A host key counts after a person has compared it, and never before: with real SSH servers and a stand-in for IAP."""

import dataclasses
import getpass
import io
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.resolve import keys_file, resolve
from console.hosts import trust
from contracts.errors import RequestError
from contracts.inventory import Host, Inventory, to_json
from launch import inventories
from launch.hosts import HostError
from launch.inventories import Trusted
from launch.targets import TargetRequest
from tests.backends.vm.conftest import RELAY, Server
from tests.launch.slices import make_host, make_inventory, make_slice

KEY, OTHER = "ssh-ed25519 AAAA", "ssh-ed25519 BBBB"


def host(index: int, address: str, **changed: Any) -> Host:
    given = {"name": "", "user": getpass.getuser(), "host_keys": (), "reach": "direct", **changed}
    return make_host(index, internal_address=address, **given)


def inventory(hosts: Sequence[Host], project: str | None = None) -> Inventory:
    return make_inventory(make_slice(hosts, name="main"), stack="lab", project=project)


@dataclasses.dataclass
class Person:
    """Types `fab trust`, reads what it says, and answers. wanted: the inventory's file."""

    wanted: TargetRequest
    says: str | None = None
    read: list[str] = dataclasses.field(default_factory=list)

    def trusts(
        self, hosts: str, says: str | None, instance: str | None = None, mark: str | None = None
    ) -> int:
        self.read.clear()

        def answer(question: str) -> str:
            assert says is not None, "nobody was to be asked"
            self.read.append(question)
            return says

        target = resolve(self.wanted)
        of_host = {"hosts": hosts, "instance": instance, "fingerprint": mark}
        return trust.trust(target, keys_file(self.wanted), **of_host, answer=answer, tell=self.read.append)

    def reaches(self, index: int) -> str:
        """How the host calls itself; raises HostError where it is not connected to."""
        transport = resolve(self.wanted).transports[index]
        return transport.begin(["sh", "-c", "echo $SERVER"], "", timeout_s=60).result(60).stdout.strip()


def person(tmp_path: Path, found: Inventory) -> Person:
    path = tmp_path / "lab.json"
    path.write_text(to_json(found))
    return Person(TargetRequest(stack=str(path)))


def fingerprint(server: Server) -> str:
    """As a person reads it on the host itself."""
    command = ["ssh-keygen", "-lf", str(server.folder / "host_key.pub")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[1]


def test_a_key_counts_after_it_was_confirmed_and_a_changed_one_is_asked_about_again(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    ada = person(tmp_path, inventory([host(0, f"{server.address}:{server.port}", name="a")]))
    kept = tmp_path / "lab.host-keys.json"
    with pytest.raises(
        HostError, match="its host key is not known → .*`fab trust --host 0` shows the key and asks"
    ):
        ada.reaches(0)
    assert ada.trusts("0", says="y") == 1
    with pytest.raises(RequestError, match="nobody is there to be asked"):
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        keys = keys_file(ada.wanted)
        trust.trust(resolve(ada.wanted), keys, hosts="0", instance=None, fingerprint=None)
    with pytest.raises(
        RequestError, match=f"the host shows {fingerprint(server)}; nothing was stored".replace("+", r"\+")
    ):
        ada.trusts("0", says=None, mark="SHA256:" + "A" * 43)
    assert not kept.exists()

    assert ada.trusts("0", says="yes") == 0
    assert f"  ssh-ed25519 {fingerprint(server)}" in ada.read
    assert "  ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in ada.read
    assert ada.reaches(0) == "0"
    assert ada.trusts("0", says=None) == 0  # nobody is asked about what is known

    before = fingerprint(server)
    server.new_host_key()
    for says in ("no", ""):
        assert ada.trusts("0", says=says) == 1
        assert any(f"ANOTHER than the known one, {before} (confirmed on " in line for line in ada.read)
        with pytest.raises(HostError, match="shows the host key .* and the inventory has"):
            ada.reaches(0)
    assert ada.trusts("0", says=None, mark=fingerprint(server)) == 0
    assert ada.reaches(0) == "0"


GCLOUD = f"""#!{sys.executable}
import sys
places = PLACES
name = sys.argv[3]
if name not in places:
    sys.exit("ERROR: (gcloud.compute.start-iap-tunnel) the resource " + name + " was not found")
sys.argv[1:] = places[name]
{RELAY}
"""


def test_hosts_that_have_published_nothing_are_trusted_one_after_the_other_through_the_tunnel(
    serve: Callable[..., Server], tmp_path: Path, program: Callable[[str, str], Path]
) -> None:
    """Where guest attributes are off there is no instance name either, which IAP needs; a person says the first one."""
    first, second = serve(), serve()
    program("gcloud", GCLOUD.replace("PLACES", repr({"t1v-n-x-w-0": [first.address, str(first.port)]})))
    hosts = [
        host(index, f"{each.address}:{each.port}", reach="iap") for index, each in enumerate((first, second))
    ]
    ada = person(tmp_path, inventory(hosts, project="p"))
    with pytest.raises(HostError, match="compute.disableGuestAttributesAccess.*fab trust --host 0"):
        ada.reaches(0)
    with pytest.raises(RequestError, match="published no instance name.*--instance t1v-n-…-w-0"):
        ada.trusts("0", says="yes")
    assert ada.trusts("0", says="yes", instance="t1v-n-x-w-0") == 0
    assert ada.reaches(0) == "0"
    with pytest.raises(HostError, match="fab trust --host 1"):
        ada.reaches(1)
    assert ada.trusts("1", says="yes") == 0  # no tunnel to it can be had: through the first
    assert ada.reaches(1) == "1"
    names = [each.name for each in resolve(ada.wanted).hosts]
    assert names == ["t1v-n-x-w-0", "t1v-n-x-w-1"]


@pytest.mark.parametrize(
    ("published", "address", "keys"),
    [
        (("w-0", (OTHER,)), "10.0.0.1", (KEY,)),
        (("w-0", ()), "10.0.0.1", (KEY,)),
        (("", ()), "10.0.0.1", (KEY,)),
        (("another-0", (OTHER,)), "10.0.0.1", (OTHER,)),
        (("w-0", (OTHER,)), "10.0.0.2", (OTHER,)),
    ],
)
def test_a_confirmed_key_is_of_that_one_machine_and_not_of_its_successor(
    published: tuple[str, tuple[str, ...]], address: str, keys: tuple[str, ...]
) -> None:
    entry = Trusted(
        slice="main", index=0, name="w-0", internal_address="10.0.0.1", host_key=KEY, confirmed="2026-11-22"
    )
    name, have = published
    found = inventories.with_keys(inventory([host(0, address, name=name, host_keys=have)]), [entry])
    assert found.slices[0].hosts[0].host_keys == keys


def test_a_file_of_confirmed_keys_that_cannot_be_read_is_an_error_and_no_missing_file(tmp_path: Path) -> None:
    for text in ("{", '{"version": 2, "hosts": []}', '{"version": 1, "hosts": [{"name": "x"}]}', "[]"):
        (tmp_path / "keys.json").write_text(text)
        with pytest.raises(RequestError, match="cannot be read as confirmed host keys"):
            inventories.read_keys(tmp_path / "keys.json")
    assert inventories.read_keys(tmp_path / "none.json") == ()
