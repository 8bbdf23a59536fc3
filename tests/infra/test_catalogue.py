"""The catalogue's numbers are those of Google's pages, and whatever is not in it is answered with what is."""

import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.catalogue import (
    ACCELERATORS,
    GENERATIONS,
    CatalogueError,
    Generation,
    accelerator,
    by_topology,
    generations,
    price_usd_per_hour,
    zone_region,
    zones,
)
from tests.processes import run_program

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "accelerators.md"


# --- every type ---------------------------------------------------------------------------------------------


def test_topology_hosts_chips_cores_and_devices_agree() -> None:
    for made in ACCELERATORS.values():
        which = made.generation
        sides = generations.sides(made.topology)
        assert math.prod(sides) == made.chips == made.hosts * made.chips_per_host, made
        assert len(sides) == which.dimensions, made
        prefix, number = made.type_name.split("-")
        assert prefix == which.type_prefix, made
        cores = made.chips * which.cores_per_chip
        assert int(number) == (cores if which.name in ("v2", "v3", "v4", "v5p") else made.chips), made
        assert made.devices == made.devices_per_host * made.hosts, made
        assert made.devices == (cores if which.name in ("v2", "v3") else made.chips), made


def test_a_host_has_4_chips_unless_it_is_alone_and_name_and_topology_lead_back_to_the_type() -> None:
    for made in ACCELERATORS.values():
        alone = made.generation.name in ("v5e", "v6e") and made.chips <= 8
        assert made.chips_per_host == (made.chips if alone else 4), made
        assert accelerator(made.type_name) is by_topology(made.generation.name, made.topology) is made
        assert made.has_default_topology, made


def test_every_type_has_a_price_in_each_of_its_zones_and_spot_is_less() -> None:
    for made in ACCELERATORS.values():
        assert made.zones, made
        # An AI zone is for who has reserved capacity there, and that has no list price.
        for zone in [each for each in made.zones if not zones.is_ai_zone(each)]:
            on_demand = price_usd_per_hour(made, zone, "on-demand")
            spot = price_usd_per_hour(made, zone, "spot")
            assert on_demand is not None and on_demand > 0, (made, zone)
            assert spot is None or 0 < spot < on_demand, (made, zone)
            assert price_usd_per_hour(made, zone, "reserved") is None


def test_every_zone_of_the_catalogue_is_known_and_an_ai_zone_belongs_to_a_standard_one() -> None:
    listed = {zone for which in GENERATIONS for zone in which.zones}
    assert listed - set(zones.ZONES) == set()
    for zone in zones.AI_ZONES:
        assert zones.is_ai_zone(zone) and zones.parent_zone(zone) in zones.zones_in(zone_region(zone))
    assert zones.parent_zone("us-central1-b") == "us-central1-b"
    assert zone_region("us-south1-ai1b") == "us-south1"


def test_the_gateway_s_default_is_a_machine_that_its_zone_has() -> None:
    for zone in zones.ZONES:
        default = zones.gateway_machine_type(zone)
        assert zones.machine_family(default) in zones.families_in(zone) and zones.is_machine_type(default)
    assert "e2" not in zones.families_in("us-central2-b")


# --- what Google documents ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "hosts", "chips", "devices_per_host", "hbm_gib", "tflops"),
    [
        ("v2-8", "2x2", 1, 4, 8, 64, 180),
        ("v2-512", "16x16", 64, 256, 8, 4096, 11_520),
        ("v3-8", "2x2", 1, 4, 8, 128, 492),
        ("v3-2048", "32x32", 256, 1024, 8, 32_768, 125_952),
        ("v4-8", "2x2x1", 1, 4, 4, 128, 1100),
        ("v4-32", "2x2x4", 4, 16, 4, 512, 4400),
        ("v4-4096", "8x16x16", 512, 2048, 4, 65_536, 563_200),
        ("v5litepod-1", "1x1", 1, 1, 1, 16, 197),
        ("v5litepod-8", "2x4", 1, 8, 8, 128, 1576),
        ("v5litepod-16", "4x4", 4, 16, 4, 256, 3152),
        ("v5p-64", "2x4x4", 8, 32, 4, 3040, 14_688),
        ("v5p-12288", "16x16x24", 1536, 6144, 4, 583_680, 2_820_096),
        ("v6e-4", "2x2", 1, 4, 4, 128, 3672),
        ("v6e-256", "16x16", 64, 256, 4, 8192, 235_008),
    ],
)
def test_a_type_is_what_its_page_says(
    name: str, shape: str, hosts: int, chips: int, devices_per_host: int, hbm_gib: int, tflops: int
) -> None:
    made = accelerator(name)
    assert (made.topology, made.hosts, made.chips) == (shape, hosts, chips)
    assert (made.devices_per_host, made.hbm_gib) == (devices_per_host, hbm_gib)
    assert made.peak_bf16_flops_per_s == pytest.approx(tflops * 1e12)


V5P_SHAPES = {
    128: "4x4x4", 384: "4x4x12", 512: "4x8x8", 1152: "4x12x12", 1536: "8x8x12", 2944: "4x4x92", 4608: "12x12x16",
    6272: "4x28x28", 7808: "4x4x244", 9216: "12x16x24", 10368: "12x12x36", 12160: "4x20x76",
}  # fmt: skip
"""Of Google's page for v5p and of the list that axlearn compiles for: compact, oblong, a line, a prime."""


def test_a_v5p_has_the_shape_most_like_a_cube_and_all_whole_cubes_are_sizes_but_six_long_lines() -> None:
    assert {number: accelerator(f"v5p-{number}").topology for number in V5P_SHAPES} == V5P_SHAPES
    numbers = {int(name.removeprefix("v5p-")) for name in ACCELERATORS if name.startswith("v5p-")}
    cubes = set(range(128, 12288 + 1, 128))
    assert numbers - cubes == {8, 16, 32, 64}
    assert cubes - numbers == {8576, 9088, 9344, 10112, 10624, 11392}


def test_a_v4_in_another_shape_keeps_its_name_and_says_that_the_name_is_not_enough() -> None:
    line = by_topology("v4", "4x4x16")
    assert (line.type_name, line.chips, line.hosts, line.has_default_topology) == ("v4-512", 256, 64, False)
    assert accelerator("v4-512").topology == "4x8x8"


# --- zones and prices ---------------------------------------------------------------------------------------


def test_slices_of_v2_and_v3_are_in_fewer_zones_and_at_other_prices_than_one_host() -> None:
    assert "us-central1-b" in accelerator("v3-8").zones
    assert accelerator("v3-32").zones == ("europe-west4-a",)
    assert price_usd_per_hour(accelerator("v2-8"), "us-central1-b", "on-demand") == pytest.approx(4.50)
    assert price_usd_per_hour(accelerator("v2-32"), "us-central1-a", "on-demand") == pytest.approx(24.00)


@pytest.mark.parametrize(
    ("name", "zone", "on_demand", "spot"),
    [
        ("v3-8", "europe-west4-a", 8.80, 2.244),
        ("v4-8", "us-central2-b", 12.88, 3.686),
        ("v5litepod-16", "us-west4-a", 19.20, 7.68),
        ("v5p-8", "us-east5-a", 16.80, 6.72),
        ("v6e-8", "europe-west4-a", 23.76, 8.29984),
        ("v6e-8", "us-central1-ai1a", 21.60, 4.35368),
        ("v6e-8", "southamerica-west1-a", 21.60, None),
        ("v4-8", "europe-west4-a", None, None),
    ],
)
def test_a_price_is_the_regions_times_the_chips_and_none_where_none_is_listed(
    name: str, zone: str, on_demand: float | None, spot: float | None
) -> None:
    made = accelerator(name)
    assert price_usd_per_hour(made, zone, "on-demand") == pytest.approx(on_demand)
    assert price_usd_per_hour(made, zone, "spot") == pytest.approx(spot)


@pytest.mark.parametrize(
    "text", ["us-central1", "", "us-central1-b ", "b", "US-CENTRAL1-B", "us-central1-b\n"]
)
def test_what_is_no_zone_has_no_region(text: str) -> None:
    with pytest.raises(CatalogueError, match=r"is not a zone; write it as us-central1-b"):
        zone_region(text)


# --- the data files ---------------------------------------------------------------------------------------------


def test_each_figure_of_the_catalogue_has_a_source_with_a_date() -> None:
    tables = tomllib.loads((ROOT / "infra/catalogue/tpus.toml").read_text())
    shared = tables["sources"]
    own = [tables[which.name].get("sources", {}) for which in GENERATIONS]
    assert all(re.search(r" 20\d\d$", source) for sources in (shared, *own) for source in sources.values())
    keys = {key for which in GENERATIONS for key in tables[which.name]} - {"sources"}
    assert {*shared} - keys == {"page"} and all({*sources} <= keys for sources in own)


IMAGINARY = """
[v9z]
type_prefix = "v9z"
number_counts = "chips"
dimensions = 3
largest_chips = 4096
most_chips_on_one_host = 4
cores_per_chip = 2
devices_per_chip = 1
hbm_gib_per_chip = 288
peak_bf16_tflops_per_chip = 4600
clock_mhz = 2400
hbm_gb_per_s_per_chip = 9800
ici_gb_per_s_per_chip = 1200
api_name = "V9_ZETA"
runtime_version = "v2-alpha-tpuv9z"
quota_prefix = "TPUV9Z"
disk_types = ["hyperdisk-ml"]
most_disks = 15
zones = ["us-east5-c"]

[v9z.prices]
us-east5 = { on-demand = 8.0, spot = 2.5 }

[v9z.nodes]
prefix = "ct9z-standard"
label = "tpu-v9z-slice"
chips = [4]
boot_disk_type = "hyperdisk-balanced"
"""
PROGRAM = """
import datetime
from console.accelerators import list_accelerators
from infra import policy
from infra.config import reader
from keeper.zombies import QUOTA_PREFIXES
from rehearsal.simulated_cloud.capacity import Offers, accelerator_config
there = {"zone": "us-east5-c"}
slices = [{"name": "vm", "accelerator": "v9z-16", **there}, {"name": "one", "accelerator": "v9z-4", **there},
          {"name": "pool", "generation": "v9z", "topology": "4x4x4", "provisioning": "node-pool", **there}]
slices[1]["data-disks"] = [{"name": "d", "size-gib": 10}]
config = reader.read({"slices": slices, "budget-usd-per-hour": 1000}, project="my-project", stack="dev")
vm, one, pool = config.slices
print(vm.runtime_version, one.data_disks[0].disk_type, pool.accelerator.machine_type, QUOTA_PREFIXES["v9z"])
review = policy.review(config, today=datetime.date(2026, 11, 1))
print(*[" ".join(line.split()) for line in review.table.splitlines() if "v9z-16" in line], *review.errors, sep="; ")
offered = Offers([]).accelerator({"acceleratorType": "v9z-16"}, "us-east5-c", "node")
print(accelerator_config(offered))
list_accelerators(zone=None, generation="v9z", max_chips=16)
"""


def test_a_table_in_the_catalogue_s_file_is_all_that_a_new_generation_needs(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "infra", tmp_path / "infra", ignore=shutil.ignore_patterns("__pycache__", ".venv"))
    for name in ("backends", "console", "contracts", "host", "jobs", "keeper", "launch", "rehearsal"):
        (tmp_path / name).symlink_to(ROOT / name)
    with (tmp_path / "infra/catalogue/tpus.toml").open("a") as file:
        file.write(IMAGINARY)
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = run_program([sys.executable, "-c", PROGRAM], environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    configured, cost, requested, _, one_host, *_ = done.stdout.splitlines()
    assert configured == "v2-alpha-tpuv9z hyperdisk-ml ct9z-standard-4t TPUV9Z"
    assert cost == "slice vm: v9z-16, us-east5-c 16 chips, on-demand 128.000 3,072.00"
    assert requested == "{'type': 'V9_ZETA', 'topology': '2x2x4'}"
    assert one_host.split() == ["v9z-4", "2x2x1", "1", "4", "4", "1,152", "18,400", "32.00", "10.00", "1"]


# --- the house ----------------------------------------------------------------------------------------------


def test_the_catalogue_needs_only_the_standard_library() -> None:
    script = "import sys; sys.path.insert(0, sys.argv[1]); import infra.catalogue"
    bare = [sys.executable, "-I", "-S", "-c", script, str(ROOT)]
    done = subprocess.run(bare, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_generations_in_the_docs_are_those_of_the_catalogue() -> None:
    expected = [_row(which) for which in GENERATIONS]
    lines = DOCS.read_text().splitlines()
    start = lines.index(next(line for line in lines if line.startswith("| generation |"))) + 2
    assert lines[start : start + len(expected) + 1] == [*expected, ""]


def _row(which: Generation) -> str:
    """A generation's line in the docs."""
    alone, per = which.most_chips_on_one_host, which.chips_per_slice_host
    hosts = f"chips / {per}" if alone == per else f"1 up to {alone} chips, then chips / {per}"
    naming = [f"`{which.type_prefix}-N`", which.number_counts, hosts]
    chip = [which.devices_per_chip, which.hbm_gib_per_chip, which.peak_bf16_tflops_per_chip]
    runtime = f"`{which.runtime_version}`" if which.runtime_version else "an image"
    return f"| {' | '.join(map(str, [which.name, *naming, *chip, runtime]))} |"


# --- what is not in it: the messages are in config/mistakes.txt -------------------------------------------------


near_types = st.text() | st.from_regex(r"(v[0-9][ep]?|v5litepod|tpu7x|TPU-v4)-?[0-9x٣]*\n?", fullmatch=True)
near_shapes = st.text() | st.from_regex(r"[0-9٣]{1,6}(x[0-9]{1,6}){0,3}\n?", fullmatch=True)


@given(near_types)
def test_any_text_is_a_type_under_its_own_name_or_a_catalogue_error(text: str) -> None:
    try:
        assert accelerator(text).type_name == text
    except CatalogueError as error:
        assert f'"{text}"' in str(error)


@given(st.sampled_from([which.name for which in GENERATIONS]) | st.text(), near_shapes)
def test_any_shape_is_one_of_the_generation_or_a_catalogue_error(name: str, shape: str) -> None:
    try:
        made = by_topology(name, shape)
    except CatalogueError:
        return
    assert (made.topology, generations.chips_in(shape)) == (shape, made.chips)
    assert made.type_name in ACCELERATORS
