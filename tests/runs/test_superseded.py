"""An attempt that was taken for dead and wakes up beside the one that follows it ends, and changes nothing."""

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.errors import SUPERSEDED
from launch.runs import Run
from tests.runs.lab import FAST, SLOWLY, Lab, Losses, evaluations, losses, start_ticks

END_LIMIT_S = 15.0
"""After the thaw, for the old attempt to end."""


def stands_still(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(path.read_text().rpartition(")")[2].split()[0] == "T" for path in threads)


def written(run: Run) -> dict[str, str]:
    """A digest of each file of the run that an attempt commits, by its name."""
    root = Path(run.directory.url)
    paths = [*root.glob("checkpoints/**/*"), *root.glob("heartbeats/*.json")]
    paths += [
        root / name for name in ("metrics.jsonl", "result.json", "run.json", "report.html", "settings.json")
    ]
    found = {str(path.relative_to(root)): path for path in paths if path.is_file()}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}


class Frozen:
    """All processes of an attempt stopped: jobs with what they have started, supervisors, and those that guard them."""

    def __init__(self, lab: Lab, run: Run) -> None:
        self._records = lab.records(run)
        self._singles = [*lab.guards(run), *(record["supervisor_pid"] for record in self._records)]

    def send(self, signum: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            for pid in self._singles:
                os.kill(pid, signum)
            for record in self._records:
                os.killpg(record["pgid"], signum)

    def are_gone(self) -> bool:
        alive = [
            pid for pid in (*self._singles, *(record["pid"] for record in self._records)) if start_ticks(pid)
        ]
        return not alive


@pytest.fixture
def other_user(lab: Lab, tmp_path: Path) -> Iterator[Lab]:
    """Somebody with agents of their own, who know nothing of the processes that others have started."""
    made = Lab(lab.runs_dir, tmp_path / "other-cache", lab.data)
    try:
        yield made
    finally:
        made.end_all()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("frozen_s", "is_saving"),
    [
        pytest.param(8, True, id="while-saving", marks=pytest.mark.slow),
        pytest.param(8, False, id="while-stepping", marks=pytest.mark.nightly),
        pytest.param(180, True, id="3-minutes-while-saving", marks=pytest.mark.nightly),
        pytest.param(180, False, id="3-minutes-while-stepping", marks=pytest.mark.nightly),
    ],
)
def test_hosts_that_were_frozen_while_another_attempt_began_end_without_having_written_a_byte(
    lab: Lab,
    other_user: Lab,
    reference: Run,
    right_losses: Losses,
    frozen_s: float,
    is_saving: bool,
    request: pytest.FixtureRequest,
) -> None:
    run = lab.launch(*(SLOWLY if is_saving else ()))
    lab.reach(run, 12)
    old = Frozen(lab, run)
    saving = Path(run.directory.url, ".unfinished", "0")
    if is_saving:
        lab.until(lambda: any(saving.glob("*checkpoint-tmp")), "a checkpoint is being written", pause_s=0)
    old.send(signal.SIGSTOP)
    request.addfinalizer(lambda: old.send(signal.SIGCONT))
    # On hosts, each user has agents of their own.
    described = run.directory.read_json("run.json") or {}
    run.directory.write_json("run.json", {**described, "cache_dir": str(other_user.agent_root.parent)})
    exits = [lab.agent_root / "runs" / run.run_id / f"0-{host}" / "exit.json" for host in range(2)]
    assert not any(path.exists() for path in exits)
    time.sleep(frozen_s)
    lab.until(lambda: other_user.state(lab.read(run)) == "lost", "it seems to be dead", 30, pause_s=0.5)

    newer = other_user.launch(*FAST, resume=run)
    other_user.reach(newer, 20)
    with other_user.frozen(newer):
        ranks = [record["pid"] for record in other_user.records(newer)]
        lab.until(lambda: all(map(stands_still, ranks)), "the newer attempt stands still")
        before = written(newer)
        old.send(signal.SIGCONT)
        lab.until(old.are_gone, "the old attempt has ended", END_LIMIT_S)
        time.sleep(2)  # for whatever could still come
        assert written(newer) == before
    for host, path in enumerate(exits):
        ended = json.loads(path.read_text())
        log = Path(run.directory.path(f"logs/0/host-{host}.log")).read_text()
        said = "attempt 1 of this run has begun since; attempt 0 ends"
        assert ended["code"] == SUPERSEDED or said in ended["reason"], ended
        assert "Traceback" not in log

    done = other_user.finish(newer)
    assert losses(done) == right_losses
    assert evaluations(done) == evaluations(reference)
    assert (done.attempt, (done.result or {})["outcome"]) == (1, "done")
    with contextlib.suppress(FileNotFoundError):
        assert list(saving.iterdir()) == []
