"""How long a launch takes, and each of its phases, beside the plainest ways to run one command on every host.

Every measurement is made in a process of its own, from after its imports to its last answer. `first` finds hosts that
have neither the agent nor the code, `again` finds both. The job is a stand-in that only says that it has joined.

python -m bench.launch [--hosts 4 16 64] [--latency-ms 0 50] [--simulated 256]"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench import ssh_hosts
from contracts.inventory import Inventory, from_json, to_json

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600
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


def threading_group(inventory: Inventory, folder: Path) -> Measured:
    """Fabric's own way: a thread a host. It checks no host key."""
    from fabric import ThreadingGroup

    hosts = [f"{getpass.getuser()}@{host.internal_address}" for host in inventory.slices[0].hosts]
    with _measured(len(hosts)) as measured:
        key = {"key_filename": str(folder / "key"), "look_for_keys": False, "allow_agent": False}
        group = ThreadingGroup(*hosts, connect_kwargs=key)
        group.run("true", hide=True)
    return measured


def openssh(inventory: Inventory, folder: Path) -> Measured:
    """A process of OpenSSH a host, all at once."""
    hosts = inventory.slices[0].hosts
    known = folder / "known_hosts"
    places = [host.internal_address.rsplit(":", 1) for host in hosts]
    known.write_text(
        "".join(
            f"[{place[0]}]:{place[1]} {host.host_keys[0]}\n"
            for place, host in zip(places, hosts, strict=True)
        )
    )
    options = ["-F", "none", "-i", str(folder / "key"), "-o", f"UserKnownHostsFile={known}"]
    options += ["-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes"]
    with _measured(len(hosts)) as measured:
        processes = [
            subprocess.Popen(["ssh", *options, "-p", port, address, "true"]) for address, port in places
        ]
        codes = [process.wait(LIMIT_S) for process in processes]
        if any(codes):
            raise SystemExit("ssh failed")
    return measured


def one_command(inventory: Inventory, _: Path) -> Measured:
    """Our connections, one command on each."""
    from launch.ssh.connection import Ssh
    from launch.ssh.transport import transports_of

    one_slice = inventory.slices[0]
    with Ssh() as ssh, _measured(len(one_slice.hosts)) as measured:
        hosts = transports_of(inventory, one_slice, ssh=ssh)
        for future in [host.begin(["true"], "", timeout_s=LIMIT_S) for host in hosts]:
            if future.result().exit_code != 0:
                raise SystemExit("true failed")
    return measured


def launch(inventory: Inventory, folder: Path) -> Measured:
    """The whole launch, as `fab train` does it, but for the run's own files."""
    from launch import jobs, plan, targets
    from launch import launch as rollout
    from launch.hosts import stop_processes

    target = targets.of_inventory(
        inventory,
        targets.Wanted(stack="bench", platform="cpu", python=sys.executable, runs=str(folder / "runs")),
    )
    code = jobs.bundle(folder / "checkout")
    run_id = f"joins-{time.time_ns()}"
    wanted = plan.Plan(
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
        facts = rollout.preflight(wanted, target.agents)
        phase.ends("preflight")
        rollout.stage(wanted, code, target.agents, facts)
        phase.ends("stage")
        wanted = plan.settled(wanted, facts, token="bench")
        rollout.start(wanted, target.agents)
        phase.ends("start")
        try:
            rollout.join(wanted, target.agents)
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
    "OpenSSH processes, `true`": openssh,
    "our connections, `true`": one_command,
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
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in both)


def row(name: str, measured: Measured, floor_s: float) -> str:
    """A line of the table. floor_s: the wall time of the ThreadingGroup."""
    phases = " | ".join(f"{measured[phase]:.2f}" if phase in measured else "" for phase in PHASES)
    trips = f"{measured['round_trips']:.0f}" if "round_trips" in measured else ""
    wall = f"{measured['wall']:.2f} | {measured['wall'] / floor_s:.2f}"
    return f"| {name} | {wall} | {measured['cpu_ms']:.1f} | {trips} | {phases} |"


def compare(kind: str, count: int, latency_ms: int) -> None:
    """One table."""
    make = ssh_hosts.simulated if kind == "simulated" else ssh_hosts.real
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
                measured = _apart(way, folder)
                floor_s = floor_s or measured["wall"]
                print(row(way, measured, floor_s), flush=True)


def _apart(way: str, folder: Path) -> Measured:
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
