"""The step without one of its improvements: what is taken out is out, and what is computed stays the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench.mlm_peers.case import CASES
from bench.variants import BESIDES, VARIANTS, Variant, all_of_them, of_case, taken_out
from jobs.flax_mlm import model, sharding
from jobs.flax_mlm import step as steps
from jobs.flax_mlm.config import Config
from tests.jobs.vocabulary import FACTS

CONFIG = Config(
    layers=1,
    width=16,
    heads=4,
    ff_width=24,
    max_positions=16,
    sequence_length=12,
    batch_size=4,
    steps=10,
    dtype="float32",
)
# Without dropout there is nothing in the place of its generator.
UNDROPPED = [
    name for name, each in VARIANTS.items() if not (each.options or each.environ) and "dropout" not in name
]
# Each variant compiles a step of its own: those that "all of them" has are tried in one.
IN_BFLOAT16 = "matrices transposed as they lie"
BY_THEMSELVES = [name for name in UNDROPPED if name in BESIDES and name != IN_BFLOAT16]
Numbers = dict[str, float]

# Every variant compiles a step of its own.
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("two_devices")]


def first_step(names: list[str], **options: Any) -> tuple[Numbers, list[Any]]:
    """What a step returns without those, beside the state that it was given."""
    config = Config(**{**CONFIG.__dict__, **options})
    mesh = sharding.make_mesh(1, jax.devices()[:1])
    with taken_out(names) as all_used:
        optimizer = steps.make_optimizer(config)
        graph, state = steps.create(config, FACTS, optimizer, mesh)
        rule = steps.mask_rule(FACTS, config.mask_share, config.sequence_length)
        train_step = steps.make_train_step(graph, optimizer, rule, config, mesh, state)
        random = np.random.default_rng(3)
        tokens_BS = random.integers(4, 47, (config.batch_size, config.sequence_length)).astype(np.int32)
        rows_B = np.arange(config.batch_size, dtype=np.int32)
        _, results = train_step(state, jnp.asarray(tokens_BS), jnp.asarray(rows_B))
        all_used()
    return {name: float(value) for name, value in results.items()}, jax.tree.leaves(state)


@pytest.fixture(scope="module")
def as_it_is(two_devices: None) -> Numbers:
    numbers, state = first_step([])
    assert all(leaf.is_deleted() for leaf in state)  # donated: the test below would show nothing otherwise
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_without_dropout_a_variant_comes_to_the_same_loss_and_gradient(name: str, as_it_is: Numbers) -> None:
    numbers, _ = first_step([name])
    assert numbers == pytest.approx(as_it_is, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if "dropout" in name])
def test_another_generator_of_dropout_drops_other_activations_and_as_many(name: str) -> None:
    with_ours, _ = first_step([], dropout=0.3)
    with_other, _ = first_step([name], dropout=0.3)
    assert with_other["loss"] != with_ours["loss"]
    assert with_other["loss"] == pytest.approx(with_ours["loss"], rel=0.05)
    keys_B = jax.random.split(jax.random.key(1), 8)
    with taken_out([name]):
        dropped = np.asarray(model.__dict__["dropout"](jnp.ones((8, 200, 5)), 0.3, keys_B))
    assert (dropped == 0).mean() == pytest.approx(0.3, abs=0.02)
    assert dropped.max() == pytest.approx(1 / 0.7)


@pytest.mark.slow
def test_a_matrix_that_is_not_copied_comes_to_the_same_in_the_kind_that_is(as_it_is: Numbers) -> None:
    as_it_lies, _ = first_step([IN_BFLOAT16], dtype="bfloat16")
    copied, _ = first_step([], dtype="bfloat16")
    assert copied != as_it_is
    assert as_it_lies == pytest.approx(copied, rel=1e-2)


@pytest.mark.slow
def test_all_of_them_together_come_to_the_same_loss_too(as_it_is: Numbers) -> None:
    together = [name for name in all_of_them("base") if name in UNDROPPED]
    numbers, _ = first_step(together)
    assert numbers == pytest.approx(as_it_is, rel=1e-5)


@pytest.mark.slow
def test_what_is_not_donated_is_still_there_after_the_step() -> None:
    _, state = first_step(["no buffer donated"])
    assert not any(leaf.is_deleted() for leaf in state)


def test_logits_at_every_position_are_as_many_as_positions() -> None:
    dims = steps.dimensions(CONFIG, FACTS)
    inputs = jnp.zeros((4, 12), jnp.int32), jnp.zeros((4, 3), jnp.int32)

    def positions() -> Any:
        made = nnx.eval_shape(lambda: model.Mlm(dims, jnp.dtype("float32"), nnx.Rngs(0)))
        return nnx.eval_shape(lambda its: its(*inputs), made).shape[1]

    assert positions() == 3
    with taken_out(["logits at every position"]):
        assert positions() == 12


def test_without_padding_the_table_has_a_row_a_token_and_no_more() -> None:
    dims = steps.dimensions(CONFIG, FACTS)
    assert dims.vocab_rows == 128
    with taken_out(["vocabulary not padded"]):
        assert dims.vocab_rows == 48


def test_everything_that_the_variants_take_out_is_there_and_is_put_back() -> None:
    each = [(owner, name) for its in VARIANTS.values() for owner, name, _ in (*its.instead, *its.around)]
    places = list(dict.fromkeys(each))

    def there() -> list[Any]:
        return [getattr(owner, name) for owner, name in places]

    before = there()
    with taken_out(list(VARIANTS)):
        assert not any(now is then for now, then in zip(there(), before, strict=True))
    assert there() == before


def test_a_variant_of_what_the_job_has_no_more_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIANTS, "old", Variant(instead=[(model, "one_that_went", 1)]))
    with (
        pytest.raises(LookupError, match=r"old: jobs\.flax_mlm\.model has no one_that_went"),
        taken_out(["old"]),
    ):
        pass


def test_a_variant_whose_place_is_never_come_by_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(LookupError, match="never used: GELU by autodiff: gelu"),
        taken_out(["GELU by autodiff", "layer norm by autodiff"]) as all_used,
    ):
        model.__dict__["layer_norm"](jnp.ones(3), jnp.ones(3), jnp.ones(3))
        all_used()


def test_padding_is_taken_out_only_where_the_vocabulary_has_any() -> None:
    assert [case for case in CASES if "vocabulary not padded" in of_case(case)] == ["base"]
    assert VARIANTS.keys() > BESIDES
    assert not BESIDES & set(all_of_them("base"))
