"""What differs between backends is data, and a command that has no meaning on one says what to do instead."""

import dataclasses
from typing import Any

import pytest

from backends.local.local_backend import local
from backends.pods.pod_backend import PodBackend
from contracts.errors import RequestError
from launch.targets import Backend
from tests.launch.slices import make_target, ssh_backend

NO_CLUSTER: Any = None
BACKENDS: dict[str, Backend] = {
    "local": local(1, "cpu", [0]).backend,
    "vm": ssh_backend(),
    "pods": PodBackend(NO_CLUSTER),
}
ON_PODS = "the hosts of s are pods, which are there as long as a run is; "


@pytest.mark.parametrize(
    ("command", "backend", "said"),
    [
        ("ssh", "local", "the hosts are this machine, which needs no SSH; say --stack as well"),
        ("trust", "local", "fab trust: the hosts are this machine, which has no host keys to trust"),
        ("deploy", "pods", f"fab deploy: {ON_PODS}an image has all that they need"),
        ("put", "pods", f"fab put: {ON_PODS}put data into the stack's bucket"),
        ("run", "pods", f"fab run: {ON_PODS}`fab ssh` opens a shell"),
        ("submit", "pods", f"fab submit: {ON_PODS}`fab train --queue NAME` waits"),
        ("trust", "pods", f"fab trust: {ON_PODS}the cluster's API leads to them"),
    ],
)
def test_a_command_without_meaning_says_why_and_what_to_do_instead(
    command: str, backend: str, said: str
) -> None:
    target = make_target([], backend=BACKENDS[backend])
    with pytest.raises(RequestError) as error:
        target.require(command)
    assert str(error.value).startswith(said)
    refusing = {name for name, other in BACKENDS.items() if command in other.capabilities.instead}
    for name in BACKENDS.keys() - refusing:
        other = dataclasses.replace(target, backend=BACKENDS[name])
        assert other.require(command) is other
