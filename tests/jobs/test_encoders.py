"""Encoding by several processes: their answers are this one's, in order, and none of them is ever left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jobs
from contracts.errors import RequestError
from jobs.flax_mlm import batches as batches_module
from jobs.flax_mlm import encoders
from jobs.flax_mlm.corpus import open_corpus
from jobs.flax_mlm.encode import Dtype
from jobs.flax_mlm.tokenizer import TokenizerFacts, load_tokenizer, train_tokenizer

TEXTS = [
    f"{n} the cat sat on the mat and the dog ate that hat when it rained all day long " * 2 for n in range(60)
]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFacts:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TEXTS, 300, path)
    return load_tokenizer(path)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a document or three, pieces shorter than a document."""
    monkeypatch.setattr(batches_module, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(batches_module, "PIECE_CHARACTERS", 300)


def test_an_error_in_the_text_comes_through_the_processes(tmp_path: Path, facts: TokenizerFacts) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b c"}\n{"text"\n')
    batches = batches_module.batches(("train", text) for text in open_corpus(str(tmp_path)).documents())
    with pytest.raises(RequestError, match=r"a\.jsonl:3: not JSON"):
        list(encoders.encoded(batches, facts.path, "<u2", processes=2))


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_processes_answer_as_this_one_does_and_in_order(facts: TokenizerFacts, dtype: Dtype) -> None:
    def work() -> Iterator[batches_module.Batch]:
        documents = (("eval" if number % 3 == 0 else "train", text) for number, text in enumerate(several))
        return batches_module.batches(documents)  # type: ignore[arg-type]

    several = [*TEXTS, "", "é" * 700, "日本語 " * 300, "\N{GRINNING FACE} <mask> </s>"]
    here = list(encoders.encoded(work(), facts.path, dtype, processes=0))
    assert list(encoders.encoded(work(), facts.path, dtype, processes=3)) == here
    assert len(here) > 10


def forever() -> Iterator[batches_module.Batch]:
    while True:
        yield from batches_module.batches([("train", "a b c " * 100)])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started from now on."""
    found: list[subprocess.Popen[bytes]] = []
    real = encoders._start

    def start(tokenizer: Path, dtype: Dtype) -> subprocess.Popen[bytes]:
        found.append(real(tokenizer, dtype))
        return found[-1]

    monkeypatch.setattr(encoders, "_start", start)
    return found


def test_a_killed_encoder_ends_the_work_with_a_reason(
    facts: TokenizerFacts, started: list[subprocess.Popen[bytes]]
) -> None:
    listening = encoders.encoded(forever(), facts.path, "<u2", processes=2)
    next(listening)
    started[1].kill()
    with pytest.raises(RuntimeError, match="a process that tokenises ended with -9"):
        for _ in listening:
            pass
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_who_stops_listening_leaves_no_process(
    facts: TokenizerFacts, started: list[subprocess.Popen[bytes]]
) -> None:
    listening = encoders.encoded(forever(), facts.path, "<u2", processes=2)
    next(listening)
    listening.close()  # type: ignore[attr-defined]
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_an_encoder_ends_when_who_started_it_is_killed(facts: TokenizerFacts) -> None:
    program = (
        "import sys, time; from pathlib import Path; from jobs.flax_mlm import encoders\n"
        "print(encoders._start(Path(sys.argv[1]), '<u2').pid, flush=True); time.sleep(100)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(facts.path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(jobs.__file__).parents[1])},
    ) as parent:
        assert parent.stdout is not None
        encoder = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    ended, _, _ = select.select([encoder], [], [], 60)
    os.close(encoder)
    assert ended


@pytest.mark.parametrize(
    ("size_bytes", "cores", "count"),
    [(1 << 20, 64, 0), (1 << 40, 1, 0), (1 << 40, 2, 2), (3 * (16 << 20), 64, 3), (1 << 40, 224, 16)],
)
def test_a_process_a_core_but_none_for_little_text(size_bytes: int, cores: int, count: int) -> None:
    assert encoders.processes_for(size_bytes, cores) == count
