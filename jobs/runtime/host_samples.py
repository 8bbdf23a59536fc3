"""What each host's sampler has read: the columns, the file of a bounded size, and what is wrong by them. Pure.

The file is hosts/host-<i>.json, described in `contracts.run_directory`; `jobs.runtime.sampler` writes it. Whoever shows
a run reads it here. Imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jobs.runtime.metric_definitions import finite

MOST_POINTS = 360
"""Of a column: when they are full, each two become one. At 10 s a sample, a point is of 10 s in the first hour."""
READ_LIMIT = 10_000
"""Points of a file of somebody else's that are read at most."""

Values = Mapping[str, float | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """One number of a host. merge: what becomes of several samples in one point. is_of_devices: of its accelerators."""

    title: str
    unit: str
    merge: Literal["mean", "max", "min"] = "mean"
    is_of_devices: bool = False


COLUMNS = {
    "cpu_pct": Column(title="CPU", unit="%"),
    "memory_mib": Column(title="memory", unit="MiB", merge="max"),
    "run_memory_mib": Column(title="of the run", unit="MiB", merge="max"),
    "disk_free_mib": Column(title="disk free", unit="MiB", merge="min"),
    "root_free_mib": Column(title="/ free", unit="MiB", merge="min"),
    "received_mib_s": Column(title="received", unit="MiB/s"),
    "sent_mib_s": Column(title="sent", unit="MiB/s"),
    "duty_pct": Column(title="devices busy", unit="%", is_of_devices=True),
    "duty_least_pct": Column(title="least busy", unit="%", is_of_devices=True),
    "tensorcore_pct": Column(title="TensorCore", unit="%", is_of_devices=True),
    "hbm_mib": Column(title="HBM", unit="MiB", merge="max", is_of_devices=True),
    "throttled_pct": Column(title="throttled", unit="%", is_of_devices=True),
    "idle_s": Column(title="idle for", unit="s", merge="max", is_of_devices=True),
    "step": Column(title="step", unit="", merge="max"),
}
"""By their names in the file.

cpu_pct: of all processors of the host. run_memory_mib: resident, of all processes of the run on the host.
disk_free_mib: where the run directory is, if that is a disk. duty_pct, tensorcore_pct: the mean of the host's devices;
duty_least_pct: of the one that does least, where there are several. hbm_mib: of the device that has the least left (a
GPU's memory is called HBM too). throttled_pct: a TPU by how much, a GPU how much of the time; the worst device. idle_s:
since when the device that has been idle longest has computed nothing. step: the last one that the host's process has
said.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSamples:
    """The content of one file. points: columns of one length, "time" (Unix seconds) among them."""

    host: int
    interval_s: float
    samples_per_point: int = 1
    samples_in_last: int = 0
    capacity: Mapping[str, float] = dataclasses.field(default_factory=dict)
    latest: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    points: Mapping[str, Sequence[float | None]] = dataclasses.field(default_factory=lambda: {"time": ()})

    def added(
        self,
        time_s: float,
        values: Values,
        *,
        capacity: Mapping[str, float],
        devices: Sequence[Values] = (),
    ) -> HostSamples:
        """The same with one more sample. capacity: of what is known now. devices: what each device said."""
        sample = {"time": time_s} | {name: _rounded(name, value) for name, value in values.items()}
        told = [{name: value for name, value in each.items() if value is not None} for each in devices]
        latest = {name: value for name, value in sample.items() if value is not None}
        count, into = len(self.points["time"]), self.samples_in_last
        names = dict.fromkeys([*self.points, *latest])
        points = {name: list(self.points.get(name, [None] * count)) for name in names}
        per_point, interval_s = self.samples_per_point, self.interval_s
        if count and into < per_point:
            for name, column in points.items():
                column[-1] = _merged(name, column[-1], into, sample.get(name))
            into += 1
        else:
            for name, column in points.items():
                column.append(sample.get(name))
            into = 1
        if len(points["time"]) >= MOST_POINTS and into == per_point:
            points = {name: _halved(name, column) for name, column in points.items()}
            per_point, interval_s = 2 * per_point, 2 * interval_s
            into = per_point
        return dataclasses.replace(
            self,
            interval_s=interval_s,
            samples_per_point=per_point,
            samples_in_last=into,
            capacity={**self.capacity, **{name: round(value) for name, value in capacity.items()}},
            latest={**latest, **({"devices": told} if told else {})},
            points=points,
        )

    def between(self, since_s: float, until_s: float) -> HostSamples:
        """The same with the points of this time only."""
        kept = [i for i, time in enumerate(self.points["time"]) if time and since_s <= time <= until_s]
        points = {name: [column[i] for i in kept] for name, column in self.points.items()}
        return dataclasses.replace(self, points=points)

    def known(self, name: str) -> list[float]:
        """The values of a column, without the times when there was none."""
        return [value for value in self.points.get(name, ()) if value is not None]

    def fresh(self, now_s: float) -> Mapping[str, Any]:
        """The last sample; empty where it is so old that the sampler must have ended."""
        limit_s = 30.0 + 6 * self.interval_s / self.samples_per_point
        return self.latest if now_s - self.latest.get("time", 0.0) <= limit_s else {}


def read(value: Mapping[str, Any] | None) -> HostSamples | None:
    """A file's content; None where it is not there, or has no points. What cannot be understood is left out."""
    given, now, most = ((value or {}).get(name) for name in ("points", "latest", "capacity"))
    times = given.get("time") if isinstance(given, Mapping) else None
    if (
        not isinstance(given, Mapping)
        or not isinstance(times, list)
        or not times
        or None in map(finite, times)
    ):
        return None
    numbers = [
        finite((value or {}).get(name))
        for name in ("host", "interval_s", "samples_per_point", "samples_in_last")
    ]
    host, interval_s, per_point, in_last = (number or 0 for number in numbers)
    latest = {name: number for name, number in _numbers(now).items() if name == "time" or name in COLUMNS}
    devices = now.get("devices") if isinstance(now, Mapping) else None
    if isinstance(devices, list):
        latest["devices"] = [_numbers(each) for each in devices]  # type: ignore[assignment]
    return HostSamples(
        host=int(host),
        interval_s=interval_s if interval_s > 0 else 10.0,
        samples_per_point=max(1, int(per_point)),
        samples_in_last=max(1, int(in_last)),
        capacity={name: number for name, number in _numbers(most).items() if number > 0},
        latest=latest,
        points={
            name: [finite(each) for each in column[-READ_LIMIT:]]
            for name, column in given.items()
            if (name == "time" or name in COLUMNS) and isinstance(column, list) and len(column) == len(times)
        },
    )


def _numbers(value: object) -> dict[str, float]:
    items = value.items() if isinstance(value, Mapping) else ()
    return {name: number for name, each in items if (number := finite(each)) is not None}


def _rounded(name: str, value: float | None) -> float | None:
    return None if value is None else round(value) if name.endswith(("_mib", "step")) else round(value, 1)


def _merged(name: str, before: float | None, weight: int, value: float | None) -> float | None:
    """What a point of `weight` samples becomes with one more."""
    if before is None or value is None:
        return value if before is None else before
    if name == "time":
        return value
    merge = COLUMNS[name].merge if name in COLUMNS else "mean"
    if merge != "mean":
        return max(before, value) if merge == "max" else min(before, value)
    return _rounded(name, (before * weight + value) / (weight + 1))


def _halved(name: str, column: Sequence[float | None]) -> list[float | None]:
    pairs = zip(column[::2], column[1::2], strict=False)
    return [_merged(name, first, 1, second) for first, second in pairs] + [*column[len(column) // 2 * 2 :]]
