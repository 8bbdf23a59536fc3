"""The process environment: every mistake in it is told at once, and nothing else is read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import RequestError
from jobs.runtime import environment
from jobs.runtime.environment import ProcessEnvironment

WHOLE = {
    "RUN_ID": "flax_mlm-20261120-214500-abcd",
    "RUN_DIR": "/runs/one",
    "RUN_JOB": "flax_mlm",
    "RUN_STACK": "jax",
    "RUN_ATTEMPT": "2",
    "RUN_NUM_PROCESSES": "4",
    "RUN_PROCESS_ID": "3",
    "RUN_COORDINATOR": "127.0.0.1:4000",
    "RUN_PLATFORM": "cpu",
    "RUN_CACHE_DIR": "/cache",
    "RUN_LOCAL_DEVICES": "2",
    "RUN_PEAK_FLOPS_PER_S": "394000000000000",
    "RUN_CONTROL_DIR": "/control",
}
OPTIONAL = ("RUN_LOCAL_DEVICES", "RUN_PEAK_FLOPS_PER_S", "RUN_CONTROL_DIR")
NEEDED = [name for name in WHOLE if name not in OPTIONAL]


def mistakes(environ: dict[str, str]) -> str:
    with pytest.raises(RequestError) as error:
        environment.read(environ)
    return str(error.value)


def test_every_variable_reaches_its_field() -> None:
    assert environment.read({**WHOLE, "HOME": "/elsewhere"}) == ProcessEnvironment(
        run_id="flax_mlm-20261120-214500-abcd",
        run_dir="/runs/one",
        job="flax_mlm",
        stack="jax",
        attempt=2,
        num_processes=4,
        process_id=3,
        coordinator="127.0.0.1:4000",
        platform="cpu",
        cache_dir="/cache",
        local_devices=2,
        peak_flops_per_s=394 * 10**12,
        control_dir="/control",
    )


def test_what_is_optional_may_be_absent_or_empty() -> None:
    for rest in ({}, dict.fromkeys(OPTIONAL, "")):
        read = environment.read({name: WHOLE[name] for name in NEEDED} | rest)
        assert (read.local_devices, read.peak_flops_per_s, read.control_dir) == (None, None, None)


@given(st.sets(st.sampled_from(NEEDED), min_size=1), st.booleans())
def test_every_variable_that_is_missing_or_empty_is_listed(missing: set[str], empty: bool) -> None:
    environ = {name: value for name, value in WHOLE.items() if name not in missing}
    said = mistakes({**environ, **dict.fromkeys(missing, "")} if empty else environ)
    assert {name for name in WHOLE if f"{name} is not set" in said} == missing
    assert "`fab train` sets it" in said


WRONG: dict[str, tuple[str, str]] = {
    "RUN_ATTEMPT": ("-1", 'RUN_ATTEMPT: "-1" is not a whole number of at least 0'),
    "RUN_NUM_PROCESSES": ("0", 'RUN_NUM_PROCESSES: "0" is not a whole number of at least 1'),
    "RUN_PROCESS_ID": ("one", 'RUN_PROCESS_ID: "one" is not a whole number of at least 0'),
    "RUN_COORDINATOR": ("nowhere", 'RUN_COORDINATOR: "nowhere" is not host:port'),
    "RUN_PLATFORM": ("TPU", 'RUN_PLATFORM: "TPU" is not a platform; choose one of cpu, gpu, tpu'),
    "RUN_LOCAL_DEVICES": ("1.5", 'RUN_LOCAL_DEVICES: "1.5" is not a whole number of at least 1'),
    "RUN_PEAK_FLOPS_PER_S": ("1e12", 'RUN_PEAK_FLOPS_PER_S: "1e12" is not a whole number of at least 1'),
}


@given(st.sets(st.sampled_from(sorted(WRONG)), min_size=1))
def test_every_wrong_value_is_listed_with_its_rule(wrong: set[str]) -> None:
    said = mistakes({**WHOLE, **{name: WRONG[name][0] for name in wrong}})
    for name in wrong:
        assert WRONG[name][1] in said


@pytest.mark.parametrize("text", ["²", "１", "1e3", " 1", "0x1", "+1", "1_000", "-0"])
def test_only_plain_digits_are_a_number(text: str) -> None:
    assert "RUN_ATTEMPT" in mistakes({**WHOLE, "RUN_ATTEMPT": text})


@pytest.mark.parametrize("text", ["4000", ":4000", "host:", "host:²", "host:0", "host:65536", "host:-1"])
def test_a_coordinator_is_a_host_and_a_port(text: str) -> None:
    assert f'RUN_COORDINATOR: "{text}" is not host:port' in mistakes({**WHOLE, "RUN_COORDINATOR": text})


@pytest.mark.parametrize("text", ["127.0.0.1:1", "[::1]:4000", "worker-0.local:65535"])
def test_a_coordinator_may_be_a_name_or_an_address(text: str) -> None:
    assert environment.read({**WHOLE, "RUN_COORDINATOR": text}).coordinator == text


def test_a_process_beyond_the_number_of_processes_is_refused() -> None:
    said = mistakes({**WHOLE, "RUN_PROCESS_ID": "4"})
    assert "RUN_PROCESS_ID: 4 must be below RUN_NUM_PROCESSES (4)" in said


@pytest.mark.parametrize(("process_id", "is_first"), [("0", True), ("1", False)])
def test_rank_0_is_the_first(process_id: str, is_first: bool) -> None:
    assert environment.read({**WHOLE, "RUN_PROCESS_ID": process_id}).is_first is is_first


@given(st.dictionaries(st.sampled_from(list(WHOLE)), st.text(max_size=12)))
def test_whatever_the_variables_hold_it_is_read_or_refused_with_a_message(changed: dict[str, Any]) -> None:
    try:
        read = environment.read({**WHOLE, **changed})
    except RequestError as error:
        assert str(error).startswith("the process environment is not complete")
    else:
        assert 0 <= read.process_id < read.num_processes
        assert dataclasses.replace(read) == read
