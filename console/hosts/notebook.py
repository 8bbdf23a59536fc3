"""`fab jupyter`: notebooks on the first host, for this machine only: on loopback there, through a tunnel here."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import http.client
import json
import secrets
import time
import urllib.error
import urllib.request
import webbrowser
from concurrent.futures import Future
from typing import Any

from contracts.durations import spoken
from launch.hosts import HostError, Stream, Transport
from launch.output import Lines, printable, say, terminal
from launch.targets import PYTHON as DEPLOYED_PYTHON
from launch.targets import Target

LOOPBACK = "127.0.0.1"
MODULE = "jupyterlab"
START_LIMIT_S = 90.0
LOOK_S = 0.2
SH_LIMIT_S = 30.0
KEPT_LINES = 12
NO_COMMAND = 127

KEEP_TOKEN = 'umask 077; file=$(mktemp) && cat > "$file" && printf %s "$file"'
"""Writes a secret from standard input to a file that only its owner can read; anyone can read an argument list."""

IN_PYTHON = 'case $1 in "~/"*) python=$HOME/${1#"~/"};; *) python=$1;; esac; shift; exec "$python" "$@"'
"""$1, where "~/" is the home directory there, with the rest as its arguments."""

SERVER = """
import importlib.util, json, os, socket, sys
path, module = sys.argv[1:]
with open(path) as file:
    token = file.read()
os.unlink(path)
if importlib.util.find_spec(module) is None:
    print(json.dumps({"missing": sys.executable}), flush=True)
    sys.exit(1)
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
print(json.dumps({"port": port}), flush=True)
os.environ["JUPYTER_TOKEN"] = token
words = ["--no-browser", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
words += ["--ServerApp.allow_remote_access=False"] + ["--allow-root"] * (os.geteuid() == 0)
os.execv(sys.executable, [sys.executable, "-m", module, *words])
"""
"""Reads the token from the file $1 and removes it, then becomes the server of the module $2. Its first line is an
answer to this side; a port that another process takes in the next moment makes the server end, which is told."""


def serve(target: Target, module: str, *, browser: bool) -> int:
    """Start the server, print its address, and end it when this is interrupted. The exit code: 1, as it should not end
    by itself.

    Raises:
        HostError: it cannot be started.
    """
    host, transport = target.hosts[0].name, target.transports[0]
    console, token = terminal(), secrets.token_urlsafe(32)
    say(console)(f"starting {module} on {host}")
    server = _Server(host, transport, target.python, module, token)
    try:
        with transport.forward(LOOPBACK, server.port(target.hosts[0].index)) as local_port:
            server.wait_until_it_answers(local_port)
            url = f"http://{LOOPBACK}:{local_port}/lab?token={token}"
            say(console)(f"{url}\nCtrl-C ends it; what you saved stays on {host}")
            if browser:
                webbrowser.open(url)
            while not server.ended.done():  # with a limit each, so that an interrupt comes through
                concurrent.futures.wait([server.ended], timeout=1.0)
            raise server.error("has ended")
    finally:
        server.ended.cancel()


class _Server:
    """The server on its host, from its start to its end. ended: holds its exit code; cancelling it ends the server."""

    def __init__(self, host: str, transport: Transport, python: str, module: str, token: str) -> None:
        self._host, self._python, self._module = host, python, module
        self._last_lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._first: Future[str] = Future()
        cuts: dict[Stream, Lines] = {"out": Lines(), "err": Lines()}

        def take(stream: Stream, data: bytes) -> None:
            for line in cuts[stream].feed(data):
                if stream == "out" and not self._first.done():
                    self._first.set_result(line)
                elif line.strip():
                    self._last_lines.append(line)

        file = _run(host, transport, ["sh", "-c", KEEP_TOKEN], token)
        argv = ["sh", "-c", IN_PYTHON, "sh", python, "-c", SERVER, file, module]
        self.ended = transport.stream(argv, take, timeout_s=None)

    def port(self, index: int) -> int:
        """Return the port on its host on which the server will listen.

        Raises:
            HostError: there is no such interpreter, it has no such module, or the host cannot be reached.
        """
        either: list[Future[Any]] = [self._first, self.ended]
        concurrent.futures.wait(either, timeout=START_LIMIT_S, return_when=concurrent.futures.FIRST_COMPLETED)
        if not self._first.done():
            raise self.error("did not start")
        try:
            answer = json.loads(self._first.result())
            if "missing" not in answer:
                return int(answer["port"])
        except (ValueError, KeyError, TypeError):
            raise HostError(host=self._host, reason=f"did not start: {self._first.result()[:200]}") from None
        raise HostError(
            host=self._host,
            reason=f"{self._python} has no module {self._module}",
            remedy=f"`fab run --hosts {index} --command '{installation(self._python, self._module)}'` installs it",
        )

    def wait_until_it_answers(self, port: int) -> None:
        """Wait until the server answers at a port of this machine.

        Raises:
            HostError: it ended, or does not answer in time.
        """
        until_s = time.monotonic() + START_LIMIT_S
        while not self.ended.done():
            with contextlib.suppress(OSError, http.client.HTTPException):
                # Anything that it says will do, a refusal without the token too.
                with contextlib.suppress(urllib.error.HTTPError):
                    _open(f"http://{LOOPBACK}:{port}/api").close()
                return
            if time.monotonic() > until_s:
                raise self.error(f"does not answer after {spoken(START_LIMIT_S)}")
            concurrent.futures.wait([self.ended], timeout=LOOK_S)
        raise self.error("has ended")

    def error(self, problem: str) -> HostError:
        """Return the error of the server, with its last lines, or of the host that could not be reached."""
        code = None
        if self.ended.done():
            try:
                code = self.ended.result()
            except (HostError, OSError) as error:
                return HostError.from_error(self._host, error)
        summary = f"{self._module} {problem}" + (f" with exit code {code}" if code is not None else "")
        remedy = (
            f"`fab deploy` makes {self._python}, or name another with --python" if code == NO_COMMAND else ""
        )
        return HostError(host=self._host, reason="\n    ".join([summary, *self._last_lines]), remedy=remedy)


def installation(python: str, module: str) -> str:
    """Return the line of shell that installs a module; what `fab deploy` makes has no pip, and uv beside it."""
    if python != DEPLOYED_PYTHON:
        return f"{python} -m pip install {module}"
    return f"{python.removesuffix('/venv/bin/python')}/uv/bin/uv pip install --python {python} {module}"


def _open(url: str) -> http.client.HTTPResponse:
    # No proxy of this machine's environment: it would be asked for its own loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    answer: http.client.HTTPResponse = opener.open(url, timeout=LOOK_S * 10)
    return answer


def _run(host: str, transport: Transport, argv: list[str], stdin: str) -> str:
    try:
        done = transport.begin(argv, stdin, timeout_s=SH_LIMIT_S).result()
    except HostError as error:
        raise HostError.from_error(host, error) from None
    if done.exit_code != 0:
        message = printable(done.stderr).strip() or f"no answer within {SH_LIMIT_S:g} s"
        raise HostError(host=host, reason=f"cannot keep the token: {message}")
    return done.stdout
