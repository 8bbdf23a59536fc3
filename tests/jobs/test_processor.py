"""Whether a CPU multiplies bfloat16 is read off what Linux says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.runtime import processor

EPYC = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f avx512_bf16 amx\n\nprocessor\t: 1\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"


@pytest.mark.parametrize(
    ("cpuinfo", "able"),
    [
        (EPYC, True),
        (EPYC.replace("avx512_bf16 ", ""), False),
        (EPYC.replace("avx512_bf16", "avx512_bf160"), False),
        (ARM, False),
        ("", False),
    ],
)
def test_the_instructions_are_looked_for_among_the_flags(
    cpuinfo: str, able: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    assert processor.multiplies_bfloat16.__wrapped__() is able


def test_a_system_that_says_nothing_of_its_processor_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "nothing")
    assert processor.multiplies_bfloat16.__wrapped__() is False
