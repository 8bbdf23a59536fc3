"""Ways to a host that are not a connection of its own: through another, or by a program."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.ssh.connection import Ssh
from launch.ssh.transport import SshTransport
from tests.launch.ssh.conftest import RELAY, Server, at, free_port, refusal


def relay(server: Server) -> tuple[str, ...]:
    return (sys.executable, "-c", RELAY, server.address, str(server.port))


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    return serve()


def test_a_host_is_reached_through_another_that_is_connected_to_once(
    serve: Callable[..., Server], ssh: Ssh
) -> None:
    hop, *others = (serve() for _ in range(3))
    hosts = [dataclasses.replace(other.access, through=hop.access) for other in others]
    pending = [
        SshTransport(each, ssh).begin(["sh", "-c", "echo $SERVER"], "", timeout_s=60) for each in hosts
    ]
    assert [each.result(60).stdout for each in pending] == ["1\n", "2\n"]
    assert hop.logins() == 1


def test_a_hop_that_fails_is_named_with_its_reason(serve: Callable[..., Server], ssh: Ssh) -> None:
    hop, behind = serve(name="hop"), serve(name="behind")
    (hop.folder / "authorized_keys").write_text("")
    said = refusal(ssh, dataclasses.replace(behind.access, through=hop.access))
    assert said.startswith("behind: through hop: does not let")


def test_a_host_that_the_hop_cannot_reach_is_said(serve: Callable[..., Server], ssh: Ssh) -> None:
    hop = serve(name="hop")
    behind = dataclasses.replace(at(free_port("127.0.0.1"), hop.access), name="behind", through=hop.access)
    assert re.match(
        r"behind: hop cannot reach it at 127.0.0.1:\d+: Connection refused → ", refusal(ssh, behind)
    )
    hop = serve("AllowTcpForwarding no", name="hop")
    assert "set AllowTcpForwarding yes in /etc/ssh/sshd_config of hop" in refusal(
        ssh, dataclasses.replace(behind, through=hop.access)
    )


def test_where_the_hop_is_gone_the_other_way_is_taken(serve: Callable[..., Server], ssh: Ssh) -> None:
    server = serve()
    gone = at(free_port("127.0.0.1"), dataclasses.replace(server.access, name="gone"))
    alone = dataclasses.replace(server.access, proxy_command=relay(server))
    access = dataclasses.replace(server.access, through=gone, otherwise=alone)
    SshTransport(access, ssh).connect().result(30)
    assert server.logins() == 1


def test_a_programs_input_and_output_can_be_the_connection(server: Server, ssh: Ssh) -> None:
    access = dataclasses.replace(server.access, address="not-used.invalid", proxy_command=relay(server))
    done = SshTransport(access, ssh).begin(["cat"], "x" * 1_000_000, timeout_s=60).result(60)
    assert len(done.stdout) == 1_000_000


def test_a_proxy_ends_with_its_connection(server: Server, user_home: Path) -> None:
    mark = user_home / "pid"
    program = f"import os; open({str(mark)!r}, 'w').write(str(os.getpid()))\n{RELAY}"
    command = (sys.executable, "-c", program, server.address, str(server.port))
    with Ssh() as ssh:
        SshTransport(dataclasses.replace(server.access, proxy_command=command), ssh).connect().result(30)
        pid = int(mark.read_text())
        assert Path(f"/proc/{pid}").exists()
    until_s = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_a_proxy_that_ends_is_said_with_its_last_words(server: Server, ssh: Ssh) -> None:
    program = "import sys; sys.exit('WARNING: slow\\n\\nERROR: the instance is stopped\\n')"
    access = dataclasses.replace(server.access, proxy_command=(sys.executable, "-c", program))
    assert "ended with exit code 1: ERROR: the instance is stopped → " in refusal(ssh, access)


def test_a_proxy_that_is_not_installed_is_said(server: Server, ssh: Ssh) -> None:
    access = dataclasses.replace(server.access, proxy_command=("no-such-gcloud", "x"))
    assert "the command no-such-gcloud is not installed → install it" in refusal(ssh, access)


def test_a_proxy_that_says_nothing_is_given_up_and_ended(
    server: Server, hasty_ssh: Ssh, user_home: Path
) -> None:
    mark = user_home / "pid"
    program = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    access = dataclasses.replace(server.access, proxy_command=(sys.executable, "-c", program))
    assert "does not answer" in refusal(hasty_ssh, access)
    assert not Path(f"/proc/{mark.read_text()}").exists()
