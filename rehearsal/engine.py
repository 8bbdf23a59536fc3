"""The real Pulumi engine, offline: a file backend, the stand-in for gcp, the simulated Cloud TPU API, one folder.

    with TpuApi() as api, Engine(folder=…, cli=…, program=declare, tpu_url=api.url) as engine:
        engine.configure({"gcp:project": "my-project", "tpu-stack:slices": […]})
        report = engine.up()
        assert report.ok, report.text

The program runs in this process. Nothing of the user's account, configuration or Pulumi installation is used, and
nothing is sent anywhere but to this machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import yaml
from pulumi import automation
from pulumi.automation.errors import CommandError

from rehearsal.engine_command import EngineCommand
from rehearsal.engine_operation import Kind, Operation, Say
from rehearsal.engine_processes import end_marked
from rehearsal.engine_report import Report
from rehearsal.gcp_stand_in.provider import WORLD_VARIABLE
from rehearsal.gcp_stand_in.world import World

Program = Callable[[], None]

ROOT = Path(__file__).resolve().parent.parent
MARK = "TPU_STACK_ENGINE"
ACCESS_TOKEN = "rehearsal-access-token"
NOWHERE = "http://127.0.0.1:9"  # the port of discard: a request to the internet ends at once

# What a user's shell may hold that would lead Pulumi or Google's libraries to an account or another Python.
_USERS_OWN = ("PULUMI_", "GOOGLE_", "GCLOUD_", "CLOUDSDK_", "PYTHON", "VIRTUAL_ENV", "TF_")


class Cli(Protocol):
    """Where Pulumi's command line is; `tools.pulumi_cli.PulumiCli` is one."""

    @property
    def command(self) -> Path: ...
    @property
    def folder(self) -> Path: ...
    @property
    def dynamic_folder(self) -> Path: ...
    @property
    def version(self) -> str: ...


class Engine:
    """One stack. `world`: what the stand-in has made. folder: a new one; everything is in it, to be thrown away after.

    project_file: a Pulumi.yaml whose name and configuration schema hold here too; None: a bare project tpu-stack.
    tpu_url: of the simulated Cloud TPU API.
    """

    def __init__(
        self,
        *,
        folder: Path,
        cli: Cli,
        program: Program,
        tpu_url: str,
        project_file: Path | None = None,
        stack: str = "dev",
    ) -> None:
        self.program = program
        self.world = World(path=folder / "world.json")
        self.folder = folder
        self.settings_file = folder / "work" / f"Pulumi.{stack}.yaml"
        for name in ("work", "backend", "home", "cloudsdk"):
            (folder / name).mkdir(parents=True)
        project = _project(project_file)
        (folder / "work" / "Pulumi.yaml").write_text(yaml.safe_dump(project), encoding="utf-8")
        self._command = EngineCommand(cli.command, cli.version, self._environment(cli))
        options = automation.LocalWorkspaceOptions(
            work_dir=str(folder / "work"), pulumi_home=str(folder / "home"), pulumi_command=self._command
        )
        self._stack = automation.create_stack(
            stack, project_name=project["name"], program=self._run_program, opts=options
        )
        self._stack.set_config("gcp:accessToken", automation.ConfigValue(value=ACCESS_TOKEN, secret=True))
        # What every settings file of this stack has to hold: how its secrets are kept, and where the cloud is.
        self.own_settings: dict[str, Any] = yaml.safe_load(self.settings_file.read_text(encoding="utf-8"))
        self.own_settings["config"]["gcp:tpuV2CustomEndpoint"] = f"{tpu_url}/v2/"
        self._write({})

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
        self._write(values)

    def adopt(self, settings: bytes) -> None:
        """The stack's settings file from now on, to the byte; without `own_settings` it has no cloud to ask."""
        self.settings_file.write_bytes(settings)

    def _write(self, values: Mapping[str, object]) -> None:
        settings = {**self.own_settings, "config": {**values, **self.own_settings["config"]}}
        self.settings_file.write_text(yaml.safe_dump(settings), encoding="utf-8")

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

    def begin(self, kind: Kind, *, say: Say | None = None, **options: Any) -> Operation:
        """Start it and come back at once, to interrupt or kill it. say: is handed every line as it comes."""
        return Operation(kind, self._stack, self._command, say, options)

    def type(self, *arguments: str) -> tuple[bool, str]:
        """What a user types behind `pulumi`, without a terminal: whether it succeeded, and all that it said."""
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
        """What the state holds, the stack itself and its providers left out."""
        own = ("pulumi:pulumi:Stack", "pulumi:providers:")
        return [each for each in self.state().get("resources", []) if not each["type"].startswith(own)]

    def _run_program(self) -> None:
        self.program()

    def _environment(self, cli: Cli) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_USERS_OWN)}
        proxies = dict.fromkeys(("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"), NOWHERE)
        near = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        folders = [cli.folder, ROOT / "rehearsal" / "bin", cli.dynamic_folder, Path(sys.executable).parent]
        return {
            **kept,
            **proxies,
            **near,
            MARK: str(self.folder),
            WORLD_VARIABLE: str(self.world.path),
            "PATH": os.pathsep.join([*map(str, folders), kept.get("PATH", os.defpath)]),
            "PYTHONPATH": str(ROOT),
            "PULUMI_PYTHON_CMD": sys.executable,
            "PULUMI_BACKEND_URL": (self.folder / "backend").as_uri(),
            "PULUMI_CONFIG_PASSPHRASE": "rehearsal",
            "PULUMI_SKIP_UPDATE_CHECK": "true",
            "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
            "CLOUDSDK_CONFIG": str(self.folder / "cloudsdk"),
        }


def _project(project_file: Path | None) -> dict[str, Any]:
    """A project for an inline program: no folder of its own, and any Python."""
    if project_file is None:
        return {"name": "tpu-stack", "runtime": "python"}
    found: dict[str, Any] = yaml.safe_load(project_file.read_text(encoding="utf-8"))
    return {name: value for name, value in found.items() if name != "main"} | {"runtime": "python"}
