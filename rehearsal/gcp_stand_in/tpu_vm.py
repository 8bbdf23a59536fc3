"""Nodes of the Cloud TPU API for `gcp.tpu.V2Vm`, over REST as the real provider makes them.

So capacity, stock-outs and preemption are those of the one simulated cloud. A 429 is tried again, silently and with
growing gaps, until the time is over and IN_FLIGHT_S more, as the real provider does; others are told at once."""

from __future__ import annotations

import dataclasses
import json
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from contracts.aliases import Json
from rehearsal.gcp_stand_in.stand_in_world import WorldError
from rehearsal.local_servers import RefusalError, ask

POLL_S = 0.05
LONGEST_GAP_S = 1.0
IN_FLIGHT_S = 30.0
REQUEST_LIMIT_S = 60.0
DEFAULT_LIMIT_S = 1200.0
AGAIN = (429, 500, 502, 503)
PATCHED = ("description", "dataDisks", "metadata", "tags", "labels")
# Properties of a V2Vm that the API calls the same, and what it tells of a node besides.
SAME = (
    "acceleratorType", "acceleratorConfig", "runtimeVersion", "description", "cidrBlock", "metadata", "tags",
    "networkConfig", "networkConfigs", "schedulingConfig", "dataDisks", "shieldedInstanceConfig",
)  # fmt: skip
REPORTED_FIELDS = (
    "state",
    "health",
    "healthDescription",
    "apiVersion",
    "multisliceNode",
    "queuedResource",
    "symptoms",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuVms:
    """endpoint: as in gcp:tpuV2CustomEndpoint, with its version, such as http://127.0.0.1:8470/v2/."""

    endpoint: str

    def create(self, own_id: str, inputs: Json, limit_s: float) -> None:
        """Returns when the node is READY. Raises WorldError."""
        parent, _, node_id = own_id.rpartition("/nodes/")
        deadline = time.monotonic() + (limit_s or DEFAULT_LIMIT_S)
        path = f"{parent}/nodes?nodeId={urllib.parse.quote(node_id)}"
        try:
            operation = self._insist("POST", path, deadline, body(inputs))
        except RefusalError as refusal:
            raise WorldError(f"Error creating Vm: {refusal}") from None
        self._wait(operation, deadline, "create")

    def read(self, own_id: str) -> Json | None:
        """The node's outputs; None where there is none."""
        try:
            return outputs(self._insist("GET", own_id, time.monotonic() + REQUEST_LIMIT_S))
        except RefusalError as refusal:
            if refusal.code == 404:
                return None
            raise WorldError(f"Error when reading or editing TpuV2Vm: {refusal}") from None

    def all(self, project: str) -> list[Json]:
        """The nodes of a project in every zone, queued resources' own included. Raises WorldError."""
        try:
            answer = self._insist(
                "GET",
                f"projects/{project}/locations/-/nodes?pageSize=1000",
                time.monotonic() + REQUEST_LIMIT_S,
            )
        except RefusalError as refusal:
            raise WorldError(f"Error when listing nodes: {refusal}") from None
        return list(answer.get("nodes", []))

    def update(self, own_id: str, inputs: Json, changed: list[str], limit_s: float) -> None:
        """Changes the node's fields. Raises WorldError."""
        mask = ",".join(sorted(name for name in changed if name in PATCHED))
        deadline = time.monotonic() + (limit_s or DEFAULT_LIMIT_S)
        try:
            operation = self._insist("PATCH", f"{own_id}?updateMask={mask}", deadline, body(inputs))
        except RefusalError as refusal:
            raise WorldError(f"Error updating Vm {own_id!r}: {refusal}") from None
        self._wait(operation, deadline, "update")

    def delete(self, own_id: str, limit_s: float) -> None:
        """Returns when the node is gone, at once where it is not there. Raises WorldError."""
        deadline = time.monotonic() + (limit_s or DEFAULT_LIMIT_S)
        try:
            operation = self._insist("DELETE", own_id, deadline)
        except RefusalError as refusal:
            if refusal.code == 404:
                return
            raise WorldError(f"Error when reading or editing Vm: {refusal}") from None
        self._wait(operation, deadline, "delete")

    def _wait(self, operation: Json, deadline: float, verb: str) -> None:
        while not operation.get("done"):
            if time.monotonic() > deadline:
                raise WorldError(
                    f"Error waiting to {verb} Vm: timeout while waiting for state to become 'done'"
                )
            time.sleep(POLL_S)
            try:
                operation = self._insist("GET", operation["name"], deadline)
            except RefusalError as refusal:
                raise WorldError(f"Error waiting to {verb} Vm: {refusal}") from None
        if "error" in operation:
            error = operation["error"]
            message = f"Error code {error.get('code')}, message: {error.get('message')}"
            raise WorldError(f"Error waiting to {verb} Vm: {message}")

    def _insist(self, method: str, path: str, deadline: float, content: Json | None = None) -> Json:
        gap_s = POLL_S
        while True:
            try:
                return self._send(method, path, content)
            except RefusalError as refusal:
                end = deadline + (IN_FLIGHT_S if refusal.code == 429 else 0)
                if refusal.code not in AGAIN or time.monotonic() + gap_s > end:
                    raise
            time.sleep(gap_s)
            gap_s = min(2 * gap_s, LONGEST_GAP_S)

    def _send(self, method: str, path: str, content: Json | None) -> Json:
        data = None if content is None else json.dumps(content).encode()
        try:
            answer: Json = json.loads(
                ask(method, f"{self.endpoint.rstrip('/')}/{path}", data, REQUEST_LIMIT_S)
            )
        except OSError as error:
            raise WorldError(f"the Cloud TPU API at {self.endpoint} does not answer: {error}") from None
        return answer


def body(inputs: Mapping[str, Any]) -> Json:
    """A node of the API, of the inputs of a V2Vm."""
    node = {name: inputs[name] for name in SAME if inputs.get(name) is not None}
    node["labels"] = {**(inputs.get("labels") or {}), "goog-pulumi-provisioned": "true"}
    if account := inputs.get("serviceAccount"):
        renamed = {"email": account.get("email"), "scope": account.get("scopes")}
        node["serviceAccount"] = {name: value for name, value in renamed.items() if value is not None}
    return node


def outputs(node: Mapping[str, Any]) -> Json:
    """The outputs of a node beyond its inputs."""
    reported = {name: node[name] for name in REPORTED_FIELDS if name in node}
    return reported | {
        "networkEndpoints": node.get("networkEndpoints", []),
        "effectiveLabels": node.get("labels", {}),
    }
