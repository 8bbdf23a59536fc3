"""The process in which Pulumi runs dynamic providers, as far as a test can be one."""

from __future__ import annotations

import concurrent.futures
import socket
import sys
import threading
import types

import pytest

from infra.cloud_tpu import plugin
from infra.cloud_tpu.errors import AbandonedError, CloudTpuError


@pytest.fixture
def plugin_process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process looks like the plugin's."""
    main = types.ModuleType("__main__")
    main.__spec__ = types.SimpleNamespace(name=plugin.MODULE)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "__main__", main)
    return monkeypatch


def test_the_pool_of_four_threads_lets_more_than_four_wait_at_once() -> None:
    together = threading.Barrier(7)

    def wait() -> bool:
        grown = plugin.allow_threads(10)
        together.wait(timeout=20)
        return grown

    with concurrent.futures.ThreadPoolExecutor(max_workers=4) as pool:
        first = pool.submit(plugin.allow_threads, 10)
        assert first.result()
        assert [each.result() for each in [pool.submit(wait) for _ in range(7)]] == [True] * 7


def test_a_thread_of_no_pool_stays_as_it_is() -> None:
    assert not plugin.allow_threads()


def test_an_engine_that_listens_is_there_and_one_that_has_ended_is_not(
    plugin_process: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        plugin_process.setattr(sys, "argv", ["pulumi", f"127.0.0.1:{port}"])
        assert plugin.engine_is_there()
    assert not plugin.engine_is_there()


@pytest.mark.parametrize("arguments", [[], ["pulumi"], ["pulumi", "nonsense"], ["pulumi", "127.0.0.1:http"]])
def test_where_we_cannot_know_the_engine_is_there(
    plugin_process: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    plugin_process.setattr(sys, "argv", arguments)
    assert plugin.engine_is_there()


def test_outside_the_plugin_the_engine_counts_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest", "127.0.0.1:1"])
    assert plugin.engine_is_there()


def test_a_line_that_nobody_can_read_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(AbandonedError):
        plugin.say("hello")


def test_errors_for_the_user_have_no_traceback_and_bugs_have_one(plugin_process: pytest.MonkeyPatch) -> None:
    plugin_process.setattr(sys, "tracebacklimit", 1000, raising=False)
    with pytest.raises(CloudTpuError), plugin.plain_errors():
        raise CloudTpuError("no")
    assert sys.tracebacklimit == 0
    with pytest.raises(KeyError), plugin.plain_errors():
        raise KeyError("a bug")
    assert sys.tracebacklimit == 1000
