"""Hosts to measure against, all on this machine: real SSH servers, servers that are further away, simulated ones.

Real: one sshd a host, with its own address, key and home directory. Further away: a relay before each that hands on
every piece after half a round trip, also while connecting; its work is done by this machine's processors too.
Simulated: one process is all hosts, speaks SSH, and answers as an agent would without doing anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import multiprocessing
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncssh

from contracts.inventory import Host, Inventory, Slice, Storage

START_S = 60.0


@contextlib.contextmanager
def real(count: int, folder: Path, latency_s: float) -> Iterator[Inventory]:
    """So many sshd, behind relays where there is a latency."""
    key = _new_key(folder / "key")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    servers, places, keys = [], [], []
    with contextlib.ExitStack() as stack:
        for index in range(count):
            address, home = _address(index), folder / f"host-{index}"
            home.mkdir()
            keys.append(_new_key(home / "host_key"))
            (home / "authorized_keys").write_text(key)
            places.append((address, _free_port(address)))
            (home / "config").write_text(_config(home, *places[-1]))
            command = ["/usr/sbin/sshd", "-D", "-f", str(home / "config"), "-E", str(home / "log")]
            servers.append(subprocess.Popen(command))
            stack.callback(_end, servers[-1])
        for place in places:
            _await_listening(place)
        if latency_s:
            places = stack.enter_context(_in_process(_relay, places, latency_s))
        yield _inventory(places, keys)


@contextlib.contextmanager
def simulated(count: int, folder: Path, latency_s: float) -> Iterator[Inventory]:
    """So many hosts that one process plays."""
    _new_key(folder / "key")
    host_key = _new_key(folder / "host_key")
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(_in_process(_play, count, folder, latency_s))
        yield _inventory(places, [host_key] * count)


def _inventory(places: list[tuple[str, int]], keys: list[str]) -> Inventory:
    hosts = tuple(
        Host(
            index=index,
            name=f"h-{index}",
            internal_address=f"{address}:{port}",
            external_address=None,
            user=getpass.getuser(),
            host_keys=(" ".join(key.split()[:2]),),
            reach="direct",
        )
        for index, ((address, port), key) in enumerate(zip(places, keys, strict=True))
    )
    one = Slice(
        name="bench",
        accelerator_type="none",
        generation="none",
        topology="none",
        zone="none",
        capacity="on-demand",
        origin="bench",
        count=1,
        devices_per_host=1,
        hosts=hosts,
    )
    storage = Storage(bucket_url=None, bucket_region=None, nfs_source=None, nfs_mount=None)
    return Inventory(stack="bench", project=None, storage=storage, images={}, gateway=None, slices=(one,))


def _address(index: int) -> str:
    return f"127.0.{1 + index // 250}.{1 + index % 250}"


def _config(home: Path, address: str, port: int) -> str:
    return f"""ListenAddress {address}
Port {port}
HostKey {home}/host_key
AuthorizedKeysFile {home}/authorized_keys
PidFile {home}/pid
SetEnv HOME="{home}"
StrictModes no
UsePAM no
PasswordAuthentication no
PrintMotd no
"""


def _new_key(path: Path) -> str:
    """The public half of a key that is made at `path`."""
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(path)
    path.chmod(0o600)
    return key.export_public_key().decode()


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def _await_listening(place: tuple[str, int]) -> None:
    until_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(place, timeout=5).close()
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)
        else:
            return


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(START_S)


@contextlib.contextmanager
def _in_process(work: Any, *arguments: Any) -> Iterator[list[tuple[str, int]]]:
    """The places where a process of its own listens."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=_serve, args=(work, its, *arguments), daemon=True)
    process.start()
    try:
        if not ours.poll(START_S):
            raise SystemExit("the process that stands in for hosts does not start")
        yield ours.recv()
    finally:
        process.terminate()
        process.join(START_S)


def _serve(work: Any, pipe: Any, *arguments: Any) -> None:
    async def serve() -> None:
        pipe.send(await work(*arguments))
        await asyncio.Event().wait()

    asyncio.run(serve())


async def _relay(places: list[tuple[str, int]], latency_s: float) -> list[tuple[str, int]]:
    return [await _relay_one(place, latency_s / 2) for place in places]


async def _relay_one(place: tuple[str, int], delay_s: float) -> tuple[str, int]:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()

        def hand_on(data: bytes) -> None:
            with contextlib.suppress(OSError, RuntimeError):
                writer.write(data) if data else writer.write_eof()

        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                loop.call_later(delay_s, hand_on, data)
        loop.call_later(delay_s, hand_on, b"")

    carrying = set()  # asyncio itself holds on to no task

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        carrying.add(asyncio.current_task())
        await asyncio.sleep(2 * delay_s)  # the greeting of TCP
        there, back = await asyncio.open_connection(*place)
        await asyncio.gather(carry(reader, back), carry(there, writer))
        await asyncio.sleep(2 * delay_s)
        back.close()
        writer.close()

    server = await asyncio.start_server(accept, place[0], 0)
    port: int = server.sockets[0].getsockname()[1]
    return place[0], port


class _Host:
    """A simulated host, and whether it has been brought the agent and the code."""

    def __init__(self) -> None:
        self._has_agent = False
        self._has_code = False

    async def command(self, process: asyncssh.SSHServerProcess[str]) -> None:
        words = process.command or ""
        if "python3" not in words:
            process.exit(0)
            return
        line = await process.stdin.readline()
        if not self._has_agent:
            process.stdout.write(json.dumps({"need": words.split()[-1]}) + "\n")
            await process.stdin.readline()
            self._has_agent = True
        while line:
            verb = json.JSONDecoder().raw_decode(line[line.index(":") + 1 :].lstrip())[0]
            process.stdout.write(json.dumps({"ok": True, **self._answer(verb)}) + "\n")
            line = await process.stdin.readline()
        process.exit(0)

    def _answer(self, verb: str) -> dict[str, Any]:
        if verb == "preflight":
            facts = {"bundle_present": self._has_code, "free_ports": [1, 2], "home": "/home/u"}
            return {"checks": [], "facts": facts}
        self._has_code = self._has_code or verb == "stage"
        return {"state": "joined", "beat": None, "process": {"state": "running"}} if verb == "join" else {}


async def _play(count: int, folder: Path, latency_s: float) -> list[tuple[str, int]]:
    key = asyncssh.read_private_key(folder / "key").export_public_key().decode()
    places = []
    for index in range(count):
        server = await asyncssh.listen(
            _address(index),
            0,
            server_host_keys=[str(folder / "host_key")],
            authorized_client_keys=asyncssh.import_authorized_keys(key),
            process_factory=_Host().command,
            line_editor=False,
        )
        places.append((_address(index), server.get_port()))
    return await _relay(places, latency_s) if latency_s else places
