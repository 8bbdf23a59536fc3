"""`make lock`: every lock from its .in, the images' too, and what moved is said."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIN = "numpy=={} \\\n    --hash=sha256:00\n"


def test_make_lock_says_which_pins_moved(tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "images/one").mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/lock.sh").write_text((ROOT / "tools/lock.sh").read_text())
    for each in ("uv", "run", "jobs", "dev", "gpu", "tpu"):
        (tmp_path / f"requirements/{each}.in").touch()
    for each in ("requirements", "requirements-cpu"):
        (tmp_path / f"images/one/{each}.in").touch()
    (tmp_path / "images/one/overrides.in").touch()
    (tmp_path / "images/one/requirements.txt").write_text(PIN.format(1))
    # In uv's place, one that writes a lock of one pin and what it was asked.
    uv = tmp_path / "uv"
    uv.write_text(
        f"#!/bin/sh\nfor last; do :; done\necho \"$@\" >>asked\nprintf '%s' '{PIN.format(2)}' >\"$last\"\n"
    )
    uv.chmod(0o755)

    def make_lock() -> str:
        return subprocess.run(
            ["sh", "tools/lock.sh"], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "UV": "uv", "UPGRADE": ""},
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip

    said = make_lock().splitlines()
    assert "-images/one/requirements.txt:numpy==1" in said
    assert "+images/one/requirements.txt:numpy==2" in said
    assert "+images/one/requirements-cpu.txt:numpy==2" in said
    assert "+jobs.txt:numpy==2" in said
    *_, tpu, cpu = (tmp_path / "asked").read_text().splitlines()
    assert "--overrides images/one/overrides.in" in tpu
    assert "--constraint" not in tpu
    assert "--constraint images/one/requirements.txt" in cpu
    assert "every pin is what it was" in make_lock()
