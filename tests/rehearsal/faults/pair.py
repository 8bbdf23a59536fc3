"""Two hosts of a slice, each a machine with its own sshd and a device; what runs there, and what is left there."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from _pytest.mark import ParameterSet

from backends import host_backend
from backends.resolve import inventory_target
from backends.vm import transport
from backends.vm.connection import Limits, Ssh
from contracts import inventory as contract
from contracts.inventory import Inventory, Storage
from contracts.run_directory import ACTIVE, State
from launch import launching, runs
from launch.hosts import stop_processes
from launch.request.run_request import Request
from launch.runs import Run
from launch.targets import PresetInventory, Target, TargetRequest
from rehearsal.machines.host_image import DEVICE, PYTHON
from rehearsal.machines.machines import Machines
from tests.launch.slices import make_host, make_inventory, make_slice

NAMES = ("w-0", "w-1")
SHARE = "/mnt/share"
CORPUS = f"{SHARE}/corpus.jsonl"
USER = "sa_rehearsal"
LIMITS = Limits(connect_s=4.0, login_s=4.0, keepalive_s=2.0)
"""A host that fell silent is given up sooner than a user does that, so that a case takes seconds."""
HANG_FLOOR_S = 15.0
CLEAN_LIMIT_S = 60.0
"""The longest that anything of a run may outlive its end, whatever happened to hosts and launcher."""

# Prints a line for each process of a run or an agent, each lock of a start that is held, and each holder of the device.
LEFT_OVER = r"""
import fcntl, glob, os, sys
for folder in glob.glob("/proc/[0-9]*"):
    pid = int(folder[6:])
    try:
        command = open(folder + "/cmdline", "rb").read().split(b"\0")
        environment = open(folder + "/environ", "rb").read()
        opened = [os.readlink(each) for each in glob.glob(folder + "/fd/*")]
        state = open(folder + "/stat").read().rpartition(")")[2].split()[0]
    except OSError:
        continue
    if pid == os.getpid() or state in "ZX":
        continue
    ours = b"RUN_CONTROL_DIR=" in environment or b"/agent/" in b" ".join(command)
    if ours or sys.argv[1] in opened:
        print(pid, b" ".join(command)[:200].decode(errors="replace"))
for path in glob.glob(os.path.expanduser("~/.cache/tpu-stack/agent/runs/*/*.lock")):
    with open(path, "rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("held:", path)
"""


class Pair:
    """The machines w-0 and w-1 and a launcher's view of them."""

    end_limit_s = 240.0
    """Of a run of 120 steps, on a computer that is shared with others."""

    def __init__(self, machines: Machines, inventory: Inventory, folder: Path) -> None:
        self.machines, self.faults, self.inventory = machines, machines.faults, inventory
        self.inventory_path = folder / "inventory.json"
        self.inventory_path.write_text(contract.to_json(inventory))
        self.said: list[str] = []

    @contextlib.contextmanager
    def target(self, *, platform: str = "cpu") -> Iterator[Target]:
        """A launcher's own connections; they end with it, as when it exits."""
        with (
            Ssh(LIMITS) as ssh,
            mock.patch.object(transport, "Ssh", lambda: ssh),
        ):
            preset = PresetInventory(
                folder=self.inventory_path.parent,
                inventory=self.inventory,
                platform=platform,
                python=PYTHON,
                stand_in_devices=(DEVICE,),
            )
            yield inventory_target(
                self.inventory, TargetRequest(stack=str(self.inventory_path), preset=preset)
            )

    def launch(self, target: Target, *more: str, resume: Run | None = None) -> Run:
        """A run that has just joined, or `resume` gone on with. more: options besides those of a tiny model."""
        request = Request(
            job="flax_mlm",
            arguments=more if resume else (*options(), *more),
            name=None,
            resume=resume,
            hang_floor_s=HANG_FLOOR_S,
        )
        return launching.launch(request, target, self.said.append)

    def finish(self, target: Target, run: Run, limit_s: float = CLEAN_LIMIT_S) -> tuple[State, Run]:
        """What the run came to, and its directory then."""
        until(lambda: self.state(target, run) not in ACTIVE, f"{run.run_id} has ended", limit_s, pause_s=0.3)
        state = self.state(target, run)
        return state, read(run)

    def state(self, target: Target, run: Run) -> State:
        return target.run_state(read(run))

    def reach(self, run: Run, step: int) -> None:
        """Wait until the metrics have that step."""

        def has_reached() -> bool:
            ended = read(run).current_result()
            assert ended is None, f"{run.run_id} ended before step {step}: {ended}"
            lines = run.directory.read_new_metrics(-512)[0]
            return any(line["step"] >= step for line in lines)

        until(has_reached, f"step {step} of {run.run_id}", self.end_limit_s)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """The jobs stand still at their present step, for what takes a moment to happen."""
        stopped = [(name, self.faults.wedge(name)) for name in NAMES]
        try:
            yield
        finally:
            standing = {each.name for each in self.machines.list() if each.state == "running"}
            for name, pid in stopped:
                if name in standing:
                    self.faults.unwedge(name, pid)

    def left_over(self, name: str) -> str:
        """What a run or an agent has left on a host; "" where nothing is."""
        container = self.machines.containers.find(name)
        done = container.exec_run(["python3", "-S", "-E", "-c", LEFT_OVER, DEVICE], user=USER,
                                  environment={"HOME": f"/home/{USER}"})  # fmt: skip
        assert done.exit_code == 0, done.output
        return str(done.output.decode())

    def until_clean(self, *names: str, limit_s: float = CLEAN_LIMIT_S) -> float:
        """Wait until these hosts (all, where none is named) have nothing of a run; how long that took, in seconds."""
        names, began_s = names or NAMES, time.monotonic()

        def is_clean() -> bool:
            return not any(self.left_over(name) for name in names)

        until(is_clean, lambda: "nothing is left:\n" + "".join(map(self.left_over, names)), limit_s, 0.5)
        return time.monotonic() - began_s

    def run_names(self) -> list[str]:
        """The runs that have a directory on the share."""
        container = self.machines.containers.find(NAMES[0])
        done = container.exec_run(["sh", "-c", f"ls {SHARE}/runs 2>/dev/null || true"], user=USER)
        return sorted(done.output.decode().split())

    def end_all(self, target: Target) -> None:
        """Stop whatever runs there still are."""
        for entry in target.backend.status().processes:
            stop_processes(target.agents, entry["run_id"], entry["attempt"], grace_s=0)


def options() -> tuple[str, ...]:
    """The smallest model that still learns, for 2 processes."""
    sizes = "--layers 1 --width 32 --heads 2 --ff-width 64 --vocab-size 300 --max-positions 32"
    batch = "--sequence-length 16 --batch-size 12 --learning-rate 1e-2 --eval-fraction 0.2"
    periods = "--log-every 1 --eval-every 1000 --checkpoint-every 10 --eval-sequences 24"
    return ("--data", CORPUS, *f"--steps 120 {sizes} {batch} {periods}".split())


def read(run: Run) -> Run:
    found = runs.read(run.directory)
    assert found is not None, f"{run.directory.url} holds no run"
    return found


def until(
    holds: Callable[[], bool], what: str | Callable[[], str], limit_s: float, pause_s: float = 0.05
) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        said = what if isinstance(what, str) else what()
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {said}"
        time.sleep(pause_s)


def read_inventory(addresses: dict[str, str], host_keys: dict[str, str]) -> Inventory:
    """As somebody would write it by hand for two machines with a share."""
    hosts = [
        make_host(
            index,
            name=name,
            internal_address=address,
            user=USER,
            host_keys=(host_keys[name],),
            reach="direct",
        )
        for index, (name, address) in enumerate(addresses.items())
    ]
    one = make_slice(hosts, accelerator_type="v5litepod-8", topology="2x4", origin="node by-hand")
    storage = Storage(bucket_url=None, bucket_region=None, nfs_source="by-hand:/share", nfs_mount=SHARE)
    return make_inventory(one, stack="by-hand", project=None, storage=storage, images={})


# --- what goes wrong with a host of the pair, and how it is mended ---------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fault:
    """cause, undo: what is done to a host of the pair. says: a part of what the launcher must say of that host."""

    cause: Callable[[Pair, str], object]
    undo: Callable[[Pair, str], object]
    says: str


def of_faults(cause: str, undo: str, says: str) -> Fault:
    """cause, undo: methods of Faults that take a machine's name."""
    return Fault(
        lambda pair, host: getattr(pair.faults, cause)(host),
        lambda pair, host: getattr(pair.faults, undo)(host),
        says,
    )


KILLED = Fault(
    lambda pair, host: pair.machines.kill(host),
    lambda pair, host: pair.machines.restart(host),
    "does not answer",
)
CLOCK_OFF = Fault(
    lambda pair, host: pair.faults.set_clock(host, 3600.0),
    lambda pair, host: pair.faults.set_clock(host, 0.0),
    "the clock is +36",
)
CUT_OFF = of_faults("cut", "heal", "does not answer")
DISK_FULL = of_faults("fill_disk", "empty_disk", "No space left")
SHARE_FULL = of_faults("fill_share", "empty_share", "No space left")
DEVICE_HELD = of_faults("hold_device", "release_device", "accel0 is held by pid")
SHARE_MISSING = of_faults("unmount_share", "mount_share", "/mnt/share is not mounted")
PYTHON_MISSING = of_faults("break_python", "mend_python", "/opt/jobs/bin/python")
KEY_REFUSED = of_faults("refuse_keys", "accept_keys", "does not let")
HOST_KEY_CHANGED = of_faults("change_host_key", "restore_host_key", "key")


@contextlib.contextmanager
def broken(pair: Pair, *faults: tuple[Fault, str]) -> Iterator[None]:
    """The pair with these faults, which are mended again whatever happens."""
    with contextlib.ExitStack() as stack:
        for fault, host in faults:
            stack.callback(fault.undo, pair, host)
            fault.cause(pair, host)
        yield


@contextlib.contextmanager
def ready(pair: Pair, fault: Fault, host: str) -> Iterator[Callable[[], object]]:
    """Call what it gives, and the fault is there; it is mended at the end."""
    try:
        yield lambda: fault.cause(pair, host)
    finally:
        fault.undo(pair, host)


@contextlib.contextmanager
def exactly_before(phase: str, happens: Callable[[], Any]) -> Iterator[None]:
    """It happens when the phases before have been carried out on all hosts, and this one not yet on any."""
    of_phase = launching if phase == "join" else host_backend
    carried_out = getattr(of_phase, phase)

    def disturbed(*arguments: Any, **named: Any) -> Any:
        happens()
        return carried_out(*arguments, **named)

    with mock.patch.object(of_phase, phase, disturbed):
        yield


def nightly_but(each_time: set[str], cases: Mapping[str, Sequence[object]]) -> list[ParameterSet]:
    """The cases as parameters; of one rule's cases some are enough each time, and `make test-nightly` runs all."""
    assert each_time <= set(cases)
    return [
        pytest.param(*case, id=name, marks=() if name in each_time else pytest.mark.nightly)
        for name, case in cases.items()
    ]
