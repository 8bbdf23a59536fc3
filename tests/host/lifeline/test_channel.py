"""A connection is bounded both ways: whatever the other side sends or leaves unread, this side goes on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.agent.liveness_client import LINE_LIMIT, Channel


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel and the other side's bare socket."""
    near, far = socket.socketpair()
    channel = Channel(near)
    with far:
        yield channel, far
    channel.close()


def test_messages_arrive_in_order_however_they_are_cut(pair: tuple[Channel, socket.socket]) -> None:
    channel, far = pair
    found: list[dict[str, Any]] = []
    for part in (b'{"a"', b': 1}\n{"b": 2}\n{', b'"c": 3}\n'):
        far.sendall(part)
        found += channel.receive()
    assert found == [{"a": 1}, {"b": 2}, {"c": 3}]
    assert channel.broken is None


def test_what_came_before_the_end_is_not_lost(pair: tuple[Channel, socket.socket]) -> None:
    channel, far = pair
    far.sendall(b'{"last": "words"}\n')
    far.shutdown(socket.SHUT_WR)
    assert channel.receive() == [{"last": "words"}]
    assert channel.broken == "the connection ended"


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 5000, b'{"a": ' + b" " * LINE_LIMIT + b"1}"]
)
def test_a_line_that_is_no_short_json_object_breaks_the_channel(
    pair: tuple[Channel, socket.socket], line: bytes
) -> None:
    channel, far = pair
    far.sendall(line + b"\n")
    assert channel.receive() == []
    assert channel.broken is not None


def test_a_line_without_an_end_breaks_the_channel_at_the_limit(pair: tuple[Channel, socket.socket]) -> None:
    channel, far = pair
    for _ in range(3):
        far.sendall(b"x" * (LINE_LIMIT // 2))
        channel.receive()
    assert channel.broken == f"a line is longer than {LINE_LIMIT} bytes"


def test_who_does_not_read_is_given_up_and_never_waited_for(pair: tuple[Channel, socket.socket]) -> None:
    channel, _ = pair
    for _ in range(1000):
        channel.send({"text": "x" * 10000})
        if channel.broken is not None:
            break
    assert channel.broken == "it does not read what it is sent"
    assert not channel.has_unsent


def test_what_did_not_fit_goes_later(pair: tuple[Channel, socket.socket]) -> None:
    channel, far = pair
    sent = 0
    while not channel.has_unsent:
        channel.send({"text": "x" * 10000})
        sent += 1
    received = b""
    while received.count(b"\n") < sent:
        received += far.recv(65536)
        channel.flush()
    assert not channel.has_unsent
    assert channel.broken is None


def test_whoever_has_gone_breaks_the_channel_and_raises_nothing(pair: tuple[Channel, socket.socket]) -> None:
    channel, far = pair
    far.close()
    channel.send({})
    assert channel.receive() == []
    assert channel.broken is not None


@given(
    st.lists(
        st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers(), max_size=3), max_size=5
    )
)
def test_what_is_sent_is_what_arrives(messages: list[dict[str, Any]]) -> None:
    near, far = socket.socketpair()
    sender, receiver = Channel(near), Channel(far)
    for message in messages:
        sender.send(message)
    assert receiver.receive() == messages
    sender.close()
    receiver.close()
