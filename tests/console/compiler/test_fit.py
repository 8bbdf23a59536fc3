"""`fab fit`: what follows from the compiler's answer, what is tried where a step does not fit, and what is refused."""

import dataclasses
import json
from typing import Any

import pytest

from backends.local import environments
from console.compiler import fit as fits
from console.compiler.fit import Estimate, Place
from contracts.errors import FAILED, RequestError
from infra import catalogue
from launch import jobs
from launch.hosts import HostError
from launch.request.run_request import Request, work_out
from tests.launch.slices import make_target

GIB = 2**30


def place(name: str = "v5litepod-16", slices: int = 1) -> Place:
    return Place(accelerator=catalogue.accelerator(name, "any"), slices=slices)


def answer(**changed: Any) -> dict[str, Any]:
    """Of a step that takes 150 M cycles, 100 ms at a v5e's 1.5 GHz."""
    memory = {
        "parameters": GIB,
        "optimizer": 2 * GIB,
        "temporaries": 3 * GIB,
        "total": 6 * GIB,
        "limit": None,
    }
    return {
        "fits": True, "memory": memory, "cycles": 150_000_000, "kernels": [], "collectives": [], "without_estimate": {},
        "spent": [], "unit": "tokens", "per_step": 1_000_000, "steps": 3600,
        "model_operations": round(0.1 * 16 * 197e12 / 2), "compile_s": 60.0, "is_kept": False,
        "compiler": "libtpu 0, jax 0", **changed,
    }  # fmt: skip


def test_rate_mfu_and_cost_follow_from_the_cycles_the_clock_and_the_price() -> None:
    found = Estimate(place=place(), answer=answer())
    assert found.step_s == pytest.approx(0.1)
    assert found.per_s == pytest.approx(10e6)
    assert found.mfu == pytest.approx(0.5)
    assert found.usd_per_million("on-demand") == pytest.approx(16 * 1.2 / 3600 / 10)
    assert found.run_s == pytest.approx(360)
    assert Estimate(place=place(slices=2), answer=answer()).mfu == pytest.approx(0.25)


def test_what_has_no_estimate_is_counted_by_the_chips_own_figures() -> None:
    kernels = [
        {"name": "forward", "count": 2, "operations": 197e9, "bytes": 0},  # 1 ms of the matrix units
        {"name": "backward", "count": 1, "operations": 0, "bytes": 819e6},  # 1 ms of the memory
    ]
    sums = [  # of a chip in 4x4 all four links are in use: 200 GB/s
        {"kind": "all-reduce", "reach": "within a host", "sent_bytes": 100e6, "overlapped_cycles": 0},
        {"kind": "all-reduce", "reach": "between hosts", "sent_bytes": 200e6, "overlapped_cycles": 750_000},
        {"kind": "all-gather", "reach": "within a host", "sent_bytes": 500e6, "overlapped_cycles": 9_000_000},
    ]
    found = Estimate(place=place(), answer=answer(kernels=kernels, collectives=sums))
    assert found.kernels_s == pytest.approx(2e-3)
    assert found.collectives_s == pytest.approx(1e-3)
    assert found.step_s == pytest.approx(0.103)
    assert Estimate(
        place=place("v5litepod-4"), answer=answer(collectives=sums)
    ).collectives_s == pytest.approx(2.5e-3)
    assert Estimate(place=place("v5litepod-1"), answer=answer(collectives=[])).collectives_s == 0
    # Between slices, a chip of a v5e sends 3.125 GB/s.
    between = {
        "kind": "all-reduce",
        "reach": "between slices",
        "sent_bytes": 31.25e6,
        "overlapped_cycles": 7_500_000,
    }
    found = Estimate(place=place(slices=2), answer=answer(collectives=[between]))
    assert found.collectives_s == pytest.approx(10e-3 - 5e-3)
    assert found.useful_overlap(between) == 7_500_000
    assert found.useful_overlap({**between, "overlapped_cycles": 90_000_000}) == 15_000_000


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("v2-8", ("v2:2x2", [2, 2, 1], None)),
        ("v4-16", ("v4:2x2x2", [2, 2, 1], "megacore")),
        ("v5litepod-1", ("v5e:1x1", [1, 1, 1], None)),
        ("v5litepod-8", ("v5e:2x4", [2, 4, 1], None)),
        ("v6e-16", ("v6e:4x4", [2, 2, 1], None)),
        ("v5p-8", ("v5p:2x2x1", [2, 2, 1], None)),
        ("tpu7x-8", ("tpu7x:2x2x1", [2, 2, 1], None)),
    ],
)
def test_a_slice_is_described_as_libtpu_names_it_with_the_chips_of_its_hosts(
    name: str, topology: tuple[str, list[int], str | None]
) -> None:
    found = place(name).topology
    assert (found["topology"], found["chips_per_host"], found["chip_config"]) == topology


def tried(state_gib: float, temporaries_gib: float, *words: str) -> list[tuple[str, ...]]:
    job = jobs.find("flax_mlm")
    memory = {"parameters": state_gib * GIB / 3, "optimizer": state_gib * GIB * 2 / 3}
    memory |= {"temporaries": temporaries_gib * GIB, "total": (state_gib + temporaries_gib) * GIB}
    memory["limit"] = 16 * GIB
    first = Estimate(place=place(), answer=answer(fits=False, memory=memory))
    return list(fits.changes(job, job.parse(words), first))


def test_of_changes_that_save_memory_those_that_cost_the_least_are_tried_first() -> None:
    found = tried(4, 40, "--batch-size", "512")
    assert found[:3] == [("--accumulate", "2"), ("--accumulate", "4"), ("--accumulate", "8")]
    assert found.index(("--remat",)) < found.index(("--fsdp", "2")) < found.index(("--batch-size", "256"))
    assert tried(4, 200, "--batch-size", "512")[0] == ("--accumulate", "16")  # fewer parts cannot be enough
    # Parts of a device's 32 rows; a batch of 512 on 16 devices has no more.
    assert ("--accumulate", "64") not in found


def test_parameters_that_are_too_much_by_themselves_are_shared_out_and_nothing_else_is_tried() -> None:
    assert tried(40, 1, "--batch-size", "512")[:2] == [("--fsdp", "4"), ("--fsdp", "8")]
    assert {words[0] for words in tried(40, 1, "--batch-size", "512")} == {"--fsdp"}


WRONG = [
    ("flax_mlm", "v6e-12", 1, (), (), '--accelerator: "v6e-12" is not a v6e size; choose one of'),
    ("flax_mlm", "v6e-8", 1, ("v5p-9",), (), '--compare: "v5p-9" is not a v5p size'),
    ("flax_mlm", "v5litepod-16", 1, (), ("--batch-size", "100"), "v5litepod-16: --batch-size 100: is shared out"),
    ("flax_mlm", "v5litepod-16", 2, (), ("--batch-size", "16"), "2 × v5litepod-16: --batch-size 16: is"),
    ("flax_mlm", "v5litepod-16", 0, (), (), "--slices 0: must be between 1 and"),
    ("flax_mlm", "v5litepod-16", 1, (), ("--fsdp", "3"), "--fsdp 3: 16 devices do not make groups of 3"),
    ("flax_mlm", "v5litepod-16", 1, (), ("--no-such", "3"), "--no-such 3: there is no such option"),
    ("torch_glue", "v5litepod-16", 1, (), (), "--job torch_glue: runs on pytorch, and only the step of a JAX job"),
]  # fmt: skip


@pytest.mark.parametrize(("job", "accelerator", "slices", "compare", "words", "said"), WRONG)
def test_what_cannot_work_is_refused_before_an_environment_is_made_or_anything_compiled(
    job: str,
    accelerator: str,
    slices: int,
    compare: tuple[str, ...],
    words: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environments, "ensure", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(RequestError) as refused:
        fits.fit(jobs.find(job), words, accelerator, slices=slices, compare=compare, as_json=False)
    assert said in str(refused.value)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """A stand-in for the compiler: with --remat a step fits. Returns (place, words) of what it was given."""
    given: list[tuple[str, list[str]]] = []

    def measure(job: jobs.Job, config: Any, where: Place, **_: Any) -> Estimate:
        given.append((where.name, job.arguments(config)))
        memory = {
            "parameters": GIB,
            "optimizer": GIB,
            "temporaries": 20 * GIB,
            "total": 22 * GIB,
            "limit": 16 * GIB,
        }
        is_enough = config.remat or where.name == "v6e-16"
        return Estimate(place=where, answer=answer() if is_enough else answer(fits=False, memory=memory))

    monkeypatch.setattr(fits, "measure", measure)
    monkeypatch.setattr(environments, "ensure", lambda *_: None)
    return given


def test_where_a_step_does_not_fit_the_first_change_that_does_is_named(
    compiler: list[tuple[str, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--batch-size", "32")
    assert (
        fits.fit(jobs.find("flax_mlm"), words, "v5litepod-16", slices=1, compare=(), as_json=False) == FAILED
    )
    assert [words for _, words in compiler] == [[], ["--accumulate", "2"], ["--remat"]]
    said = capsys.readouterr().out
    assert "memory    does not fit: 22.00 of 16.00 GiB a device" in said
    assert "it fits with --remat: 6.00 GiB, a step of at least 100 ms" in said


def test_slices_are_compared_in_a_table_or_as_one_object_and_each_figure_is_called_an_estimate(
    compiler: list[tuple[str, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(as_json: bool) -> str:
        words = ("--batch-size", "32")
        fits.fit(
            jobs.find("flax_mlm"),
            words,
            "v6e-16",
            slices=1,
            compare=("v5litepod-16", "v6e-64"),
            as_json=as_json,
        )
        return capsys.readouterr().out

    text = run(False)
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith(("v6e", "v5"))}
    assert "yes" in rows["v6e-16"] and "no" in rows["v5litepod-16"] and "–" in rows["v6e-64"]
    assert "--batch-size 32: is shared out over 64 devices" in rows["v6e-64:"]
    assert "an estimate by the TPU compiler (libtpu 0, jax 0); nothing was run" in text
    found = json.loads(run(True))
    assert found["is_estimate"] is True
    assert [each.get("fits") for each in found["slices"]] == [True, False, None]
    assert found["slices"][0]["tokens_per_s"] > 1e6


def test_a_dry_run_for_a_tpu_shows_the_fit_where_the_compiler_is_here_and_soon_done_else_the_command(
    compiler: list[tuple[str, list[str]]], make_agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target([make_agent(lambda *_: {}) for _ in range(4)])

    def said(*words: str) -> list[str]:
        asked = Request(job="flax_mlm", arguments=words, name=None, resume=None)
        return [*fits.dry_run_lines(work_out(asked, target), target)]

    command = "`fab fit --job flax_mlm --accelerator v5litepod-16 -- --remat`"
    monkeypatch.setattr(environments, "is_made", lambda _: True)
    shown = said("--remat")
    assert compiler == [("v5litepod-16", ["--remat"])]
    assert shown[2].startswith("memory    fits: 6.00 of 16.00 GiB") and shown[-1] == f"more of it: {command}"
    assert not any(line.startswith("time goes to") for line in shown)
    assert said()[2].startswith("memory    does not fit: 22.00 of 16.00 GiB")

    def late(*_: Any, **__: Any) -> Estimate:
        raise HostError(host="here", reason="v5litepod-16: the compiler was not done within 2 min")

    monkeypatch.setattr(fits, "measure", late)
    began, line = said("--remat")
    assert began == "compiling flax_mlm's step for v5litepod-16, for at most 2 min …"
    assert (
        line
        == f"whether it fits: v5litepod-16: the compiler was not done within 2 min; {command} takes its time"
    )
    monkeypatch.setattr(environments, "is_made", lambda _: False)
    assert said("--remat") == [f"whether it fits: {command} gets the TPU compiler, and says so"]
    hello = Request(job="jax_hello", arguments=(), name=None, resume=None)
    on_cpus = dataclasses.replace(target, platform="cpu")
    assert [*fits.dry_run_lines(work_out(hello, on_cpus), on_cpus)] == []
