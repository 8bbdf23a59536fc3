"""`fab verify`: a process on every host, started as a run's is, that computes with all the others; and a verdict."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import random
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from backends import host_backend
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.run_directory import RunDirectory, heartbeat
from launch import jobs, launching, output, runs
from launch import plan as plans
from launch.code.bundles import left_out_lines
from launch.hosts import HostError, ask_all, stop_processes
from launch.jobs import CHECKOUT
from launch.launching import NotJoined
from launch.output import printable, say, terminal
from launch.plan import MAX_CLOCK_OFFSET_S
from launch.targets import Container, Plan, Target

FOLDER = ".verify"
"""In the folder of runs, and no run: what is looked for there has other names."""
FRAMEWORKS = ("jax", "pytorch", "pytorch_xla", "tensorflow")
MODULE = "runtime.verify"
"""What is started on the hosts, as a module of `jobs`."""
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
    plan, failures, reports = gather(target, framework, runtime, container_access)
    problems = [*failures, *judge(target, reports)]
    console.print(table(target, reports))
    for line in lines(reports, problems):
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
    if framework not in FRAMEWORKS:
        raise RequestError(f"--framework {framework}: choose one of {', '.join(FRAMEWORKS)}")
    if part := target.part_of_tpu:
        raise RequestError(part)
    box = plans.choose_container(target, framework, runtime, access=container_access)
    python = target.python
    if not target.python_is_given:
        python = target.interpreter(framework, in_container=box is not None)
        if box is None:
            target.make_environment(framework, say(terminal()))
    plan = _plan(dataclasses.replace(target, python=python), framework, box)
    failures = _carry_out(plan, plan.target)
    per_host = plan.ranks_per_host
    names = [f"verify/rank-{rank}.json" for rank in range(plan.processes * per_host)]
    reports = RunDirectory(plan.run_dir, target.files).read_jsons(names)
    return (
        plan,
        failures,
        [merged(reports[rank : rank + per_host]) for rank in range(0, len(names), per_host)],
    )


def merged(reports: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Return the reports of a host's ranks as one; None: one is missing."""
    present = [report for report in reports if report is not None]
    if len(present) < len(reports):
        return None
    wrong_first = sorted(present, key=lambda report: report["all_reduce"]["is_right"])
    return {
        **present[0],
        "local_devices": sum(report["local_devices"] for report in present),
        "processes": present[0]["processes"] // len(present),
        "matmuls": [work for report in present for work in report["matmuls"]],
        "all_reduce": wrong_first[0]["all_reduce"],
    }


def clear(target: Target, plan: Plan) -> None:
    """Leave nothing behind of what went well."""
    with contextlib.suppress(HostError, OSError):  # a few kilobytes that stay are no reason to fail
        RunDirectory(plan.run_dir, target.files).remove_all()


def _plan(target: Target, framework: str, box: Container | None) -> Plan:
    now = datetime.datetime.now(datetime.UTC)
    run_id = runs.new_run_id(f"verify_{framework}", now, random.Random())
    return Plan(
        target=target,
        run_id=run_id,
        job=MODULE,
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
    facts = host_backend.preflight(plan, target.agents)
    host_backend.stage(code, target.agents, facts)
    host_backend.pull(plan, target.agents, facts, say(terminal()))
    plan = plans.settled(plan, facts, token=secrets.token_hex(16))
    host_backend.start(plan, target.agents)
    try:
        try:
            launching.join(plan, host_backend.HostLauncher())
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
    reasons = []
    for host, answer, beat in zip(
        target.hosts, ask_all(target.agents, "status", requests), beats, strict=True
    ):
        if isinstance(answer, HostError):
            reasons.append(str(answer))
            continue
        for entry in answer["processes"]:
            reason = _reason(entry, beat)
            reasons += [f"{host.name}: {reason}"] if reason else []
    return reasons


def _reason(entry: Mapping[str, Any], beat: Mapping[str, Any] | None) -> str | None:
    if entry["state"] in ("starting", "running") or entry.get("code") == 0:
        return None
    message = (beat or {}).get("message") if (beat or {}).get("state") == "failed" else None
    ending = entry.get("reason") or (
        f"ended by signal {entry['signal']}" if entry.get("signal") else f"exit code {entry.get('code')}"
    )
    return str(message or ending)


SLOW_SHARE = 0.6
"""A device below this share of the median rate counts as faulty."""
NO_REPORT = "where nothing else is said of it: the folder of runs is not one that all hosts share"
Report = Mapping[str, Any]


def judge(target: Target, reports: Sequence[Report | None]) -> list[str]:
    """Return everything that is not as the target promises, each with its host and, if there is one, its remedy."""
    problems: list[str] = []
    by_host: dict[str, Report] = {}
    for host, report in zip(target.hosts, reports, strict=True):
        if report is None:
            problems.append(f"{host.name}: wrote no report → {NO_REPORT}")
        else:
            by_host[host.name] = report
            problems += [f"{host.name}: {text}" for text in _host_problems(target, report)]
    return [*problems, *_slow(target, by_host), *_differing(by_host), *_clocks(by_host)]


def _host_problems(target: Target, report: Report) -> list[str]:
    problems = []
    hosts, a_host = len(target.hosts), target.devices // len(target.hosts)
    if report["platform"] != target.platform:
        problems.append(
            f"computes on {printable(str(report['platform']))}, and asked for is {target.platform}"
        )
    if report["local_devices"] != a_host:
        problems.append(
            f"has {report['local_devices']} devices where the slice has {a_host} a host → another "
            "process may hold some (`fab doctor`), or the runtime version does not fit the TPU"
        )
    if report["devices"] != target.devices or report["processes"] != hosts:
        problems.append(
            f"sees {report['devices']} devices of {report['processes']} hosts where there are "
            f"{target.devices} of {hosts}"
        )
    problems += [
        f"{printable(str(matmul['device']))} multiplies wrongly → do not use this host: make the slice again"
        for matmul in report["matmuls"]
        if not matmul["is_right"]
    ]
    if not report["all_reduce"]["is_right"]:
        problems.append("has a wrong sum over all devices")
    return problems


def _slow(target: Target, by_host: Mapping[str, Report]) -> list[str]:
    """Devices far behind the others; on a CPU that says more of its neighbours than of itself."""
    if target.platform == "cpu":
        return []
    rates = [(host, matmul) for host, report in by_host.items() for matmul in report["matmuls"]]
    middle = statistics.median([matmul["flops_per_s"] for _, matmul in rates]) if rates else 0
    return [
        f"{host}: {printable(str(matmul['device']))} does {flops(matmul['flops_per_s'])} where the middle one does "
        f"{flops(middle)} → it holds all others back: make the slice again"
        for host, matmul in rates
        if matmul["flops_per_s"] < SLOW_SHARE * middle
    ]


def _differing(by_host: Mapping[str, Report]) -> list[str]:
    """Versions that are not the same everywhere."""
    problems = []
    for name in sorted({name for report in by_host.values() for name in report["versions"]}):
        hosts_by_version: dict[str, list[str]] = {}
        for host, report in by_host.items():
            hosts_by_version.setdefault(printable(str(report["versions"].get(name, "none"))), []).append(host)
        if len(hosts_by_version) > 1:
            versions = "; ".join(
                f"{version} on {', '.join(hosts)}" for version, hosts in hosts_by_version.items()
            )
            problems.append(f"{name} is not the same on all hosts: {versions} → `fab deploy`")
    return problems


def _clocks(by_host: Mapping[str, Report]) -> list[str]:
    middle = statistics.median([report["clock_s"] for report in by_host.values()]) if by_host else 0.0
    return [
        f"{host}: its clock is {report['clock_s'] - middle:+.1f} s from the others' → turn on time synchronisation"
        for host, report in by_host.items()
        if abs(report["clock_s"] - middle) > MAX_CLOCK_OFFSET_S
    ]


def table(target: Target, reports: Sequence[Report | None]) -> Table:
    """Return a table with a line for each host."""
    rows = output.table("host", "devices", "matmul a device", "all-reduce", "clock")
    clocks = [report["clock_s"] for report in reports if report is not None]
    middle = statistics.median(clocks) if clocks else 0.0
    for host, report in zip(target.hosts, reports, strict=True):
        if report is None:
            rows.add_row(host.name, "no report")
            continue
        slowest = min((matmul["flops_per_s"] for matmul in report["matmuls"]), default=0.0)
        peak = target.peak_flops_per_s
        share = f" ({slowest / peak:.0%} of peak)" if peak else ""
        reduce = report["all_reduce"]
        rows.add_row(
            host.name,
            f"{report['local_devices']} × {printable(str(report['device_kind']))}",
            flops(slowest) + share,
            f"{reduce['mib']} MiB in {reduce['took_s'] * 1e3:.1f} ms",
            f"{report['clock_s'] - middle:+.2f} s",
        )
    return rows


def lines(reports: Sequence[Report | None], wrong: Sequence[str]) -> list[str]:
    """Return what is said under the table: the versions that most have, then the verdict."""
    versions = collections.Counter(
        ", ".join(f"{name} {printable(str(version))}" for name, version in report["versions"].items())
        for report in reports
        if report is not None
    )
    summary = [text for text, _ in versions.most_common(1)]
    if wrong:
        return [
            *summary,
            f"NOT WELL: {len(wrong)} finding{'s' * (len(wrong) > 1)}",
            *(f"  {text}" for text in wrong),
        ]
    devices = next(report["devices"] for report in reports if report is not None)
    return [
        *summary,
        f"all is well: {devices} devices on {len(reports)} host{'s' * (len(reports) > 1)} compute together",
    ]


def flops(per_s: float) -> str:
    return f"{per_s / 1e12:.1f} TFLOP/s" if per_s >= 1e12 else f"{per_s / 1e9:.0f} GFLOP/s"
