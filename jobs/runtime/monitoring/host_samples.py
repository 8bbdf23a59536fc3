"""What each host's sampler has read: its columns, its file of a bounded size, and what is wrong by them. Pure.

The file is hosts/host-<i>.json, described in `contracts.run_directory`; `jobs.runtime.monitoring.sampler` writes it.
Whoever shows a run reads it here. Imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jobs.runtime.monitoring.metric_definitions import finite

MOST_POINTS = 360
"""Of a column: when they are full, each two become one. At 10 s a sample, a point is of 10 s in the first hour."""
LARGEST = 1e15

Values = Mapping[str, float | None]


def sampled(value: object) -> float | None:
    """The value where it is a number that a sampler or a clock can have read."""
    return finite(value, LARGEST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """One number of a host. merge: what becomes of several samples in one point. is_device: of its accelerators."""

    title: str
    unit: str
    merge: Literal["mean", "max", "min"] = "mean"
    is_device: bool = False


COLUMNS = {
    "cpu_pct": Column(title="CPU", unit="%"),
    "memory_mib": Column(title="memory", unit="MiB", merge="max"),
    "run_memory_mib": Column(title="of the run", unit="MiB", merge="max"),
    "disk_free_mib": Column(title="disk free", unit="MiB", merge="min"),
    "root_free_mib": Column(title="/ free", unit="MiB", merge="min"),
    "received_mib_s": Column(title="received", unit="MiB/s"),
    "sent_mib_s": Column(title="sent", unit="MiB/s"),
    "duty_pct": Column(title="devices busy", unit="%", is_device=True),
    "duty_least_pct": Column(title="least busy", unit="%", is_device=True),
    "tensorcore_pct": Column(title="TensorCore", unit="%", is_device=True),
    "hbm_mib": Column(title="HBM", unit="MiB", merge="max", is_device=True),
    "throttled_pct": Column(title="throttled", unit="%", is_device=True),
    "idle_s": Column(title="idle for", unit="s", merge="max", is_device=True),
    "step": Column(title="step", unit="", merge="max"),
}
"""By their names in the file.

cpu_pct: of all processors of the host. run_memory_mib: resident, of all processes of the run on the host.
disk_free_mib: of the run directory, if it is on a disk. duty_pct, tensorcore_pct: the mean of the host's devices;
duty_least_pct: the least busy of several devices. hbm_mib: of the device with the least left (GPUs' memory too).
throttled_pct: of the worst device, of a TPU by how much, of a GPU how much of the time. idle_s: of the device that has
been idle longest. step: the last one that was reported.
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
        """The same with one more sample. capacity: new values of it. devices: the values of each device."""
        sample = {"time": round(time_s, 1)} | {name: _rounded(name, value) for name, value in values.items()}
        device_values = [
            {name: value for name, value in device.items() if value is not None} for device in devices
        ]
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
            latest={**latest, **({"devices": device_values} if device_values else {})},
            points=points,
        )

    def between(self, since_s: float, until_s: float) -> HostSamples:
        """The same with the points of this time only."""
        indices = [i for i, time in enumerate(self.points["time"]) if time and since_s <= time <= until_s]
        points = {name: [column[i] for i in indices] for name, column in self.points.items()}
        return dataclasses.replace(self, points=points)

    def recorded(self, name: str) -> list[float]:
        """The values of a column, without the times when there was none."""
        return [value for value in self.points.get(name, ()) if value is not None]

    def text(self, name: str, value: float) -> str:
        """A value of a column for people, of memory with how much there is."""
        unit = COLUMNS[name].unit
        capacity = None if name.endswith("_free_mib") else self.capacity.get(name)
        if unit == "MiB":
            value, unit, capacity = value / 1024, "GiB", capacity and capacity / 1024
        digits = 0 if unit in ("%", "") or max(value, capacity or 0.0) >= 100 else 1
        return f"{value:,.{digits}f}{f' of {capacity:,.{digits}f}' if capacity else ''} {unit}".rstrip()

    def fresh(self, now_s: float) -> Mapping[str, Any]:
        """The last sample; empty where it is so old that the sampler must have ended."""
        limit_s = 30.0 + 6 * self.interval_s / self.samples_per_point
        return self.latest if now_s - self.latest.get("time", 0.0) <= limit_s else {}


def read(value: Mapping[str, Any] | None) -> HostSamples | None:
    """A file's content; None where it is not there, has no points, or cannot be understood."""
    try:
        samples = HostSamples(**(value or {}))
        times, devices = samples.points["time"], samples.latest.get("devices", [])
        columns = [
            *samples.points.values(),
            samples.capacity.values(),
            *(device.values() for device in devices),
        ]
        numbers = [number for column in columns for number in column if number is not None]
        numbers += [*times, *(number for name, number in samples.latest.items() if name != "devices")]
        numbers += [samples.host, samples.samples_per_point, samples.samples_in_last, samples.interval_s]
        is_right = {len(column) for column in samples.points.values()} == {len(times)} and all(times)
        return samples if times and is_right and None not in map(sampled, numbers) else None
    except (TypeError, KeyError, AttributeError):
        return None


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong. kind: "input", or one of SENTENCES. text: with the hosts, the value and what to do."""

    kind: str
    hosts: tuple[int, ...]
    text: str


RECENT_S = 600.0
"""How far back findings about a running run go."""
START_S = 300.0
FEWEST_POINTS, FEWEST_TO_COMPARE, FEWEST_STEPS = 3, 20, 100
"""With fewer, devices are not judged, nor the speeds of hosts, which are sampled at different moments."""
MOST_WAIT, LEAST_DUTY_PCT, IDLE_PCT, THROTTLED_PCT = 0.1, 50.0, 10.0, 5.0
SLOWER, NEARLY_FULL = 0.9, 0.95
SENTENCES = {
    "one-idle": "one device idles while the others compute; see whether the job uses all devices of a host",
    "idle": "the devices are busy less than half of the time; give them larger batches, or more in flight",
    "slow": "slower than the other hosts by more than 10 %; see its log, and what else runs there",
    "throttled": "the devices are slowed down, for heat or power; take another machine, or report this one",
    "memory": "memory within 5 % of full; the system may kill the process: hold less",
    "hbm": "device memory within 5 % of full; a smaller batch leaves room for evaluations",
}


def findings(
    hosts: Sequence[HostSamples], metrics: Sequence[Mapping[str, Any]], *, since_s: float = 0.0
) -> list[Finding]:
    """What is wrong by the points and the lines of metrics since then, each kind once.

    Devices are judged during steps only, as a compilation is not idleness; without metrics of steps, after START_S.
    """
    timed = [
        (line["time"], line["step_s"], line.get("input_wait_s") or 0.0)
        for line in metrics
        if line.get("step_s") and line.get("time") and line["time"] >= since_s
    ]
    begun_s = min((times[0] for host in hosts if (times := host.recorded("time"))), default=0.0) + START_S
    begin_s = min((time for time, _, _ in timed), default=begun_s)
    end_s = max((time for time, _, _ in timed), default=math.inf)
    recent = [host.between(since_s, math.inf) for host in hosts]
    stepping = [host.between(max(begin_s, since_s), end_s) for host in hosts]
    stepping = [host for host in stepping if len(host.points["time"]) >= FEWEST_POINTS]
    results = []
    waited = sum(wait_s for _, _, wait_s in timed) / (sum(step_s for _, step_s, _ in timed) or 1.0)
    if waited > MOST_WAIT:
        text = (
            f"input-bound: in {100 * waited:.0f} % of the time of the steps, the devices wait for the next batch; "
            "make batches cheaper, or read the data from a faster disk"
        )
        results.append(Finding(kind="input", hosts=(), text=text))
    duty, throttled = _averages(stepping, "duty_pct"), _averages(stepping, "throttled_pct")
    one_idle = {
        host: f"{mean:.0f} %"
        for host, mean in _averages(stepping, "duty_least_pct").items()
        if mean < IDLE_PCT <= duty.get(host, 0.0)
    }
    some_idle = {
        host: f"{mean:.0f} %" for host, mean in duty.items() if mean < LEAST_DUTY_PCT and host not in one_idle
    }
    slowed = {host: f"by {mean:.0f} %" for host, mean in throttled.items() if mean > THROTTLED_PCT}
    wrong = {
        "one-idle": one_idle,
        "idle": some_idle,
        "slow": _slow(duty, stepping),
        "throttled": slowed,
        "memory": _full(recent, "memory_mib"),
        "hbm": _full(recent, "hbm_mib"),
    }
    for kind, values in wrong.items():
        if values:
            names = ", ".join(f"{host} ({value})" for host, value in values.items())
            text = f"host{'s' if len(values) > 1 else ''} {names}: {SENTENCES[kind]}"
            results.append(Finding(kind=kind, hosts=tuple(values), text=text))
    return results


def _averages(hosts: Sequence[HostSamples], name: str) -> dict[int, float]:
    return {host.host: sum(values) / len(values) for host in hosts if (values := host.recorded(name))}


def _slow(duty: Mapping[int, float], stepping: Sequence[HostSamples]) -> dict[int, str]:
    """Hosts whose devices are less busy than those of the others, or which step more slowly.

    A device that waits in a collective operation for another host counts as busy; those of the slow host do not.
    Without values of devices, only hosts that step independently of each other differ.
    """
    spans = [host.recorded("time") for host in stepping]
    begin_s = max((span[0] for span in spans), default=0.0)
    end_s = min((span[-1] for span in spans), default=0.0)
    rates = {}
    for host in stepping:
        common = host.between(begin_s, end_s)
        times, steps = common.recorded("time"), common.recorded("step")
        if len(steps) == len(times) >= FEWEST_TO_COMPARE and steps[-1] - steps[0] >= FEWEST_STEPS:
            rates[host.host] = 60.0 * (steps[-1] - steps[0]) / max(times[-1] - times[0], 1.0)
    values, unit = (duty, "% busy") if len(duty) > 1 else (rates, "steps a minute")
    usual = sorted(values.values())[len(values) // 2] if len(values) > 1 else 0.0  # the higher one of two
    return {
        host: f"{value:.0f} {unit}, the others {usual:.0f}"
        for host, value in values.items()
        if value < SLOWER * usual
    }


def _full(hosts: Sequence[HostSamples], name: str) -> dict[int, str]:
    return {
        host.host: f"{max(values) / 1024:.1f} of {capacity / 1024:.1f} GiB"
        for host in hosts
        if (capacity := host.capacity.get(name))
        and (values := host.recorded(name))
        and max(values) > NEARLY_FULL * capacity
    }
