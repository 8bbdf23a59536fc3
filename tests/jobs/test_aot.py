"""The TPU compiler itself compiles a job's step for a slice that is not there. The first test makes the environment."""

import hashlib
import json
import re
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from backends.local import environments
from console.compiler.fit import ENVIRONMENT, Estimate, Place, Script, measure
from contracts.errors import RequestError
from infra import catalogue
from jobs.runtime.jax import executables
from launch import jobs
from launch.code import precompiled

NARROW = ("--layers", "1", "--vocab-size", "384", "--sequence-length", "32", "--batch-size", "16")


@pytest.fixture(scope="module", autouse=True)
def environment() -> None:
    environments.ensure(ENVIRONMENT, print)


def compiled(job_name: str, accelerator: str, *words: str, slices: int = 1, keep: bool = False) -> Estimate:
    job = jobs.find(job_name)
    place = Place(accelerator=catalogue.accelerator(accelerator, "any"), slices=slices)
    return measure(job, job.parse(words), place, keep=keep)


@pytest.mark.slow
def test_a_step_is_compiled_for_a_slice_that_is_not_there_and_its_sums_are_of_all_its_gradients() -> None:
    found = compiled("flax_mlm", "v5litepod-4", *NARROW)
    memory, collectives = found.answer["memory"], found.answer["collectives"]
    assert found.fits and found.answer["compiler"].startswith("libtpu 0.0.")
    assert (found.answer["devices"], found.answer["per_step"]) == (4, 16 * 32)
    assert memory["optimizer"] == pytest.approx(2 * memory["parameters"], rel=0.01)  # two means
    assert {each["kind"] for each in collectives} == {"reduce-scatter", "all-gather", "all-reduce"}
    assert {(each["reach"], each["group"]) for each in collectives} == {("within a host", 4)}
    # Of all matrices but the 514 positions each device has a quarter. In bfloat16 they are collected and summed.
    positions = 514 * 128 * 4
    quarter = memory["parameters"] - positions
    sent_bytes = sum(each["sent_bytes"] for each in collectives)
    assert sent_bytes == pytest.approx((4 * quarter + positions) / 2 * 2 * 3 / 4, rel=0.03)
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
    one_host = compiled("flax_mlm", "v5litepod-4", *NARROW)  # whose devices are a group without being asked
    assert found.answer["memory"]["parameters"] == one_host.answer["memory"]["parameters"]


@pytest.mark.slow
def test_the_smallest_job_hands_over_its_step_too() -> None:
    found = compiled("jax_hello", "v4-8")
    assert found.fits
    assert found.answer["device_kind"] == "TPU v4" and found.answer["devices"] == 4  # two cores, one device


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
def test_a_program_of_a_tpu_is_kept_as_bytes_with_its_facts_and_another_runtime_refuses_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a runtime that refuses a program: here that of CPUs, given a TPU's by a note that says that it is its own."""
    made = compiled("jax_hello", "v5litepod-16", keep=True).answer
    assert compiled("jax_hello", "v5litepod-16", keep=True).answer["note"] == made["note"]
    facts, content = made["note"]["facts"], precompiled.program_path(made["note"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == made["note"]["sha256"]
    assert hashlib.sha256(content[32:]).digest() == content[:32]
    said, _, packed = content[32:].partition(b"\n")
    assert json.loads(said) == facts
    assert zlib.decompress(packed).startswith(b"\x80") and len(zlib.decompress(packed)) > 50_000
    assert (facts["platform"], facts["device_kind"], facts["host"]) == ("tpu", "TPU v5 lite", None)
    assert facts["runtime"].startswith("TFRT TPU v5 lite\nBuilt on")
    # As JAX sets it on a TPU VM, when it is imported there.
    assert facts["flags"] == [None, " --xla_tpu_use_enhanced_launch_barrier=true"]
    assert sorted(at[2] for at in facts["devices"]) == [[x, y, 0] for x in range(4) for y in range(4)]

    lowered = jax.jit(jnp.sin).lower(1.0)
    ours = executables.program_facts(lowered, jax.devices()[:1])
    kept = json.dumps(ours).encode() + b"\n" + packed
    (tmp_path / "program").write_bytes(hashlib.sha256(kept).digest() + kept)
    sha256 = hashlib.sha256((tmp_path / "program").read_bytes()).hexdigest()
    note = {"facts": ours, "sha256": sha256, "url": f"file://{tmp_path}/program"}
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.json").write_text(json.dumps(note))
    programs = executables.Executables(str(tmp_path / "cache"), jax.devices()[:1], notes=tmp_path / "notes")
    assert float(programs.compiled(jax.jit(jnp.sin), 1.0)(1.0)) == pytest.approx(0.8414, abs=1e-4)
    _, refusal = capsys.readouterr().out.strip().splitlines()
    assert "cannot be loaded and is compiled anew: " in refusal


SCRIPTS = {
    "import nothing_of_that_name\ndef lower_step(devices): ...": "cannot be imported (ModuleNotFoundError: No module",
    "import sys\nsys.exit(3)\ndef lower_step(devices): ...": "cannot be imported (SystemExit: 3); it is",
    "def lower_step(devices): return {'step': 1}": "lower_step: ValueError: it has to return a dictionary",
    "def lower_step(devices): return {'step': 1, 'arguments': (), 'rows': 2}": "it has to return a dictionary",
}


@pytest.mark.slow
def test_a_script_hands_over_its_step_or_is_refused_in_a_line_that_says_why(tmp_path: Path) -> None:
    place = Place(accelerator=catalogue.accelerator("v5litepod-16", "any"), slices=1)
    example = Script(path="examples/jax/train.py")
    found = measure(example, example.parse(["500"]), place)
    assert found.fits and (found.answer["unit"], found.answer["per_step"]) == ("points", 64 * 16)
    assert found.answer["steps"] == 500
    assert {each["kind"] for each in found.answer["collectives"]} == {"all-reduce"}
    for number, (text, said) in enumerate(SCRIPTS.items()):
        script = Script(path=str(tmp_path / f"script{number}.py"))
        Path(script.path).write_text(text)
        with pytest.raises(RequestError, match=re.escape(said)) as refused:
            measure(script, script.parse([]), place)
        assert str(refused.value).startswith(f"{script.path}: ")


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
