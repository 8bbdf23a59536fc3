"""`fab serve`: the export of a run behind HTTP, as a run of its own: here, or on a host of a stack through a tunnel."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from console import display as displays
from console import follow
from console.display import Progress
from console.models import answers
from console.summary import exit_code, summary
from contracts.errors import DONE, RequestError
from contracts.run_directory import ACTIVE, EXPORT, SERVING
from jobs.runtime.storage.cache import user_cache_dir
from launch import jobs, launching, runs
from launch.hosts import HostError
from launch.launching import finalize
from launch.output import say, terminal
from launch.request.run_request import Request
from launch.runs import Run
from launch.targets import Target

HERE = "127.0.0.1"
PORT = 8000
FRAMEWORKS = {"pytorch_xla": "pytorch"}
"""Frameworks of runs whose exports another one serves."""
STOP_GRACE_S = 30.0
"""For the requests under way, which the server itself gives 20 s."""
TOKEN = "serve-token"
"""In the cache directory: a header with the token, as `curl -H @FILE` reads it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """address, port: where to listen on this machine; None: loopback, and PORT. token_file: None: one that is created
    if a token is needed. in_image: in the framework's image, with Docker. server_arguments: the server's own options.
    """

    address: str | None = None
    port: int | None = None
    token_file: str | None = None
    in_image: bool = False
    detach: bool = False
    server_arguments: Sequence[str] = ()


def serve(target: Target, name: str, options: Options) -> int:
    """Start a server for a run's export, say how to use it, and stop it when this is interrupted; or, if `name` is a
    server that runs already, forward a port to it until this is interrupted.

    Raises:
        RequestError: there is no such run, it has no export, or the host cannot serve it.
        HostsError: the host is not ready.
    """
    console = terminal()
    run = answers.run_that_predicts(target, name, also=(jobs.SERVER,))
    if run.described["job"] == jobs.SERVER:
        look = target.backend.status([run]).for_run(run)
        state = runs.state_by(run, look)
        if state not in ACTIVE and not runs.may_be_restarted(run, look, state):
            raise RequestError(
                f"{run.run_id} is a server that has ended; name the run whose export is to be served"
            )
        return _lead(console, target, run, stops=False)
    request = _request(target, run, options)
    try:
        served = launching.launch(request, target, say(console))
    except launching.LaunchFailed as failure:
        return _report(console, failure.run, target.run_state(failure.run))
    if options.detach:
        option = target.stack_option
        say(console)(
            f"it goes on by itself: `fab serve{option} {served.run_id}` leads to it, "
            f"`fab stop {served.run_id}{option}` stops it"
        )
        return DONE
    return _lead(console, target, served, stops=True)


def _request(target: Target, run: Run, options: Options) -> Request:
    """Return the request for the server's run.

    Raises:
        RequestError: it cannot be served so.
    """
    runs.require_export(run)
    job = run.described["job"]
    framework = jobs.find(job).framework
    framework = FRAMEWORKS.get(framework, framework)
    if target.part_of_tpu:
        raise RequestError(
            f"--hosts: a server is one process on one host, and the TPU of {target.slice.name} has "
            f"{len(target.slice.hosts)}; take a slice with one host, or add --platform cpu"
        )
    if target.platform == "tpu" and framework != "jax":
        raise RequestError(f"--platform tpu: exports of {job} are served on CPUs; add --platform cpu")
    server_options = {"job": job, "run": run.run_id, "export": run.directory.path(EXPORT)}
    if not target.capabilities.shares_files and (options.address or options.token_file):
        raise RequestError(
            f"--address, --token-file: a server on {target.name} listens on its host's loopback, and is reached "
            "through the tunnel only; leave them out"
        )
    server_options["port"] = str(options.port or 0)
    if target.capabilities.shares_files:
        server_options |= _listening(options)
    elif options.port:
        raise RequestError(f"--port {options.port}: through a tunnel it is a free one; leave it out")
    server_arguments = [
        word for name, value in server_options.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    return Request(
        job=jobs.SERVER,
        framework=framework,
        arguments=(*server_arguments, *options.server_arguments),
        name=None,
        resume=None,
        runtime="docker" if options.in_image else None,
    )


def _listening(options: Options) -> dict[str, str]:
    """Return where a server on this machine listens, and the file with its token where it needs one."""
    address, port = options.address or HERE, PORT if options.port is None else options.port
    try:
        socket.getaddrinfo(address, port)
        socket.create_server(
            (address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        ).close()
    except (socket.gaierror, UnicodeError):  # UnicodeError: of a name that is no host's
        raise RequestError(
            f"--address {address}: is no address; write one of this machine's, such as 127.0.0.1 or 0.0.0.0, and the "
            "port as --port"
        ) from None
    except OSError as error:
        typed, reason = f"--address {address} --port {port}", error.strerror or error
        raise RequestError(
            f"{typed}: cannot be listened on ({reason}); name an address that this machine has"
            if error.errno == errno.EADDRNOTAVAIL
            else f"{typed}: cannot be listened on ({reason}); choose another port, or 0 for a free one"
        ) from None
    server_options = {"address": address, "port": str(port)}
    if options.token_file is not None:
        path = Path(options.token_file).expanduser().absolute()
        if not path.is_file():
            raise RequestError(f"--token-file {path}: there is no such file")
        if path.stat().st_mode & 0o077:
            raise RequestError(
                f"--token-file {path}: must be a file that only you can read; `chmod 600` makes it so"
            )
        server_options["token_file"] = str(path)
    elif not jobs.find(jobs.SERVER).config_module().is_loopback(address):
        server_options["token_file"] = str(_token_file())
    return server_options


def _token_file() -> Path:
    """Return the file with this user's token; one that is not there is made."""
    path = user_cache_dir(os.environ) / TOKEN
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"authorization: Bearer {secrets.token_urlsafe(32)}\n")
    return path


def _lead(console: Console, target: Target, run: Run, *, stops: bool) -> int:
    """Forward a port to a server until it ends or this is interrupted. stops: an interrupt stops the server too."""
    announced: list[Any] = []
    with contextlib.ExitStack() as tunnel:

        def opened() -> list[str]:
            serving = run.directory.read_json(SERVING)
            if serving is None or serving in announced:  # it failed before, or has been announced
                return []
            tunnel.close()  # to a pod that another one has replaced
            address = serving["address"] if target.capabilities.shares_files else HERE
            port = tunnel.enter_context(target.backend.forward(run.run_id, 0, serving["port"]))
            announced[:] = [serving]
            return lines(run, serving, address, port, stops=stops)

        shown = _Shown(console, opened)
        if threading.current_thread() is threading.main_thread():
            # A shell that starts this in the background has it ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            state = follow.follow(run, target, shown)
        except BaseException as error:
            # Whatever ends this command, no server may be left behind unnoticed.
            if stops:
                with contextlib.suppress(OSError):  # the terminal may be gone
                    shown.close()
                    console.print(
                        "stopping; requests under way are answered first (Ctrl-C again: do not wait for them)"
                    )
                with contextlib.suppress(HostError):  # a cluster may have started it again
                    run = runs.read(run.directory) or run
                target.backend.stop(run, grace_s=STOP_GRACE_S)
            if not isinstance(error, KeyboardInterrupt):
                raise
            if not stops:
                return DONE
            state = follow.follow(run, target, displays.Plain(console))
        finally:
            shown.close()
    return _report(console, run, state)


def _report(console: Console, run: Run, state: Any) -> int:
    ended = (
        finalize(runs.read(run.directory) or run, state, None)
        if state != "done"
        else runs.read(run.directory)
    )
    for line in summary(ended or run, state):
        say(console)(line)
    return exit_code(ended or run, state)


def lines(run: Run, serving: dict[str, Any], address: str, port: int, *, stops: bool) -> list[str]:
    """Return lines about a server: its address, and a command that sends it a request. serving: content of SERVING."""
    config = run.described["config"]
    reached = {"0.0.0.0": HERE, "::": "[::1]"}.get(address, f"[{address}]" if ":" in address else address)
    url = f"http://{reached}:{port}"
    command = ["curl", f"{url}/v1/predict", "-H", "content-type: application/json"]
    if config.get("token_file"):
        command += ["-H", f"@{config['token_file']}"]
    if serving["takes"] == "picture":  # which may be larger than a word of a command line
        example = f"""(printf '{{"inputs": ["'; base64 -w0 photo.jpg; printf '"]}}') | {shlex.join(command)} -d @-"""
    else:
        example = (
            f"{shlex.join(command)} -d {shlex.quote(json.dumps(serving['example'], ensure_ascii=False))}"
        )
    end = "stops the server" if stops else "leaves the server running"
    return [
        f"serving {config['run']} ({serving['task']}) at {url}, as {run.run_id}",
        f"  {example}",
        f"Ctrl-C {end}; docs/serving.md has the API",
    ]


class _Shown:
    """Shows what a server waits for until it answers, then how to send it requests, again whenever that changes."""

    def __init__(self, console: Console, opened: Callable[[], list[str]]) -> None:
        self._display, self._opened, self._answers = displays.make(console), opened, False

    def note(self, text: str) -> None:
        self._display.note(text)

    def waiting(self, text: str) -> None:
        if not self._answers:
            self._display.waiting(text)

    def progress(self, _progress: Progress) -> None:
        lines = self._opened()
        if lines:
            self._answers = True
            self._display.close()
        for line in lines:
            self._display.note(line)

    def close(self) -> None:
        self._display.close()
