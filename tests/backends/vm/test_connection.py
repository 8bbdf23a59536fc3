"""Opening a connection: pinned keys, the way there, and every failure with its reason and remedy, within its limit."""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncssh
import pytest

from backends.vm.access import Access
from backends.vm.connection import Ssh
from backends.vm.transport import SshTransport
from launch.hosts import HostError
from tests.backends.vm.conftest import RELAY, Server, at, refusal, write_key
from tests.processes import all_end
from tests.servers import free_port


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    return serve()


def test_one_connection_serves_everything_and_reads_nothing_of_the_users_own_configuration(
    server: Server, ssh: Ssh, user_home: Path
) -> None:
    (user_home / ".ssh" / "config").write_text("Host *\n  User nobody\n  Port 1\n  HostName 127.0.0.99\n")
    (user_home / ".ssh" / "known_hosts").write_text("damaged")
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


def test_connections_that_are_closed_end_what_is_under_way_and_take_no_more(
    server: Server, user_home: Path
) -> None:
    host = SshTransport(server.access, ssh := Ssh())
    future = host.begin(["sleep", "600"], "", timeout_s=60)
    host.connect().result(30)
    ssh.close()
    ssh.close()
    assert future.cancelled() or future.exception(30) is not None
    with pytest.raises(RuntimeError, match="closed"):
        host.begin(["true"], "", timeout_s=30)


# --- where nobody answers as an SSH server should -----------------------------------------------------------------

NOBODY = Access(
    name="host-0", address="127.0.0.1", user="u", os_login=False, made_by_pulumi=False,
    host_keys=(asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode(),),
)  # fmt: skip


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


def busy(client: socket.socket) -> None:
    client.sendall(b"Exceeded MaxStartups\r\n")
    client.close()


@pytest.mark.parametrize(
    ("greet", "said"),
    [
        (socket.socket.close, "closed the connection before a word was said: too many"),
        (busy, "closed the connection before a word was said: too many"),
        (
            lambda client: client.sendall(b"SSH-1.5-old\r\n"),
            "the login failed: Unsupported SSH version → is it an SSH server?",
        ),
        (lambda client: client.sendall(b"SSH-2.0-slow\r\n"), "took more than 1.5 s for the login"),
    ],
)
def test_a_server_that_hangs_up_or_hangs_or_is_another_kind_is_told_apart(
    hasty_ssh: Ssh, greet: Callable[[socket.socket], None], said: str
) -> None:
    with listening(greet) as port:
        assert said in refusal(hasty_ssh, at(port, NOBODY))


def test_a_name_a_port_and_a_host_that_do_not_answer_are_told_apart(hasty_ssh: Ssh) -> None:
    unknown = dataclasses.replace(NOBODY, address="no-such-host.invalid")
    assert 'host-0: the name "no-such-host.invalid" is not known' in refusal(hasty_ssh, unknown)
    port = free_port("127.0.0.1")
    refused = f"127.0.0.1:{port} refuses the connection → is the host running?"
    assert refused in refusal(hasty_ssh, at(port, NOBODY))
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as clients:
        for _ in range(4):  # what the kernel holds back for a program that accepts nothing
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        silent = at(full.getsockname()[1], NOBODY)
        assert "does not answer → is the host running?" in refusal(hasty_ssh, silent)


# --- host keys ----------------------------------------------------------------------------------------------------


def test_a_changed_host_key_is_refused_with_both_fingerprints(server: Server, ssh: Ssh) -> None:
    pinned = server.access
    server.new_host_key()
    said = refusal(ssh, pinned)
    expected, found = (
        asyncssh.import_public_key(each.host_keys[0]).get_fingerprint() for each in (pinned, server.access)
    )
    assert f"shows the host key {found}, and the inventory has {expected}" in said
    assert "somebody may be in between: do not connect" in said
    assert "`pulumi up --refresh`" in refusal(ssh, dataclasses.replace(pinned, made_by_pulumi=True))
    assert server.logins() == 0
    SshTransport(server.access, ssh).connect().result(30)


def test_a_host_without_a_known_key_is_never_connected_to(server: Server, ssh: Ssh) -> None:
    access = dataclasses.replace(server.access, host_keys=())
    assert "its host key is not known → put the first two words of" in refusal(ssh, access)
    assert "pulumi up --refresh" in refusal(ssh, dataclasses.replace(access, made_by_pulumi=True))
    access = dataclasses.replace(server.access, host_keys=("ssh-ed25519 nonsense",))
    assert 'the inventory\'s host key "ssh-ed25519 nonsense" cannot be read' in refusal(ssh, access)
    assert "Connection from" not in server.log


def test_of_a_hosts_keys_the_one_that_is_pinned_is_asked_for_and_one_of_several_is_enough(
    serve: Callable[..., Server], ssh: Ssh, tmp_path: Path
) -> None:
    own = asyncssh.generate_private_key("ecdsa-sha2-nistp256")
    own.write_private_key(tmp_path / "ecdsa")
    (tmp_path / "ecdsa").chmod(0o600)
    access = serve(f"HostKey {tmp_path / 'ecdsa'}").access
    other = asyncssh.generate_private_key("ecdsa-sha2-nistp384").export_public_key().decode()
    for keys in (access.host_keys, (own.export_public_key().decode(),), (other, *access.host_keys)):
        SshTransport(dataclasses.replace(access, host_keys=keys), ssh).connect().result(30)
    said = refusal(ssh, dataclasses.replace(access, host_keys=(other,)))
    assert re.search("shows the host key SHA256:.* and the inventory has SHA256:", said)


# --- the user's keys ----------------------------------------------------------------------------------------------


def test_a_refused_key_is_named_with_the_user_and_the_remedy(
    serve: Callable[..., Server], ssh: Ssh, user_home: Path
) -> None:
    server = serve("MaxAuthTries 2")
    (server.folder / "authorized_keys").write_text("")
    said = refusal(ssh, server.access)
    assert re.search(r"host-0: does not let \w+ in with id_ed25519 → add one of them to", said)
    of_os_login = dataclasses.replace(server.access, os_login=True)
    assert "gcloud compute os-login ssh-keys add" in refusal(ssh, of_os_login)
    for user, outside in (("ada_example_com", False), ("ext_ada_example_com", True)):
        denied = of_os_login.permission_denied(user, ["k"], [])
        assert ("roles/compute.osLoginExternalUser" in denied.remedy) is outside
    for name in ("google_compute_engine", "id_ecdsa", "id_rsa"):  # more than this server takes
        write_key(user_home / ".ssh" / name)
    with Ssh() as again:
        assert "does not let" in refusal(again, server.access)


def test_a_session_too_many_is_refused_in_words(serve: Callable[..., Server], ssh: Ssh) -> None:
    host = SshTransport(serve("MaxSessions 1").access, ssh)
    came = threading.Event()
    future = host.stream(["sh", "-c", "echo; sleep 60"], lambda *_: came.set(), timeout_s=60)
    assert came.wait(30)
    with pytest.raises(HostError, match="refused to open one more session"):
        host.begin(["true"], "", timeout_s=30).result(30)
    future.cancel()


# --- through another host -----------------------------------------------------------------------------------------


def test_hosts_are_reached_through_another_that_is_connected_to_once(
    serve: Callable[..., Server], ssh: Ssh
) -> None:
    hop, *others = (serve() for _ in range(3))
    hosts = [dataclasses.replace(other.access, through=hop.access) for other in others]
    pending = [
        SshTransport(each, ssh).begin(["sh", "-c", "echo $SERVER"], "", timeout_s=60) for each in hosts
    ]
    assert [each.result(60).stdout for each in pending] == ["1\n", "2\n"]
    assert hop.logins() == 1
    behind = dataclasses.replace(at(free_port("127.0.0.1"), hop.access), name="behind", through=hop.access)
    said = refusal(ssh, behind)
    assert re.match(r"behind: host-0 cannot reach it at 127.0.0.1:\d+: Connection refused → ", said)


def test_a_hop_that_fails_or_forwards_nothing_is_named_and_another_way_is_taken_where_there_is_one(
    serve: Callable[..., Server], ssh: Ssh
) -> None:
    hop, server = serve("AllowTcpForwarding no", name="hop"), serve(name="behind")
    behind = dataclasses.replace(server.access, through=hop.access)
    assert "set AllowTcpForwarding yes in /etc/ssh/sshd_config of hop" in refusal(ssh, behind)
    (hop.folder / "authorized_keys").write_text("")
    with Ssh() as again:
        assert refusal(again, behind).startswith("behind: through hop: does not let")
        alone = dataclasses.replace(server.access, proxy_command=relay(server))
        SshTransport(dataclasses.replace(behind, otherwise=alone), again).connect().result(30)
    assert server.logins() == 1


# --- by a program -------------------------------------------------------------------------------------------------


def relay(server: Server, mark: Path | None = None) -> tuple[str, ...]:
    """mark: where it writes its process id."""
    noted = f"import os; open({str(mark)!r}, 'w').write(str(os.getpid()))\n" if mark else ""
    return (sys.executable, "-c", noted + RELAY, server.address, str(server.port))


def test_a_programs_input_and_output_can_be_the_connection_and_it_ends_with_it(
    server: Server, user_home: Path
) -> None:
    mark = user_home / "pid"
    access = dataclasses.replace(server.access, address="not-used.invalid", proxy_command=relay(server, mark))
    with Ssh() as ssh:
        done = SshTransport(access, ssh).begin(["cat"], "x" * 1_000_000, timeout_s=60).result(60)
        assert len(done.stdout) == 1_000_000
        pid = int(mark.read_text())
        assert Path(f"/proc/{pid}").exists()
    assert all_end([pid])


@pytest.mark.parametrize(
    ("last_words", "remedy"),
    [
        ("The resource 'projects/p/instances/w-0' was not found", "fab recover RUN"),
        ("4033: 'not authorized'", "gcloud auth login"),
    ],
)
def test_of_a_machine_that_is_not_there_recovering_it_is_the_remedy_and_no_login(
    last_words: str, remedy: str
) -> None:
    tunnel = dataclasses.replace(NOBODY, proxy_command=("gcloud", "compute", "start-iap-tunnel", "w-0", "22"))
    error = tunnel.proxy_ended(1, last_words)
    assert last_words in error.reason
    remedies = ("fab recover RUN", "gcloud auth login")
    assert [name for name in remedies if name in error.remedy] == [remedy]


def test_a_program_that_ends_or_is_not_installed_or_says_nothing_is_said_and_gone(
    hasty_ssh: Ssh, user_home: Path
) -> None:
    def said(*command: str) -> str:
        return refusal(hasty_ssh, dataclasses.replace(NOBODY, proxy_command=command))

    program = "import sys; sys.exit('WARNING: slow\\n\\nERROR: the instance is stopped\\n')"
    last_words = "ended with exit code 1: ERROR: the instance is stopped → "
    assert last_words in said(sys.executable, "-c", program)
    assert "the command no-such-gcloud is not installed → install it" in said("no-such-gcloud", "x")
    mark = user_home / "pid"
    program = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    assert "does not answer" in said(sys.executable, "-c", program)
    assert not Path(f"/proc/{mark.read_text()}").exists()
