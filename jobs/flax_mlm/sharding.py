"""The devices as a grid: the rows of a batch over all of them, each matrix over the `fsdp` of a group or whole on each.

Fully sharded data parallelism (Rajbhandari et al. 2020, arXiv:1910.02054, stage 3): the devices of a group hold one
copy of the parameters and of the optimizer's state between them. A device collects a layer's matrices when it comes to
the layer (`make_model`), and of their gradient it keeps its own part, summed over the group; then the groups sum
theirs.

The TPUs of one host are such a group without being asked: as many bytes pass between them as if each took the whole
sum, and each does only its part of the optimizer's work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from contracts.errors import RequestError
from jobs.flax_mlm.model import Layer, Mlm, plainly
from jobs.runtime.jax.custom_gradients import platform, rounded

DATA, FSDP = "data", "fsdp"
"""The grid's axes: groups of devices, and the devices of a group."""
ROWS = PartitionSpec((DATA, FSDP))
REPLICATED = PartitionSpec()
SHARDED = PartitionSpec(FSDP)
"""By its first axis: a device's part is whole rows, which lie next to each other in memory."""
FLOAT32 = jnp.dtype(jnp.float32)


def make_mesh(fsdp: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """All devices (or these) in groups of `fsdp`; raises as `grid` does. 1: `_own_group` says how many."""
    devices = jax.devices() if devices is None else devices
    return Mesh(grid(_own_group(devices) if fsdp == 1 else fsdp, devices), (DATA, FSDP))


def _own_group(devices: Sequence[Any]) -> int:
    """The devices of a group where nobody asks for groups: all TPUs of a single host, or one.

    Not on CPUs, where each sum between processes costs the same whatever its size. Not beyond one host either: over 16
    chips the TPU compiler makes a whole sum of each that is scattered, and over 256 another one of each that is
    collected, so that 1.5 to 2 times as many bytes pass between devices (docs/benchmarks.md).
    """
    is_one_host = len({device.process_index for device in devices}) == 1
    return len(devices) if is_one_host and devices[0].platform == "tpu" else 1


def grid(fsdp: int, devices: Sequence[Any]) -> np.ndarray:
    """(groups, fsdp) devices: a group is of neighbours, and of a multislice run it lies within a slice.

    Raises:
        RequestError: a slice's devices do not make groups of `fsdp`.
    """
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    devices_per_slice = len(devices) // slices
    if devices_per_slice % fsdp:
        raise RequestError(
            f"--fsdp {fsdp}: a group lies within a slice, and the {devices_per_slice} devices of one do not make "
            f"groups of {fsdp}; choose a number that divides {devices_per_slice}"
        )
    group_grid = (devices_per_slice // fsdp, fsdp)
    # Groups of 2 or 8 divide an axis of the network of 4 x 4 chips: without leave for that there is no such mesh.
    if slices > 1:
        device_grid = mesh_utils.create_hybrid_device_mesh(
            group_grid, (slices, 1), devices, allow_split_physical_axes=True
        )
    else:
        device_grid = mesh_utils.create_device_mesh(group_grid, devices, allow_split_physical_axes=True)
    return np.asarray(device_grid)


def by_row(mesh: Mesh) -> NamedSharding:
    """The sharding of (B, …) arrays of which each device has its own rows."""
    return NamedSharding(mesh, ROWS)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays that every device has whole."""
    return NamedSharding(mesh, REPLICATED)


def specs(tree: Any, mesh: Mesh) -> Any:
    """How each leaf of a state lies: a matrix that the group can share out evenly is cut, anything else is whole."""
    group = mesh.shape[FSDP]
    return jax.tree.map(
        lambda leaf: SHARDED if group > 1 and leaf.ndim > 1 and leaf.shape[0] % group == 0 else REPLICATED,
        tree,
    )


def shardings(state: dict[str, Any], mesh: Mesh) -> Any:
    """How the parts of a training's state lie, as jit and Orbax take it."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(state, mesh))


def to_host(tree: Any, mesh: Mesh) -> Any:
    """Copy every leaf whole into this host's memory, one after the other: no device holds more than one of them."""
    collected = jax.jit(lambda leaf: leaf, out_shardings=replicated(mesh))
    return jax.tree.map(lambda leaf: np.asarray(collected(leaf)), tree)


def collect(tree: Any, tree_specs: Any, sent: jnp.dtype) -> Any:
    """On each device: the parameters whole. The gradient of what was cut comes back cut, and summed over the group.

    sent: the dtype in which both pass between devices.
    """
    return jax.tree.map(
        lambda leaf, spec: _collected(leaf, sent) if spec == SHARDED else leaf,
        tree,
        tree_specs,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _collected(part: jax.Array, sent: jnp.dtype) -> jax.Array:
    """Of `part` of each device of the group the whole, in its own dtype: a table's gradient is a sum of many small
    numbers, which `sent` may not hold."""
    collected: jax.Array = jax.lax.all_gather(rounded(part, sent), FSDP, tiled=True)
    return collected.astype(part.dtype)


def _collected_backward(sent: jnp.dtype, _residuals: None, gradient: jax.Array) -> tuple[jax.Array]:
    summed = jax.lax.psum_scatter(rounded(gradient, sent), FSDP, tiled=True)
    return (summed.astype(gradient.dtype),)


_collected.defvjp(lambda part, sent: (_collected(part, sent), None), _collected_backward)


def sum_gradients(gradient: Any, gradient_specs: Any, sent: jnp.dtype) -> Any:
    """The sum over all devices of gradients that `collect` has dealt with. sent: the dtype in which those of matrices
    pass between devices."""
    leaves, structure = jax.tree.flatten(gradient)
    leaf_specs = jax.tree.leaves(gradient_specs)
    narrow = [rounded(leaf, sent) if leaf.ndim > 1 else leaf for leaf in leaves]

    def with_spec(spec: PartitionSpec) -> list[jax.Array]:
        return [leaf for leaf, leaf_spec in zip(narrow, leaf_specs, strict=True) if leaf_spec == spec]

    summed = {
        SHARDED: iter(sum_over(with_spec(SHARDED), (DATA,))),
        REPLICATED: iter(sum_over(with_spec(REPLICATED))),
    }
    sums = [next(summed[spec]).astype(leaf.dtype) for leaf, spec in zip(leaves, leaf_specs, strict=True)]
    return jax.tree.unflatten(structure, sums)


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


def make_model(
    graph: nnx.GraphDef[Mlm],
    params_specs: Any,
    *,
    method: Callable[..., jax.Array] = Mlm.__call__,
    sent: jnp.dtype = FLOAT32,
    remat: bool = False,
    recollect: bool = False,
) -> ModelOf:
    """On each device: parameters, of which it may hold only a part, to this method of the model.

    sent: as `collect` has it. remat: of what a layer computes only its input is kept for the backward pass, and
    computed again from it. recollect: a layer's matrices that had to be collected are not kept either: they are
    collected a second time.
    """

    def apply(layer: Layer, *inputs: jax.Array | None) -> jax.Array:
        graph, state = nnx.split(layer)

        def applied(params: Any, *inputs: jax.Array | None) -> jax.Array:
            whole_layer: Layer = nnx.merge(graph, collect(params, params_specs["layers"][0], sent))
            return plainly(whole_layer, *inputs)

        if remat or recollect:
            applied = jax.checkpoint(applied, policy=None if remat else _is_kept)
        result: jax.Array = applied(nnx.to_pure_dict(state), *inputs)
        return result

    def model(params: Any) -> Callable[..., jax.Array]:
        # All that is no layer's is collected now, the layers' when their turn comes.
        collected = {
            name: part if name == "layers" else collect(part, params_specs[name], sent)
            for name, part in params.items()
        }
        return functools.partial(method, nnx.merge(graph, collected), apply=apply)

    return model


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a result is kept for the backward pass: not a collected matrix, nor a view of it."""
    return primitive.name not in (
        "all_gather",
        "convert_element_type",
        "transpose",
        "reshape",
        "slice",
        "squeeze",
    )
