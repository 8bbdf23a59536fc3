"""Ports of this machine, and HTTP servers that take the part of Google's or of another service that is not here."""

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any


def free_port(address: str = "127.0.0.1") -> int:
    return free_ports(1, address)[0]


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server((address, 0))) for _ in range(count)]
        return [listening.getsockname()[1] for listening in sockets]


class Handler(http.server.BaseHTTPRequestHandler):
    """One that writes no log."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def reply(self, content: Any = b"", status: int = 200, **headers: str) -> None:
        """content: bytes as they are, anything else as JSON. headers: by their names, with _ for -."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server, as host:port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
