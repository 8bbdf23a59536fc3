"""The real Pulumi engine, offline: a file backend, the stand-in for gcp, the simulated Cloud TPU API, one folder.

    with SimulatedCloud() as api, Engine(folder=…, cli=…, program=declare, tpu_url=api.url) as engine:
        engine.configure({"gcp:project": "my-project", "tpu-stack:slices": […]})
        report = engine.up()
        assert report.ok, report.text

The program runs in this process. Nothing of the user's account, configuration or Pulumi installation is used, and
nothing is sent anywhere but to this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

import yaml
from pulumi import automation
from pulumi.automation import CommandResult, EngineEvent, PulumiCommand
from pulumi.automation._cmd import OnOutput
from pulumi.automation.errors import CommandError, create_command_error
from semver import VersionInfo

from contracts.aliases import Say
from rehearsal.gcp_stand_in.provider import WORLD_VARIABLE
from rehearsal.gcp_stand_in.stand_in_world import World
from rehearsal.simulated_cloud import COMPUTE_PATH
from tools.pulumi_cli import PulumiCli

Program = Callable[[], None]
OperationKind = Literal["preview", "up", "refresh", "destroy"]

OPERATION_LIMIT_S = 300.0
PROC = Path("/proc")

ROOT = Path(__file__).resolve().parent.parent
MARK = "TPU_STACK_ENGINE"
ACCESS_TOKEN = "rehearsal-access-token"
# Pulumi's warning; the stand-in says itself, and once, that it is none of Google's.
STAND_IN_WARNING = "using pulumi-resource-gcp from $PATH"
SECRET = "[secret]"
NOWHERE = "http://127.0.0.1:9"  # the port of discard: a request to the internet ends at once

# What a user's shell may hold that would lead Pulumi or Google's libraries to an account or another Python.
_USERS_OWN = ("PULUMI_", "GOOGLE_", "GCLOUD_", "CLOUDSDK_", "PYTHON", "VIRTUAL_ENV", "TF_")


class EngineCommand(PulumiCommand):
    """environ: the whole environment, apart from what the Automation API adds to it."""

    def __init__(self, command: Path, version: str, environ: Mapping[str, str]) -> None:
        # The version is known: the parent's own way runs the command to ask for it.
        self.command = str(command)
        self.version = VersionInfo.parse(version)
        self._environ = dict(environ)
        self._process: subprocess.Popen[str] | None = None

    def run(
        self,
        args: list[str],
        cwd: str,
        additional_env: Mapping[str, str],
        on_output: OnOutput | None = None,
        on_error: OnOutput | None = None,
    ) -> CommandResult:
        """As the parent's method. Raises CommandError if the command fails or is killed."""
        process = subprocess.Popen(
            [self.command, "--non-interactive", *args],
            cwd=cwd,
            env={**self._environ, **additional_env, "PULUMI_AUTOMATION_API": "true"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._process = process
        assert process.stdout is not None and process.stderr is not None
        printed: list[str] = []
        complained: list[str] = []
        threads = [
            threading.Thread(target=_read, args=(process.stdout, printed, on_output)),
            threading.Thread(target=_read, args=(process.stderr, complained, on_error)),
        ]
        with process:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            code = process.wait()
        result = CommandResult(stdout="\n".join(printed), stderr="\n".join(complained), code=code)
        if code != 0:
            raise create_command_error(result)
        return result

    def signal(self, number: signal.Signals) -> None:
        """Signal the running command and its process group; the plugins, in groups of their own, get nothing.

        Raises ProcessLookupError if none runs."""
        if self._process is None or self._process.poll() is not None:
            raise ProcessLookupError("no pulumi command is running")
        os.killpg(self._process.pid, number)


def _read(stream: IO[str], lines: list[str], tell: OnOutput | None) -> None:
    with stream:
        for line in stream:
            lines.append(line.rstrip())
            if tell is not None:
                tell(lines[-1])


class EngineTimeoutError(Exception):
    """The engine has not come so far within the limit; the message holds what it has said."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Something that the engine did, or in a preview would do: create, update, delete, replace, same, read …

    parent: the urn of what it belongs to; empty of the stack itself."""

    op: str
    type: str
    name: str
    urn: str
    parent: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The result of one operation. changes: counts by create, update, same, delete, replace; empty if it ended before.

    diagnostics: severity (info, info#err, warning or error) and message. outputs: as `pulumi stack output` shows them.
    """

    ok: bool
    lines: tuple[str, ...]
    changes: Mapping[str, int]
    steps: tuple[Step, ...]
    diagnostics: tuple[tuple[str, str], ...]
    outputs: Mapping[str, Any]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def messages(self, severity: str) -> list[str]:
        return [message for level, message in self.diagnostics if level == severity]


class EngineOperation:
    """A running operation, with its output and steps so far, collected from several threads."""

    def __init__(
        self,
        kind: OperationKind,
        stack: automation.Stack,
        command: EngineCommand,
        say: Say | None,
        options: Mapping[str, Any],
    ) -> None:
        self._kind = kind
        self._command = command
        self._say = say
        self._ok = False
        self._outputs: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._steps: list[Step] = []
        self._diagnostics: list[tuple[str, str]] = []
        self._changes: dict[str, int] = {}
        self._thread = threading.Thread(
            target=self._run, args=(getattr(stack, kind), options), name=kind, daemon=True
        )
        self._thread.start()

    def wait_for(self, text: str, limit_s: float = 60.0) -> None:
        """Returns when a line or message with that text has come. Raises EngineTimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._has(text), limit_s):
                raise EngineTimeoutError(
                    f"{self._kind} has not said {text!r} within {limit_s} s; it said:\n{self._text()}"
                )

    def interrupt(self) -> None:
        """Interrupt the operation, as one Ctrl-C does."""
        self._command.signal(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL to the command, not to its plugins."""
        self._command.signal(signal.SIGKILL)

    def wait(self, limit_s: float) -> bool:
        """Whether it has ended within that time."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def report(self, limit_s: float = OPERATION_LIMIT_S) -> Report:
        """Waits for the end. Raises EngineTimeoutError."""
        if not self.wait(limit_s):
            raise EngineTimeoutError(f"the operation is not done after {limit_s} s; it said:\n{self._text()}")
        if self._error is not None:
            raise self._error
        with self._changed:
            return Report(
                ok=self._ok,
                lines=tuple(self._lines),
                changes=dict(self._changes),
                steps=tuple(self._steps),
                diagnostics=tuple(self._diagnostics),
                outputs=self._outputs,
            )

    def _run(self, run: Callable[..., Any], options: Mapping[str, Any]) -> None:
        try:
            result = run(on_output=self._hear, on_error=self._hear, on_event=self._note, **options)
            outputs = getattr(result, "outputs", {})
            self._outputs = {
                name: SECRET if output.secret else output.value for name, output in outputs.items()
            }
            self._ok = True
        except CommandError:
            self._ok = False
        except BaseException as error:  # told to whoever asks for the report
            self._error = error

    def _hear(self, line: str) -> None:
        if STAND_IN_WARNING in line:
            return
        with self._changed:
            self._lines.append(line)
            self._changed.notify_all()
        if self._say is not None:
            self._say(line)

    def _note(self, event: EngineEvent) -> None:
        with self._changed:
            if event.resource_pre_event is not None:
                meta = event.resource_pre_event.metadata
                state = meta.new or meta.old
                self._steps.append(
                    Step(
                        op=str(getattr(meta.op, "value", meta.op)),
                        type=meta.type,
                        name=meta.urn.split("::", 3)[3],
                        urn=meta.urn,
                        parent=state.parent if state is not None else "",
                    )
                )
            diagnostic = event.diagnostic_event
            if diagnostic is not None and not diagnostic.ephemeral:
                # Without the engine's marks for colours, <{%reset%}> and the like.
                plain = re.sub(r"<\{%.*?%\}>", "", diagnostic.message, flags=re.DOTALL).strip()
                self._diagnostics.append((diagnostic.severity, plain))
            if event.summary_event is not None:
                changes = event.summary_event.resource_changes
                self._changes = {str(getattr(op, "value", op)): count for op, count in changes.items()}
            self._changed.notify_all()

    def _has(self, text: str) -> bool:
        return any(text in line for line in (*self._lines, *(message for _, message in self._diagnostics)))

    def _text(self) -> str:
        return "\n".join(self._lines) or "(nothing)"


class Engine:
    """One stack. `world`: what the stand-in has made. folder: a new one for everything, to be removed afterwards.

    project_file: a Pulumi.yaml whose name holds here too; None: a bare project tpu-stack.
    tpu_url: of the simulated Cloud TPU API, and of Compute Engine where that is simulated. variables: of the
    environment of the engine and its plugins. plugins: a folder with more of them, such as a language host, by which
    `pulumi import` reads the project.
    """

    def __init__(
        self,
        *,
        folder: Path,
        cli: PulumiCli,
        program: Program,
        tpu_url: str,
        project_file: Path | None = None,
        stack: str = "dev",
        variables: Mapping[str, str] | None = None,
        plugins: Path | None = None,
    ) -> None:
        self.program = program
        self._variables = dict(variables or {})
        self._plugins = [plugins] if plugins else []
        self.world = World(path=folder / "world.json")
        self.folder = folder
        self.settings_file = folder / "work" / f"Pulumi.{stack}.yaml"
        for name in ("work", "backend", "home", "cloudsdk"):
            (folder / name).mkdir(parents=True)
        project = _project(project_file, tpu_url)
        (folder / "work" / "Pulumi.yaml").write_text(yaml.safe_dump(project), encoding="utf-8")
        self._command = EngineCommand(cli.command, cli.version, self._environment(cli))
        options = automation.LocalWorkspaceOptions(
            work_dir=str(folder / "work"), pulumi_home=str(folder / "home"), pulumi_command=self._command
        )
        self._stack = automation.create_stack(
            stack, project_name=project["name"], program=self._run_program, opts=options
        )
        self.configure({})

    # --- life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_orphans()

    def end_orphans(self) -> list[int]:
        """Ends every process that this engine started and that is still there, such as plugins of a killed command."""
        return end_marked(MARK, str(self.folder))

    # --- configuration --------------------------------------------------------------------------------------------

    def configure(self, values: Mapping[str, object]) -> None:
        """The stack's whole configuration from now on, keys with their namespace, values as in YAML."""
        settings = yaml.safe_load(self.settings_file.read_text(encoding="utf-8")) or {}
        # What else it holds says how this stack keeps its secrets.
        self.settings_file.write_text(yaml.safe_dump({**settings, "config": dict(values)}), encoding="utf-8")

    def adopt(self, settings: bytes) -> None:
        """The stack's settings file from now on, to the byte."""
        self.settings_file.write_bytes(settings)

    # --- operations -----------------------------------------------------------------------------------------------

    def preview(self, **options: Any) -> Report:
        """As `pulumi preview`; `options` are those of the Automation API. A failure is in the report, not raised."""
        return self.begin("preview", **options).report()

    def up(self, **options: Any) -> Report:
        """As `pulumi up`."""
        return self.begin("up", **options).report()

    def refresh(self, **options: Any) -> Report:
        """As `pulumi refresh`, without running the program."""
        return self.begin("refresh", **options).report()

    def destroy(self, **options: Any) -> Report:
        """As `pulumi destroy`, without running the program."""
        return self.begin("destroy", **options).report()

    def begin(self, kind: OperationKind, *, say: Say | None = None, **options: Any) -> EngineOperation:
        """Start it and come back at once, to interrupt or kill it. say: is handed every line as it comes."""
        return EngineOperation(kind, self._stack, self._command, say, options)

    def type(self, *arguments: str) -> tuple[bool, str]:
        """Run a `pulumi` command without a terminal. Returns whether it succeeded, and its output."""
        lines: list[str] = []
        directory, home = str(self.folder / "work"), str(self.folder / "home")
        try:
            self._command.run([*arguments], directory, {"PULUMI_HOME": home}, lines.append, lines.append)
        except CommandError:
            return False, "\n".join(lines)
        return True, "\n".join(lines)

    def cancel(self) -> None:
        """As `pulumi cancel`: frees the lock that a killed command left."""
        self._stack.cancel()

    def state(self) -> dict[str, Any]:
        """The deployment: `resources`, and `pending_operations` of an operation that was killed."""
        return dict(self._stack.export_stack().deployment or {})

    def resources(self) -> list[dict[str, Any]]:
        """The resources in the state, without the stack itself and its providers."""
        own = ("pulumi:pulumi:Stack", "pulumi:providers:")
        return [
            resource for resource in self.state().get("resources", []) if not resource["type"].startswith(own)
        ]

    def _run_program(self) -> None:
        self.program()

    def _environment(self, cli: PulumiCli) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_USERS_OWN)}
        proxies = dict.fromkeys(("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"), NOWHERE)
        near = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        own = [cli.folder, ROOT / "rehearsal" / "bin", cli.dynamic_folder, Path(sys.executable).parent]
        folders = [*own, *self._plugins]
        return {
            **inherited,
            **proxies,
            **near,
            MARK: str(self.folder),
            WORLD_VARIABLE: str(self.world.path),
            "PATH": os.pathsep.join([*map(str, folders), inherited.get("PATH", os.defpath)]),
            "GOOGLE_OAUTH_ACCESS_TOKEN": ACCESS_TOKEN,
            "PYTHONPATH": str(ROOT),
            "PULUMI_PYTHON_CMD": sys.executable,
            "PULUMI_BACKEND_URL": (self.folder / "backend").as_uri(),
            "PULUMI_CONFIG_PASSPHRASE": "rehearsal",
            "PULUMI_SKIP_UPDATE_CHECK": "true",
            "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
            "CLOUDSDK_CONFIG": str(self.folder / "cloudsdk"),
            **self._variables,
        }


def _project(project_file: Path | None, tpu_url: str) -> dict[str, Any]:
    """A project for an inline program: no folder of its own, any Python, and its cloud at that address."""
    project: dict[str, Any] = {"name": "tpu-stack"}
    if project_file is not None:
        project = yaml.safe_load(project_file.read_text(encoding="utf-8"))
    endpoints = {"tpuV2": f"{tpu_url}/v2/", "compute": f"{tpu_url}{COMPUTE_PATH}"}
    config = {f"gcp:{name}CustomEndpoint": {"value": url} for name, url in endpoints.items()}
    return {name: value for name, value in project.items() if name != "main"} | {
        "runtime": "python",
        "config": config,
    }


def marked(variable: str, value: str) -> list[int]:
    """The ids of the processes that were started with this variable, from Linux's /proc, without this process."""
    entry = f"{variable}={value}".encode()
    process_ids = []
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
            if entry in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                process_ids.append(int(folder.name))
    return process_ids


def end_marked(variable: str, value: str) -> list[int]:
    """Kill the processes with this variable, and those that they start meanwhile. Returns their ids."""
    ended: list[int] = []
    while remaining := [candidate for candidate in marked(variable, value) if candidate not in ended]:
        for process_id in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        ended += remaining
    return ended
