"""Machines follow the nodes of the simulated cloud: there when one is READY, gone as soon as it is lost."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Callable
from typing import Any

import asyncssh
import pytest

from tests.rehearsal.daemon.conftest import Lab

NewLab = Callable[[list[str]], Lab]

ZONE = "projects/p/locations/us-central1-a"
ADDRESSES = [f"10.9.0.{number}" for number in range(2, 12)]
LIMIT_S = 10.0


def send(lab: Lab, method: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(
        f"{lab.api.url}/v2/{path}", method=method, data=None if body is None else json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)


def make_node(lab: Lab, name: str = "n", accelerator: str = "v5litepod-16") -> Any:
    """A spot node, READY."""
    body = {
        "acceleratorType": accelerator,
        "runtimeVersion": "v2-alpha-tpuv5-lite",
        "schedulingConfig": {"spot": True},
    }
    send(lab, "POST", f"{ZONE}/nodes?nodeId={name}", body)
    node = send(lab, "GET", f"{ZONE}/nodes/{name}")
    assert node["state"] == "READY"
    return node


def published(lab: Lab, name: str = "n") -> list[dict[str, str]]:
    """Of each worker, its guest attributes by key."""
    found = send(lab, "POST", f"{ZONE}/nodes/{name}:getGuestAttributes", {})["guestAttributes"]
    return [{item["key"]: item["value"] for item in each["queryValue"]["items"]} for each in found]


def settled(lab: Lab) -> None:
    assert lab.hosts.settle(LIMIT_S), lab.said


def test_every_worker_of_a_ready_node_is_a_machine_with_the_address_and_host_key_that_the_api_tells(
    new_lab: NewLab,
) -> None:
    lab = new_lab(ADDRESSES)
    node = make_node(lab)
    settled(lab)
    told = [end["ipAddress"] for end in node["networkEndpoints"]]
    machines = [lab.paper.up[worker["hostname"]] for worker in published(lab)]
    assert [machine.address for machine in machines] == told
    assert len(set(told)) == 4 and set(told) <= set(ADDRESSES)
    for machine, worker in zip(machines, published(lab), strict=True):
        pair = asyncssh.import_private_key(machine.host_key_private_pem)
        assert base64.b64encode(pair.public_data).decode() == worker["ssh-ed25519"]


def test_the_api_answers_while_machines_take_their_time(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES)
    lab.paper.may_boot.clear()
    make_node(lab)
    assert all(worker["ssh-ed25519"] for worker in published(lab))
    assert lab.paper.up == {}
    lab.paper.may_boot.set()
    settled(lab)
    assert len(lab.paper.up) == 4


@pytest.mark.parametrize("loss", ["preempt", "terminate", "vanish"])
def test_a_node_that_is_lost_takes_its_machines_with_it(new_lab: NewLab, loss: str) -> None:
    lab = new_lab(ADDRESSES)
    make_node(lab)
    settled(lab)
    getattr(lab.api.control, loss)("n")
    settled(lab)
    assert (lab.paper.up, lab.paper.down) == ({}, {})
    assert lab.hosts.names() == []


def test_a_node_that_is_deleted_takes_its_machines_with_it(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES)
    make_node(lab)
    settled(lab)
    send(lab, "DELETE", f"{ZONE}/nodes/n")
    settled(lab)
    assert (lab.paper.up, lab.paper.down) == ({}, {})


def test_a_node_that_is_lost_while_its_machines_boot_leaves_none(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES)
    lab.paper.may_boot.clear()
    make_node(lab)
    lab.api.control.preempt("n")
    lab.paper.may_boot.set()
    settled(lab)
    assert (lab.paper.up, lab.paper.down) == ({}, {})


def test_a_machine_that_loses_power_comes_back_as_itself(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES)
    make_node(lab)
    settled(lab)
    name = lab.hosts.names()[1]
    lab.hosts.move(name, "down")
    settled(lab)
    assert list(lab.paper.down) == [name] and lab.hosts.stands(name) == "down"
    lab.hosts.move(name, "up")
    settled(lab)
    assert len(lab.paper.up) == 4


def test_a_machine_that_was_removed_does_not_come_back(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES)
    make_node(lab)
    settled(lab)
    name = lab.hosts.names()[0]
    lab.api.control.preempt("n")
    lab.hosts.move(name, "up")
    settled(lab)
    assert lab.paper.up == {} and len(lab.paper.booted) == 4


def test_a_machine_that_is_being_removed_is_not_started_again(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES)
    make_node(lab, accelerator="v5litepod-8")
    settled(lab)
    (name,) = lab.hosts.names()
    lab.paper.may_remove.clear()
    lab.api.control.preempt("n")
    lab.hosts.move(name, "up")
    lab.paper.may_remove.set()
    settled(lab)
    assert lab.paper.up == {}


def test_no_two_machines_have_the_same_address(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES[:3])
    for name in ("a", "b"):
        make_node(lab, name, "v5litepod-8")
    settled(lab)
    lab.api.control.vanish("b")
    settled(lab)
    for name in ("c", "d"):
        make_node(lab, name, "v5litepod-8")
    settled(lab)
    assert sorted(machine.address for machine in lab.paper.up.values()) == ADDRESSES[:3]


def test_an_address_is_given_out_again_only_when_its_machine_is_gone(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES[:5])
    first = make_node(lab)
    settled(lab)
    lab.api.control.vanish("n")
    settled(lab)
    second = make_node(lab, "m")
    settled(lab)
    told = [[end["ipAddress"] for end in node["networkEndpoints"]] for node in (first, second)]
    assert len(set(told[1])) == 4
    assert told[1][0] == ADDRESSES[4]  # the one that has rested longest


def test_a_machine_that_cannot_boot_is_named_and_the_others_are_up(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES)
    lab.paper.may_boot.clear()
    make_node(lab)
    broken = lab.hosts.names()[2]
    lab.paper.broken = {broken}
    lab.paper.may_boot.set()
    settled(lab)
    assert lab.hosts.failed == {broken: "no room for it"}
    assert len(lab.paper.up) == 3
    assert f"machine {broken}: no room for it" in lab.said


def test_workers_are_listed_in_their_order_beyond_ten(new_lab: NewLab) -> None:
    lab = new_lab([f"10.9.0.{number}" for number in range(2, 40)])
    make_node(lab, accelerator="v5litepod-64")
    settled(lab)
    assert lab.hosts.names() == [worker["hostname"] for worker in published(lab)]
    assert lab.moves >= 16
