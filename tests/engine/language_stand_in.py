"""A stand-in for Pulumi's language host for Python, only for tests: a built command line comes without one.

    python -m tests.engine.language_stand_in PROGRAM_SCRIPT ENGINE_ADDRESS

The engine starts the executable `pulumi-language-python`, asks it which plugins a program needs, and has it run the
program. This one does both for the one kind of project that ours is: the option `virtualenv`, found from the folder of
Pulumi.yaml, and packages listed by pip. It makes no environment where there is none. PROGRAM_SCRIPT is Pulumi's own,
from its Go module; what it is handed is what its argument parser names.
"""

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent import futures
from pathlib import Path

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.json_format import MessageToDict
from grpc import ServicerContext as Context
from pulumi.runtime.proto import language_pb2 as proto
from pulumi.runtime.proto import language_pb2_grpc, plugin_pb2

# With it the script says that the user has been told: the engine then adds nothing of its own.
TOLD = 32


class EnvironmentMissingError(Exception):
    """There is no Python where the option `virtualenv` says."""


def environment_of(info: proto.ProgramInfo) -> Path:
    """The folder of the program's Python. Raises EnvironmentMissingError."""
    folder = Path(info.root_directory, MessageToDict(info.options).get("virtualenv", ""))
    if not (folder / "bin" / "python").is_file():
        raise EnvironmentMissingError(f"no Python environment in {folder} (option virtualenv of Pulumi.yaml)")
    return folder


def packages_in(environment: Path) -> list[plugin_pb2.PackageDependency]:
    """What Pulumi's packages in it name in their pulumi-plugin.json. Raises CalledProcessError where pip is missing."""
    listed = subprocess.run(
        [environment / "bin" / "python", "-m", "pip", "list", "--verbose", "--format", "json"],
        stdin=subprocess.DEVNULL, capture_output=True, check=True,
    ).stdout  # fmt: skip
    found = []
    for package in json.loads(listed):
        file = Path(package["location"], package["name"].lower().replace("-", "_"), "pulumi-plugin.json")
        said = json.loads(file.read_text()) if file.is_file() else {}
        if said.get("resource"):
            found.append(
                plugin_pb2.PackageDependency(
                    name=said["name"], kind="resource", version=f"v{said['version']}"
                )
            )
    return found


def arguments_of(request: proto.RunRequest, engine: str) -> list[str]:
    """For Pulumi's script: options that have a value, and the program, which is "." for a folder."""
    options = {
        "monitor": request.monitor_address,
        "engine": engine,
        "project": request.project,
        "root_directory": request.info.root_directory,
        "stack": request.stack,
        "pwd": request.pwd,
        "dry_run": str(request.dryRun).lower(),
        "parallel": str(request.parallel),
        "organization": request.organization,
    }
    given = [word for name, value in options.items() if value for word in (f"--{name}", value)]
    return [*given, request.info.entry_point, *request.args]


def environ_of(request: proto.RunRequest, environment: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """This process's, as if that Python environment had been activated, and the stack's configuration."""
    kept = {name: value for name, value in environ.items() if name != "PYTHONHOME"}
    return {
        **kept,
        "PATH": f"{environment / 'bin'}{os.pathsep}{kept.get('PATH', os.defpath)}",
        "VIRTUAL_ENV": str(environment),
        "PULUMI_CONFIG": json.dumps(dict(request.config)),
        "PULUMI_CONFIG_SECRET_KEYS": json.dumps(list(request.configSecretKeys)),
    }


class LanguageHost(language_pb2_grpc.LanguageRuntimeServicer):
    """What `pulumi preview`, `up`, `refresh` and `destroy` call. The rest answers that it is not implemented."""

    def __init__(self, script: Path, engine: str) -> None:
        self._script = script
        self._engine = engine

    def GetPluginInfo(self, _request: Empty, _context: Context) -> plugin_pb2.PluginInfo:
        return plugin_pb2.PluginInfo(version=importlib.metadata.version("pulumi"))

    def GetRequiredPackages(
        self, request: proto.GetRequiredPackagesRequest, context: Context
    ) -> proto.GetRequiredPackagesResponse:
        try:
            return proto.GetRequiredPackagesResponse(packages=packages_in(environment_of(request.info)))
        except (EnvironmentMissingError, subprocess.CalledProcessError) as error:
            context.abort(grpc.StatusCode.UNKNOWN, str(error))
            raise  # for the reader of types: abort has raised

    def Run(self, request: proto.RunRequest, context: Context) -> proto.RunResponse:
        try:
            environment = environment_of(request.info)
        except EnvironmentMissingError as error:
            context.abort(grpc.StatusCode.UNKNOWN, str(error))
            raise
        python = environment / "bin" / "python"
        done = subprocess.run(
            [python, self._script, *arguments_of(request, self._engine)],
            env=environ_of(request, environment, os.environ),
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode == TOLD:
            return proto.RunResponse(bail=True)
        if done.returncode:
            return proto.RunResponse(error=f"program exited with non-zero exit code: {done.returncode}")
        return proto.RunResponse()


def main(arguments: list[str]) -> None:
    """Prints the port. Returns when the engine is gone: it holds the other end of the standard input."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8), options=[("grpc.so_reuseport", 0)])
    host = LanguageHost(Path(arguments[0]), arguments[1])
    language_pb2_grpc.add_LanguageRuntimeServicer_to_server(host, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    with contextlib.suppress(KeyboardInterrupt):  # so the engine ends its plugins
        sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
