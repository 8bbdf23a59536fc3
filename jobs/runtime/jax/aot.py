"""Compiles a job's training step for a TPU slice that need not be there, and says what the compiler says of it.

libtpu holds the whole compiler and describes slices that it has never seen, so this runs on any Linux machine, in an
environment that has libtpu. A job hands over its step by `lower_step(config, devices)`, in its step.py or else its
train.py; it traces the very functions that it trains with, for shapes instead of arrays. A script of the user's own
does so by `lower_step(devices)` (`SCRIPT_STEP`).

python -m jobs.runtime.jax.aot: a request on standard input, {"job" or "script" (its path), "words" (the options),
"topology" (as libtpu names it, "v5e:4x4"), "slices", "chips_per_host" ([2, 2, 1]), "chip_config" (None: libtpu's own),
"cache_dir", "keep" (whether the compiled program is kept for the hosts)}; the last line of standard output is the
answer. Exit code 2: the last line of standard error says what is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from contracts.errors import DONE, WRONG_REQUEST, RequestError, first_line
from contracts.files import DiskFiles
from jobs.runtime import option_rules
from jobs.runtime.jax import distributed, hlo
from jobs.runtime.jax.executables import Executables, compile_for, compiler_options

FOLDER = "aot"
HOOK = "lower_step"
MODULES = ("step", "train")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStep:
    """A training step, traced for devices that need not be there.

    parameters, optimizer: those of its arguments, as shapes with shardings. per_step: how many of `unit` a step takes,
    over all devices. model_operations: floating-point operations of a step over all devices, as MFU counts them; None:
    the job does not count them. steps: of the whole run; None where that depends on the data.
    """

    traced: jax.stages.Traced
    arguments: Any
    parameters: Any = ()
    optimizer: Any = ()
    unit: str = "steps"
    per_step: int = 1
    steps: int | None = None
    model_operations: int | None = None


def shapes(tree: Any, shardings: Any) -> Any:
    """A tree of arrays, or of what has shapes, as shapes with shardings, which a jitted function can be traced for."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def plain_step(
    devices: Sequence[jax.Device],
    first_state: Callable[[], Any],
    take_step: Callable[..., Any],
    batch: Sequence[jax.ShapeDtypeStruct],
    unit: str,
    steps: int | None,
) -> TrainStep:
    """The step of a job that trains by `distributed.Devices`: (state, *batch) to (state, loss), where a state is the
    parameters and the optimizer's state. batch: its arrays, of which each device has its rows."""
    all_devices = distributed.Devices(devices)
    drawn = jax.eval_shape(first_state)
    state = shapes(drawn, jax.tree.map(lambda _: all_devices.replicated, drawn))
    rows = shapes(list(batch), [all_devices.by_row] * len(batch))
    step: Any = all_devices.jit(take_step)
    return TrainStep(
        traced=step.trace(state, *rows),
        arguments=(state, *rows),
        parameters=state[0],
        optimizer=state[1],
        unit=unit,
        per_step=batch[0].shape[0],
        steps=steps,
    )


def main() -> int:
    request = json.load(sys.stdin)
    try:
        answer = measure(request)
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_REQUEST
    print(json.dumps(answer))
    return DONE


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compile the step of a request, or find what was found of the same program before.

    Raises:
        RequestError: the job hands over no step, or its options cannot work for these devices.
    """
    devices = slice_devices(request)
    options = request["words"]
    step = (
        script_step(request["script"], options, devices)
        if request.get("script")
        else lower_step(request["job"], options, devices)
    )
    lowered = step.traced.lower()
    compiler = f"libtpu {version('libtpu')}, jax {jax.__version__}"
    counting = [Path(module).read_bytes() for module in (__file__, hlo.__file__)]  # an answer is of this code
    flags = [os.environ.get("LIBTPU_INIT_ARGS"), compiler_options(devices)]
    facts = [counting, compiler, flags, *(request[name] for name in _TOPOLOGY)]
    scopes = step.traced.jaxpr.jaxpr.pretty_print(name_stack=True)  # which are no part of the program's text
    digest = hashlib.sha256(f"{facts}\n{scopes}\n{lowered.as_text()}".encode()).hexdigest()
    answer_path = Path(request["cache_dir"]) / FOLDER / f"{digest}.json"
    program = functools.cache(functools.partial(compile_for, devices, lowered))
    try:
        compiled = json.loads(answer_path.read_text())
        is_kept = True
    except (OSError, ValueError):
        compiled, is_kept = _compile(program, step, devices), False
        DiskFiles().write(str(answer_path), json.dumps(compiled).encode())
    note = None
    if request.get("keep") and compiled["fits"]:
        note = Executables(request["cache_dir"], mesh_devices(devices, step.arguments)).precompile(
            lowered, program
        )
    return {
        **compiled,
        "is_kept": is_kept,
        "note": note,
        "compiler": compiler,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "unit": step.unit,
        "per_step": step.per_step,
        "steps": step.steps,
        "model_operations": step.model_operations,
    }


_TOPOLOGY = ("topology", "slices", "chips_per_host", "chip_config")


def slice_devices(request: Mapping[str, Any]) -> list[jax.Device]:
    """The devices of one or several slices, as libtpu describes them."""
    config = {} if request["chip_config"] is None else {"chip_config_name": request["chip_config"]}
    described = topologies.get_topology_desc(
        platform="tpu",
        topology_name=request["topology"],
        num_slices=request["slices"],
        chips_per_host_bounds=request["chips_per_host"],
        **config,
    )
    return list(described.devices)


def lower_step(job: str, options: Sequence[str], devices: Sequence[jax.Device]) -> TrainStep:
    """A job's step for these devices.

    Raises:
        RequestError: the job hands over none, or its options cannot work.
    """
    config_module = importlib.import_module(f"jobs.{job}.config")
    config = config_module.Config(**option_rules.parse(config_module.Config, options).values)
    for name in MODULES:
        if importlib.util.find_spec(f"jobs.{job}.{name}") is None:
            continue
        hook = getattr(importlib.import_module(f"jobs.{job}.{name}"), HOOK, None)
        if hook is not None:
            step: TrainStep = hook(config, devices)
            return step
    raise RequestError(
        f"--job {job}: hands over no step to be compiled; it needs {HOOK}(config, devices) in its step.py or train.py"
    )


SCRIPT_STEP = ("step", "arguments")
"""What a script's `lower_step` returns at least: the jitted function, and what it is called with, as shapes with
shardings. Besides these it may say what else a `TrainStep` has."""
_SCRIPT_OPTIONAL = ("parameters", "optimizer", "unit", "per_step", "steps", "model_operations")


def script_step(path: str, options: Sequence[str], devices: Sequence[jax.Device]) -> TrainStep:
    """The step that a script hands over for these devices. The script is imported, with its words as arguments.

    Raises:
        RequestError: it cannot be imported, or hands over nothing that can be traced.
    """
    sys.argv, sys.path[:0] = [path, *options], [str(Path(path).parent)]
    spec = importlib.util.spec_from_file_location("script", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RequestError(
            f"{path}: cannot be imported ({first_line(error)}); it is given what TPU VMs have "
            '(requirements/tpu.in), and what trains stands below `if __name__ == "__main__":`'
        ) from None
    try:
        parts = getattr(module, HOOK)(devices)
        unknown = {*parts} - {*SCRIPT_STEP, *_SCRIPT_OPTIONAL}
        if unknown or not {*SCRIPT_STEP} <= {*parts}:
            raise ValueError(
                f"it has to return a dictionary with {' and '.join(SCRIPT_STEP)}, and may add "
                f"{', '.join(_SCRIPT_OPTIONAL)}"
            )
        _bytes(parts["arguments"])  # whether they can be shared out so
        traced = parts["step"].trace(*parts["arguments"])
    except Exception as error:
        raise RequestError(f"{path}: {HOOK}: {first_line(error)}") from None
    return TrainStep(traced=traced, **{name: part for name, part in parts.items() if name != "step"})


def _compile(
    program: Callable[[], jax.stages.Compiled], step: TrainStep, devices: Sequence[jax.Device]
) -> dict[str, Any]:
    began_s = time.monotonic()
    held = {"parameters": _bytes(step.parameters), "optimizer": _bytes(step.optimizer)}
    held["batch"] = _bytes(step.arguments) - sum(held.values())
    try:
        compiled = program()
    except jax.errors.JaxRuntimeError as error:
        out_of_memory = hlo.out_of_memory(str(error))
        if out_of_memory is None:
            raise
        used, limit = out_of_memory
        held["temporaries"] = max(0, used - sum(held.values()))
        return {
            "fits": False,
            "memory": {**held, "total": used, "limit": limit},
            "compile_s": time.monotonic() - began_s,
        }
    compile_s = time.monotonic() - began_s
    memory: Any = compiled.memory_analysis()
    held["temporaries"] = memory.temp_size_in_bytes
    held["program"] = memory.generated_code_size_in_bytes
    total = sum(held.values()) + memory.output_size_in_bytes - memory.alias_size_in_bytes
    costs: Any = compiled.cost_analysis() or {}
    account = hlo.summary(compiled.as_text() or "", _places(devices, step.arguments))
    return {
        "fits": True,
        "memory": {**held, "total": total, "limit": None},
        "compile_s": compile_s,
        "cycles": account.all_cycles,
        "memory_bytes": account.memory_bytes,
        "program_operations": round(max(0.0, costs.get("flops", 0.0))),
        "kernels": kernels(step.traced.jaxpr.jaxpr),
        "without_estimate": {
            name: count for name, count in account.without_estimate.items() if name != PALLAS_TARGET
        },
        "collectives": [collective._asdict() for collective in account.collectives],
        "spent": [
            {"scope": scope, "operation": operation, "cycles": cycles}
            for (scope, operation), cycles in Counter(account.cycles).most_common()
        ],
    }


def _bytes(tree: Any) -> int:
    """Of a device's part of every leaf."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def mesh_devices(devices: Sequence[jax.Device], arguments: Any) -> list[Any]:
    """The devices in the order of the mesh of the arguments."""
    mesh = jax.tree.leaves(arguments)[0].sharding.mesh
    return list(devices) if mesh.empty else list(mesh.devices.flat)


def _places(devices: Sequence[jax.Device], arguments: Any) -> list[tuple[int, int]]:
    """(slice, host) of each device, in the order of the mesh. The compiler numbers devices within their slice."""
    return [
        (getattr(device, "slice_index", None) or 0, device.process_index)
        for device in mesh_devices(devices, arguments)
    ]


# --- kernels ---------------------------------------------------------------------------------------------------------

PALLAS_TARGET = "tpu_custom_call"


def kernels(jaxpr: Any) -> list[dict[str, Any]]:
    """What a step's Pallas kernels do on a device, of which the compiler estimates nothing: the operations of their
    matrix products, for all points of their grid, and the bytes of what they read and write, once."""
    counters: dict[str, Counter[str]] = {}
    for equation, times in _equations(jaxpr, 1):
        if equation.primitive.name != "pallas_call":
            continue
        name = str(equation.params.get("name") or "kernel")
        points = math.prod(size for size in equation.params["grid_mapping"].grid if isinstance(size, int))
        products = sum(
            _product_operations(inner) * count
            for inner, count in _equations(equation.params["jaxpr"], 1)
            if inner.primitive.name == "dot_general"
        )
        arrays = [variable.aval for variable in (*equation.invars, *equation.outvars)]
        moved = sum(math.prod(variable.shape) * variable.dtype.itemsize for variable in arrays)
        counters.setdefault(name, Counter()).update(
            count=times, operations=times * points * products, bytes=times * moved
        )
    return [{"name": name, **counts} for name, counts in counters.items()]


def _equations(jaxpr: Any, times: int) -> Iterator[tuple[Any, int]]:
    """All equations of a program with how often each is carried out; not those within kernels."""
    for equation in jaxpr.eqns:
        yield equation, times
        if equation.primitive.name == "pallas_call":
            continue
        count = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner, count)


def _product_operations(equation: Any) -> int:
    """A multiplication and an addition for each pair that a product adds up."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    along = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    return int(2 * along * math.prod(equation.outvars[0].aval.shape))


if __name__ == "__main__":
    # The module as jobs import it, and not this one: they make its `TrainStep`.
    sys.exit(importlib.import_module("jobs.runtime.jax.aot").main())
