"""`fab verify`: a process on every host, started as a run's is, that computes with all the others; and a verdict."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import random
import secrets
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from backends import host_launcher
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.run_directory import RunDirectory, heartbeat
from launch import jobs, launch, runs
from launch import plan as plans
from launch.bundles import left_out_lines
from launch.hosts import HostError, ask_all, stop_processes
from launch.jobs import CHECKOUT
from launch.launch import NotJoined
from launch.output import printable, say, terminal
from launch.plan import MAX_CLOCK_OFFSET_S, Container, Plan
from launch.targets import Target

FOLDER = ".verify"
"""In the folder of runs, and no run: what is looked for there has other names."""
MODULES = {
    "jax": "runtime.jax.verify",
    "pytorch": "runtime.torch.verify",
    "pytorch_xla": "runtime.torch.verify",
    "tensorflow": "runtime.tensorflow.verify",
}
"""What is started on the hosts, by framework, as a module of `jobs`."""
LIMIT_S = 600.0
POLL_S = 0.5


def verify(target: Target, framework: str, runtime: str | None, container_access: str | None = None) -> int:
    """Print what each host found and whether all is well; 0 or 1.

    runtime, container_access: as `launch.plan.choose_container` takes them.

    Raises:
        RequestError: there is no such framework here, or the hosts are a part of a TPU slice.
        HostsError: a host failed the preflight, and nothing was started; or a start, and all was stopped again.
    """
    console = terminal()
    plan, failures, found = gather(target, framework, runtime, container_access)
    problems = [*failures, *judge(target, found)]
    console.print(table(target, found))
    for line in lines(found, problems):
        say(console)(line)
    if problems:
        say(console)(f"what the hosts wrote: {plan.run_dir}")
        return 1
    clear(target, plan)
    return 0


def gather(
    target: Target, framework: str, runtime: str | None, container_access: str | None = None
) -> tuple[Plan, list[str], Sequence[Mapping[str, Any] | None]]:
    """Run the test; return its plan, what failed, and each host's report in worker order. Raises as `verify`."""
    if framework not in MODULES:
        raise RequestError(f"--framework {framework}: choose one of {', '.join(MODULES)}")
    if part := target.part_of_tpu:
        raise RequestError(part)
    box = plans.choose_container(target, framework, runtime, access=container_access)
    python = target.python
    if not target.python_is_given:
        python = target.interpreter(framework, in_container=box is not None)
        if box is None:
            target.backend.make_environment(framework, say(terminal()))
    plan = _plan(dataclasses.replace(target, python=python), framework, box)
    failures = _carry_out(plan, plan.target)
    per_host = plan.ranks_per_host
    names = [f"verify/rank-{rank}.json" for rank in range(plan.processes * per_host)]
    found = RunDirectory(plan.run_dir, target.files).read_jsons(names)
    return plan, failures, [of_host(found[rank : rank + per_host]) for rank in range(0, len(names), per_host)]


def of_host(reports: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Return the reports of a host's ranks as one; None: one is missing."""
    known = [each for each in reports if each is not None]
    if len(known) < len(reports):
        return None
    wrong_first = sorted(known, key=lambda each: each["all_reduce"]["is_right"])
    return {
        **known[0],
        "local_devices": sum(each["local_devices"] for each in known),
        "processes": known[0]["processes"] // len(known),
        "matmuls": [work for each in known for work in each["matmuls"]],
        "all_reduce": wrong_first[0]["all_reduce"],
    }


def clear(target: Target, plan: Plan) -> None:
    """Leave nothing behind of what went well."""
    if target.capabilities.shares_files:
        shutil.rmtree(plan.run_dir, ignore_errors=True)
        return
    with contextlib.suppress(HostError, OSError):  # a few kilobytes that stay are no reason to fail
        _remove(target, plan.run_dir, depth=4)


def _plan(target: Target, framework: str, box: Container | None) -> Plan:
    now = datetime.datetime.now(datetime.UTC)
    run_id = runs.new_run_id(f"verify_{framework}", now, random.Random())
    return Plan(
        target=target,
        run_id=run_id,
        job=MODULES[framework],
        framework=framework,
        run_dir=f"{target.runs_url}/{FOLDER}/{run_id}",
        cwd=plans.HOME,
        bundle_sha256="",
        container=box,
        ranks_per_host=plans.ranks_of_job(framework, target, None),
    )


def _carry_out(plan: Plan, target: Target) -> list[str]:
    """Start, wait for the end, and stop what is left; what failed, in words."""
    code = jobs.bundle(CHECKOUT)
    plan = dataclasses.replace(plan, bundle_sha256=code.sha256)
    for line in left_out_lines([code]):
        say(terminal())(line)
    facts = host_launcher.preflight(plan, target.agents)
    host_launcher.stage(code, target.agents, facts)
    host_launcher.pull(plan, target.agents, facts, say(terminal()))
    plan = plans.settled(plan, facts, token=secrets.token_hex(16))
    host_launcher.start(plan, target.agents)
    try:
        try:
            launch.join(plan, target.agents)
            is_over = _wait(plan, target)
        except NotJoined as error:
            hint = plans.container_hint(plan.container, target.platform)
            return [str(error), *_reasons(plan, target), *([hint] if hint else [])]
        return _reasons(plan, target) + ([] if is_over else [f"it was not done within {spoken(LIMIT_S)}"])
    finally:
        stop_processes(target.agents, plan.run_id, plan.attempt, grace_s=0)


def _wait(plan: Plan, target: Target) -> bool:
    """Wait until every process has ended; return whether they did in time."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if all(entry["state"] not in ("starting", "running") for entry in _status(plan, target)):
            return True
        time.sleep(POLL_S)
    return False


def _status(plan: Plan, target: Target) -> list[dict[str, Any]]:
    """Of every process that its host tells of; a host that does not answer now may do so at the next look."""
    requests = [plan.process(index) for index in range(plan.processes)]
    answers = ask_all(target.agents, "status", requests)
    silent = {"state": "running"}
    return [
        entry
        for answer in answers
        for entry in ([silent] if isinstance(answer, HostError) else answer["processes"])
    ]


def _reasons(plan: Plan, target: Target) -> list[str]:
    """Return what processes that did not end well say, or what is known of how they ended."""
    beats = RunDirectory(plan.run_dir, target.files).read_jsons(
        [heartbeat(index) for index in range(plan.processes)]
    )
    requests = [plan.process(index) for index in range(plan.processes)]
    found = []
    for host, answer, beat in zip(
        target.hosts, ask_all(target.agents, "status", requests), beats, strict=True
    ):
        if isinstance(answer, HostError):
            found.append(str(answer))
            continue
        for entry in answer["processes"]:
            reason = _reason(entry, beat)
            found += [f"{host.name}: {reason}"] if reason else []
    return found


def _reason(entry: Mapping[str, Any], beat: Mapping[str, Any] | None) -> str | None:
    if entry["state"] in ("starting", "running") or entry.get("code") == 0:
        return None
    said = (beat or {}).get("message") if (beat or {}).get("state") == "failed" else None
    how = entry.get("reason") or (
        f"ended by signal {entry['signal']}" if entry.get("signal") else f"exit code {entry.get('code')}"
    )
    return str(said or how)


def _remove(target: Target, path: str, *, depth: int) -> None:
    names: Sequence[str] = target.files.list(path) if depth and "." not in path.rpartition("/")[2] else ()
    for name in names:
        _remove(target, f"{path}/{name}", depth=depth - 1)
    target.files.remove(path)


SLOW_SHARE = 0.6
"""A device below this share of the median rate counts as faulty."""
NO_REPORT = "where nothing else is said of it: the folder of runs is not one that all hosts share"
Report = Mapping[str, Any]


def judge(target: Target, reports: Sequence[Report | None]) -> list[str]:
    """Return everything that is not as the target promises, each with its host and, if there is one, its remedy."""
    found: list[str] = []
    known: dict[str, Report] = {}
    for host, report in zip(target.hosts, reports, strict=True):
        if report is None:
            found.append(f"{host.name}: wrote no report → {NO_REPORT}")
        else:
            known[host.name] = report
            found += [f"{host.name}: {text}" for text in _of_host(target, report)]
    return [*found, *_slow(target, known), *_differing(known), *_clocks(known)]


def _of_host(target: Target, report: Report) -> list[str]:
    found = []
    hosts, a_host = len(target.hosts), target.devices // len(target.hosts)
    if report["platform"] != target.platform:
        found.append(f"computes on {printable(str(report['platform']))}, and asked for is {target.platform}")
    if report["local_devices"] != a_host:
        found.append(
            f"has {report['local_devices']} devices where the slice has {a_host} a host → another "
            "process may hold some (`fab doctor`), or the runtime version does not fit the TPU"
        )
    if report["devices"] != target.devices or report["processes"] != hosts:
        found.append(
            f"sees {report['devices']} devices of {report['processes']} hosts where there are "
            f"{target.devices} of {hosts}"
        )
    found += [
        f"{printable(str(each['device']))} multiplies wrongly → do not use this host: make the slice again"
        for each in report["matmuls"]
        if not each["is_right"]
    ]
    if not report["all_reduce"]["is_right"]:
        found.append("has a wrong sum over all devices")
    return found


def _slow(target: Target, known: Mapping[str, Report]) -> list[str]:
    """Devices far behind the others; on a CPU that says more of its neighbours than of itself."""
    if target.platform == "cpu":
        return []
    rates = [(host, each) for host, report in known.items() for each in report["matmuls"]]
    middle = statistics.median([each["flops_per_s"] for _, each in rates]) if rates else 0
    return [
        f"{host}: {printable(str(each['device']))} does {flops(each['flops_per_s'])} where the middle one does "
        f"{flops(middle)} → it holds all others back: make the slice again"
        for host, each in rates
        if each["flops_per_s"] < SLOW_SHARE * middle
    ]


def _differing(known: Mapping[str, Report]) -> list[str]:
    """Versions that are not the same everywhere."""
    found = []
    for name in sorted({name for report in known.values() for name in report["versions"]}):
        hosts_of: dict[str, list[str]] = {}
        for host, report in known.items():
            hosts_of.setdefault(printable(str(report["versions"].get(name, "none"))), []).append(host)
        if len(hosts_of) > 1:
            told = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in hosts_of.items())
            found.append(f"{name} is not the same on all hosts: {told} → `fab deploy`")
    return found


def _clocks(known: Mapping[str, Report]) -> list[str]:
    middle = statistics.median([report["clock_s"] for report in known.values()]) if known else 0.0
    return [
        f"{host}: its clock is {report['clock_s'] - middle:+.1f} s from the others' → turn on time synchronisation"
        for host, report in known.items()
        if abs(report["clock_s"] - middle) > MAX_CLOCK_OFFSET_S
    ]


def table(target: Target, reports: Sequence[Report | None]) -> Table:
    """Return a table with a line for each host."""
    found = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("host", "devices", "matmul a device", "all-reduce", "clock"):
        found.add_column(heading)
    clocks = [report["clock_s"] for report in reports if report is not None]
    middle = statistics.median(clocks) if clocks else 0.0
    for host, report in zip(target.hosts, reports, strict=True):
        if report is None:
            found.add_row(host.name, "no report")
            continue
        slowest = min((each["flops_per_s"] for each in report["matmuls"]), default=0.0)
        peak = target.peak_flops_per_s
        share = f" ({slowest / peak:.0%} of peak)" if peak else ""
        reduce = report["all_reduce"]
        found.add_row(
            host.name,
            f"{report['local_devices']} × {printable(str(report['device_kind']))}",
            flops(slowest) + share,
            f"{reduce['mib']} MiB in {reduce['took_s'] * 1e3:.1f} ms",
            f"{report['clock_s'] - middle:+.2f} s",
        )
    return found


def lines(reports: Sequence[Report | None], wrong: Sequence[str]) -> list[str]:
    """Return what is said under the table: the versions that most have, then the verdict."""
    versions = collections.Counter(
        ", ".join(f"{name} {printable(str(version))}" for name, version in report["versions"].items())
        for report in reports
        if report is not None
    )
    told = [text for text, _ in versions.most_common(1)]
    if wrong:
        return [
            *told,
            f"NOT WELL: {len(wrong)} finding{'s' * (len(wrong) > 1)}",
            *(f"  {text}" for text in wrong),
        ]
    devices = next(report["devices"] for report in reports if report is not None)
    return [
        *told,
        f"all is well: {devices} devices on {len(reports)} host{'s' * (len(reports) > 1)} compute together",
    ]


def flops(per_s: float) -> str:
    return f"{per_s / 1e12:.1f} TFLOP/s" if per_s >= 1e12 else f"{per_s / 1e9:.0f} GFLOP/s"
