"""The estimates of training steps: what counts as grown, what the tables are made of, and that none has grown since it
was written down."""

import subprocess
import sys
from typing import Any

import pytest

from bench import tpu
from bench.tpu import Cell
from contracts.errors import RequestError

CELL = Cell(step="base 128", accelerator="v5litepod-4")
GIB, MIB = 2**30, 2**20


def record(cycles: int = 75_000_000, **changed: Any) -> dict[str, Any]:
    """Of a step that takes 50 ms at a v5e's 1.5 GHz, half of it products at the rate of PRODUCT."""
    return {
        "compiler": "libtpu 0, jax 0",
        "devices": 4,
        "fits": True,
        "memory": {"parameters": GIB, "temporaries": 3 * GIB, "total": 4 * GIB, "limit": None},
        "unit": "tokens",
        "per_step": 32768,
        "model_operations": 4 * 37_500_000 * PRODUCT,
        "cycles": cycles,
        "memory_bytes": 8_190_000_000,
        "kernels": [],
        "collectives": [],
        "spent": {"layers: dot_general": 40_000_000, "head: dot_general": 10_000_000},
        **changed,
    }


PRODUCT = 100_000
SUMS = {"kind": "all-reduce", "reach": "within a host", "sent_bytes": 100 * MIB, "overlapped_cycles": 0}
KERNELS = [{"name": "splash", "count": 1, "operations": 197e9, "bytes": 0}]  # 1 ms


@pytest.mark.parametrize(
    ("now", "complaints"),
    [
        (record(77_000_000), []),
        (record(60_000_000, spent={"layers: dot_general": 60_000_000}), []),
        (
            record(90_000_000, spent={"layers: dot_general": 52_000_000, "head: sort": 3_000_000}),
            [
                "75,000,000 cycles are now 90,000,000, +20.0 %: layers: dot_general +12,000,000, head: sort +3,000,000"
            ],
        ),
        (
            record(75_000_000, kernels=[{**KERNELS[0], "operations": 1970e9}]),
            ["75,000,000 cycles are now 90,000,000, +20.0 %: kernels +15,000,000"],
        ),
        (
            record(memory={"parameters": GIB, "temporaries": 4 * GIB, "total": 5 * GIB, "limit": None}),
            [f"{4 * GIB:,} bytes of memory are now {5 * GIB:,}, +25.0 %: temporaries +{GIB:,}"],
        ),
        (
            record(collectives=[{**SUMS, "overlapped_cycles": 10**9}]),
            [f"0 bytes sent are now {100 * MIB:,}, from none: all-reduce within a host +{100 * MIB:,}"],
        ),
        (
            {"problem": "v5litepod-4: the compiler failed: INTERNAL"},
            ["v5litepod-4: the compiler failed: INTERNAL"],
        ),
    ],
)
def test_what_rises_by_more_than_three_percent_is_told_with_the_parts_that_grew(
    now: dict[str, Any], complaints: list[str]
) -> None:
    assert list(tpu.complaints(CELL, record(), now)) == [f"{CELL.name}: {text}" for text in complaints]


def test_a_cell_that_did_not_fit_or_compile_has_nothing_to_grow_from() -> None:
    for before in ({"problem": "the compiler failed"}, record(fits=False)):
        assert list(tpu.complaints(CELL, before, record())) == []


def test_a_row_says_what_of_a_step_is_the_compilers_and_what_is_counted() -> None:
    slow = record(kernels=KERNELS, collectives=[SUMS])
    assert tpu.row(CELL, slow, PRODUCT) == (
        "| base 128, 64 rows a device | v5litepod-4 | 4.00 of 16 | 75.00 | 1.00 | 49 % | 52.05 ms | 37 % | 100.0 | – "
        "| – | 2 % |"
    )
    assert "17.50 of 16: does not fit" in tpu.row(
        CELL, record(fits=False, memory={"total": 17.5 * GIB, "limit": 16 * GIB}), PRODUCT
    )
    row = tpu.goal_row(CELL.name, record(), PRODUCT, [30_000_000, 15_000_000])
    assert row.endswith("| 50 % | 65 % | 50.0 ms | 30.0 ms | 10.0 ms |")
    row = tpu.goal_row(
        CELL.name, slow, PRODUCT, [30_000_000, 15_000_000]
    )  # kernels in place of attention's products
    assert row.endswith("| 49 % | 65 % | 51.0 ms | 21.0 ms | 10.0 ms |")


def test_the_tables_hold_what_was_compiled_name_the_rest_and_replace_the_page_s_own() -> None:
    records = {
        "products": dict.fromkeys(("v5e", "v5p", "v6e"), PRODUCT),
        "goals": {},
        "cells": {CELL.name: record()},
    }
    made = dict(tpu.tables(records))
    assert made["cells"].count("\n| ") == 1 and "keras_glue on 21 slices)" in made["cells"]
    assert "| – | 60 % | – | – | – |" in made["goals"]
    page = "a\n<!-- bench.tpu: goals -->\nold\n<!-- bench.tpu: end of goals -->\nb"
    assert tpu.with_table(page, "goals", "new") == page.replace("old", "new")
    with pytest.raises(RequestError, match="has no place for the table peer"):
        tpu.with_table(page, "peer", "new")


def test_every_cell_has_a_name_of_its_own_and_the_page_is_of_the_records() -> None:
    names = [cell.name for cell in tpu.CELLS]
    assert len({*names}) == len(names)
    assert {cell.place.accelerator.generation.name for cell in tpu.CELLS} == {
        *("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
    }
    assert {cell.name for cell in tpu.CI} | tpu.GOALS.keys() | {tpu.PEER_CELL} <= {*names}
    records = tpu.read_records()
    assert records["cells"].keys() <= {*names}
    page = tpu.PAGE.read_text(encoding="utf-8")
    for name, table in tpu.tables(records):
        assert tpu.with_table(page, name, table) == page


def test_a_slice_of_a_cell_may_have_more_hosts_than_the_catalogue_gives_it() -> None:
    places = [Cell(step="tiny 128", accelerator="v6e-8", hosts=hosts).place for hosts in (None, 2)]
    assert [(place.name, place.topology["chips_per_host"]) for place in places] == [
        ("v6e-8", [2, 4, 1]),
        ("v6e-8 of 2 hosts", [2, 2, 1]),
    ]


def check(*options: str) -> None:
    words = [sys.executable, "-m", "bench.tpu", "--check", *options]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_estimate_of_the_steps_that_ci_compiles_has_risen() -> None:
    check("--ci")


@pytest.mark.nightly
@pytest.mark.timeout(8 * 3600)
def test_no_estimate_has_risen_since_it_was_written_down() -> None:
    check()
