"""One pair of hosts for all tests here, whole again after each; and a run that nobody disturbed."""

import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import asyncssh
import pytest

from rehearsal.machines.machines import Machine, Machines
from tests.rehearsal.faults.pair import CORPUS, NAMES, Pair, read_inventory
from tests.runs.conftest import write_corpus
from tests.runs.lab import Losses, losses
from tools import stand_in_base


def new_key() -> tuple[str, str]:
    """A key: private, in OpenSSH's form, and public, as a line "ssh-ed25519 AAAA…"."""
    key = asyncssh.generate_private_key("ssh-ed25519")
    return key.export_private_key().decode(), " ".join(key.export_public_key().decode().split()[:2])


@pytest.fixture(scope="module")
def whole_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    base = stand_in_base.chosen(os.environ, print)
    environ = os.environ | ({stand_in_base.VARIABLE: base} if base else {})
    (own_private, own_public), keys = new_key(), {name: new_key() for name in NAMES}
    identity = folder / "identity"
    identity.touch(0o600)
    identity.write_text(own_private)
    launchers = {"TPU_STACK_SSH_KEY": str(identity), "XDG_CACHE_HOME": str(folder / "cache")}
    with Machines(name=f"test-{secrets.token_hex(4)}", say=print, environ=environ) as machines:
        addresses = dict(zip(NAMES, machines.network.addresses(len(NAMES)), strict=True))
        with ThreadPoolExecutor(len(NAMES)) as pool:
            hosts = [
                Machine(name=name, address=addresses[name], host_key=keys[name][0], authorized_key=own_public)
                for name in NAMES
            ]
            list(pool.map(machines.boot, hosts))
        with mock.patch.dict(os.environ, launchers):
            made = Pair(machines, read_inventory(addresses, {name: keys[name][1] for name in NAMES}), folder)
            write_corpus(folder / "corpus.jsonl")
            with made.target() as target:
                text = (folder / "corpus.jsonl").read_text()
                target.agents[0].ask("write", {"path": CORPUS, "text": text})
            yield made


@pytest.fixture
def pair(whole_pair: Pair) -> Iterator[Pair]:
    """Two hosts with nothing running on them, and nothing afterwards."""
    whole_pair.said.clear()
    yield whole_pair
    try:
        whole_pair.until_clean()
    finally:
        with whole_pair.target() as target:
            whole_pair.end_all(target)


@pytest.fixture(scope="module")
def right_losses(whole_pair: Pair) -> Losses:
    """What every step's loss is to be, whatever happens on the way."""
    with whole_pair.target() as target:
        state, run = whole_pair.finish(target, whole_pair.launch(target), whole_pair.end_limit_s)
        assert state == "done"
        return losses(run)
