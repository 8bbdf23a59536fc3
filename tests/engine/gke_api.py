"""Google's API of clusters on loopback, as far as infra asks it, over what the gcp provider's stand-in has made."""

import contextlib
from collections.abc import Iterator
from typing import Any

from rehearsal.gcp_stand_in.stand_in_world import World
from tests.servers import Handler, serving

CLUSTER, POOL = "gcp:container/cluster:Cluster", "gcp:container/nodePool:NodePool"


@contextlib.contextmanager
def served(world: World) -> Iterator[str]:
    """Its URL, as gcp:containerCustomEndpoint has it."""

    class Clusters(Handler):
        def do_GET(self) -> None:
            found = answer(world, self.path.removeprefix("/v1/"))
            missing = {"error": {"code": 404, "status": "NOT_FOUND", "message": f"Not found: {self.path}"}}
            self.reply(missing if found is None else found, 404 if found is None else 200)

    with serving(Clusters) as address:
        yield f"http://{address}/v1/"


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
