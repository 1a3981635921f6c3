"""Buckets: flat buffers of gradients of one device and dtype, with the same layout on every rank, and their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.compressors.feedback_rules import begins_from
from gossamer.algorithms.compressors.sharded import is_unsent, redivide
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.kernels import scratch_like
from gossamer.base.layout import FlatTensors, Layout, Slot, dense_stride, dtype_name
from gossamer.errors import AttachError, LayoutError, LoopError

EARLY_BYTES = 2**16  # gradients from this size are copied early; on a GPU one launch copies many small ones


class Bucket:
    """Gradients that are compressed and sent together. flat: the gradients; state: the compressor's state."""

    def __init__(self, parameters: Mapping[str, Parameter], compressor: Compressor, at: AggregationContext) -> None:
        self.layout = arrange(parameters, compressor)
        example = next(iter(parameters.values()))
        self.flat = torch.zeros(self.layout.numel, dtype=example.dtype, device=example.device)
        self.packed = FlatTensors(self.flat, self.layout)
        self.mean_buffer = self.flat  # receives the mean; overwrites the gradients unless inputs are kept
        self.parameters = {slot.name: parameters[slot.name] for slot in self.layout}
        self.views = dict(self.packed.items())
        self._rows = [(name, each, self.views[name], self.views[name].shape) for name, each in self.parameters.items()]
        self.state: State = compressor.init(self.packed, at)
        self._compressor, self._at = compressor, at
        self._before: State | None = None  # the state that the last commit replaced
        self._rooms: list[Tensor] = []  # buffers for means, used in turn
        large = (name for name, view in self.views.items() if view.is_cpu and view.nbytes >= EARLY_BYTES)
        self.early = frozenset(large)  # copied before all gradients have arrived
        self.in_parts: set[str] = set()  # gradients that arrived in several parts in some pass
        self.expect_all()
        self._shown = self.flat._version

    def keep_inputs(self) -> None:
        """Write means to separate memory from now on, since repeating an exchange needs its inputs. A mean remains
        unchanged until the next exchange ends, for ranks that missed it; optimizers get a copy."""
        self._rooms = self._rooms or [torch.empty_like(self.flat) for _ in range(2)]
        self.mean_buffer = self._rooms[0]

    def exchanged(self) -> None:
        """Called after an exchange: switch the buffer for the next mean."""
        if self._rooms:
            self._rooms.reverse()
            self.mean_buffer = self._rooms[0]

    def expect_all(self) -> None:
        """Prepare for the next backward pass."""
        self.missing = set(self.layout.names)
        self._taken: set[str] = set()  # gradients copied in this pass

    def arrive(self, name: str) -> None:
        """Record a gradient, or a part of one: with reentrant activation checkpointing, several segments may share a
        parameter."""
        if name in self.missing:
            self.missing.discard(name)
        else:
            self.in_parts.add(name)

    @property
    def complete(self) -> bool:
        """Whether all gradients are certain to be complete before the pass ends."""
        return not self.missing and not self.in_parts

    def take(self, name: str, parameter: Tensor) -> None:
        """Copy a large gradient into the bucket as soon as it is computed, while it is in cache; its memory is then
        free for the next gradient. Small gradients are copied together when the bucket is sent, where a misfit raises.

        The parameter's gradient becomes a view of the bucket, so that later changes to it are sent as well.
        """
        gradient, view = parameter.grad, self.views[name]
        if gradient is None or gradient is view or gradient.layout != torch.strided or gradient.shape != view.shape:
            return
        with torch.no_grad():  # the pass may record a graph
            view.copy_(gradient)
        parameter.grad = view
        self._taken.add(name)

    def new_gradients(self) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        """Return pairs (view in the bucket, gradient) of gradients outside of the bucket, as after zero_grad(); and
        whether some were in the bucket before this pass. Views without a gradient are set to zero."""
        new: list[tuple[Tensor, Tensor]] = []
        held = False
        for name, parameter, view, shape in self._rows:  # runs for every parameter, so it must be cheap
            gradient = parameter.grad
            if gradient is view:
                held = held or name not in self._taken
            elif gradient is None:
                view.zero_()
            elif gradient.shape != shape or gradient.layout is not torch.strided:
                raise _misfit(name, view, gradient)
            else:
                new.append((view, gradient))
        return new, held

    def gather_parameters(self, out: Tensor | None = None) -> Tensor:
        """Copy the parameters, concatenated: (n,), into `out` or into scratch memory."""
        flat = scratch_like(self.flat) if out is None else out
        torch._foreach_copy_([slot.view(flat) for slot in self.layout], self._detached())
        return flat

    def scatter_parameters(self, flat: Tensor) -> None:
        """Overwrite the parameters with concatenated values: (n,)."""
        torch._foreach_copy_(self._detached(), [slot.view(flat) for slot in self.layout])

    def _detached(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.parameters.values()]

    @property
    def unsent(self) -> list[Tensor]:
        """Values that the compressor has still to send (residuals)."""
        return [packed.flat for key, packed in self.state.items() if is_unsent(key)]

    def take_place(self, at: AggregationContext) -> None:
        """Keep all unsent values after this worker's rank or the number of workers changed."""
        if (at.rank, at.world) == (self._at.rank, self._at.world):
            return
        for state in filter(None, (self.state, self._before)):
            redivide(state, self._compressor, self.packed, self._at, at)
        self._at = at

    def rescale(self, factor: float) -> None:
        """Scale unsent values, after the number of workers that they are divided by changed by `factor`. For
        compressors that send differences to a value known to the others, that value is reset to the last mean."""
        for state in filter(None, (self.state, self._before)):
            for key, packed in state.items():
                if is_unsent(key):
                    packed.flat.mul_(factor)
                elif (begins := begins_from(key)) != key:
                    packed.flat.copy_(state[begins].flat)

    def clear(self) -> None:
        """Remove all gradients, so that optimizers skip the parameters."""
        self.point(set())

    def withdraw(self) -> None:
        """Remove gradients that are views of this bucket, after an abandoned exchange wrote to it. Others remain."""
        for name, parameter in self.parameters.items():
            if parameter.grad is self.views[name]:
                parameter.grad = None
        self._shown = self.flat._version

    def point(self, used: Set[str]) -> None:
        """Make the gradients of `used` parameters views of this buffer, and remove those of all others."""
        for name, parameter, view, _ in self._rows:
            parameter.grad = view if name in used else None
        self._shown = self.flat._version

    @property
    def touched(self) -> bool:
        """Whether gradients were modified since they were assigned, for example by clipping."""
        return self.flat._version != self._shown

    def commit(self, following: State, used: Set[str], correction: float, mean: Tensor | None = None) -> None:
        """Adopt the new state, multiply the mean by `correction`, and assign it to the parameters' gradients.

        A parameter that no rank used was not exchanged: it keeps its state and has no gradient.

        Args:
            mean: the mean, if it is not in this buffer; it is not modified.
        """
        for name in self.parameters.keys() - used:
            for key, packed in self.state.items():
                if name in packed.layout.by_name:
                    following[key][name].copy_(packed[name])
        self._before, self.state = self.state, following.after(self.state) if following else following
        if mean is None:
            mean = self.flat
        if correction != 1.0:
            torch.mul(mean, correction, out=self.flat)
        elif mean is not self.flat:
            self.flat.copy_(mean)
        self.point(used)

    def roll_back(self) -> None:
        """Undo the last commit: restore the previous state, which the commit did not overwrite."""
        if self._before is not None:
            self.state, self._before = self._before.after(self.state), None

    def keep_before(self) -> None:
        """Copy the state for a roll-back, since the next exchange overwrites its memory."""
        if self._before is not None:
            copies = {key: FlatTensors(packed.flat.clone(), packed.layout) for key, packed in self._before.items()}
            self._before = State(copies)

    @property
    def has_new(self) -> bool:
        """Whether there are gradients that are not views of this bucket."""
        return any(p.grad is not None and p.grad is not self.views[name] for name, p in self.parameters.items())

    @property
    def still_shown(self) -> bool:
        """Whether some parameter's gradient is still a view of this bucket."""
        return any(parameter.grad is self.views[name] for name, parameter in self.parameters.items())

    @property
    def shown(self) -> set[str]:
        """Names of the parameters whose gradients are views of this bucket."""
        return {name for name, parameter in self.parameters.items() if parameter.grad is self.views[name]}

    @property
    def zeroed(self) -> bool:
        """Whether zero_grad(set_to_none=False) has cleared the gradients here; one new gradient may have arrived."""
        return sum(bool(view.any()) for view in self.views.values()) <= 1 < len(self.views)

    def state_by_name(self, *, rolled_back: bool = False) -> dict[str, dict[str, Tensor]]:
        """{parameter name: {key: tensor}}, as views; rolled_back: as before the last commit."""
        found: dict[str, dict[str, Tensor]] = {}
        state = self._before if rolled_back and self._before is not None else self.state
        for key, packed in state.items():
            for name, view in packed.items():
                found.setdefault(name, {})[key] = view
        return found


def _misfit(name: str, view: Tensor, gradient: Tensor) -> Exception:
    if gradient.layout != torch.strided:
        return LoopError(
            f'"{name}" has a sparse gradient, but no module declared it at attach, so no rows were planned for it: set '
            f"model.{name.rpartition('.')[0] or 'table'}.sparse = True on the module that holds it, before attach; or "
            "compute the gradient with sparse=False."
        )
    return LayoutError(
        f'"{name}" was {tuple(view.shape)} at attach and is {tuple(gradient.shape)} now, so its compressor state is '
        f'invalid. Call session.reset_compressor_state("{name}") after resizing.'
    )


def state_by_name(buckets: Iterable[Bucket]) -> dict[str, dict[str, Tensor]]:
    """{parameter name: {key: tensor}} of all buckets, as views."""
    return {name: remembered for bucket in buckets for name, remembered in bucket.state_by_name().items()}


def copy_state(old: Mapping[str, Mapping[str, Tensor]], new: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Overwrite the tensors of `new` with those of `old` under the same names."""
    for name, remembered in new.items():
        for key, tensor in remembered.items():
            tensor.copy_(old[name][key])


def arrange(parameters: Mapping[str, Tensor], compressor: Compressor) -> Layout:
    """The layout of one bucket; tensors of the same compressor group are adjacent."""

    def group(name: str) -> int:
        return compressor.group(slot_of(name, parameters[name]))

    return Layout.of({name: parameters[name] for name in sorted(parameters, key=group)})


def slot_of(name: str, tensor: Tensor) -> Slot:
    """A tensor's slot before it has an offset, for the compressor."""
    return Slot(name, tuple(tensor.shape), 0, dense_stride(tensor))


def layout_text(parts: Iterable[Mapping[str, Parameter]], compressor: Compressor) -> str:
    """A fingerprint of the buckets of `parts`, of which none is made."""
    dtypes = [(part, dtype_name(next(iter(part.values())).dtype)) for part in parts]
    return ";".join(arrange(part, compressor).fingerprint() + dtype for part, dtype in dtypes)


def layouts(buckets: Iterable[Bucket]) -> list[tuple[str, Layout]]:
    return [(dtype_name(bucket.flat.dtype), bucket.layout) for bucket in buckets]


def refuse_late_part(bucket: Bucket, name: str, sent: Sequence[Bucket]) -> None:
    """Raise LoopError if a part of a gradient arrives after its bucket was sent."""
    if any(bucket is each for each in sent):
        raise LoopError(
            f'"{name}" received another part of its gradient after the first part was sent to be averaged: reentrant '
            "activation checkpointing accumulates the gradient of a parameter shared by several segments in parts, "
            "and in every earlier pass it arrived whole. Call torch.utils.checkpoint.checkpoint(..., "
            "use_reentrant=False), or checkpoint the same segments in every step."
        )


@dataclass(frozen=True)
class BucketInput:
    """Input of a bucket, written just before it is sent: share * pairs + sums_share * sums."""

    pairs: Sequence[tuple[Tensor, Tensor]] = ()  # (view in the bucket, gradient that is not in it)
    share: float = 1.0
    sums: Tensor | None = None  # of earlier backward passes
    sums_share: float = 1.0

    def put(self, flat: Tensor) -> None:
        if self.pairs:
            views, gradients = zip(*self.pairs, strict=True)
            torch._foreach_copy_(views, gradients)
        if self.sums is not None:
            flat.mul_(self.share).add_(self.sums, alpha=self.sums_share)


NO_INPUT = BucketInput()


SUM = "accumulated"


class GradientAccumulator:
    """Weighted sums of gradients over the backward passes of a reduction, except the last pass."""

    def __init__(self, buckets: Sequence[Bucket], accumulate: int | Callable[[], int]) -> None:
        """accumulate: backward passes of a reduction; a callable if the number changes between reductions."""
        self._buckets = buckets
        self._accumulate = accumulate
        sums = callable(accumulate) or accumulate > 1
        self._flats = [torch.zeros_like(bucket.flat) for bucket in buckets] if sums else []
        self.clear()

    def clear(self) -> None:
        self.made = 0  # backward passes in the sums
        self.weight = 0.0  # of all their samples
        self.used: set[str] = set()  # parameters that had a gradient

    @property
    def complete(self) -> bool:
        """Whether the next pass is the last one, which is sent."""
        passes = self._accumulate() if callable(self._accumulate) else self._accumulate
        return self.made >= passes - 1

    @torch.no_grad()
    def add(self, weight: float, scale: float) -> None:
        """Add the gradients to the sums and remove them from the parameters, so that no optimizer uses them yet."""
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            if not self.made:
                flat.zero_()
            for slot in bucket.layout:
                parameter = bucket.parameters[slot.name]
                if parameter.grad is not None:
                    slot.view(flat).add_(parameter.grad, alpha=weight / scale)
                    self.used.add(slot.name)
                    parameter.grad = None
        self.made, self.weight = self.made + 1, self.weight + weight

    def join(self, place: int, pairs: Sequence[tuple[Tensor, Tensor]], weight: float, scale: float) -> BucketInput:
        """The input for a bucket, by index, that gives the mean over all samples of all passes."""
        if not self.made:
            return BucketInput(pairs)
        total = self.weight + weight or 1.0
        return BucketInput(pairs, weight / total, self._flats[place], scale / total)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """The sums by parameter name, as views."""
        for bucket, flat in zip(self._buckets, self._flats, strict=False):
            for slot in bucket.layout:
                yield slot.name, slot.view(flat)

    def progress(self) -> dict[str, Any]:
        return {"made": self.made, "weight": self.weight, "used": sorted(self.used)}

    def resume(self, progress: Mapping[str, Any]) -> None:
        self.made, self.weight, self.used = progress["made"], progress["weight"], set(progress["used"])


@contextmanager
def kept_gradients(parameters: Iterable[Parameter]) -> Iterator[None]:
    """Context manager for a reduction: restores gradients that no optimizer has used yet."""
    kept = [(p, None if p.grad is None else p.grad.clone()) for p in parameters]
    yield
    for parameter, gradient in kept:
        parameter.grad = gradient


class KeptInputs:
    """Inputs of a reduction, by place, for repeating it: references while they are not overwritten, otherwise copies in
    reused memory.

    Args:
        buckets: from now on these write their means elsewhere, so that their inputs are not overwritten.
    """

    def __init__(self, buckets: Iterable[Bucket] = ()) -> None:
        self._buckets = [*buckets]
        for bucket in self._buckets:
            bucket.keep_inputs()
        self._copies: dict[int, Tensor] = {}
        self._copied: set[int] = set()  # places of the current reduction
        self._there: set[int] = set()  # places with inputs that are not overwritten

    def clear(self) -> None:
        """Called when another reduction begins."""
        self._copied.clear()
        self._there.clear()

    def exchanged(self) -> None:
        """Called when the reduction is complete."""
        for bucket in self._buckets:
            bucket.exchanged()

    def trust(self, place: int) -> None:
        """Mark the input of a place as not overwritten; code that overwrites it must call `keep` first."""
        self._there.add(place)

    def keep(self, place: int, flat: Tensor) -> None:
        """Copy the input of a place, on the first call only, since the mean may overwrite it later."""
        self._there.discard(place)
        if self.restores(place, flat):
            return
        copy = self._copies.get(place)
        if copy is None or copy.shape != flat.shape or copy.dtype != flat.dtype:
            copy = self._copies[place] = torch.empty_like(flat)
        copy.copy_(flat)
        self._copied.add(place)

    def restores(self, place: int, flat: Tensor) -> bool:
        """Restore the input of a place, if it was kept. Returns whether it was."""
        if place in self._copied:
            flat.copy_(self._copies[place])
        return place in self._copied or place in self._there


BUCKET_BYTES = 25 * 2**20
FIRST_BYTES = 2**20  # of a first bucket that is sent during backward, as in torch's DistributedDataParallel


def assign_buckets(
    parameters: Mapping[str, Parameter], bucket_bytes: int = BUCKET_BYTES, first_bytes: int = BUCKET_BYTES
) -> list[dict[str, Parameter]]:
    """Assign parameters to buckets, in reverse order, since gradients are computed roughly from the last to the first.

    A bucket holds one device and dtype and is full at `bucket_bytes`, the first one of each device and dtype at
    `first_bytes` if that is less. Larger tensors are not split.
    """
    done: list[dict[str, Parameter]] = []
    filling: dict[tuple[torch.device, torch.dtype], dict[str, Parameter]] = {}
    full: dict[tuple[torch.device, torch.dtype], int] = {}
    for name, parameter in reversed(list(parameters.items())):
        kind = (parameter.device, parameter.dtype)
        bucket = filling.setdefault(kind, {})
        bucket[name] = parameter
        if sum(p.nbytes for p in bucket.values()) >= full.get(kind, min(first_bytes, bucket_bytes)):
            done.append(filling.pop(kind))
            full[kind] = bucket_bytes
    return done + list(filling.values())


def assign_fragments(parameters: Mapping[str, Parameter], count: int) -> list[dict[str, Parameter]]:
    """Divide parameters into `count` parts of about equal bytes: the largest tensor first, each to the smallest part.

    Within each part the parameters keep their order. Raises AttachError if there are fewer tensors than parts.
    """
    if len(parameters) < count:
        raise AttachError(
            f"{len(parameters)} tensors cannot be divided into {count} fragments, since a fragment needs a tensor: "
            f"write fragments={len(parameters)} at most."
        )
    places: dict[str, int] = {}
    filled = [0] * count
    for name, parameter in sorted(parameters.items(), key=lambda item: -item[1].nbytes):
        place = filled.index(min(filled))
        places[name] = place
        filled[place] += parameter.nbytes
    return [{name: p for name, p in parameters.items() if places[name] == place} for place in range(count)]
