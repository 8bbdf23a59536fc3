"""What is not in the catalogue is answered with what there is instead, whatever the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.catalogue import ACCELERATORS, GENERATIONS, CatalogueError, accelerator, by_topology, topology


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "v6e-12",
            (
                '"v6e-12" is not a v6e size; choose one of '
                "v6e-1, v6e-4, v6e-8, v6e-16, v6e-32, v6e-64, v6e-128, v6e-256"
            ),
        ),
        (
            "v4-4",
            (
                '"v4-4" is not a v4 size; choose one of v4-8, v4-16, v4-32, v4-64, v4-128, v4-256 … v4-4096'
                "; the number counts TensorCores, 2 a chip"
            ),
        ),
        (
            "v5e-8",
            '"v5e-8" is not an accelerator type: those of v5e are called v5litepod; did you mean v5litepod-8?',
        ),
        (
            "v5e-9",
            (
                '"v5e-9" is not a v5e size; choose one of v5litepod-1, v5litepod-4, v5litepod-8, v5litepod-16, '
                "v5litepod-32, v5litepod-64, v5litepod-128, v5litepod-256"
            ),
        ),
        (
            "tpu7x-8",
            (
                '"tpu7x-8" is not offered by the Cloud TPU API, only by Compute Engine and GKE; '
                "choose one of v2, v3, v4, v5e, v5p, v6e"
            ),
        ),
        ("V6E-8", '"V6E-8" is not an accelerator type; did you mean v6e-8?'),
        ("tpu-v3-8", '"tpu-v3-8" is not an accelerator type; did you mean v3-8?'),
        (
            "a100-8",
            '"a100-8" is not an accelerator type; write one such as v4-8 or v6e-16, of v2, v3, v4, v5e, v5p, v6e',
        ),
    ],
)
def test_a_type_that_is_none_is_answered_with_those_there_are(name: str, said: str) -> None:
    with pytest.raises(CatalogueError) as error:
        accelerator(name)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("generation", "shape", "said"),
    [
        (
            "v6e",
            "3x3",
            '"3x3" is not a v6e topology; choose one of 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16',
        ),
        (
            "v4",
            "16x4x4",
            (
                '"16x4x4" is not a v4 topology; choose one of 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, 4x4x8 … 8x16x16, '
                "or another AxBxC of multiples of 4, A ≤ B ≤ C"
            ),
        ),
        (
            "v2",
            "big",
            '"big" is not a topology; write it as 4x8 or 4x4x8; topologies of v2: 2x2, 4x4, 8x8, 8x16, 16x16',
        ),
        ("v9", "2x2", '"v9" is not a TPU generation; choose one of v2, v3, v4, v5e, v5p, v6e'),
        (
            "tpu7x",
            "2x2x1",
            (
                '"tpu7x" is not offered by the Cloud TPU API, only by Compute Engine and GKE; '
                "choose one of v2, v3, v4, v5e, v5p, v6e"
            ),
        ),
    ],
)
def test_a_topology_that_is_none_is_answered_with_those_there_are(
    generation: str, shape: str, said: str
) -> None:
    with pytest.raises(CatalogueError) as error:
        by_topology(generation, shape)
    assert str(error.value) == said


@pytest.mark.parametrize(
    "shape", ["4x4x16\n", " 4x4x16", "4x4x٤", "4X4x16", "4x4x016", "4x4x0", "4x4x4x4", "256", "4x", ""]
)
def test_what_is_not_written_as_a_shape_is_none(shape: str) -> None:
    with pytest.raises(CatalogueError, match=r"is not a topology; write it as 4x8 or 4x4x8"):
        by_topology("v4", shape)


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
    assert (made.topology, topology.chips_in(shape)) == (shape, made.chips)
    assert made.type_name in ACCELERATORS
