"""Google's API of clusters on loopback, as far as infra asks it, over what the gcp provider's stand-in has made."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rehearsal.gcp_stand_in.world import World

CLUSTER, POOL = "gcp:container/cluster:Cluster", "gcp:container/nodePool:NodePool"


@contextlib.contextmanager
def served(world: World) -> Iterator[str]:
    """Its URL, as gcp:containerCustomEndpoint has it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answer(world, self.path.removeprefix("/v1/"))
            missing = {"error": {"code": 404, "status": "NOT_FOUND", "message": f"Not found: {self.path}"}}
            content = json.dumps(missing if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/"
        server.shutdown()


def answer(world: World, name: str) -> dict[str, Any] | None:
    if name.endswith("/nodePools"):
        pools = [each for each in world.with_type("container:NodePool") if each.id.startswith(f"{name}/")]
        return {"nodePools": [pool(world, each.id) for each in pools]}
    thing = world.find(POOL, name) or world.find(CLUSTER, name)
    return None if thing is None else pool(world, name)


def pool(world: World, own_id: str) -> dict[str, Any]:
    reason = world.errors().get(own_id)
    shown: dict[str, Any] = {"name": own_id.rpartition("/")[2], "status": "ERROR" if reason else "RUNNING"}
    if reason:
        code, _, message = reason.partition(": ")
        shown["conditions"] = [{"code": code, "message": message, "canonicalCode": "RESOURCE_EXHAUSTED"}]
    return shown
