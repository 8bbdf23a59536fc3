"""Batches are shared out over all devices, everything else is whole on each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jobs.runtime.devices import Devices

pytestmark = pytest.mark.usefixtures("two_devices")


def test_each_device_has_its_own_rows_and_the_mean_is_one_over_all_of_them() -> None:
    devices, values_B = Devices(), np.arange(6, dtype=np.float32)
    rows_B = devices.rows(values_B)
    assert [shard.data.tolist() for shard in rows_B.addressable_shards] == [[0, 1, 2], [3, 4, 5]]
    mean = devices.jit(jnp.mean)(rows_B)
    assert mean.is_fully_replicated
    assert float(mean) == 2.5


def test_what_a_compiled_function_makes_is_whole_on_every_device() -> None:
    made = Devices().jit(lambda: jax.random.normal(jax.random.key(0), (3,)))()
    first, second = (shard.data for shard in made.addressable_shards)
    assert first.shape == second.shape == (3,)


def test_rows_that_cannot_be_shared_out_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="divi"):
        Devices().rows(np.zeros(3, np.float32))
