"""Configurations, and everything that the program declares of them, recorded by Pulumi's own mocks."""

import asyncio
import copy
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pulumi
import pytest
from pulumi.runtime import mocks, rpc
from pulumi.runtime.proto import resource_pb2

from contracts import inventory
from infra.config import Config, reader
from infra.stack import declare_stack

PROJECT, STACK = "my-project", "dev"

SLICE: dict[str, Any] = {"name": "main", "accelerator": "v5litepod-16", "capacity": "spot"}
VALUES: dict[str, Any] = {
    "zone": "us-central1-a",
    "slices": [SLICE],
    "access": {"members": ["user:ada@example.com"]},
}

TWO_ZONES = [
    {"name": "a", "accelerator": "v5litepod-16", "capacity": "spot"},
    {"name": "b", "accelerator": "v5litepod-8", "provisioning": "direct"},
    {"name": "c", "accelerator": "v6e-8", "zone": "us-east1-d"},
]

SHAPES: dict[str, dict[str, Any]] = {
    "one slice": {},
    "three slices in two zones": {"slices": TWO_ZONES, "allow_cross_region": True},
    "multislice": {"slices": [{"name": "m", "accelerator": "v5litepod-16", "capacity": "spot", "count": 2}]},
    "existing network": {"network": {"existing": "default"}},
    "Filestore": {"storage": {"nfs": {"kind": "filestore"}}},
    "a data disk": {
        "slices": [
            {
                "name": "main",
                "accelerator": "v5litepod-8",
                "data-disks": [{"name": "scratch", "size-gib": 10}],
            }
        ]
    },
    "no slices": {"slices": []},
    "node pools": {"slices": [{"name": "p", "accelerator": "v5litepod-16", "provisioning": "node-pool"}]},
    "Compute Engine": {
        "zone": "us-east5-a",
        "slices": [
            {"name": "one", "accelerator": "v6e-8", "provisioning": "compute", "capacity": "spot"},
            {"name": "four", "accelerator": "v6e-16", "provisioning": "compute", "count": 2},
        ],
    },
    "a cluster and nothing else": {
        "slices": [{"name": "p", "accelerator": "v5litepod-16", "provisioning": "node-pool"}],
        "storage": {"nfs": {"kind": "none"}},
    },
    "no storage at all": {"storage": {"bucket": False, "nfs": {"kind": "none"}}},
}

BOTH_KINDS = [
    {"name": "q", "accelerator": "v5litepod-8"},
    {"name": "d", "accelerator": "v5litepod-8", "provisioning": "direct"},
]

Configure = Callable[..., Config]


@pytest.fixture
def configure() -> Configure:
    """The configuration of one spot slice with all defaults, or with other top-level keys (`_` for `-`)."""

    def configure(*, stack: str = STACK, **changes: Any) -> Config:
        values = copy.deepcopy(VALUES) | {key.replace("_", "-"): value for key, value in changes.items()}
        return reader.read(values, project=PROJECT, stack=stack)

    return configure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resource:
    """One registration: its type, name and inputs (as the provider gets them), its parent and options."""

    kind: str
    name: str
    inputs: dict[str, Any]
    urn: str
    parent: str
    protect: bool
    options: resource_pb2.RegisterResourceRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declared:
    resources: tuple[Resource, ...]
    inventory: inventory.Inventory
    image_repository: str

    def all(self, kind: str) -> list[Resource]:
        """Those of a type: its last part, "Firewall", or more of it where that is not enough."""
        tail = kind if "/" in kind else f":{kind}"
        return [each for each in self.resources if each.kind.endswith(tail)]

    def one(self, kind: str) -> Resource:
        (found,) = self.all(kind)
        return found

    def needs(self, resource: Resource) -> set[str]:
        """The URNs that it is made after: its own dependencies and those of the components around it."""
        parents = [each for each in self.resources if each.urn == resource.parent]
        of_parents = set().union(*(self.needs(each) for each in parents))
        return set(resource.options.dependencies) | of_parents


Declare = Callable[..., Declared]
_DECLARED: dict[str, Declared] = {}  # many rules look at the same few stacks


@pytest.fixture
def declare(configure: Configure) -> Iterator[Declare]:
    """Run the program under mocks: `declare()`, or with the keys that `configure` takes."""

    def declare(**changes: Any) -> Declared:
        key = json.dumps(changes)
        if key not in _DECLARED:
            _DECLARED[key] = _declare(configure(**changes))
        return _DECLARED[key]

    # Pulumi takes the thread's loop and makes none itself.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield declare
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture(params=SHAPES.values(), ids=list(SHAPES))
def any_stack(request: pytest.FixtureRequest, declare: Declare) -> Declared:
    """Each of SHAPES: what takes it is a rule of every stack."""
    return declare(**request.param)


def _declare(config: Config) -> Declared:
    monitor = _Monitor(_Computed(config.stack))
    mocks.set_mocks(monitor.mocks, project="tpu-stack", stack=config.stack, monitor=monitor)
    found: list[Any] = []

    @pulumi.runtime.test  # type: ignore[untyped-decorator]
    def program() -> pulumi.Output[None]:
        stack = declare_stack(config)
        found.append(stack.image_repository)
        return stack.inventory.apply(found.append)

    # It returns when every registration has been answered: what is absent then was never declared.
    program()
    repository, made = found
    return Declared(resources=tuple(monitor.seen), inventory=made, image_repository=repository)


class _Monitor(mocks.MockMonitor):
    """Keeps the options too, which Pulumi does not hand to mocks."""

    def __init__(self, computed: mocks.Mocks) -> None:
        super().__init__(computed)
        self.seen: list[Resource] = []
        self._lock = threading.Lock()

    def RegisterResource(
        self, request: resource_pb2.RegisterResourceRequest
    ) -> resource_pb2.RegisterResourceResponse:
        # Pulumi calls this from threads of a pool, gives each a loop of its own, and closes none of them.
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            answer: resource_pb2.RegisterResourceResponse = super().RegisterResource(request)  # type: ignore[no-untyped-call]
        finally:
            asyncio.set_event_loop(None)
            loop.close()
        resource = Resource(
            kind=request.type,
            name=request.name,
            inputs=rpc.deserialize_properties(request.object),
            urn=answer.urn,
            parent=request.parent,
            protect=request.protect,
            options=request,
        )
        with self._lock:
            self.seen.append(resource)
        return answer


class _Computed(mocks.Mocks):
    """What Google would fill in, and our own providers."""

    def __init__(self, stack: str) -> None:
        self._owner = "0123abcd" if stack == STACK else f"0123{stack}"

    def new_resource(self, args: mocks.MockResourceArgs) -> tuple[str | None, dict[str, Any]]:
        name = args.inputs.get("name", args.name)
        where = f"projects/{PROJECT}"
        state = dict(args.inputs)
        match args.typ.rpartition(":")[2]:
            case "Network":
                return f"{where}/global/networks/{name}", state
            case "Subnetwork":
                return f"{where}/regions/{args.inputs['region']}/subnetworks/{name}", state
            case "Address":
                state["address"] = "10.0.0.2"
            case "Disk":
                state["selfLink"] = f"https://compute/{where}/zones/{args.inputs['zone']}/disks/{name}"
                return f"{where}/zones/{args.inputs['zone']}/disks/{name}", state
            case "Account":
                state["email"] = f"{args.inputs['accountId']}@{PROJECT}.iam.gserviceaccount.com"
                state["name"] = f"{where}/serviceAccounts/{state['email']}"
            case "IAMCustomRole":
                state["name"] = f"{where}/roles/{args.inputs['roleId']}"
            case "Instance" if "fileShares" in args.inputs:
                state["networks"] = [{**args.inputs["networks"][0], "ipAddresses": ["10.7.0.2"]}]
            case "QueuedResource":
                count = int(args.inputs["node_count"])
                state["nodes"] = [
                    {"id": f"n-{node}", "workers": [_worker(f"n-{node}", index) for index in range(2)]}
                    for node in range(count)
                ]
                state["state"] = "ACTIVE"
            case "RegionInstanceTemplate" | "ResourcePolicy":
                kind = {"RegionInstanceTemplate": "instanceTemplates"}.get(
                    args.typ.rpartition(":")[2], "resourcePolicies"
                )
                state["selfLink"] = f"https://compute/{where}/regions/{args.inputs['region']}/{kind}/{name}"
            case "ComputeSlice":
                hosts = int(args.inputs["hosts"])
                state["nodes"] = [
                    {"id": f"g-{group}", "workers": [_worker(f"g-{group}", index) for index in range(hosts)]}
                    for group in range(int(args.inputs["count"]))
                ]
                state |= {"state": "ACTIVE", "create_time": "2026-11-01T00:00:00Z"}
            case "NodeWorkers":
                state["workers"] = [_worker("direct", 0)]
            case "Bucket":
                state["projectNumber"] = 4711
            case "Cluster":
                state["endpoint"] = "10.9.9.9"
                config = dict(state["controlPlaneEndpointsConfig"])
                config["dnsEndpointConfig"] = {"endpoint": "gke-1.us-east5.gke.goog"}
                state["controlPlaneEndpointsConfig"] = config
                state["masterAuth"] = {"clusterCaCertificate": "YXV0aG9yaXR5"}
            case "V2Vm":
                state["networkEndpoints"] = [{"ipAddress": "10.0.0.10", "accessConfigs": []}]
            case "StackIdentity":
                state["owner"] = self._owner
        return f"{args.name}-id", state

    def call(self, args: mocks.MockCallArgs) -> tuple[dict[str, Any], None]:
        raise AssertionError(f"the program asks the cloud for {args.token}; a preview may not need it")


def _worker(node: str, index: int) -> dict[str, Any]:
    return {
        "index": index,
        "name": f"t1v-n-{node}-w-{index}",
        "internal_address": f"10.0.0.{10 + index}",
        "external_address": "",
        "host_keys": ["ssh-ed25519 AAAA"],
    }
