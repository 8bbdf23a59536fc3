"""What hosts' samplers have read: bounded, whatever time it covers, and read back whatever is in the file."""

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.runtime.monitoring.host_samples import COLUMNS, MOST_POINTS, HostSamples, findings, read

EMPTY = HostSamples(host=1, interval_s=10.0)


def sampled(count: int, spike: int = -1) -> HostSamples:
    found = EMPTY
    for index in range(count):
        values = {
            "cpu_pct": float(index % 2 * 100),
            "memory_mib": 9000.0 if index == spike else 1000.0,
            "disk_free_mib": 7.0 if index == spike else 500.0,
            **({"duty_pct": 50.0} if index >= 5 else {}),
        }
        found = found.added(1e9 + 10 * index, values, capacity={"memory_mib": 16000.4})
    return found


def test_days_of_samples_stay_small_keep_their_extremes_and_cover_all_of_the_time() -> None:
    count = 3 * 24 * 360
    found = sampled(count, spike=12_345)
    times = found.recorded("time")
    assert len(json.dumps(found.points)) < 40_000
    assert MOST_POINTS / 2 <= len(times) <= MOST_POINTS
    assert max(found.recorded("memory_mib")) == 9000 and min(found.recorded("disk_free_mib")) == 7
    assert all(value == 50.0 for value in found.recorded("cpu_pct")[:-1])
    spacing_s = {round(after - before, 3) for before, after in pairwise(times[:-1])}
    assert spacing_s == {found.interval_s} and times[-1] == 1e9 + 10 * (count - 1)
    assert found.latest["time"] == times[-1] and found.capacity == {"memory_mib": 16000}


def test_the_file_of_an_earlier_attempt_goes_on_where_it_was() -> None:
    whole = sampled(1000)
    again = read(json.loads(json.dumps(vars(sampled(700)))))
    assert again is not None
    for index in range(700, 1000):
        values = {
            "cpu_pct": float(index % 2 * 100),
            "memory_mib": 1000.0,
            "disk_free_mib": 500.0,
            "duty_pct": 50.0,
        }
        again = again.added(1e9 + 10 * index, values, capacity={"memory_mib": 16000.4})
    assert again == whole


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["time", "points", "latest", "capacity", "devices", *COLUMNS]), inner
        )
    ),
)


@given(st.dictionaries(st.sampled_from(["host", "points", "latest", "capacity", "interval_s"]), JSON))
def test_whatever_is_in_the_file_it_is_read_or_left_out(given: dict[str, object]) -> None:
    found = read(given)
    if found is not None:
        assert {len(column) for column in found.points.values()} == {len(found.points["time"])}
        assert all(math.isfinite(value) for name in found.points for value in found.recorded(name))
        found.added(2e9, {"cpu_pct": 1.0}, capacity={})


def test_what_a_sampler_said_long_ago_is_not_what_the_host_does_now() -> None:
    found = sampled(3)
    assert found.fresh(1e9 + 25)["cpu_pct"] == 0.0 and not found.fresh(1e9 + 300)


def host(number: int, points: int = 30, capacity: float = 16_000.0, **values: float) -> HostSamples:
    found = HostSamples(host=number, interval_s=10.0)
    for index in range(points):
        rate = values.get("steps_a_minute", 60.0)
        sample = {
            "step": rate * index / 6,
            **{name: value for name, value in values.items() if name in COLUMNS},
        }
        found = found.added(
            1000 + 10 * index + number, sample, capacity={"memory_mib": capacity, "hbm_mib": capacity}
        )
    return found


def lines(wait_s: float = 0.0) -> list[dict[str, float]]:
    return [{"time": 1000 + 30 * index, "step_s": 1.0, "input_wait_s": wait_s} for index in range(11)]


STEPS = lines()
CASES: list[tuple[str, list[HostSamples], list[dict[str, float]], list[tuple[str, tuple[int, ...], str]]]] = [
    ("all is well", [host(n, duty_pct=97, duty_least_pct=95, throttled_pct=0) for n in (0, 1)], STEPS, []),
    ("nothing is known", [], [], []),
    ("waits for input", [host(0)], lines(0.31), [("input", (), "31 %")]),
    ("waits a little", [host(0)], lines(0.09), []),
    ("devices idle", [host(n, duty_pct=21) for n in (0, 1)], STEPS, [("idle", (0, 1), "less than half")]),
    ("one device idles", [host(0, duty_pct=75, duty_least_pct=0)], STEPS, [("one-idle", (0,), "one device")]),
    ("devices idle before the steps", [host(0, duty_pct=0)], [{**STEPS[0], "time": 5000.0}], []),
    ("own command at its start", [host(0, points=20, duty_pct=0)], [], []),
    ("own command after its start", [host(0, points=90, duty_pct=0)], [], [("idle", (0,), "less than half")]),
    (
        "slow",
        [host(0, duty_pct=98), host(1, duty_pct=70), host(2, duty_pct=98)],
        STEPS,
        [("slow", (1,), "70 % busy")],
    ),
    ("a bit slow", [host(0, duty_pct=98), host(1, duty_pct=90)], STEPS, []),
    ("few steps", [host(0), host(1, steps_a_minute=45)], STEPS, [("slow", (1,), "45 steps a minute")]),
    ("a sampler that ended", [host(0), host(1, points=12)], STEPS, []),
    (
        "throttled",
        [host(0, throttled_pct=0), host(1, throttled_pct=30)],
        STEPS,
        [("throttled", (1,), "by 30 %")],
    ),
    (
        "memory",
        [host(0, memory_mib=15_900), host(1, memory_mib=15_000)],
        [],
        [("memory", (0,), "15.5 of 15.6 GiB")],
    ),
    ("device memory", [host(0, hbm_mib=15_500, duty_pct=90)], STEPS, [("hbm", (0,), "15.1 of 15.6 GiB")]),
]


@pytest.mark.parametrize(
    ("hosts", "metrics", "wanted"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_each_thing_that_is_wrong_is_found_once_with_its_hosts_and_value(
    hosts: list[HostSamples], metrics: list[dict[str, float]], wanted: list[tuple[str, tuple[int, ...], str]]
) -> None:
    found = findings(hosts, metrics)
    assert [(each.kind, each.hosts) for each in found] == [(kind, who) for kind, who, _ in wanted]
    assert all(words in each.text for each, (_, _, words) in zip(found, wanted, strict=True))
