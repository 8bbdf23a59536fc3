"""Hosts that boot are waited for, what waiting does not mend is not, and all are told of."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from launch.deploy import deploy
from launch.hosts import Agent, Completed, HostError, HostsError
from launch.ssh import login
from launch.ssh.access import Access
from launch.targets import Target
from tests.launch.slices import make_target

MakeAgent = Callable[..., Agent]


@pytest.fixture
def agents(make_agent: MakeAgent) -> list[Agent]:
    return [make_agent(lambda verb, request: {"names": []}, host=f"w-{index}") for index in range(2)]


class Booting:
    """A host that refuses as often as it is told to, then lets in."""

    def __init__(self, *refusals: HostError | OSError) -> None:
        self.refusals, self.tries = list(refusals), 0

    def begin(self, argv: Sequence[str], stdin: str, *, timeout_s: float) -> Future[Completed]:
        future: Future[Completed] = Future()
        self.tries += 1
        if self.refusals:
            future.set_exception(self.refusals.pop(0))
        else:
            future.set_result(Completed(exit_code=0, stdout="", stderr=""))
        return future


def of_hosts(agents: list[Agent], *hosts: Booting) -> Target:
    given: Any = hosts
    return make_target(agents, given)


def test_a_host_that_boots_is_waited_for_and_said_once(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy, "AGAIN_S", 0.01)
    told: list[str] = []
    refused = HostError(host="", reason="10.0.0.0:22 refuses the connection")
    first, second = Booting(refused, refused, OSError("closed")), Booting()
    assert deploy.reach(of_hosts(agents, first, second), told.append, limit_s=30) == [None, None]
    assert (first.tries, second.tries) == (4, 1)
    assert [text.partition(" s for ")[2] for text in told] == [
        "w-0: 10.0.0.0:22 refuses the connection",
        "w-0: closed",
    ]


ACCESS = Access(name="w-0", address="10.0.0.2", user="u", os_login=True, host_keys=(), made_by_pulumi=True)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ACCESS.host_key_unknown(), False),
        (ACCESS.host_key_changed(["SHA256:a"], "SHA256:b"), False),
        (ACCESS.host_key_unreadable("x", "y"), False),
        (ACCESS.proxy_missing("gcloud"), False),
        (ACCESS.no_connection(socket.gaierror(-2, "unknown")), False),
        (ACCESS.no_connection(ConnectionRefusedError()), True),
        (ACCESS.no_connection(TimeoutError()), True),
        (ACCESS.closed_at_once(), True),
        (ACCESS.proxy_ended(1, "4003: failed to connect to backend"), True),
        # The account of a person reaches a fresh host some time after its sshd does.
        (ACCESS.permission_denied("u", ["k"], []), True),
    ],
)
def test_only_what_a_booting_host_does_is_waited_for(error: HostError, passes: bool) -> None:
    assert deploy.may_pass(error) is passes
    with pytest.raises(HostError) as no_user:  # nor is a machine that cannot log in anywhere
        login.user_of_profile("{}")
    assert not deploy.may_pass(no_user.value)


def test_where_no_host_answers_all_are_listed(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "AGAIN_S", 0.01)
    refused = HostError(host="", reason="refused", remedy="r")
    closed = [Booting(*[refused] * 99) for _ in range(2)]
    with pytest.raises(HostsError) as error:
        deploy.reach(of_hosts(agents, *closed), lambda text: None, limit_s=0.05)
    assert str(error.value).splitlines() == [
        "no host could be reached, nothing was changed:",
        "  w-0: refused → r",
        "  w-1: refused → r",
    ]
    # What time does not mend is not waited for, and the others go on.
    refusing = Booting(*[ACCESS.host_key_changed(["SHA256:a"], "SHA256:b")] * 2)
    first, none = deploy.reach(of_hosts(agents, refusing, Booting()), lambda text: None, limit_s=600)
    assert isinstance(first, HostError) and first.host == "w-0" and none is None
    assert refusing.tries == 1
