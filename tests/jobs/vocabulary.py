"""A vocabulary of 48 ids with RoBERTa's special tokens; there is no tokenizer behind it."""

from __future__ import annotations

from pathlib import Path

from jobs.flax_mlm.tokenizer import TokenizerFacts

FACTS = TokenizerFacts(
    path=Path("none"), vocab_size=48, bos_id=0, pad_id=1, eos_id=2, unk_id=3, mask_id=47, sha256=""
)
