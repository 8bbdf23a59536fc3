"""The tests of in_torch/ and in_tensorflow/, run by the interpreters of those frameworks' environments, which this
one's packages stand behind."""

import os
import subprocess
from pathlib import Path

import pytest

from backends.local import environments

HERE = Path(__file__).parent
LIMIT_S = 600
SQUAD = f"{HERE}/in_tensorflow/test_squad.py"


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("chosen", ["not nightly", pytest.param("nightly", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("framework", "files"),
    [
        ("pytorch", [f"{HERE}/in_torch"]),
        ("tensorflow", [f"{HERE}/in_tensorflow", f"--ignore={SQUAD}"]),
        # Its losses are exact in a process of its own. After other trainings in the same one, last digits differ.
        ("tensorflow", [SQUAD]),
    ],
    ids=["torch", "tensorflow", "squad"],
)
def test_what_computes_in_another_framework_holds_there(
    framework: str, files: list[str], chosen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        environments.ensure(framework, print)
    program = (
        f"import sys; sys.path.append({str(Path(pytest.__file__).parents[1])!r}); "
        "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    )
    python = str(environments.environment_python(framework))
    found = subprocess.run(
        [
            python,
            "-P",
            "-c",
            program,
            *["-q", "-m", chosen],
            *["-p", "no:cacheprovider", "-n", "0"],
            *files,
        ],
        cwd=HERE.parents[1],
        # OpenMP's threads wait for each other by spinning: beside another test, two take four times as long as one.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    nothing_chosen = chosen == "nightly" and found.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert found.returncode == 0 or nothing_chosen, found.stdout[-20_000:] + found.stderr[-2_000:]
