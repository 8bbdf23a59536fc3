"""A corpus to two files of token ids and their meta.json: with all cores, in bounded memory, and as often interrupted
as may be: the files are the same."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from contracts.files import DiskFiles
from jobs.flax_mlm.batches import batches
from jobs.flax_mlm.corpus import Corpus
from jobs.flax_mlm.encode import Dtype
from jobs.flax_mlm.encoders import encoded, processes_for
from jobs.flax_mlm.split import SPLITS, split_documents
from jobs.flax_mlm.streams import Streams, Torn, clear
from jobs.flax_mlm.tokenizer import TokenizerFacts

META = "meta.json"
WARNINGS = "warnings.json"
"""What was warned of when the files were made, a list of texts: to be said by whoever uses them."""
FORMAT = 1
"""Part of every key and of meta.json: raised when the same corpus gives other files."""
NOTE_CHARACTERS = 64_000_000
"""As much is done again at most when the work goes on: some seconds of two cores."""
SAY_PERIOD_S = 20.0


def tokenise(
    corpus: Corpus, facts: TokenizerFacts, eval_fraction: float, directory: Path, say: Callable[[str], None]
) -> None:
    """Write train.bin, eval.bin and meta.json into `directory`, going on with what a killed call has left there.

    Raises:
        RequestError: the corpus cannot be read, or gives nothing for one of the two splits.
        RuntimeError: a process that tokenises was killed.
        OSError: the disk is full, above all.
    """
    if is_whole(directory):  # killed between the last line below and whatever the caller does then
        clear(directory)
        return
    try:
        streams = Streams(directory)
    except Torn:
        say(f"{directory} is torn: tokenising {corpus.source} anew")
        clear(directory)
        streams = Streams(directory)
    warnings: list[str] = []
    with streams:
        meta = _write(corpus, facts, eval_fraction, streams, say, warnings.append)
    DiskFiles().write(str(directory / WARNINGS), (json.dumps(warnings, indent=2) + "\n").encode())
    DiskFiles().write(str(directory / META), (json.dumps(meta, indent=2) + "\n").encode())
    clear(directory)


def is_whole(directory: Path) -> bool:
    """Whether the files are as long as meta.json says: something outside may have torn them."""
    try:
        meta = json.loads((directory / META).read_bytes())
        width = int(meta["dtype"][-1])
        return all(
            (directory / f"{split}.bin").stat().st_size == meta[split]["tokens"] * width for split in SPLITS
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write(
    corpus: Corpus,
    facts: TokenizerFacts,
    eval_fraction: float,
    streams: Streams,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> dict[str, object]:
    processes = processes_for(corpus.text_bytes, len(os.sched_getaffinity(0)))
    dtype: Dtype = "<u2" if facts.vocab_size <= 1 << 16 else "<u4"
    begun = streams.documents
    by = f" with {processes} processes" if processes else ""
    behind = f", going on after {begun:,} documents" if begun else ""
    say(f"tokenising {corpus.source}{by}{behind}")
    # Documents that are done are read once more and not encoded (5 ms instead of 220 a million characters): so the
    # split's rules, and what is said of damaged text, hold for the whole corpus.
    todo = batches(split_documents(corpus, eval_fraction, warn=warn), skip=begun)
    started_s = said_s = time.monotonic()
    characters = noted = 0
    for batch, ids in encoded(todo, facts.path, dtype, processes=processes):
        streams.write(ids, train_documents=batch.documents("train"), eval_documents=batch.documents("eval"))
        characters += batch.characters
        now_s = time.monotonic()
        if batch.ends_whole and characters - noted >= NOTE_CHARACTERS:
            streams.note()
            noted = characters
        if now_s - said_s >= SAY_PERIOD_S:
            pace = characters / (now_s - started_s) / 1e6
            say(
                f"tokenising {corpus.source}: {characters / 1e6:,.0f} million characters so far, {pace:.1f} million a "
                f"second ({corpus.size_bytes / 1e6:,.0f} MB of files)"
            )
            said_s = now_s
    streams.note()
    seconds = time.monotonic() - started_s
    say(
        f"tokenised {characters:,} characters of {corpus.source}: {streams.documents - begun:,} documents in "
        f"{seconds:.1f} s"
    )
    return {
        "version": FORMAT,
        "corpus": corpus.fingerprint,
        "tokenizer": facts.sha256,
        "vocab_size": facts.vocab_size,
        "eval_fraction": eval_fraction,
        "dtype": dtype,
        **streams.facts(int(dtype[-1])),
    }
