"""Leaves: the floating-point arrays of a pytree as named tensors, shard by shard, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax import tree_util
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from gossamer.errors import AttachError, LayoutError, LoopError
from gossamer.train.engine.arrays import as_numpy, as_tensor

SMALL_BYTES = 128 * 2**10  # of an array that is copied faster than device_put shares its memory
TRAINED = ("float32", "bfloat16", "float16", "float64")
Index = tuple[tuple[int, int], ...]  # first and last entry, by dimension


class LeafPart(NamedTuple):
    """The entries of a leaf that one device holds."""

    name: str
    place: Index


@dataclass(frozen=True)
class _LeafSpec:
    """A leaf with averaged entries. parts: those that this process holds, by their place in the leaf."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    parts: tuple[LeafPart, ...]
    kind: Any  # the type, of a JAX array

    @cached_property
    def is_read_in_place(self) -> bool:
        """Whether the leaf is an array of one device that shares the memory of the host."""
        devices = self.sharding.device_set
        return len(devices) == 1 and next(iter(devices)).platform == "cpu"

    def describes(self, leaf: Any) -> bool:
        """Whether `leaf` is a JAX array of this form on these devices that was not deleted."""
        return bool(
            type(leaf) is self.kind
            and leaf.shape == self.shape
            and leaf.dtype == self.dtype
            and leaf.sharding == self.sharding
            and not leaf.is_deleted()
        )

    @cached_property
    def is_whole(self) -> bool:
        """Whether each device holds the whole leaf."""
        return bool(self.sharding.is_fully_replicated)

    def fits(self, sharding: Any) -> bool:
        """Whether an array of `sharding` has the same parts."""
        if self.is_whole:
            return bool(sharding.is_fully_replicated)
        return bool(sharding == self.sharding or sharding.is_equivalent_to(self.sharding, len(self.shape)))

    def index(self, slices: Any) -> Index:
        """Slices of this leaf, as a sharding has them."""
        return _index(slices, self.shape)


@dataclass(frozen=True)
class Taken:
    """A pytree as tensors by name, with its structure and shardings, so that a similar tree can be built."""

    form: Any  # the tree's structure
    places: Sequence[Any]  # of the leaves: shardings, or the leaf itself where it is carried
    arrays: Sequence[Any] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def unshared(self) -> Taken:
        """Without returning any given array itself."""
        return replace(self, tensors={})

    def released(self) -> Taken:
        """Without the arrays, so that their memory can be freed."""
        return replace(self, arrays=(), tensors={})


class Leaves:
    """The leaves of `tree`. Arrays of floating-point numbers become tensors, one for each distinct shard of this
    process; other leaves (integers, keys, functions, None) are returned unchanged.

    Args:
        every: convert all arrays of numbers to tensors, as for an optimizer's state.

    Raises:
        AttachError: for arrays that cannot be averaged.
    """

    def __init__(self, tree: Any, rank: int, *, every: bool = False) -> None:
        paths, self._form = tree_util.tree_flatten_with_path(tree, is_leaf=_is_none)
        self._rank, self._every = rank, every
        self._names = [_name(path) for path, _ in paths]
        for name, count in Counter(self._names).items():
            if count > 1:
                raise AttachError(
                    f'rank {rank}: two leaves have the name "{name}", which joins the keys of their path by dots. '
                    "Rename one of the keys."
                )
        self.all = [self._leaf(name, leaf) for name, (_, leaf) in zip(self._names, paths, strict=True)]
        self.trained = [leaf for leaf in self.all if leaf is not None]
        self._numbers = {name for name, (_, leaf) in zip(self._names, paths, strict=True) if type(leaf) is float}
        if not self.trained and not every:
            raise AttachError(
                f"rank {rank}: the tree has no array of floating-point numbers ({', '.join(self._names) or 'empty'}). "
                "Give the parameters of the model, as model.init(key, inputs) returns them."
            )

    def _leaf(self, name: str, leaf: Any) -> _LeafSpec | None:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic) or _is_key(leaf):
            return None
        if not self._every:
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating) or _is_unknown_float(leaf.dtype):
                raise AttachError(
                    f'rank {self._rank}: "{name}" has dtype {leaf.dtype}, and means are taken of {", ".join(TRAINED)}. '
                    "Give it as one of these."
                )
            if leaf.dtype.name not in TRAINED:
                return None
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise AttachError(
                f'rank {self._rank}: "{name}" has dtype {leaf.dtype}, and JAX computes in 32 bits here. Write '
                'jax.config.update("jax_enable_x64", True) before the first array, or give leaf.astype("float32").'
            )
        self._usable(name, leaf, "parameter")
        sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        kind = type(leaf) if isinstance(leaf, jax.Array) else None
        if sharding.is_fully_replicated:
            return _LeafSpec(name, leaf.shape, leaf.dtype, sharding, (LeafPart(name, _index((), leaf.shape)),), kind)
        held = {_index(shard.index, leaf.shape): None for shard in getattr(leaf, "addressable_shards", ())}
        parts = tuple(LeafPart(part_name(name, index), index) for index in sorted(held))
        return _LeafSpec(name, leaf.shape, leaf.dtype, sharding, parts, kind)

    def _usable(self, name: str, leaf: Any, role: str) -> None:
        if isinstance(leaf, jax.core.Tracer):
            raise LoopError(
                f'rank {self._rank}: the {role} "{name}" is traced: the call is within jit, grad or scan, where it '
                "would run once. Call it between two jitted functions; gossamer.jax.optimizer(...) averages within jit."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise LoopError(
                f'rank {self._rank}: the {role} "{name}" was deleted: a jitted function that donates its arguments '
                "(donate_argnums) has used its memory. Pass the array that the function returned."
            )

    # -- out of JAX ------------------------------------------------------------------------------------------------

    def take(self, tree: Any, role: str) -> Taken:
        """The leaves as tensors, on CPU without a copy. role: the name of these arrays in errors.

        Raises:
            LayoutError: if structure, shapes or dtypes differ from those of the first tree.
            LoopError: for traced or deleted arrays.
        """
        leaves, form = tree_util.tree_flatten(tree, is_leaf=_is_none)
        if form != self._form:
            self._compare_names(tree, role)
        known = [spec is not None and spec.describes(leaf) for spec, leaf in zip(self.all, leaves, strict=True)]
        arrays = [
            leaf if spec is None or is_known else self._placed(spec, leaf, role)
            for spec, leaf, is_known in zip(self.all, leaves, known, strict=True)
        ]
        if role == "gradient":
            self._refuse_gradients_of_numbers(leaves)
        for spec, array in zip(self.all, arrays, strict=True):
            if spec is not None and not spec.is_read_in_place and not _on_cpu(array):
                array.copy_to_host_async()
        jax.block_until_ready([array for spec, array in zip(self.all, arrays, strict=True) if spec is not None])
        tensors: dict[str, Tensor] = {}
        places: list[Any] = []
        for spec, array, is_known in zip(self.all, arrays, known, strict=True):
            if spec is None:
                places.append(array)
                continue
            places.append(_place(array))
            if is_known and spec.is_read_in_place:
                tensors[spec.name] = from_dlpack(array.__dlpack__())
            else:
                tensors.update(_tensors(spec, array))
        return Taken(form, places, arrays, tensors)

    def _refuse_gradients_of_numbers(self, gradients: Sequence[Any]) -> None:
        """Raise LayoutError where a Python number is trained: JAX differentiates it, but it is not averaged."""
        for name, gradient in zip(self._names, gradients, strict=True):
            if name in self._numbers and hasattr(gradient, "dtype") and not _is_key(gradient):
                raise LayoutError(
                    f'rank {self._rank}: "{name}" has a gradient, but the session\'s parameter is a Python float, and '
                    "only arrays are averaged. Make it an array before the session begins, as by "
                    "jax.tree.map(jnp.asarray, parameters)."
                )

    def _compare_names(self, tree: Any, role: str) -> None:
        names = [_name(path) for path, _ in tree_util.tree_flatten_with_path(tree, is_leaf=_is_none)[0]]
        if names == self._names:
            return
        missing = ", ".join(name for name in self._names if name not in names) or "none"
        unknown = ", ".join(name for name in names if name not in self._names) or "none"
        raise LayoutError(
            f"rank {self._rank}: the tree of each {role} differs from that of the session's parameters: missing "
            f"{missing}; unknown {unknown}; in another order: {sorted(names) == sorted(self._names)}. Pass trees of "
            "the same structure, or construct a new session for another model, on every rank."
        )

    def _placed(self, spec: _LeafSpec, leaf: Any, role: str) -> Any:
        """The leaf, with the shards of the session's parameter."""
        if not hasattr(leaf, "dtype") or leaf.shape != spec.shape or leaf.dtype != spec.dtype:
            found = (
                f"shape {leaf.shape} and dtype {leaf.dtype}"
                if hasattr(leaf, "dtype")
                else f"type {type(leaf).__name__}"
            )
            raise LayoutError(
                f'rank {self._rank}: the {role} "{spec.name}" has {found}; the session\'s parameter has shape '
                f"{spec.shape} and dtype {spec.dtype}. Give it in these, as by leaf.astype(parameter.dtype)."
            )
        self._usable(spec.name, leaf, role)
        if not isinstance(leaf, jax.Array) or spec.fits(leaf.sharding):
            return leaf
        return jax.device_put(leaf, spec.sharding)  # XLA may shard a gradient that the parameter has whole

    # -- into JAX --------------------------------------------------------------------------------------------------

    def back(self, taken: Taken, tensors: Mapping[str, Tensor]) -> Any:
        """A tree of `tensors`, without a copy, in the structure of `taken`. A leaf with unchanged tensors is the given
        array."""
        leaves: list[Any] = [*(taken.arrays or taken.places)]
        fresh = []
        for place, spec in enumerate(self.all):
            if spec is None or _same(spec, taken, tensors):
                continue
            at = taken.places[place]
            devices = [(None, spec.parts[0])] if at is None else _devices(spec, at)
            fresh.append((place, spec, at, devices))
        views = [as_numpy(tensors[part.name], spec.dtype) for _, spec, _, devices in fresh for _, part in devices]
        targets = [device for *_, devices in fresh for device, _ in devices]
        put = iter(_put(views, targets))
        for place, spec, at, devices in fresh:
            shards = [next(put) for _ in devices]
            whole = at is None or len(at.device_set) == 1
            leaves[place] = shards[0] if whole else jax.make_array_from_single_device_arrays(spec.shape, at, shards)
        return tree_util.tree_unflatten(taken.form, leaves)

    def on_host(self, taken: Taken, tensors: Mapping[str, Tensor]) -> Any:
        """The tree as numpy arrays, of unsharded leaves alone."""
        leaves = [
            carried if spec is None else as_numpy(tensors[spec.name], spec.dtype)
            for spec, carried in zip(self.all, taken.places, strict=True)
        ]
        return tree_util.tree_unflatten(taken.form, leaves)


_copied = jax.jit(lambda views: [jnp.asarray(view) for view in views])


def _put(views: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
    """All views as JAX arrays. Small ones are copied by a compiled function: device_put of an array takes longer."""
    if not views:
        return []
    if all(target is None for target in targets):  # not committed to a device, as jnp.zeros() is not
        found: list[Any]
        if sum(view.nbytes for view in views) <= SMALL_BYTES * len(views):
            with jax.transfer_guard_host_to_device("allow"):  # the caller's guard is for its own transfers
                found = _copied([*views])
        else:
            found = jax.device_put([*views])
        return found
    if None in targets:
        return [jax.device_put(view, target) for view, target in zip(views, targets, strict=True)]
    found = jax.device_put([*views], [*targets])
    return found


def _same(spec: _LeafSpec, taken: Taken, tensors: Mapping[str, Tensor]) -> bool:
    return all(tensors[part.name] is taken.tensors.get(part.name) for part in spec.parts)


def _place(array: Any) -> Any:
    """The sharding of an array; None for one that JAX may move, as jnp.zeros(3)."""
    if not isinstance(array, jax.Array) or not array.committed:
        return None
    return array.sharding


def _devices(spec: _LeafSpec, sharding: Any) -> list[tuple[Any, LeafPart]]:
    """The devices of this process with the part that each of them holds."""
    if len(sharding.device_set) == 1:
        return [(sharding, spec.parts[0])]
    by_index = {part.place: part for part in spec.parts}
    held = sharding.addressable_devices_indices_map(spec.shape)
    return [(device, by_index[_index(index, spec.shape)]) for device, index in held.items()]


def _tensors(spec: _LeafSpec, array: Any) -> dict[str, Tensor]:
    if spec.is_whole:
        return {spec.name: _tensor(array.addressable_data(0) if isinstance(array, jax.Array) else array)}
    shards = {_index(shard.index, spec.shape): shard for shard in array.addressable_shards}
    return {part.name: _tensor(shards[part.place].data) for part in spec.parts}


def _tensor(array: Any) -> Tensor:
    """An array of one device: on CPU a view, else a copy."""
    return as_tensor(array if _on_cpu(array) else np.array(array))


def _on_cpu(array: Any) -> bool:
    return not isinstance(array, jax.Array) or next(iter(array.devices())).platform == "cpu"


def _name(path: Any) -> str:
    """The keys of a leaf's path, joined by dots. The `value` of a variable is not part of its name: flax.nnx passes
    variables to `init` of an optimizer, and their values to its `update`."""
    if len(path) > 1 and path[-1] == tree_util.GetAttrKey("value"):
        path = path[:-1]
    return tree_util.keystr(path, simple=True, separator=".") or "parameters"


def _index(slices: Any, shape: Sequence[int]) -> Index:
    """Slices as pairs of numbers; without them, the whole."""
    if not slices:
        return tuple((0, size) for size in shape)
    return tuple(each.indices(size)[:2] for each, size in zip(slices, shape, strict=True))


def part_name(leaf: str, index: Index | None) -> str:
    """The name of a part of a leaf; None: the whole."""
    return leaf if index is None else f"{leaf}[{','.join(f'{first}:{last}' for first, last in index)}]"


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _is_key(leaf: Any) -> bool:
    """Whether the dtype exists only in JAX: random keys, and gradients of integers."""
    return bool(leaf.dtype == jax.dtypes.float0 or jnp.issubdtype(leaf.dtype, jax.dtypes.extended))


def _is_unknown_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.name not in TRAINED
