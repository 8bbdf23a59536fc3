"""What hosts' samplers have read: bounded, whatever time it covers, and read back whatever is in the file."""

import json
import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from jobs.runtime.host_samples import COLUMNS, MOST_POINTS, HostSamples, read

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
    times = found.points["time"]
    assert len(json.dumps(found.points)) < 40_000
    assert MOST_POINTS / 2 <= len(times) <= MOST_POINTS
    assert max(found.known("memory_mib")) == 9000 and min(found.known("disk_free_mib")) == 7
    assert all(value == 50.0 for value in found.known("cpu_pct")[:-1])
    spacing_s = {round(after - before, 3) for before, after in pairwise(times[:-1])}
    assert spacing_s == {found.interval_s} and times[-1] == 1e9 + 10 * (count - 1)
    assert found.latest["time"] == times[-1] and found.capacity == {"memory_mib": 16000}


def test_a_value_that_came_late_is_absent_before_and_not_zero() -> None:
    assert sampled(7).points["duty_pct"] == [None] * 5 + [50.0, 50.0]


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
        assert all(math.isfinite(value) for name in found.points for value in found.known(name))
        found.added(2e9, {"cpu_pct": 1.0}, capacity={})


def test_what_a_sampler_said_long_ago_is_not_what_the_host_does_now() -> None:
    found = sampled(3)
    assert found.fresh(1e9 + 25)["cpu_pct"] == 0.0 and not found.fresh(1e9 + 300)
