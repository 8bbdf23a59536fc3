"""Measures a launch and each of its phases, beside the plainest way to run a command on every host (Fabric's own).

Every measurement is made in a process of its own, from after its imports to its last answer. `first` finds hosts that
have neither the agent nor the code, `again` finds both. The job is a stand-in that only says that it has joined.

All hosts are on this machine. Real: one sshd a host, with its own address, key and home directory; further away: a
relay before each that hands on every piece after half a round trip, also while connecting, and whose work is done by
this machine's processors too. Simulated: one process is all hosts, speaks SSH, and answers as an agent would without
doing anything.

python -m bench.launch [--hosts 4 16 64] [--latency-ms 0 50] [--simulated 256]"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import json
import multiprocessing
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import asyncssh

from contracts.inventory import Host, Inventory, Slice, Storage, from_json, to_json

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600
START_S = 60.0
JOB = '''"""Joins, and waits until it is stopped."""
import json, os, signal, time
beat = {"rank": 0, "attempt": 0, "state": "joined", "step": 0, "time": time.time(), "step_time": time.time(),
        "pid": os.getpid(), "message": None}
path = os.path.join(os.environ["RUN_CONTROL_DIR"], "heartbeat.json")
with open(path + ".new", "w") as file:
    json.dump(beat, file)
os.rename(path + ".new", path)
signal.pause()
'''
PHASES = ("connect", "preflight", "stage", "start", "join")
Measured = dict[str, float]


@contextlib.contextmanager
def real(count: int, folder: Path, latency_s: float) -> Iterator[Inventory]:
    """Start `count` sshd, behind relays where there is a latency."""
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
    """Start one process that plays `count` hosts."""
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
    tpu_slice = Slice(
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
    return Inventory(
        stack="bench", project=None, storage=storage, images={}, gateway=None, slices=(tpu_slice,)
    )


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
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(work, child_end, *arguments), daemon=True)
    process.start()
    try:
        if not parent_end.poll(START_S):
            raise SystemExit("the process that stands in for hosts does not start")
        yield parent_end.recv()
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
        remote_reader, remote_writer = await asyncio.open_connection(*place)
        await asyncio.gather(carry(reader, remote_writer), carry(remote_reader, writer))
        await asyncio.sleep(2 * delay_s)
        remote_writer.close()
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
        command_line = process.command or ""
        if "python3" not in command_line:
            process.exit(0)
            return
        line = await process.stdin.readline()
        if not self._has_agent:
            process.stdout.write(json.dumps({"need": command_line.split()[-1]}) + "\n")
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


def threading_group(inventory: Inventory, folder: Path) -> Measured:
    """Fabric's own way: a thread a host. It checks no host key."""
    from fabric import ThreadingGroup

    hosts = [f"{getpass.getuser()}@{host.internal_address}" for host in inventory.slices[0].hosts]
    with _measured(len(hosts)) as measured:
        key = {"key_filename": str(folder / "key"), "look_for_keys": False, "allow_agent": False}
        group = ThreadingGroup(*hosts, connect_kwargs=key)
        group.run("true", hide=True)
    return measured


def launch(inventory: Inventory, folder: Path) -> Measured:
    """The whole launch, as `fab train` does it, but for the run's own files."""
    from backends import host_backend
    from backends.resolve import inventory_target
    from launch import jobs, plan, targets
    from launch import launching as rollout
    from launch.hosts import stop_processes

    target = inventory_target(
        inventory,
        targets.TargetRequest(
            stack="bench", platform="cpu", python=sys.executable, runs=str(folder / "runs")
        ),
    )
    code = jobs.bundle(folder / "checkout")
    run_id = f"joins-{time.time_ns()}"
    request = targets.Plan(
        target=target,
        run_id=run_id,
        job="joins",
        framework="jax",
        run_dir=f"{folder}/runs/{run_id}",
        cwd="~",
        bundle_sha256=code.sha256,
    )
    with _measured(len(target.hosts)) as measured:
        phase = _Phases(measured)
        for future in [transport.connect() for transport in target.transports]:  # type: ignore[attr-defined]
            future.result()
        phase.ends("connect")
        facts = host_backend.preflight(request, target.agents)
        phase.ends("preflight")
        host_backend.stage(code, target.agents, facts)
        phase.ends("stage")
        request = plan.settled(request, facts, token="bench")
        host_backend.start(request, target.agents)
        phase.ends("start")
        try:
            rollout.join(request, host_backend.HostLauncher())
            phase.ends("join")
            trips = [transport.round_trips for transport in target.transports]  # type: ignore[attr-defined]
            measured["round_trips"] = max(trips)
        finally:
            ended = time.perf_counter()
            stop_processes(target.agents, run_id, 0, grace_s=2)
            phase.leave_out(time.perf_counter() - ended)
    return measured


WAYS: dict[str, Callable[[Inventory, Path], Measured]] = {
    "Fabric ThreadingGroup, `true`": threading_group,
    "our launch, first": launch,
    "our launch, again": launch,
}


class _Phases:
    """Times one thing after the other."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._last_s = time.perf_counter()

    def ends(self, name: str) -> None:
        now_s = time.perf_counter()
        self._measured[name] = now_s - self._last_s
        self._last_s = now_s

    def leave_out(self, s: float) -> None:
        """What came after the launch."""
        self._measured["left_out"] = s


@contextlib.contextmanager
def _measured(hosts: int) -> Iterator[Measured]:
    """Wall time, and the processor time of this process and the ones it has waited for."""
    measured: Measured = {}
    began_s, used_s = time.perf_counter(), _used_s()
    yield measured
    measured["wall"] = time.perf_counter() - began_s - measured.get("left_out", 0)
    measured["cpu_ms"] = 1000 * (_used_s() - used_s) / hosts


def _used_s() -> float:
    both = [
        resource.getrusage(whose_usage) for whose_usage in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def row(name: str, measured: Measured, floor_s: float) -> str:
    """A line of the table. floor_s: the wall time of the ThreadingGroup."""
    phases = " | ".join(f"{measured[phase]:.2f}" if phase in measured else "" for phase in PHASES)
    trips = f"{measured['round_trips']:.0f}" if "round_trips" in measured else ""
    wall = f"{measured['wall']:.2f} | {measured['wall'] / floor_s:.2f}"
    return f"| {name} | {wall} | {measured['cpu_ms']:.1f} | {trips} | {phases} |"


def compare(kind: str, count: int, latency_ms: int) -> None:
    """One table."""
    make = simulated if kind == "simulated" else real
    with tempfile.TemporaryDirectory(prefix="tpu-stack-bench-") as name:
        folder = Path(name)
        shutil.copytree(ROOT / "jobs", folder / "checkout" / "jobs")
        (folder / "checkout" / "jobs" / "joins").mkdir()
        for file, text in (("__init__.py", ""), ("__main__.py", JOB)):
            (folder / "checkout" / "jobs" / "joins" / file).write_text(text)
        with make(count, folder, latency_ms / 1000) as inventory:
            (folder / "inventory.json").write_text(to_json(inventory))
            print(f"\n{count} {kind} hosts, {latency_ms} ms away\n")
            columns = ("way", "wall s", "times Fabric", "client CPU ms a host", "round trips", *PHASES)
            print(f"| {' | '.join(columns)} |")
            print("|---|" + "---:|" * (4 + len(PHASES)), flush=True)
            floor_s = 0.0
            for way in WAYS:
                measured = _measure_in_own_process(way, folder)
                floor_s = floor_s or measured["wall"]
                print(row(way, measured, floor_s), flush=True)


def _measure_in_own_process(way: str, folder: Path) -> Measured:
    command = [sys.executable, "-m", "bench.launch", "--measure", way, "--folder", str(folder)]
    environment = {**os.environ, "TPU_STACK_SSH_KEY": str(folder / "key"), "SSH_AUTH_SOCK": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{way}:\n{done.stderr}")
    measured: Measured = json.loads(done.stdout)
    return measured


def main(arguments: Sequence[str]) -> None:
    """Prints a table for each number of hosts and each latency."""
    parser = argparse.ArgumentParser(prog="python -m bench.launch", description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--latency-ms", type=int, nargs="+", default=[0, 50])
    parser.add_argument("--simulated", type=int, nargs="*", default=[256])
    parser.add_argument("--measure", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        inventory = from_json((options.folder / "inventory.json").read_text())
        print(json.dumps(WAYS[options.measure](inventory, options.folder)))
        return
    for latency_ms in options.latency_ms:
        for count in options.hosts:
            compare("real", count, latency_ms)
        for count in options.simulated:
            compare("simulated", count, latency_ms)


if __name__ == "__main__":
    main(sys.argv[1:])
