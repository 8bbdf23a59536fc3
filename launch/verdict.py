"""What hosts found when they computed together, judged against what the slice promises. Pure."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from launch.plan import MAX_CLOCK_OFFSET_S
from launch.printable import printable
from launch.target import Target

SLOW_SHARE = 0.6
"""A device that does less than this share of what the middle one does is taken to be ill."""
NO_REPORT = "where nothing else is said of it: the folder of runs is not one that all hosts share"
Report = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """What a slice promises of each host. peak_flops_per_s: of one device, where it is known."""

    platform: str
    hosts: int
    devices_per_host: int
    peak_flops_per_s: float | None


def expected(target: Target) -> Expected:
    return Expected(
        platform=target.platform,
        hosts=len(target.hosts),
        devices_per_host=target.devices // len(target.hosts),
        peak_flops_per_s=target.peak_flops_per_s,
    )


def problems(wanted: Expected, hosts: Sequence[str], reports: Sequence[Report | None]) -> list[str]:
    """Everything that is wrong, each with its host and, where there is one, its remedy."""
    found: list[str] = []
    for host, report in zip(hosts, reports, strict=True):
        if report is None:
            found.append(f"{host}: wrote no report → {NO_REPORT}")
        else:
            found += [f"{host}: {text}" for text in _of_host(wanted, report)]
    known = {host: report for host, report in zip(hosts, reports, strict=True) if report is not None}
    return [*found, *_slow(wanted, known), *_differing(known), *_clocks(known)]


def _of_host(wanted: Expected, report: Report) -> list[str]:
    found = []
    if report["platform"] != wanted.platform:
        found.append(f"computes on {printable(str(report['platform']))}, and asked for is {wanted.platform}")
    if report["local_devices"] != wanted.devices_per_host:
        found.append(
            f"has {report['local_devices']} devices where the slice has {wanted.devices_per_host} a host → another "
            "process may hold some (`fab doctor`), or the runtime version does not fit the TPU"
        )
    if report["devices"] != wanted.devices_per_host * wanted.hosts or report["processes"] != wanted.hosts:
        found.append(
            f"sees {report['devices']} devices of {report['processes']} hosts where there are "
            f"{wanted.devices_per_host * wanted.hosts} of {wanted.hosts}"
        )
    found += [
        f"{printable(str(each['device']))} multiplies wrongly → do not use this host: make the slice again"
        for each in report["matmuls"]
        if not each["is_right"]
    ]
    if not report["all_reduce"]["is_right"]:
        found.append("has a wrong sum over all devices")
    return found


def _slow(wanted: Expected, known: Mapping[str, Report]) -> list[str]:
    """Devices far behind the others; on a CPU that says more of its neighbours than of itself."""
    if wanted.platform == "cpu":
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


def table(hosts: Sequence[str], reports: Sequence[Report | None], wanted: Expected) -> Table:
    """A line a host."""
    found = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("host", "devices", "matmul a device", "all-reduce", "clock"):
        found.add_column(heading)
    clocks = [report["clock_s"] for report in reports if report is not None]
    middle = statistics.median(clocks) if clocks else 0.0
    for host, report in zip(hosts, reports, strict=True):
        if report is None:
            found.add_row(host, "no report")
            continue
        slowest = min((each["flops_per_s"] for each in report["matmuls"]), default=0.0)
        share = f" ({slowest / wanted.peak_flops_per_s:.0%} of peak)" if wanted.peak_flops_per_s else ""
        reduce = report["all_reduce"]
        found.add_row(
            host,
            f"{report['local_devices']} × {printable(str(report['device_kind']))}",
            flops(slowest) + share,
            f"{reduce['mib']} MiB in {reduce['took_s'] * 1e3:.1f} ms",
            f"{report['clock_s'] - middle:+.2f} s",
        )
    return found


def lines(reports: Sequence[Report | None], wrong: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """What is said under the table: the versions that most have, then the verdict."""
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
        f"all is well: {devices} devices on {len(hosts)} host{'s' * (len(hosts) > 1)} compute together",
    ]


def flops(per_s: float) -> str:
    return f"{per_s / 1e12:.1f} TFLOP/s" if per_s >= 1e12 else f"{per_s / 1e9:.0f} GFLOP/s"
