"""The devices as a grid: the rows of a batch over all of them, each matrix over the `fsdp` of a group or whole on each.

Fully sharded data parallelism (Rajbhandari et al. 2020, arXiv:1910.02054, stage 3): the devices of a group hold one
copy of the parameters and of the optimizer's state between them. A device collects a layer's matrices when it comes to
the layer (`model_of`), and of their gradient it keeps its own part, summed over the group; then the groups sum theirs.

Where the parameters are whole on each device, the TPUs of one host share out the optimizer's work and state all the
same (weight update sharding: Xu et al. 2020, arXiv:2004.13336): of a matrix's gradient a device takes the sum of its
own rows only, updates these, and collects the others'. As many bytes pass between devices as if each took the whole
sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from contracts.errors import RequestError
from jobs.flax_mlm.model import Apply, Layer, Mlm, plainly
from jobs.runtime.jax.custom_gradients import platform

DATA, FSDP = "data", "fsdp"
"""The grid's axes: groups of devices, and the devices of a group."""
ROWS = PartitionSpec((DATA, FSDP))
WHOLE = PartitionSpec()
CUT = PartitionSpec(FSDP)
"""By its first axis: a device's part is whole rows, which lie next to each other in memory."""


def make_mesh(fsdp: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """All devices (or these) in groups of `fsdp`; raises as `grid` does."""
    return Mesh(grid(fsdp, jax.devices() if devices is None else devices), (DATA, FSDP))


def grid(fsdp: int, devices: Sequence[Any]) -> np.ndarray:
    """(groups, fsdp) devices: a group is of neighbours, and of a multislice run it lies within a slice.

    Raises:
        RequestError: a slice's devices do not make groups of `fsdp`.
    """
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    of_a_slice = len(devices) // slices
    if of_a_slice % fsdp:
        raise RequestError(
            f"--fsdp {fsdp}: a group lies within a slice, and the {of_a_slice} devices of one do not make groups of "
            f"{fsdp}; choose a number that divides {of_a_slice}"
        )
    within = (of_a_slice // fsdp, fsdp)
    # Groups of 2 or 8 divide an axis of the network of 4 x 4 chips: without leave for that there is no such mesh.
    if slices > 1:
        made = mesh_utils.create_hybrid_device_mesh(
            within, (slices, 1), devices, allow_split_physical_axes=True
        )
    else:
        made = mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
    return np.asarray(made)


def by_row(mesh: Mesh) -> NamedSharding:
    """The sharding of (B, …) arrays of which each device has its own rows."""
    return NamedSharding(mesh, ROWS)


def whole(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays that every device has whole."""
    return NamedSharding(mesh, WHOLE)


def specs(tree: Any, mesh: Mesh) -> Any:
    """How each leaf of a state lies: a matrix that the group can share out evenly is cut, anything else is whole."""
    group = mesh.shape[FSDP]
    return jax.tree.map(
        lambda leaf: CUT if group > 1 and leaf.ndim > 1 and leaf.shape[0] % group == 0 else WHOLE, tree
    )


def update_specs(tree: Any, mesh: Mesh) -> Any:
    """How gradients and what the optimizer keeps of each leaf lie: as `specs`, or by its rows over all devices."""
    if not _shares_updates(mesh):
        return specs(tree, mesh)
    return jax.tree.map(
        lambda leaf: ROWS if leaf.ndim > 1 and leaf.shape[0] % mesh.size == 0 else WHOLE, tree
    )


def _shares_updates(mesh: Mesh) -> bool:
    """Not on CPUs, where each sum between processes costs the same whatever its size. Not beyond one host either: over
    16 chips the TPU compiler makes a whole sum of each that is scattered, and over 256 another one of each that is
    collected, so that 1.5 to 2 times as many bytes pass between devices (docs/benchmarks.md)."""
    devices = mesh.devices.flat
    is_one_host = len({device.process_index for device in devices}) == 1
    return mesh.size > 1 and is_one_host and mesh.shape[FSDP] == 1 and devices[0].platform == "tpu"


def shardings(state: dict[str, Any], mesh: Mesh) -> Any:
    """How the parts of a training's state lie, as jit and Orbax take it."""
    parts = {
        name: update_specs(part, mesh) if name == "opt_state" else specs(part, mesh)
        for name, part in state.items()
    }
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), parts)


def to_host(tree: Any, mesh: Mesh) -> Any:
    """Copy every leaf whole into this host's memory, one after the other: no device holds more than one of them."""
    collected = jax.jit(lambda leaf: leaf, out_shardings=whole(mesh))
    return jax.tree.map(lambda leaf: np.asarray(collected(leaf)), tree)


def collect(tree: Any, tree_specs: Any) -> Any:
    """On each device: the parameters whole. The gradient of what was cut comes back cut, and summed over the group."""
    return jax.tree.map(
        lambda leaf, spec: jax.lax.all_gather(leaf, FSDP, tiled=True) if spec == CUT else leaf,
        tree,
        tree_specs,
    )


def sum_gradients(gradient: Any, gradient_specs: Any) -> Any:
    """The sum over all devices of gradients that `collect` has dealt with; of `ROWS` each device's own part of it."""
    leaves, structure = jax.tree.flatten(gradient)
    leaf_specs = jax.tree.leaves(gradient_specs)

    def with_spec(spec: PartitionSpec) -> list[jax.Array]:
        return [leaf for leaf, its in zip(leaves, leaf_specs, strict=True) if its == spec]

    scattered = [jax.lax.psum_scatter(leaf, (DATA, FSDP), tiled=True) for leaf in with_spec(ROWS)]
    summed = {
        CUT: iter(sum_over(with_spec(CUT), (DATA,))),
        WHOLE: iter(sum_over(with_spec(WHOLE))),
        ROWS: iter(scattered),
    }
    return jax.tree.unflatten(structure, [next(summed[spec]) for spec in leaf_specs])


def sum_over(tree: Any, axes: tuple[str, ...] = (DATA, FSDP)) -> Any:
    """The sum of each leaf over the devices along `axes`.

    Between processes on CPU a sum costs 2 to 3 ms whatever its size (gloo), so there all leaves go as one array:
    40 arrays of 18,000 took 75 to 116 ms, one of 743,000 took 3.6 ms. XLA combines them itself on TPU and GPU.
    """
    if not jax.tree.leaves(tree) or all(jax.lax.axis_size(axis) == 1 for axis in axes):
        return tree
    if platform() != "cpu":
        return jax.lax.psum(tree, axes)
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.psum(flat, axes))


def on_each_device(
    body: Callable[..., Any], mesh: Mesh, inputs: tuple[Any, ...], outputs: Any
) -> Callable[..., Any]:
    """`body` on each device's own part of the inputs.

    Without check_vma: that check makes autodiff sum each parameter's gradient by itself, where one sum of them all is
    many times faster on CPU, and wants gradients that are written by hand to do that too (jax 0.12).
    """
    return jax.shard_map(body, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


type ModelOf = Callable[[Any], Callable[..., jax.Array]]
"""Parameters to what they make of the inputs of a method of `Mlm`, but for `apply`."""


def model_of(
    graph: nnx.GraphDef[Mlm],
    params_specs: Any,
    *,
    method: Callable[..., jax.Array] = Mlm.__call__,
    remat: bool = False,
) -> ModelOf:
    """On each device: parameters, of which it may hold only a part, to this method of the model.

    remat: of what a layer computes only its input is kept for the backward pass, and computed again from it.
    Matrices that had to be collected are not kept either: they are collected a second time.
    """
    apply = _layer_by_layer(params_specs, remat)

    def model(params: Any) -> Callable[..., jax.Array]:
        merged = nnx.merge(graph, _all_but_layers(params, params_specs))
        return functools.partial(method, merged, apply=apply)

    return model


def _all_but_layers(params: Any, params_specs: Any) -> Any:
    """The parameters with all that is no layer's collected: the layers' are when their turn comes."""
    collected = {name: collect(params[name], params_specs[name]) for name in params if name != "layers"}
    return {**collected, "layers": params["layers"]}


def _layer_by_layer(params_specs: Any, remat: bool) -> Apply:
    """How a layer is applied on a device that may hold only a part of it."""
    layer_specs = params_specs["layers"][0]
    is_cut = any(spec == CUT for spec in jax.tree.leaves(layer_specs))
    if not is_cut and not remat:
        return plainly

    def apply(layer: Layer, *inputs: jax.Array | None) -> jax.Array:
        graph, state = nnx.split(layer)

        def applied(params: Any, *inputs: jax.Array | None) -> jax.Array:
            whole: Layer = nnx.merge(graph, collect(params, layer_specs))
            return plainly(whole, *inputs)

        checkpointed = jax.checkpoint(applied, policy=None if remat else _is_kept)
        result: jax.Array = checkpointed(nnx.to_pure_dict(state), *inputs)
        return result

    return apply


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a result is kept for the backward pass: not a collected matrix, nor a view of it."""
    return primitive.name not in (
        "all_gather",
        "transpose",
        "reshape",
        "slice",
        "squeeze",
    )
