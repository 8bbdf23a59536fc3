"""What jobs in JAX share: devices, compiled programs that are kept, traces, and checkpoints, which are complete or
absent: one that cannot be read is put aside for the one before it."""

import concurrent.futures
import ctypes
import dataclasses
import functools
import gzip
import hashlib
import json
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from contracts.errors import RequestError
from contracts.process_environment import ProcessEnvironment
from contracts.run_directory import RunDirectory
from jobs.runtime import processor
from jobs.runtime.checkpoints import TORN
from jobs.runtime.jax.checkpoints import Checkpoints, Tree, checksum
from jobs.runtime.jax.distributed import Devices
from jobs.runtime.jax.executables import (
    COMPILER_OPTIONS,
    FOLDER,
    UNUSED_DAYS,
    Executables,
    compile_for,
    program_facts,
)
from jobs.runtime.monitoring.heartbeat import Heartbeat
from jobs.runtime.monitoring.profile import Profile, Steps, read_steps
from jobs.runtime.monitoring.tracers import JaxTracer
from jobs.runtime.process import Run
from jobs.runtime.storage.bucket_files import files_of
from tests.jobs.groups import environment_of, run_in

pytestmark = [
    pytest.mark.usefixtures("two_devices"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax.*"),
    # Orbax leaves a closed event loop behind where a read fails.
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
]

State = dict[str, jax.Array]


def step_on(state: State, rows_B: jax.Array) -> tuple[State, jax.Array]:
    """Something with a sum over devices and a state whose memory is used again."""
    total = jax.numpy.sin(rows_B).sum()
    return {"sum": state["sum"] + total, "steps": state["steps"] + 1}, total


class Machine:
    """A process that takes two steps of `step_on`, compiled or loaded, and counts what it compiles."""

    def __init__(self, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache_dir, self.compiled = cache_dir, 0
        self.shared: str | None = None
        self.notes = cache_dir / "notes"
        compile_really = jax.stages.Lowered.compile

        def counted(lowered: jax.stages.Lowered, **options: Any) -> jax.stages.Compiled:
            self.compiled += 1
            return compile_really(lowered, **options)

        monkeypatch.setattr(jax.stages.Lowered, "compile", counted)

    def run(
        self, function: Callable[..., Any] = step_on, devices: int = 2, rows: int = 6
    ) -> tuple[dict[str, bytes], int]:
        """The state after two steps, to the last bit, and how many programs that took compiling."""
        before = self.compiled
        mesh = Mesh(np.asarray(jax.devices()[:devices]), ("rows",))
        by_row, whole = NamedSharding(mesh, PartitionSpec("rows")), NamedSharding(mesh, PartitionSpec())
        jitted = jax.jit(function, donate_argnums=0, out_shardings=whole)
        step = Executables(str(self.cache_dir), mesh.devices.flat, self.shared, self.notes).cached(jitted)
        state = jax.device_put({"sum": np.float32(0), "steps": np.int32(0)}, whole)
        rows_B = jax.device_put(np.arange(rows, dtype=np.float32), by_row)
        for _ in range(2):
            given = state
            state, _ = step(given, rows_B)
            assert given["sum"].is_deleted()
        assert int(state["steps"]) == 2
        return {name: np.asarray(leaf).tobytes() for name, leaf in state.items()}, self.compiled - before

    def compile_beforehand(self, url: str) -> dict[str, Any]:
        """Compile the step of `run` for shapes alone and put it under `url`; write and return the note of it."""
        mesh = Mesh(np.asarray(jax.devices()[:2]), ("rows",))
        by_row, whole = NamedSharding(mesh, PartitionSpec("rows")), NamedSharding(mesh, PartitionSpec())
        of = functools.partial(jax.ShapeDtypeStruct, sharding=whole)
        state = {"sum": of((), np.float32), "steps": of((), np.int32)}
        rows_B = jax.ShapeDtypeStruct((6,), np.float32, sharding=by_row)
        lowered = jax.jit(step_on, donate_argnums=0, out_shardings=whole).lower(state, rows_B)
        made = Executables(str(self.cache_dir), mesh.devices.flat).precompile(lowered, lowered.compile)
        assert made is not None
        files_of(url).write(url, (self.cache_dir / FOLDER / made["key"]).read_bytes())
        note = {**made, "url": url}
        self.write_note(note)
        return note

    def write_note(self, note: dict[str, Any]) -> None:
        self.notes.mkdir(exist_ok=True)
        (self.notes / "a.json").write_text(json.dumps(note))

    def kept(self) -> list[Path]:
        return sorted(path for path in (self.cache_dir / FOLDER).iterdir() if path.suffix != ".lock")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library keeps no freed memory"
)
def test_compiling_returns_what_was_freed_to_the_system(tmp_path: Path) -> None:
    pieces = [b"x" * 2000 + bytes([i % 7]) for i in range(100_000)]
    kept = pieces[::100]  # so that the heap does not end before what is freed
    del pieces
    before = resident_bytes()
    Executables(str(tmp_path), jax.devices()[:1]).compiled(
        jax.jit(step_on), {"sum": 0.0, "steps": 0}, np.ones(2)
    )
    assert resident_bytes() < before - 100_000_000
    assert kept[0] == b"x" * 2000 + b"\0"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_one_run_has_compiled_the_next_loads_and_computes_the_same_to_the_last_bit(
    machine: Machine,
) -> None:
    def twice(state: State, rows_B: jax.Array) -> tuple[State, jax.Array]:
        return step_on(state, 2 * rows_B)

    first, compiled = machine.run()
    assert compiled == 1
    assert machine.run() == (first, 0)
    assert [path.stat().st_mode & 0o777 for path in machine.kept()] == [0o644]
    others: list[dict[str, Any]] = [{"function": twice}, {"devices": 1}, {"rows": 4}]
    for different in others:  # another program, or for other devices, is compiled by itself
        assert [machine.run(**different)[1] for _ in range(2)] == [1, 0], different
    assert machine.run() == (first, 0)


@pytest.mark.parametrize(
    ("where", "name", "instead"),
    [
        (processor, "kind", lambda: "another processor"),
        (os, "sched_getaffinity", lambda _: range(64)),
        (jax, "__version__", "0.0.1"),
        (os, "environ", {**os.environ, "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_was_compiled_for_another_machine_version_or_with_other_flags_is_not_loaded(
    where: Any, name: str, instead: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.run()
    monkeypatch.setattr(where, name, instead)
    assert machine.run()[1] == 1


def test_of_several_processes_of_a_host_one_compiles_and_the_others_load(machine: Machine) -> None:
    with concurrent.futures.ThreadPoolExecutor(3) as processes:
        states = [one.result()[0] for one in [processes.submit(machine.run) for _ in range(3)]]
    assert states == [states[0]] * 3
    assert machine.compiled == 1


def test_what_a_pod_has_compiled_the_next_one_loads_from_the_cache_that_they_share(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.shared = f"memory://{tmp_path}"
    machine.cache_dir = tmp_path / "pod-0"
    first, _ = machine.run()
    for thread in threading.enumerate():
        if thread.name == "share":
            thread.join(60)
    machine.cache_dir = tmp_path / "pod-1"
    assert machine.run() == (first, 0)
    assert capsys.readouterr().out == ""
    files, place = files_of(machine.shared), f"{machine.shared}/{FOLDER}"
    (name,) = files.list(place)
    (kept,) = files.read([f"{place}/{name}"])
    files.write(
        f"{place}/{name}", (kept or b"")[:-1]
    )  # whatever has become of it, the next pod computes the same
    machine.cache_dir = tmp_path / "pod-2"
    assert machine.run() == (first, 1)
    assert "it is torn" in capsys.readouterr().out
    machine.shared, machine.cache_dir = "nothing://knows/it", tmp_path / "pod-3"
    assert machine.run() == (first, 1)
    said = capsys.readouterr().out
    assert re.search(r"nothing://knows/it/executables/\w+ cannot be read", said)


def test_what_was_compiled_for_shapes_beforehand_is_loaded_by_the_note_that_came_with_the_code(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"memory://{tmp_path}/step"
    note = machine.compile_beforehand(url)
    machine.cache_dir = tmp_path / "host"
    first, compiled = machine.run()
    assert compiled == 0
    assert f"jit_step_on was compiled beforehand: it is loaded from {url}" in capsys.readouterr().out
    assert machine.run() == (first, 0)
    assert capsys.readouterr().out == ""  # this host has it by now
    machine.cache_dir = tmp_path / "by-itself"
    machine.notes = tmp_path / "none"
    assert machine.run() == (first, 1)

    # Whatever is wrong with it costs the compiling, and is said.
    machine.notes = tmp_path / "others"
    refused, other_place = b"\x80not a program", [[1, 0, None, None], [0, 0, None, None]]
    kept = json.dumps(note["facts"]).encode() + b"\n" + refused
    unusable = hashlib.sha256(kept).digest() + kept
    cases: list[tuple[dict[str, Any], bytes | None, str]] = [
        ({}, b"torn", f"{url} is not what was compiled beforehand, and is not loaded"),
        ({"url": f"{url}-to-come"}, None, f"{url}-to-come is not there yet"),
        ({"url": "nothing://knows/it"}, None, "nothing://knows/it cannot be read"),
        ({"sha256": hashlib.sha256(unusable).hexdigest()}, unusable, "is compiled anew: ValueError"),
        ({"facts": {**note["facts"], "jax": "0.1"}}, None, f"for another jax: 0.1 there, {jax.__version__} here"),
        ({"facts": {**note["facts"], "devices": other_place}}, None, "for another devices: [1, 0, None, None] there"),
        ({"facts": {**note["facts"], "flags": [None, "--a"]}}, None, "for another flags: [None, '--a'] there"),
    ]  # fmt: skip
    for number, (changed, content, said) in enumerate(cases):
        machine.cache_dir = tmp_path / f"host-{number}"
        machine.write_note({**note, **changed})
        if content is not None:
            files_of(url).write(url, content)
        assert machine.run() == (first, 1), changed
        assert said in capsys.readouterr().out


class Client(NamedTuple):
    platform: str
    platform_version: str


class Chip(NamedTuple):
    """A TPU device, as a slice has it or as libtpu describes one that is not there."""

    id: int
    coords: Any
    process_index: int
    slice_index: int | None
    client: Client
    core_on_chip: int = 0
    device_kind: str = "TPU v5 lite"


def test_a_description_of_a_slice_and_the_slice_itself_make_one_key_unless_what_the_program_depends_on_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = "TFRT TPU v5 lite\nBuilt on Oct 22 2026 cl/1"

    def key(prefix: str = "", **changed: Any) -> dict[str, Any]:
        client = Client("tpu", prefix + changed.pop("version", version))
        places = changed.pop("places", [(0, 0, 0), (1, 0, 0)])
        chips: list[Any] = [
            Chip(
                id=number, coords=place, client=client, **{"process_index": 0, "slice_index": None, **changed}
            )
            for number, place in enumerate(places)
        ]
        return program_facts(jax.jit(jnp.sin).lower(1.0), chips)

    described = key()
    # The client of real devices names its interface too, numbers one slice 0, and each process has an index.
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(208))
    monkeypatch.setattr(processor, "kind", lambda: "a host's")
    assert key("PJRT C API\n", places=[[0, 0, 0], [1, 0, 0]], process_index=3, slice_index=0) == described
    assert key(version="TFRT TPU v5 lite\nBuilt on Oct 23 2026 cl/2") != described
    assert key(places=[(1, 0, 0), (0, 0, 0)]) != described
    assert key(slice_index=1) != described
    monkeypatch.setitem(COMPILER_OPTIONS, "TPU v5 lite", {"xla_a": "1", "xla_b": "2"})
    assert key() != described
    described = key()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_a=81920")
    assert key()["flags"] != described["flags"]
    assert key()["options"] == {"xla_b": "2"}  # the user's own flags come first


def test_a_program_is_compiled_with_the_options_of_its_devices_or_without_where_the_compiler_refuses_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (cpu,) = jax.devices()[:1]
    lowered = jax.jit(jnp.sin).lower(1.0)
    monkeypatch.setitem(COMPILER_OPTIONS, cpu.device_kind, {"xla_no_such_option": "1"})
    assert float(compile_for([cpu], lowered)(1.0)) == pytest.approx(0.8414, abs=1e-4)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("compiled again without the options {'xla_no_such_option': '1'}: ")
    too_much = jax.errors.JaxRuntimeError("Ran out of memory in memory space hbm. Used 22.52G of 15.75G hbm.")
    monkeypatch.setattr(lowered, "compile", lambda compiler_options: (_ for _ in ()).throw(too_much))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Ran out of memory"):
        compile_for([cpu], lowered)


def test_a_torn_file_is_said_and_compiled_anew_and_a_program_that_cannot_be_kept_runs_all_the_same(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = machine.run()
    (path,) = machine.kept()
    whole = path.read_bytes()
    for torn in (whole[: len(whole) // 2], b"", b"\0" + whole):
        path.write_bytes(torn)
        assert machine.run() == (first, 1)
        said = f"{path} cannot be loaded and is compiled anew: ValueError: it is torn"
        assert said in capsys.readouterr().out
        assert machine.run() == (first, 0)
    path.unlink()
    shutil.rmtree(path.parent)
    path.parent.write_text("a file where the folder should be")
    assert [machine.run()[1] for _ in range(2)] == [1, 1]
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


def test_each_device_has_its_own_rows_and_what_a_function_makes_is_whole_on_each() -> None:
    devices, values_B = Devices(), np.arange(6, dtype=np.float32)
    rows_B = devices.rows(values_B)
    assert [shard.data.tolist() for shard in rows_B.addressable_shards] == [[0, 1, 2], [3, 4, 5]]
    mean = devices.jit(jnp.mean)(rows_B)  # one over all rows
    assert mean.is_fully_replicated
    assert float(mean) == 2.5
    with pytest.raises(ValueError, match="divi"):
        devices.rows(np.zeros(3, np.float32))


def run_of(environment: ProcessEnvironment, url: str, rank: int = 0) -> Run:
    mine = dataclasses.replace(environment, process_id=rank)
    directory = RunDirectory(url, files_of(url))
    return Run(environment=mine, directory=directory, heartbeat=Heartbeat(directory, mine))


def take_steps(run: Run, wanted: Steps | None, *, first: int = 1, last: int = 8, done: int = 0) -> None:
    """Steps of one large product each, whose results nobody waits for but `settle`."""
    product = jax.jit(lambda x_DD: jnp.tanh(x_DD @ x_DD))
    latest = product(jnp.ones((700, 700)))
    jax.block_until_ready(latest)
    profile = Profile(run, wanted, JaxTracer(), done=done, settle=lambda: jax.block_until_ready(latest))
    for step in range(first, last + 1):
        with profile.step(range(step, step + 1)):
            latest = product(latest)
    profile.close()


def files(run: Run) -> list[str]:
    folders = ("profile", "profile/plugins/profile")
    sessions = run.directory.list(folders[1])
    names = [
        f"{session}/{name}" for session in sessions for name in run.directory.list(f"{folders[1]}/{session}")
    ]
    return sorted(name for name in run.directory.list(folders[0]) if name != "plugins") + names


def steps_in(run: Run, name: str) -> list[int]:
    """The steps that the file for Perfetto names."""
    (data,) = files_of(run.directory.url).read([run.directory.path(f"profile/{name}")])
    assert data is not None
    events = json.loads(gzip.decompress(data))["traceEvents"]
    return [int(event["args"]["step_num"]) for event in events if event.get("name") == "train"]


def products_in(run: Run, name: str) -> int:
    """How many products the file for TensorBoard holds, whole but for the last end.

    A result is ready before the thread that computed it notes the end of its last operation.
    """
    data = jax.profiler.ProfileData.from_file(run.directory.path(f"profile/plugins/profile/{name}"))
    names = Counter(event.name for plane in data.planes for line in plane.lines for event in line.events)
    starts = {name: count for name, count in names.items() if f"end: {name}" in names}
    (count,) = set(starts.values())
    ends = sum(names[f"end: {name}"] for name in starts)
    assert ends in (count * len(starts) - 1, count * len(starts))
    return count


def test_the_steps_that_were_asked_for_are_in_one_folder_of_traces_by_process_and_their_work_is_whole(
    environment: ProcessEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    for rank in (0, 1):
        run = run_of(environment, environment.run_dir, rank)
        take_steps(run, Steps(first=3, last=5))
        assert run.time.spent_s("profile") > 0
        assert steps_in(run, f"steps-3-5-host-{rank}.perfetto.json.gz") == [3, 4, 5]
        assert products_in(run, f"steps-3-5/host-{rank}.xplane.pb") == 3
    assert files(run)[2:] == ["steps-3-5/host-0.xplane.pb", "steps-3-5/host-1.xplane.pb"]
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize(
    ("taken", "traced", "said"),
    [
        ({"wanted": Steps(first=3, last=9), "last": 4}, [3, 4], "steps 3-4 are traced in"),
        (
            {"wanted": Steps(first=3, last=5), "first": 5, "done": 4},
            [5],
            "--profile: steps up to 4 were taken before this attempt; the rest is traced",
        ),
        (
            {"wanted": Steps(first=3, last=5), "first": 6, "done": 5},
            [],
            "--profile: step 5 was taken before this attempt; nothing is traced",
        ),
    ],
    ids=["it ends early", "resumed among them", "resumed after them"],
)
def test_of_a_run_that_does_not_take_all_of_the_steps_those_are_traced_that_it_takes(
    environment: ProcessEnvironment,
    capsys: pytest.CaptureFixture[str],
    taken: dict[str, Any],
    traced: list[int],
    said: str,
) -> None:
    run = run_of(environment, environment.run_dir)
    take_steps(run, **taken)
    assert said in capsys.readouterr().out
    assert len(files(run)) == 2 * bool(traced)
    if traced:
        assert steps_in(run, f"steps-{traced[0]}-{traced[-1]}-host-0.perfetto.json.gz") == traced


@pytest.mark.parametrize(
    ("said", "steps", "why"),
    [
        *((said, 10, "is not A:B; give the first and the last step to trace, as 100:104") for said in (
            "3", "3:", ":5", "a:b", "3-5", "-1:5", "3:5:7", " 3:5", "3:5\n", "", "１:２"
        )),
        *((said, 10, f"{said}: must be steps of this run") for said in ("0:3", "5:4", "9:11", "11:12")),
        ("10:110", 1000, "are 101 steps, .* give 10:109 or fewer"),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_traced_are_refused_with_the_rule(said: str, steps: int, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        read_steps(said, steps=steps)


@pytest.fixture
def resumed_run(tmp_path: Path) -> Run:
    return run_in(environment_of("flax_mlm", "jax", tmp_path / "run", attempt=1))


@pytest.fixture
def directory(resumed_run: Run) -> RunDirectory:
    return resumed_run.directory


@pytest.fixture
def checkpoints(resumed_run: Run) -> Iterator[Checkpoints]:
    opened = Checkpoints(resumed_run, Tree(state(0)), keep_last=2)
    yield opened
    opened.close()


def state(step: int) -> dict[str, Any]:
    layer = jnp.sin(jnp.arange(4096.0) * step).reshape(64, 64)  # too large for Orbax to keep it with its name
    return {"params": {"layers": {0: layer}}, "step": jnp.asarray(step, jnp.int32)}


def saved(checkpoints: Checkpoints, *steps: int, values: int | None = None) -> None:
    """values: the step whose state is taken for all of them."""
    for step in steps:
        checkpoints._state.tree = state(step if values is None else values)
        checkpoints.save(step, {"row": step})
    checkpoints.wait()


def reopened(run: Run, like: Any = None) -> tuple[int, dict[str, Any], Any] | None:
    """The step, the notes and the state."""
    held = Tree(state(0) if like is None else like)
    again = Checkpoints(run, held, keep_last=2)
    try:
        restored = again.restore_latest()
        return None if restored is None else (*restored, held.tree)
    finally:
        again.close()


def test_what_was_saved_is_restored_to_the_bit_with_what_was_noted_beside_it(
    resumed_run: Run, checkpoints: Checkpoints
) -> None:
    notes = {"losses": [0.1 + 0.2, 1e-300], "row": 3}
    assert checkpoints.restore_latest() is None
    saved(checkpoints, 5)
    checkpoints._state.tree = state(10)
    checkpoints.save(10, notes)
    saved(checkpoints, 10, values=99)  # a step that is there is not written again
    for expected, noted in ((10, notes), (5, {"row": 5})):
        restored = reopened(resumed_run)
        assert restored is not None
        step, found, tree = restored
        assert (step, found) == (expected, noted)
        assert str(jax.tree.structure(tree)) == str(jax.tree.structure(state(step)))
        for mine, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(state(step)), strict=True):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)
        shutil.rmtree(resumed_run.directory.path(f"checkpoints/{step}"))


def test_the_latest_are_kept_and_the_best_besides_which_can_be_brought_back(checkpoints: Checkpoints) -> None:
    saved(checkpoints, 1, 2)
    checkpoints.best = 2
    saved(checkpoints, 3, 4, 5)
    assert checkpoints._run.directory.checkpoint_steps() == [2, 4, 5]
    checkpoints.restore_model(2)
    assert int(checkpoints._state.tree["step"]) == 2


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(data)


def link_to_nothing(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("nowhere")


def of_largest_file(damage: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: damage(
        max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    )


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": of_largest_file(truncate),
    "a byte changed": of_largest_file(flip_a_byte),
    "deleted": of_largest_file(Path.unlink),
    "notes torn": lambda folder: truncate(folder / "notes" / "metadata"),
    "notes deleted": lambda folder: shutil.rmtree(folder / "notes"),
    "emptied": lambda folder: [shutil.rmtree(path) for path in folder.iterdir() if path.is_dir()],
    "a link to nothing": link_to_nothing,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_checkpoint_is_put_aside_with_a_warning_and_the_one_before_it_used(
    resumed_run: Run, checkpoints: Checkpoints, damage: str
) -> None:
    directory = resumed_run.directory
    saved(checkpoints, 5, 10)
    newest = Path(directory.path("checkpoints/10"))
    shutil.copytree(newest, newest.with_name("15.orbax-checkpoint-tmp-0"))  # of a write that was cut off
    DAMAGES[damage](newest)
    restored = reopened(resumed_run)
    assert restored is not None
    assert (restored[:2], int(restored[2]["step"])) == ((5, {"row": 5}), 5)
    (warning,) = resumed_run.heartbeat.warnings
    assert warning.startswith("checkpoint 10 cannot be read (")
    assert warning.endswith(f"it is put aside in {TORN}/ and 5 is used")
    assert [name.partition("-")[0] for name in directory.list(TORN)] == ["10"]
    assert directory.checkpoint_steps() == [5]  # Orbax removes what was cut off in its own time


def test_where_no_checkpoint_can_be_read_the_run_is_refused_and_nothing_is_moved(
    resumed_run: Run, checkpoints: Checkpoints
) -> None:
    saved(checkpoints, 5, 10)
    with pytest.raises(RequestError, match="none of the run's 2 checkpoints can be read by this code"):
        reopened(resumed_run, {**state(0), "came_with_new_code": jnp.zeros(2)})
    assert resumed_run.directory.list("checkpoints") == ["10", "5"]
    assert resumed_run.directory.list(TORN) == []


@pytest.mark.parametrize("had_come_so_far", [True, False])
def test_a_resumed_run_whose_checkpoints_are_gone_warns_that_it_begins_anew(
    resumed_run: Run, checkpoints: Checkpoints, had_come_so_far: bool
) -> None:
    if had_come_so_far:
        resumed_run.directory.write_text("metrics.jsonl", '{"step": 9, "loss": 2.5}\n{"step": 10}\n{"st')
    Path(resumed_run.directory.path("checkpoints/15.orbax-checkpoint-tmp-0")).mkdir(parents=True)
    assert checkpoints.restore_latest() is None
    begins_anew = (
        f"there is no complete checkpoint in {resumed_run.directory.url}/checkpoints: the run begins anew"
    )
    expected = [f"{begins_anew}, and had come to step 10"] if had_come_so_far else []
    assert resumed_run.heartbeat.warnings == expected


def test_a_checksum_is_the_same_however_an_array_is_shared_out_and_another_where_one_bit_is() -> None:
    values = np.random.default_rng(3).normal(size=(6, 4)).astype(np.float32)
    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    arrays = [
        jax.device_put(values, NamedSharding(mesh, spec))
        for spec in (PartitionSpec(), PartitionSpec("x"), PartitionSpec(None, "x"))
    ]
    expected = {checksum({"a": array}) for array in arrays}
    assert len(expected) == 1
    for dtype in (np.float32, np.float16, np.int8, np.bool_):
        array = np.ones((6, 4), dtype)
        before = checksum([array])
        bits = array.view(np.uint8)
        bits[3, 1] ^= 1
        assert checksum([array]) != before
