"""The TPU compiler itself compiles a job's step for a slice that is not there. The first test makes the environment."""

from __future__ import annotations

import pytest

from backends.local import environments
from console.fit import ENVIRONMENT, Estimate, Place, measure
from contracts.errors import RequestError
from infra import catalogue
from launch import jobs

NARROW = ("--layers", "1", "--vocab-size", "384", "--sequence-length", "32", "--batch-size", "16")
FLOAT_BYTES = 4


@pytest.fixture(scope="module", autouse=True)
def environment() -> None:
    environments.ensure(ENVIRONMENT, print)


def compiled(job_name: str, accelerator: str, *words: str, slices: int = 1) -> Estimate:
    job = jobs.find(job_name)
    place = Place(accelerator=catalogue.accelerator(accelerator, "any"), slices=slices)
    return measure(job, job.parse(words), place)


@pytest.mark.slow
def test_a_step_is_compiled_for_a_slice_that_is_not_there_and_its_sums_are_of_all_its_gradients() -> None:
    found = compiled("flax_mlm", "v5litepod-4", *NARROW)
    memory, collectives = found.answer["memory"], found.answer["collectives"]
    assert found.fits and found.answer["compiler"].startswith("libtpu 0.0.")
    assert (found.answer["devices"], found.answer["per_step"]) == (4, 16 * 32)
    # Two means, of which each device has its rows of the matrices.
    assert memory["parameters"] / 2 <= memory["optimizer"] < memory["parameters"]
    assert {each["kind"] for each in collectives} == {"reduce-scatter", "all-gather", "all-reduce"}
    assert {(each["reach"], each["group"]) for each in collectives} == {("within a host", 4)}
    sums = memory["parameters"] + 2 * FLOAT_BYTES  # the loss and the hidden tokens
    sent_bytes = sum(each["sent_bytes"] for each in collectives)
    assert sent_bytes == pytest.approx(sums * 2 * 3 / 4, rel=0.01)
    scopes = {each["scope"] for each in found.answer["spent"]}
    assert {"layers", "layers, backward", "optimizer", "head"} <= scopes
    again = compiled("flax_mlm", "v5litepod-4", *NARROW)
    assert again.answer == {**found.answer, "is_kept": True}


@pytest.mark.slow
def test_shared_out_parameters_are_collected_within_a_slice_and_sums_go_between_slices() -> None:
    found = compiled("flax_mlm", "v5litepod-4", *NARROW, "--fsdp", "4", slices=2)
    reaches = {(each["kind"], each["reach"]) for each in found.answer["collectives"]}
    assert ("all-gather", "within a host") in reaches
    assert ("all-reduce", "between slices") in reaches
    whole = compiled("flax_mlm", "v5litepod-4", *NARROW)
    assert found.answer["memory"]["parameters"] < whole.answer["memory"]["parameters"] / 2


@pytest.mark.slow
def test_the_smallest_job_hands_over_its_step_too() -> None:
    found = compiled("jax_hello", "v4-8")
    assert found.fits
    assert found.answer["device_kind"] == "TPU v4" and found.answer["devices"] == 4  # two cores, one device


@pytest.mark.slow
def test_a_step_that_does_not_fit_says_what_it_needs_of_how_much() -> None:
    found = compiled("jax_hello", "v5litepod-1", "--batch-size", "3000000000")
    memory = found.answer["memory"]
    assert not found.fits
    assert memory["limit"] < 16 * 2**30 < memory["batch"] <= memory["total"]


@pytest.mark.slow
def test_what_only_the_devices_tell_is_refused_in_the_jobs_own_words() -> None:
    with pytest.raises(RequestError, match="--fsdp 8: a group lies within a slice"):
        compiled("flax_mlm", "v5litepod-4", *NARROW, "--fsdp", "8", slices=2)
