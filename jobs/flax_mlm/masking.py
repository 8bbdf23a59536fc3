"""Which tokens a step hides, as a pure function of a key and the row's place in the global batch.

So the same step hides the same tokens however many processes there are and however often the run was resumed.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskRule:
    """BERT's rule (Devlin et al. 2018, 3.1): of the chosen tokens 80 % become the mask, 10 % a random token.

    slots: tokens chosen in each sequence, a fixed number so that shapes are static.
    special_ids: never chosen, and never the random token.
    """

    slots: int
    mask_id: int
    special_ids: tuple[int, ...]
    vocab_size: int
    mask_share: float = 0.8
    random_share: float = 0.1


class Masked(NamedTuple):
    """One masked batch. Slots beyond a sequence's ordinary tokens have weight 0."""

    inputs_BS: jax.Array
    positions_BM: jax.Array
    targets_BM: jax.Array
    weights_BM: jax.Array


def slots_for(share: float, length: int) -> int:
    """Masked slots of a sequence of `length` tokens: `share` of them, rounded, at least one."""
    return max(1, round(share * length))


def mask(rule: MaskRule, key: jax.Array, tokens_BS: jax.Array, rows_B: jax.Array) -> Masked:
    """Choose `rule.slots` ordinary tokens of each row, uniformly without repetition, and hide them.

    A row draws from `fold_in(key, rows_B[i])`: its place in the global batch, or in the held-out split.
    """
    keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)
    return jax.vmap(lambda row_key, tokens_S: _mask_row(rule, row_key, tokens_S))(keys_B, tokens_BS)


def _mask_row(rule: MaskRule, key: jax.Array, tokens_S: jax.Array) -> Masked:
    choose_key, fate_key, random_key = jax.random.split(key, 3)
    special_S = jnp.isin(tokens_S, jnp.asarray(rule.special_ids, tokens_S.dtype))
    score_S = jnp.where(special_S, -1.0, jax.random.uniform(choose_key, tokens_S.shape))
    score_M, positions_M = jax.lax.top_k(score_S, rule.slots)
    targets_M = tokens_S[positions_M]
    ordinary = [i for i in range(rule.vocab_size) if i not in set(rule.special_ids)]
    random_M = jax.random.choice(random_key, jnp.asarray(ordinary, tokens_S.dtype), (rule.slots,))
    fate_M = jax.random.uniform(fate_key, (rule.slots,))
    hidden_M = jnp.where(
        fate_M < rule.mask_share,
        rule.mask_id,
        jnp.where(fate_M < rule.mask_share + rule.random_share, random_M, targets_M),
    )
    chosen_M = score_M >= 0
    inputs_S = tokens_S.at[positions_M].set(jnp.where(chosen_M, hidden_M, targets_M))
    return Masked(inputs_S, positions_M, targets_M, chosen_M.astype(jnp.float32))
