"""The engine's protocol for providers, over the values that `provider` works with, served to the engine that asks.

python -m rehearsal.gcp_stand_in ENGINE_ADDRESS     prints the port and lives as long as that engine does
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.struct_pb2 import Struct
from google.rpc import status_pb2  # type: ignore[import-untyped]
from grpc import ServicerContext as Context
from pulumi.runtime.proto import engine_pb2, engine_pb2_grpc, plugin_pb2, provider_pb2_grpc
from pulumi.runtime.proto import provider_pb2 as proto

from contracts.aliases import Json
from rehearsal.gcp_stand_in.provider import (
    WORLD_VARIABLE,
    Provider,
    provider_settings,
    resource_kind,
    urn_type,
)
from rehearsal.gcp_stand_in.stand_in_world import HalfMadeError, World, WorldError

NOTICE = "the gcp provider of this run is tpu-stack's stand-in: nothing is made at Google"
# Each resource that is being made holds a thread while it waits.
THREADS = 128
LARGEST_MESSAGE = 400 * 1024 * 1024
PARENT_POLL_S = 0.2
# How a secret is marked on the wire, sdk/go/common/resource/sig/sig.go.
SIGNATURE, SECRET_VALUE = "4dabf18193072939515e22adb298388d", "1b47061264138c4ac30d75fd1eb44270"


def reports_errors[Request, Response](
    method: Callable[[Service, Request, Context], Response],
) -> Callable[[Service, Request, Context], Response]:
    """Decorate a method so that its WorldError becomes the answer to a failed request."""

    @functools.wraps(method)
    def answer(service: Service, request: Request, context: Context) -> Response:
        try:
            return method(service, request, context)
        except WorldError as error:
            context.abort(grpc.StatusCode.UNKNOWN, str(error))
            raise  # for the reader of types: abort has raised

    return answer


class Service(provider_pb2_grpc.ResourceProviderServicer):
    """One engine's provider. `engine`: its address for messages to the user; empty: none."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._world = World(path=Path(os.environ[WORLD_VARIABLE]))
        self._provider = Provider(settings={}, world=self._world)

    def GetPluginInfo(self, _request: Empty, _context: Context) -> plugin_pb2.PluginInfo:
        return plugin_pb2.PluginInfo(version=f"{importlib.metadata.version('pulumi-gcp')}+stand-in")

    def CheckConfig(self, request: proto.CheckRequest, _context: Context) -> proto.CheckResponse:
        return proto.CheckResponse(inputs=request.news)

    def DiffConfig(self, _request: proto.DiffRequest, _context: Context) -> proto.DiffResponse:
        return proto.DiffResponse(changes=proto.DiffResponse.DIFF_NONE)

    def Configure(self, request: proto.ConfigureRequest, _context: Context) -> proto.ConfigureResponse:
        self._provider = Provider(settings=provider_settings(request.variables), world=self._world)
        self._say(NOTICE)
        return proto.ConfigureResponse()

    def Cancel(self, _request: Empty, _context: Context) -> Empty:
        """Stop nothing: the real provider, too, completes what it has begun."""
        return Empty()

    @reports_errors
    def Check(self, request: proto.CheckRequest, _context: Context) -> proto.CheckResponse:
        old, new = from_struct(request.olds), from_struct(request.news)
        inputs, mistakes = self._provider.check(request.urn, old, new, request.randomSeed)
        failures = [proto.CheckFailure(property=path, reason=reason) for path, reason in mistakes]
        return proto.CheckResponse(inputs=to_struct(inputs), failures=failures)

    @reports_errors
    def Diff(self, request: proto.DiffRequest, _context: Context) -> proto.DiffResponse:
        old, new = from_struct(request.old_inputs), from_struct(request.news)
        ignored, outputs = list(request.ignoreChanges), from_struct(request.olds)
        changed, again = self._provider.diff(request.urn, old, new, ignored, outputs)
        changes = proto.DiffResponse.DIFF_SOME if changed else proto.DiffResponse.DIFF_NONE
        first = self._provider.old_first(request.urn, changed, again)
        return proto.DiffResponse(changes=changes, diffs=changed, replaces=again, deleteBeforeReplace=first)

    @reports_errors
    def Create(self, request: proto.CreateRequest, context: Context) -> proto.CreateResponse:
        try:
            own_id, outputs = self._provider.create(
                request.urn, from_struct(request.properties), request.timeout
            )
        except HalfMadeError as error:
            left = proto.ErrorResourceInitFailed(
                id=error.own_id,
                properties=_as_sent(request.urn, error.outputs),
                inputs=request.properties,
                reasons=[str(error)],
            )
            status = status_pb2.Status(code=grpc.StatusCode.UNKNOWN.value[0], message=str(error))
            status.details.add().Pack(left)
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            raise
        return proto.CreateResponse(id=own_id, properties=_as_sent(request.urn, outputs))

    @reports_errors
    def Read(self, request: proto.ReadRequest, _context: Context) -> proto.ReadResponse:
        state = self._provider.read(request.urn, request.id, from_struct(request.inputs))
        if state is None:
            return proto.ReadResponse()
        inputs, outputs = state
        return proto.ReadResponse(
            id=request.id, inputs=to_struct(inputs), properties=_as_sent(request.urn, outputs)
        )

    @reports_errors
    def Update(self, request: proto.UpdateRequest, _context: Context) -> proto.UpdateResponse:
        old, new = from_struct(request.old_inputs), from_struct(request.news)
        outputs = self._provider.update(request.urn, request.id, old, new, request.timeout)
        return proto.UpdateResponse(properties=_as_sent(request.urn, outputs))

    @reports_errors
    def Delete(self, request: proto.DeleteRequest, _context: Context) -> Empty:
        self._provider.delete(request.urn, request.id, request.timeout)
        return Empty()

    @reports_errors
    def Invoke(self, request: proto.InvokeRequest, _context: Context) -> proto.InvokeResponse:
        raise WorldError(
            f"{request.tok}: the stand-in answers no such call; add it to rehearsal/gcp_stand_in"
        )

    def _say(self, message: str) -> None:
        if self._engine:
            with grpc.insecure_channel(self._engine) as channel:
                line = engine_pb2.LogRequest(severity=engine_pb2.INFO, message=message)
                engine_pb2_grpc.EngineStub(channel).Log(line)


def _as_sent(urn: str, outputs: Json) -> Struct:
    return to_struct(with_secrets(outputs, resource_kind(urn_type(urn)).secrets))


def with_secrets(outputs: Json, paths: str) -> Json:
    """The outputs with the values at these paths, such as masterAuth.clientKey, marked as secret."""
    marked = dict(outputs)
    for path in paths.split():
        name, _, subpath = path.partition(".")
        if name in marked:
            value = marked[name]
            marked[name] = (
                with_secrets(value, subpath) if subpath else {SIGNATURE: SECRET_VALUE, "value": value}
            )
    return marked


def from_struct(message: Struct) -> Json:
    """A message's values, whole numbers as int, without `__defaults` and the engine's other own keys."""
    values: Json = MessageToDict(message)
    return {name: _with_ints(value) for name, value in values.items() if not name.startswith("__")}


def _with_ints(value: Any) -> Any:
    """The value with whole numbers as int: all numbers are floating point on the wire."""
    if isinstance(value, dict):
        return {name: _with_ints(item) for name, item in value.items() if not name.startswith("__")}
    if isinstance(value, list):
        return [_with_ints(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def to_struct(values: Mapping[str, object]) -> Struct:
    return ParseDict(dict(values), Struct())


def main(arguments: list[str]) -> None:
    """Returns when the process that started this one is gone."""
    parent = os.getppid()
    limits = [("grpc.max_receive_message_length", LARGEST_MESSAGE), ("grpc.so_reuseport", 0)]
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=THREADS), options=limits)
    provider_pb2_grpc.add_ResourceProviderServicer_to_server(
        Service(arguments[0] if arguments else ""), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    watcher = threading.Thread(target=_wait_for_end, args=(parent,), name="parent")
    watcher.start()
    watcher.join()
    # A request that hangs must not keep a process that nobody listens to.
    os._exit(0)


def _wait_for_end(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
