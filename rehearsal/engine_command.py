"""Pulumi's command line as a process that a test can interrupt and kill, in an environment without the user's own."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from pulumi.automation import CommandResult, PulumiCommand
from pulumi.automation._cmd import OnOutput
from pulumi.automation.errors import create_command_error
from semver import VersionInfo


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
        """As the parent's. Raises a CommandError where the command fails or is killed."""
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
        said: list[str] = []
        complained: list[str] = []
        threads = [
            threading.Thread(target=_read, args=(process.stdout, said, on_output)),
            threading.Thread(target=_read, args=(process.stderr, complained, on_error)),
        ]
        with process:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            code = process.wait()
        result = CommandResult(stdout="\n".join(said), stderr="\n".join(complained), code=code)
        if code != 0:
            raise create_command_error(result)
        return result

    def signal(self, number: signal.Signals) -> None:
        """To the command that runs now and its process group. The plugins are in groups of their own and hear nothing.

        Raises ProcessLookupError where none runs."""
        if self._process is None or self._process.poll() is not None:
            raise ProcessLookupError("no pulumi command is running")
        os.killpg(self._process.pid, number)


def _read(stream: IO[str], lines: list[str], tell: OnOutput | None) -> None:
    with stream:
        for line in stream:
            lines.append(line.rstrip())
            if tell is not None:
                tell(lines[-1])
