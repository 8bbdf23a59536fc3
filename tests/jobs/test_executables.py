"""What a run has compiled the next one loads, where it would have compiled the same; whatever is wrong, it compiles."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jobs.runtime import processor
from jobs.runtime.executables import FOLDER, UNUSED_DAYS, Executables

pytestmark = pytest.mark.usefixtures("two_devices")

State = dict[str, jax.Array]


def step_on(state: State, rows_B: jax.Array) -> tuple[State, jax.Array]:
    """Something with a sum over devices and a state whose memory is used again."""
    total = jax.numpy.sin(rows_B).sum()
    return {"sum": state["sum"] + total, "steps": state["steps"] + 1}, total


class Machine:
    """A process that takes two steps of `step_on`, compiled or loaded, and counts what it compiles."""

    def __init__(self, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache_dir, self.compiled = cache_dir, 0
        compile_really = jax.stages.Lowered.compile

        def counted(lowered: jax.stages.Lowered, *its: Any) -> jax.stages.Compiled:
            self.compiled += 1
            return compile_really(lowered, *its)

        monkeypatch.setattr(jax.stages.Lowered, "compile", counted)

    def run(
        self, function: Callable[..., Any] = step_on, devices: int = 2, rows: int = 6
    ) -> tuple[dict[str, bytes], int]:
        """The state after two steps, to the last bit, and how many programs that took compiling."""
        before = self.compiled
        mesh = Mesh(np.asarray(jax.devices()[:devices]), ("rows",))
        by_row, whole = NamedSharding(mesh, PartitionSpec("rows")), NamedSharding(mesh, PartitionSpec())
        step = Executables(str(self.cache_dir), mesh.devices.flat).of(
            jax.jit(function, donate_argnums=0, out_shardings=whole)
        )
        state = jax.device_put({"sum": np.float32(0), "steps": np.int32(0)}, whole)
        rows_B = jax.device_put(np.arange(rows, dtype=np.float32), by_row)
        for _ in range(2):
            given = state
            state, _ = step(given, rows_B)
            assert given["sum"].is_deleted()
        assert int(state["steps"]) == 2
        return {name: np.asarray(leaf).tobytes() for name, leaf in state.items()}, self.compiled - before

    def kept(self) -> list[Path]:
        return sorted((self.cache_dir / FOLDER).iterdir())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_what_one_run_has_compiled_the_next_loads_and_computes_the_same_to_the_last_bit(
    machine: Machine,
) -> None:
    first, compiled = machine.run()
    assert compiled == 1
    assert machine.run() == (first, 0)
    assert [path.stat().st_mode & 0o777 for path in machine.kept()] == [0o644]


def test_another_program_or_other_devices_are_compiled_by_themselves(machine: Machine) -> None:
    def twice(state: State, rows_B: jax.Array) -> tuple[State, jax.Array]:
        return step_on(state, 2 * rows_B)

    first, _ = machine.run()
    others: list[dict[str, Any]] = [{"function": twice}, {"devices": 1}, {"rows": 4}]
    for different in others:
        assert machine.run(**different)[1] == 1, different
        assert machine.run(**different)[1] == 0, different
    assert machine.run() == (first, 0)


@pytest.mark.parametrize(
    ("where", "name", "instead"),
    [
        (processor, "kind", lambda: "another processor"),
        (os, "sched_getaffinity", lambda _: range(64)),
        (jax, "process_index", lambda: 1),
        (jax, "__version__", "0.0.1"),
    ],
)
def test_what_was_compiled_for_another_machine_process_or_version_is_not_loaded(
    where: Any, name: str, instead: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.run()
    monkeypatch.setattr(where, name, instead)
    assert machine.run()[1] == 1


def test_what_was_compiled_with_other_flags_is_not_loaded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.run()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert machine.run()[1] == 1


@pytest.mark.parametrize(
    "harm", [lambda whole: whole[: len(whole) // 2], lambda _: b"", lambda whole: b"\0" + whole]
)
def test_a_torn_file_is_said_and_compiled_anew(
    harm: Callable[[bytes], bytes], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = machine.run()
    (path,) = machine.kept()
    path.write_bytes(harm(path.read_bytes()))
    assert machine.run() == (first, 1)
    assert f"{path} cannot be loaded and is compiled anew: ValueError: it is torn" in capsys.readouterr().out
    assert machine.run() == (first, 0)


def test_a_program_that_cannot_be_kept_runs_all_the_same(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    (machine.cache_dir / FOLDER).write_text("a file where the folder should be")
    machine.run()
    assert machine.run()[1] == 1
    assert "a compiled program is not kept for later runs: FileExistsError" in capsys.readouterr().out


def test_what_no_run_has_loaded_for_long_is_removed_and_what_one_has_stays(machine: Machine) -> None:
    machine.run()
    (used,) = machine.kept()
    machine.run(rows=4)
    (unused,) = set(machine.kept()) - {used}
    for path in (used, unused):
        os.utime(path, (0, path.stat().st_mtime - (UNUSED_DAYS + 1) * 24 * 3600))
    assert machine.run()[1] == 0
    machine.run(rows=8)
    assert used in machine.kept() and unused not in machine.kept()
    assert len(machine.kept()) == 2
