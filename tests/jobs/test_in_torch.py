"""The tests of in_torch/, run by the interpreter of PyTorch's environment, which this one's packages stand behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launch import environments

HERE = Path(__file__).parent
LIMIT_S = 600


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_what_computes_in_torch_holds_there(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        environments.ensure("pytorch", print)
    program = (
        f"import sys; sys.path.append({str(Path(pytest.__file__).parents[1])!r}); "
        "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    )
    python = str(environments.python_of("pytorch"))
    found = subprocess.run(
        [python, "-P", "-c", program, "-q", "-p", "no:cacheprovider", "-n", "0", str(HERE / "in_torch")],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-20_000:] + found.stderr[-2_000:]
