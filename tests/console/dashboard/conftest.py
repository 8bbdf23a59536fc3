"""The dashboard, served on a free port of this machine, and a browser to look at it."""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, sync_playwright

from console.dashboard.dashboard_server import app
from console.dashboard.folders import Place
from contracts.files import DiskFiles, Files
from launch.runs import RunsFolder

Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves the runs of folders, and returns the address."""
    started: list[tuple[uvicorn.Server, threading.Thread, socket.socket]] = []

    def begin(*folders: Path, files: Files | None = None) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        places = [
            Place(
                folder.name,
                folder.name,
                RunsFolder(url=str(folder), files=files or DiskFiles()),
                period_s=0.05,
            )
            for folder in folders
        ]
        server = uvicorn.Server(
            uvicorn.Config(app(places), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        started.append((server, thread, listening))
        while not server.started:
            time.sleep(0.01)
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield begin
    for server, thread, listening in started:
        server.should_exit = True
        thread.join(20)
        listening.close()


@pytest.fixture
def browser() -> Iterator[Browser]:
    """Debian's Chromium, for one test: beside Playwright's event loop a thread can have no other."""
    chromium = shutil.which("chromium")
    assert chromium is not None, "the dashboard's pages are tested in a browser: apt-get install chromium"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium)
        yield running
        running.close()
