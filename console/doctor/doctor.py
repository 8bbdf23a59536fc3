"""`fab doctor`: all checks from near to far, with a verdict; and the text of `--first-day` for a bug report."""

from __future__ import annotations

import dataclasses
import getpass
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from backends.pods.api_server import Connection
from backends.vm.deploy import FRAMEWORK, named
from console.doctor import cluster_access, slice_hosts, workstation
from console.doctor.check import Check, Finding, carry_out
from console.doctor.workstation import Machine
from console.hosts import verification
from contracts.errors import RequestError
from jobs.runtime.storage.cache import user_cache_dir
from launch import jobs
from launch.hosts import HostError, HostsError, ask_all
from launch.jobs import CHECKOUT
from launch.output import say, terminal
from launch.targets import Target

E_MAIL = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+")
SECRETS = (
    re.compile(r"\bya29\.[\w.-]+"),
    re.compile(
        r"(?i)\b((?:[\w-]*(?:token|password|passphrase|secret|credential|api[-_]?key)[\w-]*)\s*[=:]\s*)\S+"
    ),
    re.compile(r"-----BEGIN [^-]*PRIVATE KEY-----.*?(?:-----END [^-]*-----|$)", re.DOTALL),
)
PROCESS = ("RUN_PROCESS_ID", "jax.process_index()")
LEAST_NAME = 4
"""A shorter name, such as a user's, would be taken out of other words too."""
MARKS = {"ok": "✓", "warn": "!", "fail": "✗", "skip": "·"}
Open = Callable[[], Target]


def doctor(open_target: Open, *, wants_stack: bool, as_json: bool) -> int:
    """Print every finding; 0 where nothing failed, else 1. wants_stack: whether it is about more than this machine."""
    machine = Machine(
        environ=os.environ,
        home=Path.home(),
        checkout=CHECKOUT,
        cache_dir=user_cache_dir(os.environ),
        ask=workstation.ask,
    )
    console = terminal()
    shown: list[Finding] = []
    in_order = findings(machine, open_target, wants_stack=wants_stack)
    for area, group in itertools.groupby(in_order, key=lambda finding: finding.area):
        area_findings = list(group)
        shown += area_findings
        if not as_json:
            say(console)(
                "\n".join([area, *(line for finding in grouped(area_findings) for line in lines(finding))])
            )
    if as_json:
        print(
            json.dumps(
                {"ok": not _failed(shown), "findings": [dataclasses.asdict(finding) for finding in shown]},
                indent=2,
            )
        )
    else:
        say(console)(verdict(shown))
    return 1 if _failed(shown) else 0


def _failed(findings: Sequence[Finding]) -> int:
    return sum(finding.state == "fail" for finding in findings)


def findings(machine: Machine, open_target: Open, *, wants_stack: bool) -> Iterator[Finding]:
    """From near to far; without a target what lies farther is not looked at."""
    area = workstation.AREA
    yield from carry_out(workstation.checks(machine, needs_pulumi=wants_stack))
    gcloud = Check(area, "gcloud", lambda: workstation.gcloud(machine.ask))
    ssh_keys = Check(area, "ssh keys", lambda: workstation.usable(machine))
    os_login = Check(area, "os login", lambda: workstation.os_login(machine))
    try:
        target = open_target()
    except RequestError as error:
        yield Finding(area="stack", name="inventory", state="fail", message=str(error))
        yield from carry_out([gcloud, ssh_keys, os_login] if wants_stack else [])
        return
    area_checks = {"ssh": _ssh, "cluster": _cluster, "hosts": _hosts, "storage": _storage}
    for check in target.capabilities.checks:
        yield from area_checks[check](target, machine)


def _ssh(target: Target, machine: Machine) -> Iterator[Finding]:
    """Of what leads to hosts over SSH."""
    area = workstation.AREA
    yield from carry_out([Check(area, "ssh keys", lambda: workstation.usable(machine))])
    if (project := target.inventory.project) is not None:
        gcloud = Check(area, "gcloud", lambda: workstation.gcloud(machine.ask))
        credentials = Check(area, "credentials", lambda: workstation.default_credentials(machine.environ))
        os_login = Check(area, "os login", lambda: workstation.os_login(machine))
        roles = Check(area, "roles", lambda: workstation.roles(project, machine.environ))
        yield from carry_out([gcloud, credentials])
        yield from carry_out([os_login] if any(host.user is None for host in target.hosts) else [])
        yield from carry_out([roles] if any(host.reach == "iap" for host in target.hosts) else [])
    yield from carry_out(slice_hosts.stack_checks(target, machine.ask))


def _storage(target: Target, machine: Machine) -> Iterator[Finding]:  # noqa: ARG001 - as the others
    yield from carry_out(slice_hosts.checks(target))


def _cluster(target: Target, machine: Machine) -> Iterator[Finding]:
    """Of a slice whose hosts are the pods of a run, so that there is no host to ask before."""
    its_cluster, pool = target.inventory.cluster, target.slice.pool
    assert its_cluster is not None and pool is not None, "a target on pods has both"
    if its_cluster.endpoint is not None:
        area = workstation.AREA
        gcloud = Check(area, "gcloud", lambda: workstation.gcloud(machine.ask))
        credentials = Check(area, "credentials", lambda: workstation.default_credentials(machine.environ))
        yield from carry_out([gcloud, credentials])
    checks = cluster_access.ClusterChecks(
        ask=Connection(its_cluster).ask, cluster=its_cluster, one_slice=target.slice, pool=pool
    )
    yield from carry_out(
        [Check("stack", "regions", lambda: slice_hosts.regions(target.inventory, target.slice))]
    )
    reached = list(carry_out([Check(cluster_access.AREA, "reached", checks.reached)]))
    yield from reached
    if not _failed(reached):
        yield from carry_out(checks.checks())
    runs = Check("storage", "runs", lambda: slice_hosts.from_here(target.files, target.runs_url))
    yield from carry_out([runs])


def _hosts(target: Target, machine: Machine) -> Iterator[Finding]:  # noqa: ARG001 - as the others
    """The first by itself, for all others may be reached through it; those that do not answer are asked no more."""
    everyone = list(range(len(target.hosts)))
    first = Check("network", "first host", lambda: slice_hosts.reached(target, everyone[:1]))
    other_hosts = Check("network", "hosts", lambda: slice_hosts.reached(target, everyone[1:]))
    reached = list(carry_out([first, other_hosts]))
    yield from reached
    lost = {finding.host for finding in reached if finding.state == "fail"}
    if answering_indexes := [index for index in everyone if target.hosts[index].name not in lost]:
        answering = only(target, answering_indexes)
        preflight = Check("hosts", "preflight", lambda: slice_hosts.preflight(answering))
        yield from carry_out([preflight])


def only(target: Target, indexes: Sequence[int]) -> Target:
    """Return the target without the other hosts."""
    return dataclasses.replace(
        target,
        hosts=tuple(target.hosts[index] for index in indexes),
        transports=tuple(target.transports[index] for index in indexes),
        agents=tuple(target.agents[index] for index in indexes),
        cpus=tuple(target.cpus[index] for index in indexes),
    )


def grouped(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of one area as they are shown: what holds of several hosts alike is said once."""
    groups: dict[tuple[str | None, ...], list[Finding]] = {}
    for number, finding in enumerate(findings):
        if finding.host is None:
            groups[(str(number),)] = [finding]
        else:
            # Messages of what is in order may differ in a figure; those of what is not are all shown.
            same = (finding.message, finding.remedy) if finding.state != "ok" else ()
            groups.setdefault(("", finding.name, finding.state, *same), []).append(finding)
    return [_merged(group) for group in groups.values()]


def _merged(group: Sequence[Finding]) -> Finding:
    if len(group) == 1:
        return group[0]
    alike = all(finding.message == group[0].message for finding in group)
    message = group[0].message if alike else f"such as {group[0].message}"
    return dataclasses.replace(
        group[0],
        host=named(list(dict.fromkeys(finding.host for finding in group if finding.host is not None))),
        message=message,
    )


def lines(finding: Finding) -> list[str]:
    """Return a finding on a terminal; the remedy stands under it."""
    host = f"{finding.host}: " if finding.host else ""
    text = f"  {MARKS[finding.state]} {finding.name}: {host}{finding.message}"
    return [text, f"      → {finding.remedy}"] if finding.remedy else [text]


def verdict(findings: Sequence[Finding]) -> str:
    """Return one line for everything."""
    warned = sum(finding.state == "warn" for finding in findings)
    failed, count = _failed(findings), f"{len(findings)} looked at"
    parts = [f"{failed} failed"] * bool(failed) + [f"{warned} to look at"] * bool(warned)
    return f"{', '.join(parts)}, of {count}" if parts else f"all well, {count}"


def first_day(target: Target) -> int:
    """Print the text; 0 where a host answered."""
    print(
        "asking every host, then starting one process on each: a minute or two …", file=sys.stderr, flush=True
    )
    answers = ask_all(target.agents, "describe", [{} for _ in target.agents])
    hosts = [
        {"agent": str(answer)}
        if isinstance(answer, HostError)
        else {k: str(v) for k, v in answer["found"].items()}
        for answer in answers
    ]
    lines = [*about(target), *by_answer(hosts), *processes(target)]
    print("\n".join(["```", *(without_names(line, private(target, hosts)) for line in lines), "```"]))
    return 0 if any(not isinstance(answer, HostError) for answer in answers) else 1


def about(target: Target) -> list[str]:
    """This machine and the slice, as far as a reader of the report has to know them."""
    commit = jobs.git_commit(CHECKOUT)
    used = target.slice
    tools = [("pulumi", ["pulumi", "version"]), ("gcloud", ["gcloud", "version"])]
    versions = [f"{name} {_first(workstation.ask(argv))}" for name, argv in tools]
    changed = " with changes" if commit and commit.is_dirty else ""
    keyed = sum(bool(host.host_keys) for host in target.hosts)
    return [
        f"tpu-stack {commit.hash[:12] if commit else '?'}{changed}, Python {sys.version.split()[0]}, "
        + ", ".join(versions),
        f"slice: {used.accelerator_type} {used.topology} x {used.count} in {used.zone}, {used.capacity}",
        f"hosts: {len(target.hosts)} of {len(used.hosts)}, platform {target.platform}, with a known key {keyed}",
        f"made as: {used.origin.partition(' ')[0]}",
        f"reached: {', '.join(sorted({host.reach for host in target.hosts}))}",
        f"images: {', '.join(target.inventory.images) or 'none'}",
    ]


def _first(answer: workstation.Answer) -> str:
    if answer.exit_code is None:
        return "is not there"
    return (answer.stdout.strip() or answer.last_line).splitlines()[0]


def by_answer(hosts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line for each thing: once where all hosts say the same, else one for each of their answers. Pure."""
    titles = list(dict.fromkeys(title for host in hosts for title in host))
    lines = []
    for title in titles:
        by_text: dict[str, list[str]] = {}
        for index, host in enumerate(hosts):
            if title in host:
                by_text.setdefault(host[title], []).append(str(index))
        for text, indexes in by_text.items():
            suffix = "" if len(indexes) == len(hosts) else f" [host {','.join(indexes)}]"
            lines.append(f"{title}{suffix}: {text}")
    return lines


def processes(target: Target) -> list[str]:
    """Both numbers of every process, from a group of them, or why there is none."""
    try:
        plan, failures, reports = verification.gather(target, FRAMEWORK, None)
        verification.clear(target, plan)
    except (RequestError, HostError, HostsError) as error:
        return [f"{' and '.join(PROCESS)}: not known, for no group was formed: {error}"]
    numbers = [
        f"{index} and {report.get('process_index', '?')} ({report['local_devices']} of {report['devices']} devices)"
        for index, report in enumerate(reports)
        if report is not None
    ]
    lines = [f"{' and '.join(PROCESS)}: {', '.join(numbers) or 'no process said any'}"]
    if reports and reports[0] is not None:
        kind = reports[0]
        versions = ", ".join(f"{name} {version}" for name, version in kind["versions"].items())
        lines.append(f"devices: {kind['platform']}, {kind['device_kind']}; {versions}")
    return lines + [f"process: {report}" for report in failures]


def private(target: Target, hosts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return what is told of nobody: name → what stands in its place."""
    inventory = target.inventory
    names = {inventory.project or "": "PROJECT", getpass.getuser(): "USER"}
    names |= {host.user or "": "USER" for host in target.hosts}
    names |= {(inventory.storage.bucket_url or "").removeprefix("gs://"): "BUCKET"}
    for host in hosts:
        home = re.search(r"/home/([\w.-]+)", host.get("python", ""))
        names |= {home[1]: "USER"} if home else {}
    return {name: word for name, word in names.items() if len(name) >= LEAST_NAME}


def without_names(text: str, names: Mapping[str, str]) -> str:
    """Without people, projects, and whatever looks like a credential. Pure."""
    for pattern in SECRETS:
        text = pattern.sub(lambda match: f"{match[1] if match.lastindex else ''}(left out)", text)
    text = E_MAIL.sub("E-MAIL", text)
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w]){re.escape(name)}(?![\w])", names[name], text)
    return text
