"""Opening a connection: pinned keys, the way there, and every failure with its reason and remedy, within its limit."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncssh
import pytest

from launch.hosts import HostError
from launch.ssh import problems
from launch.ssh.connection import Ssh
from launch.ssh.transport import SshTransport
from tests.launch.ssh.conftest import Server, at, free_port, refusal, write_key


@contextlib.contextmanager
def listening(greet: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server of ours that does to each connection what `greet` says."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError), contextlib.ExitStack() as clients:
                while True:
                    greet(clients.enter_context(server.accept()[0]))

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    return serve()


def test_one_connection_serves_everything_and_a_lost_one_is_opened_anew(server: Server, ssh: Ssh) -> None:
    host = SshTransport(server.access, ssh)
    pending = [host.begin(["true"], "", timeout_s=60) for _ in range(5)]
    assert [each.result(60).exit_code for each in pending] == [0] * 5
    assert server.logins() == 1


def test_a_host_that_does_not_answer_keeps_no_other_waiting(
    serve: Callable[..., Server], hasty_ssh: Ssh
) -> None:
    stopped, well = serve(), serve()
    os.kill(stopped.process.pid, signal.SIGSTOP)
    slow = SshTransport(stopped.access, hasty_ssh).connect()
    SshTransport(well.access, hasty_ssh).connect().result(30)
    assert not slow.done()
    with pytest.raises(HostError, match=r"does not answer → is the host running\?"):
        slow.result(30)


def test_a_host_that_is_cut_off_is_noticed_and_said(server: Server, hasty_ssh: Ssh) -> None:
    host, came = SshTransport(server.access, hasty_ssh), threading.Event()
    future = host.stream(["sh", "-c", "echo; sleep 600"], lambda *_: came.set(), timeout_s=None)
    assert came.wait(30)
    stopped = list(server.connections())
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(HostError, match="the connection was lost while a command ran"):
        future.result(30)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)


def test_a_name_that_is_not_known_is_said(server: Server, ssh: Ssh) -> None:
    access = dataclasses.replace(server.access, address="no-such-host.invalid")
    assert 'host-0: the name "no-such-host.invalid" is not known' in refusal(ssh, access)


def test_a_port_where_nobody_listens_is_said(server: Server, ssh: Ssh) -> None:
    port = free_port("127.0.0.1")
    assert f"127.0.0.1:{port} refuses the connection → is the host running?" in refusal(
        ssh, at(port, server.access)
    )


def test_a_host_that_takes_no_connection_is_given_up(server: Server, hasty_ssh: Ssh) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as clients:
        for _ in range(4):  # what the kernel holds back for a program that accepts nothing
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        assert "does not answer → is the host running?" in refusal(
            hasty_ssh, at(full.getsockname()[1], server.access)
        )


def test_a_server_that_hangs_up_before_its_greeting_is_said_to_be_busy(server: Server, ssh: Ssh) -> None:
    def busy(client: socket.socket) -> None:
        client.sendall(b"Exceeded MaxStartups\r\n")
        client.close()

    for greet in (socket.socket.close, busy):
        with listening(greet) as port:
            said = refusal(ssh, at(port, server.access))
            assert "closed the connection before a word was said: too many" in said


def test_what_is_no_ssh_server_is_said(server: Server, ssh: Ssh) -> None:
    with listening(lambda client: client.sendall(b"SSH-1.5-old\r\n")) as port:
        assert "the login failed: Unsupported SSH version → is it an SSH server?" in refusal(
            ssh, at(port, server.access)
        )


def test_a_server_that_greets_and_then_hangs_is_given_up(server: Server, hasty_ssh: Ssh) -> None:
    with listening(lambda client: client.sendall(b"SSH-2.0-slow\r\n")) as port:
        assert "took more than 1.5 s for the login" in refusal(hasty_ssh, at(port, server.access))


def test_a_changed_host_key_is_refused_with_both_fingerprints(server: Server, ssh: Ssh) -> None:
    pinned = server.access
    server.new_host_key()
    said = refusal(ssh, pinned)
    expected, found = (
        asyncssh.import_public_key(each.host_keys[0]).get_fingerprint() for each in (pinned, server.access)
    )
    assert f"shows the host key {found}, and the inventory has {expected}" in said
    assert "somebody may be in between: do not connect" in said
    assert server.logins() == 0
    SshTransport(server.access, ssh).connect().result(30)
    assert "`pulumi up --refresh`" in refusal(ssh, dataclasses.replace(pinned, made_by_pulumi=True))


def test_a_host_that_has_no_key_of_the_pinned_kind_is_refused(server: Server, ssh: Ssh) -> None:
    other = asyncssh.generate_private_key("ecdsa-sha2-nistp256").export_public_key().decode()
    said = refusal(ssh, dataclasses.replace(server.access, host_keys=(other,)))
    assert re.search("shows the host key SHA256:.* and the inventory has SHA256:", said)


def test_one_of_several_pinned_keys_is_enough(server: Server, ssh: Ssh) -> None:
    other = asyncssh.generate_private_key("ecdsa-sha2-nistp256").export_public_key().decode()
    access = dataclasses.replace(server.access, host_keys=(other, *server.access.host_keys))
    SshTransport(access, ssh).connect().result(30)


def test_of_a_hosts_keys_the_one_that_is_pinned_is_asked_for(
    serve: Callable[..., Server], ssh: Ssh, tmp_path: Path
) -> None:
    other = asyncssh.generate_private_key("ecdsa-sha2-nistp256")
    other.write_private_key(tmp_path / "ecdsa")
    (tmp_path / "ecdsa").chmod(0o600)
    access = serve(f"HostKey {tmp_path / 'ecdsa'}").access
    for keys in (access.host_keys, (other.export_public_key().decode(),)):
        SshTransport(dataclasses.replace(access, host_keys=keys), ssh).connect().result(30)


def test_a_host_without_a_known_key_is_never_connected_to(server: Server, ssh: Ssh) -> None:
    access = dataclasses.replace(server.access, host_keys=())
    assert "its host key is not known → put the first two words of" in refusal(ssh, access)
    assert "pulumi up --refresh" in refusal(ssh, dataclasses.replace(access, made_by_pulumi=True))
    assert "Connection from" not in server.log


def test_a_host_key_that_is_none_is_said(server: Server, ssh: Ssh) -> None:
    access = dataclasses.replace(server.access, host_keys=("ssh-ed25519 nonsense",))
    assert 'the inventory\'s host key "ssh-ed25519 nonsense" cannot be read' in refusal(ssh, access)


def test_a_refused_key_is_named_with_the_user_and_the_remedy(
    server: Server, ssh: Ssh, user_home: Path
) -> None:
    (server.folder / "authorized_keys").write_text("")
    said = refusal(ssh, server.access)
    assert re.search(r"host-0: does not let \w+ in with id_ed25519 → add one of them to", said)
    said = refusal(ssh, dataclasses.replace(server.access, os_login=True))
    assert "gcloud compute os-login ssh-keys add" in said
    for user, outside in (("ada_example_com", False), ("ext_ada_example_com", True)):
        denied = problems.permission_denied(
            dataclasses.replace(server.access, os_login=True), user, ["k"], []
        )
        assert ("roles/compute.osLoginExternalUser" in denied.remedy) is outside


def test_more_keys_than_a_server_takes_still_end_in_a_refusal(
    serve: Callable[..., Server], ssh: Ssh, user_home: Path
) -> None:
    for name in ("google_compute_engine", "id_ecdsa", "id_rsa"):
        write_key(user_home / ".ssh" / name)
    server = serve("MaxAuthTries 2")
    (server.folder / "authorized_keys").write_text("")
    assert "does not let" in refusal(ssh, server.access)


def test_a_session_too_many_is_refused_in_words(serve: Callable[..., Server], ssh: Ssh) -> None:
    host = SshTransport(serve("MaxSessions 1").access, ssh)
    came = threading.Event()
    future = host.stream(["sh", "-c", "echo; sleep 60"], lambda *_: came.set(), timeout_s=60)
    assert came.wait(30)
    with pytest.raises(HostError, match="refused to open one more session"):
        host.begin(["true"], "", timeout_s=30).result(30)
    future.cancel()


def test_nothing_of_the_users_own_ssh_configuration_is_read(
    server: Server, ssh: Ssh, user_home: Path
) -> None:
    (user_home / ".ssh" / "config").write_text("Host *\n  User nobody\n  Port 1\n  HostName 127.0.0.99\n")
    (user_home / ".ssh" / "known_hosts").write_text("damaged")
    SshTransport(server.access, ssh).connect().result(30)
