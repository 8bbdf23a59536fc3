"""Reads what XLA's TPU compiler writes of a compiled program: its own estimate of each operation, and the collectives.

The estimates are cycles of a core's clock (`estimated_cycles`), one for most operations that the core carries out one
after the other. Collectives, copies beside the computation and custom calls have none.

A collective is asynchronous in one of three forms, and the core computes something else between its start and its end:
- a pair of operations (all-reduce-start, all-reduce-done; async-start around a collective; send, recv-done);
- an async collective fusion: the collective is part of several fusions. The first starts it, the last ends it, and each
  of those between computes something of its own and carries the collective a part of its way;
- neither: the core waits.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

type Reach = Literal["within a host", "between hosts", "between slices"]
"""How far a collective goes."""

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
REDUCE_SCATTER = "all-reduce-scatter"
"""Begins the name of a computation in which the TPU compiler has made one collective of a sum and a slice of it."""
MEGASCALE = "_xla_megascale_transfer_type"
"""Marks what the slices of a multislice run send each other through their hosts."""
FREE_CUSTOM_CALLS = frozenset({"ConcatBitcast", "AllocateBuffer", "Sharding", "AssumeGatherIndicesInBound"})
COPIES_BESIDE = ("copy-start", "slice-start")
"""Between the chip's memory and what a core keeps beside it, while the core computes."""
SLOW_WITHOUT_ESTIMATE = ("sort", "custom-call")
"""Operations that take time though the compiler estimates none."""

_KERNEL_METADATA = re.compile(r"kernel_metadata=\{\n(?:.*\n)*?\}")
"""Breaks the line of an operation, and has braces at the beginning of a line, as the end of a computation has."""
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = (.*)$")
_ARRAY = re.compile(r"(pred|bf16|f8\w*|[sufc]\d+)\[([\d,]*)\]")
_BESIDE_CORE = re.compile(r"\w+\[[\d,]*\]\{[^}]*S\(\d+\)\}")
"""An array that is kept in another memory than the chip's large one."""
FUSED = "fused in "
"""Begins the name of a collective that is an async collective fusion."""
_FUSED_CONFIG = "async_collective_fusion_config"
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CHAIN = re.compile(r'chain_id="(\d+)"')
"""Collectives of a shard_map have one channel: then the chain tells them apart."""
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


class Instruction(NamedTuple):
    """One line of a computation: `name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


class Operation(NamedTuple):
    """An instruction that is carried out `times` in a step. operand_bytes: of all that it is given. memory_bytes: what
    it reads from the chip's memory and writes there.

    starts, ends: the asynchronous collective that starts or ends with it. carries: the async collective fusions that
    go on only while such an operation is carried out.
    """

    instruction: Instruction
    times: int
    operand_bytes: int
    memory_bytes: int
    starts: str | None = None
    ends: str | None = None
    carries: frozenset[str] = frozenset()


class Collective(NamedTuple):
    """kind: one of COLLECTIVES. sent_bytes: what a device sends for it in a step, where a ring carries it out.
    overlapped_cycles: of what the core computes meanwhile, in a step. Where several collectives use the same network at
    once, each has its part of these cycles, by its bytes."""

    kind: str
    reach: Reach
    group: int
    sent_bytes: int
    overlapped_cycles: int = 0


class Summary(NamedTuple):
    """What a step takes on one device. cycles: by (scope, operation) as `label` names them. memory_bytes: what all
    operations with an estimate, and copies beside them, read from the chip's memory and write there.
    without_estimate: how many of the SLOW_WITHOUT_ESTIMATE there are, by opcode or target."""

    cycles: Mapping[tuple[str, str], int]
    memory_bytes: int
    collectives: Sequence[Collective]
    without_estimate: Mapping[str, int]

    @property
    def all_cycles(self) -> int:
        return sum(self.cycles.values())


def summary(text: str, places: Sequence[tuple[int, int]]) -> Summary:
    """Summarise the text of a compiled program.

    places: (slice, host) of each device, in the order of the program's mesh.
    """
    cycles: Counter[tuple[str, str]] = Counter()
    collectives: list[Collective] = []
    without, memory_bytes = Counter[str](), 0
    overlap = _Overlap()
    for operation in operations(text):
        instruction, times = operation.instruction, operation.times
        estimate = _CYCLES.search(instruction.attributes)
        entry_collective = collective(operation, places)
        overlap.end(operation.ends)
        if estimate or instruction.opcode in COPIES_BESIDE:
            memory_bytes += times * operation.memory_bytes
        if estimate:
            cycles[label(instruction)] += times * int(estimate[1])
            overlap.compute(times * int(estimate[1]), operation.carries)
        elif entry_collective is not None:
            overlap.start(operation.starts, len(collectives), entry_collective)
            collectives.append(entry_collective)
        elif instruction.opcode in SLOW_WITHOUT_ESTIMATE:
            target = _TARGET.search(instruction.attributes)
            name = target[1] if target else instruction.opcode
            if name not in FREE_CUSTOM_CALLS:
                without[name] += times
    overlapped = [
        counted._replace(overlapped_cycles=round(overlap.cycles[index]))
        for index, counted in enumerate(collectives)
    ]
    return Summary(cycles, memory_bytes, overlapped, without)


class _Overlap:
    """Shares out the core's cycles to the collectives that are under way. cycles: by a collective's place in the
    list."""

    def __init__(self) -> None:
        self.cycles: defaultdict[int, float] = defaultdict(float)
        self._under_way: dict[str, tuple[int, Collective]] = {}

    def start(self, name: str | None, index: int, collective: Collective) -> None:
        if name is not None:
            self._under_way[name] = index, collective

    def end(self, name: str | None) -> None:
        if name is not None:
            self._under_way.pop(name, None)

    def compute(self, cycles: int, carries: frozenset[str]) -> None:
        for is_between_slices in (False, True):  # a network each
            moving = [
                (index, open_collective.sent_bytes)
                for name, (index, open_collective) in self._under_way.items()
                if (open_collective.reach == "between slices") == is_between_slices
                and (name in carries or not name.startswith(FUSED))
            ]
            total_bytes = max(1, sum(sent_bytes for _, sent_bytes in moving))
            for index, sent_bytes in moving:
                self.cycles[index] += cycles * sent_bytes / total_bytes


# --- the text --------------------------------------------------------------------------------------------------------


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The computations of a program by name, and the name of the one that it begins with."""
    bodies: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in _KERNEL_METADATA.sub("", text).splitlines():
        if not line.startswith(" ") and line.endswith("{") and "(" in line:
            header = line.removeprefix("ENTRY ").split()
            current = header[0].lstrip("%")
            bodies[current] = []
            entry = current if line.startswith("ENTRY ") else entry
        elif current and (match := _OPERATION.match(line)):
            bodies[current].append(_instruction(match[1], match[2]))
        elif line.startswith("}"):
            current = ""
    return bodies, entry


def _instruction(name: str, definition: str) -> Instruction:
    end = _closing(definition) + 1 if definition.startswith("(") else definition.index(" ")
    shape, definition = definition[:end], definition[end:].strip()
    opcode, _, _ = definition.partition("(")
    close = _closing(definition)
    operands = re.sub(r"/\*.*?\*/", "", definition[len(opcode) + 1 : close])
    names = tuple(word.split()[-1].lstrip("%") for word in operands.split(", ") if word.strip())
    return Instruction(name, shape, opcode, names, definition[close + 1 :])


def _closing(text: str) -> int:
    """Where the first parenthesis is closed."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == ")" and depth == 0:
            return index
    return len(text)


def size_bytes(shape: str) -> int:
    """The bytes of a shape, of all its parts where it is a tuple; tokens and flags (u32[]) have next to none."""
    total = 0
    for kind, sizes in _ARRAY.findall(shape):
        bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
        total += math.prod(int(size) for size in sizes.split(",") if size) * bits // 8
    return total


def memory_bytes(
    instruction: Instruction, shapes: Mapping[str, str], bodies: Mapping[str, Sequence[Instruction]]
) -> int:
    """What an operation reads from the chip's memory and writes there. Of an array of which a fusion takes or renews
    only a part, as a loop over layers does, that part."""
    if instruction.opcode in COPIES_BESIDE:
        return size_bytes(" ".join(_BESIDE_CORE.findall(instruction.shape)))
    called = _called(instruction) if instruction.opcode == "fusion" else []
    inner = bodies.get(called[0], ()) if called else ()
    read = sum(
        _taken_bytes(inner, index, size_bytes(_BESIDE_CORE.sub("", shapes.get(operand, ""))))
        for index, operand in enumerate(instruction.operands)
    )
    written = size_bytes(_BESIDE_CORE.sub("", instruction.shape))
    if inner and inner[-1].opcode == _RENEWED:
        inner_shapes = {member.name: member.shape for member in inner}
        written = min(written, size_bytes(inner_shapes.get(inner[-1].operands[1], "")))
    return read + written


_TAKEN, _RENEWED = ("dynamic-slice", "slice", "gather"), "dynamic-update-slice"


def _taken_bytes(inner: Sequence[Instruction], index: int, size: int) -> int:
    """What a fusion takes of its operand of that number and size."""
    names = {
        member.name for member in inner if member.opcode == "parameter" and member.operands == (str(index),)
    }
    users = [member for member in inner if names & set(member.operands)]
    if users and all(member.opcode in _TAKEN and member.operands[0] in names for member in users):
        return min(size, sum(size_bytes(member.shape) for member in users))
    if users and all(member.opcode == _RENEWED and member.operands[0] in names for member in users):
        return 0
    return size


def operations(text: str) -> Iterator[Operation]:
    """Every operation of a step, those of loops as often as they are carried out, and collectives inside of fusions."""
    bodies, entry = computations(text)

    def walk(name: str, times: int, only_collectives: bool, wrapped: str | None) -> Iterator[Operation]:
        shapes = {instruction.name: instruction.shape for instruction in bodies[name]}
        fused = {} if only_collectives else _fused_collectives(bodies, name)
        last = {chain: user for user, chains in fused.items() for chain in chains}
        started: set[str] = set()
        received = {
            instruction.name: _rendezvous(instruction)
            for instruction in bodies[name]
            if instruction.opcode == "recv"
        }
        for instruction in bodies[name]:
            is_collective = instruction.opcode.removesuffix("-start") in COLLECTIVES
            if is_collective and name.startswith(REDUCE_SCATTER):
                instruction = instruction._replace(opcode="reduce-scatter")
            if is_collective or not only_collectives:
                carries = fused.get(instruction.name, frozenset())
                yield Operation(
                    instruction,
                    times,
                    sum(size_bytes(shapes.get(operand, "")) for operand in instruction.operands),
                    memory_bytes(instruction, shapes, bodies),
                    starts=wrapped or _starts(instruction),
                    ends=_ends(instruction, received)
                    or next((chain for chain in carries if last[chain] == instruction.name), None),
                    carries=carries,
                )
            if is_collective:
                continue  # what it calls is how two values are added
            new = fused.get(instruction.name, frozenset()) - started
            started |= new
            if instruction.name in fused and not new:
                continue  # it goes on with what an earlier one has started
            inner = only_collectives or instruction.opcode not in (
                "while",
                "call",
                "conditional",
                "async-start",
            )
            starts = next(iter(new), instruction.name if instruction.opcode == "async-start" else wrapped)
            count = trip_count(instruction, bodies) if instruction.opcode == "while" else 1
            for called in _called(instruction):
                if called in bodies:
                    yield from walk(called, times * count, inner, starts)

    return walk(entry, 1, False, None)


def _starts(instruction: Instruction) -> str | None:
    """The asynchronous collective that a collective's own operation is the start of."""
    if instruction.opcode == "send":
        return _rendezvous(instruction)
    return instruction.name if instruction.opcode.endswith("-start") else None


def _ends(instruction: Instruction, received: Mapping[str, str | None]) -> str | None:
    """The asynchronous collective whose result an operation waits for. received: the rendezvous of each `recv`."""
    if not instruction.opcode.endswith("-done") or instruction.opcode == "send-done":
        return None
    operand = instruction.operands[0]
    return received.get(operand) if instruction.opcode == "recv-done" else operand


def _rendezvous(transfer: Instruction) -> str | None:
    """What a `send` and the `recv` that gives its result have in common."""
    rendezvous = _RENDEZVOUS.search(transfer.attributes)
    return rendezvous[1] if rendezvous else None


def _fused_collectives(bodies: Mapping[str, Sequence[Instruction]], name: str) -> dict[str, frozenset[str]]:
    """The async collective fusions of which each fusion of a computation is a part."""
    parts = {}
    for instruction in bodies[name]:
        if instruction.opcode != "fusion":
            continue
        chains = {
            f"{FUSED}{channel[0]} {chain[0] if (chain := _CHAIN.search(inner.attributes)) else ''}"
            for called in _called(instruction)
            for inner in bodies.get(called, ())
            if inner.opcode in COLLECTIVES
            and _FUSED_CONFIG in inner.attributes
            and (channel := _CHANNEL.search(inner.attributes))
        }
        if chains:
            parts[instruction.name] = frozenset(chains)
    return parts


def _called(instruction: Instruction) -> list[str]:
    branches = _BRANCHES.search(instruction.attributes)
    names = branches[1].replace("%", "").split(", ") if branches else []
    return [*names, *_CALLED.findall(instruction.attributes)]


def trip_count(loop: Instruction, bodies: Mapping[str, Sequence[Instruction]]) -> int:
    """How often a loop's body is carried out: what the compiler says, or else the bound of a loop that counts from 0 by
    1, as `lax.scan` makes it; 1 where that cannot be seen."""
    stated = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if stated:
        return int(stated[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
    lines = bodies.get(condition[1], ()) if condition else ()
    bounds = {
        instruction.name: int(instruction.operands[0])
        for instruction in lines
        if instruction.opcode == "constant" and instruction.operands and instruction.operands[0].isdigit()
    }
    for instruction in lines:
        if (
            instruction.opcode == "compare"
            and "direction=LT" in instruction.attributes
            and instruction.operands[-1] in bounds
        ):
            return bounds[instruction.operands[-1]]
    return 1


_OUT_OF_MEMORY = (
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def out_of_memory(message: str) -> tuple[int, int] | None:
    """(needed, available) bytes of a device, where the compiler's error says that they are not enough; else None."""
    for pattern in _OUT_OF_MEMORY:
        if match := pattern.search(message):
            needed, available = (round(float(match[at]) * 1024 ** _POWERS[match[at + 1]]) for at in (1, 3))
            return needed, available
    return None


# --- where the time goes ---------------------------------------------------------------------------------------------

_WRAPPED = re.compile(r"^(?:transpose|jvp|vmap|remat|checkpoint|rematted_computation)\((.*)\)$")
_NO_SCOPE = frozenset(
    {"shard_map", "while", "body", "cond", "checkpoint", "remat", "rematted_computation", "closed_call", ""}
)


def label(instruction: Instruction) -> tuple[str, str]:
    """(scope, operation) of an instruction: ("layers, backward", "dot_general") of
    "jit(step)/shard_map/transpose(jvp(layer_3))/dot_general". Scopes that differ by their number only count as one.
    """
    op_name = _OP_NAME.search(instruction.attributes)
    if not op_name:
        return "made by the compiler", instruction.opcode
    *path, operation = _parts(op_name[1])
    scopes = [
        scope_name
        for scope_name in map(_unwrapped, path)
        if scope_name not in _NO_SCOPE and not scope_name.startswith("jit(")
    ]
    named = [scope_name for scope_name in scopes if re.fullmatch(r"[A-Za-z_]\w*", scope_name)]
    scope = re.sub(r"_\d+(?=_|$)", "s", named[0], count=1) if named else "elsewhere"
    return f"{scope}, backward" if "transpose(" in op_name[1] else scope, _unwrapped(operation)


def _parts(name: str) -> list[str]:
    """The parts of an op_name: it is cut at slashes that are in no parenthesis."""
    parts, depth = [""], 0
    for character in name:
        depth += (character == "(") - (character == ")")
        if character == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [inner for part in parts for inner in _unwrapped(part).split("/")]


def _unwrapped(part: str) -> str:
    while match := _WRAPPED.match(part):
        part = match[1]
    return part


# --- collectives -----------------------------------------------------------------------------------------------------


def collective(operation: Operation, places: Sequence[tuple[int, int]]) -> Collective | None:
    """What an operation makes devices send each other; None where it is no collective."""
    instruction, times, operand_bytes = operation.instruction, operation.times, operation.operand_bytes
    kind = instruction.opcode.removesuffix("-start")
    if instruction.opcode == "send" and MEGASCALE in instruction.attributes:
        slices = len({place[0] for place in places})
        transfer = re.search(rf'{MEGASCALE}="(\w+)"', instruction.attributes)
        kind = transfer[1].lower().replace("_", "-") if transfer else "send"
        array = _ARRAY.search(instruction.shape)
        sent_bytes = times * size_bytes(array[0] if array else "")
        return Collective(kind, "between slices", slices, sent_bytes)
    if kind not in COLLECTIVES:
        return None
    groups = device_groups(instruction.attributes, len(places))
    size = max(len(group) for group in groups)
    if size < 2 and kind != "collective-permute":
        return None
    sent: Callable[[int], float] = {
        "all-reduce": lambda n: 2 * (n - 1) / n,
        "all-gather": lambda n: n - 1,
        "collective-permute": lambda _: 1,
    }.get(kind, lambda n: (n - 1) / n)
    sent_bytes = round(times * operand_bytes * sent(size))
    return Collective(kind, _reach(groups, places), size, sent_bytes)


def _reach(groups: Sequence[Sequence[int]], places: Sequence[tuple[int, int]]) -> Reach:
    reached = [{places[index] for index in group if index < len(places)} for group in groups]
    if any(len({slice_index for slice_index, _ in group}) > 1 for group in reached):
        return "between slices"
    return "between hosts" if any(len(group) > 1 for group in reached) else "within a host"


def device_groups(attributes: str, devices: int) -> list[list[int]]:
    """The groups of a collective, of indices of devices in the order of the program's mesh.

    XLA writes them as lists ({{0,1},{2,3}}), as a grid that is cut ([2,2]<=[4], [2,2]<=[2,2]T(1,0)), or by the axes of
    a mesh (mesh['data'=4,'fsdp'=2] {'fsdp'}); no groups: all devices are one.
    """
    pairs = re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", attributes)
    listed = pairs or re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", attributes)
    if listed:
        return [[int(n) for n in group.split(",") if n] for group in re.findall(r"\{([\d, ]*)\}", listed[1])]
    cut = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if cut:
        sizes = _numbers(cut[3])
        order = _numbers(cut[4]) if cut[4] else list(range(len(sizes)))
        return _groups(sizes, order, int(cut[2]))
    meshed = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^)]*\))? ?\{([^}]*)\}", attributes)
    if meshed:
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", meshed[1])}
        names = list(axes)
        along = [names.index(name) for name in re.findall(r"'([^']+)'", meshed[2])]
        order = [*(index for index in range(len(names)) if index not in along), *along]
        return _groups(list(axes.values()), order, math.prod(axes[names[index]] for index in along))
    return [list(range(devices))]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _groups(sizes: Sequence[int], order: Sequence[int], group: int) -> list[list[int]]:
    """0, 1, 2 … laid out in a grid of these sizes, read with its axes in that order, in groups of so many."""
    grid = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
    groups: list[list[int]] = grid.reshape(-1, group).tolist()
    return groups
