"""What else a host over SSH can do: a port of it on this machine."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable

import pytest

from launch.hosts import HostError, Transport
from launch.ssh.connection import Ssh
from launch.ssh.transport import SshTransport
from tests.launch.ssh.conftest import Server, free_port


def test_a_port_of_a_host_is_one_of_this_machines_loopback_while_it_is_wanted(
    serve: Callable[..., Server], ssh: Ssh
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:

        def echo() -> None:
            client, _ = there.accept()
            with client:
                client.sendall(client.recv(100).upper())

        thread = threading.Thread(target=echo)
        thread.start()
        with SshTransport(serve().access, ssh).forward("127.0.0.1", there.getsockname()[1]) as port:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
                client.sendall(b"words")
                assert client.recv(100) == b"WORDS"
            thread.join(30)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=30)


def test_a_tunnel_to_a_host_that_cannot_be_reached_is_an_error(
    serve: Callable[..., Server], ssh: Ssh
) -> None:
    access = dataclasses.replace(serve().access, port=free_port("127.0.0.1"), address="127.0.0.1")
    with (
        pytest.raises(HostError, match="refuses the connection"),
        SshTransport(access, ssh).forward("127.0.0.1", 1),
    ):
        pass


def test_it_is_a_transport(serve: Callable[..., Server], ssh: Ssh) -> None:
    host: Transport = SshTransport(serve().access, ssh)
    assert host.begin(["true"], "", timeout_s=30).result(30).exit_code == 0


def test_connections_that_are_closed_end_what_is_under_way_and_take_no_more(
    serve: Callable[..., Server], user_home: object
) -> None:
    host = SshTransport(serve().access, ssh := Ssh())
    future = host.begin(["sleep", "600"], "", timeout_s=60)
    host.connect().result(30)
    ssh.close()
    ssh.close()
    assert future.cancelled() or future.exception(30) is not None
    with pytest.raises(RuntimeError, match="closed"):
        host.begin(["true"], "", timeout_s=30)
