"""Buckets: flat buffers of gradients of one device and dtype, laid out alike on every rank; and what goes into them."""

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
from gossamer.algorithms.compressors.sharded import is_unsent
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.kernels import scratch_like
from gossamer.base.layout import FlatTensors, Layout, Slot, dense_stride, dtype_name
from gossamer.errors import AttachError, LayoutError, LoopError

EARLY_BYTES = 2**16  # of a gradient whose copy takes longer than the call; on a GPU one launch copies many


class Bucket:
    """Gradients that are compressed and sent together: `flat` holds them, `state` is the compressor's about them."""

    def __init__(self, parameters: Mapping[str, Parameter], compressor: Compressor, at: AggregationContext) -> None:
        self.layout = arrange(parameters, compressor)
        example = next(iter(parameters.values()))
        self.flat = torch.zeros(self.layout.numel, dtype=example.dtype, device=example.device)
        self.packed = FlatTensors(self.flat, self.layout)
        self.mean_buffer = self.flat  # where a mean may be written: over the gradients, unless these stay
        self.parameters = {slot.name: parameters[slot.name] for slot in self.layout}
        self.views = dict(self.packed.items())
        self.state: State = compressor.init(self.packed, at)
        self._before: State | None = None  # the state that the last commit replaced
        self._rooms: list[Tensor] = []  # for means, in turns
        large = (name for name, view in self.views.items() if view.is_cpu and view.nbytes >= EARLY_BYTES)
        self.early = frozenset(large)  # whose gradients do not wait until all are there
        self.in_parts: set[str] = set()  # whose gradients came in several parts in some pass
        self.expect_all()
        self._shown = self.flat._version

    def keep_inputs(self) -> None:
        """From now on means are written apart from what they are made of, which is needed to make them again; and a
        mean stays as it is until the next exchange is over, for ranks that miss it: optimizers see a copy."""
        self._rooms = self._rooms or [torch.empty_like(self.flat) for _ in range(2)]
        self.mean_buffer = self._rooms[0]

    def exchanged(self) -> None:
        """An exchange is over; the next one's mean belongs into other memory."""
        if self._rooms:
            self._rooms.reverse()
            self.mean_buffer = self._rooms[0]

    def expect_all(self) -> None:
        """Another backward pass begins, or the next one is waited for."""
        self.missing = set(self.layout.names)
        self._taken: set[str] = set()  # whose gradients came to lie here in this pass

    def arrive(self, name: str) -> None:
        """A gradient is there: the whole of it, or one of its parts, as under reentrant activation checkpointing where
        several segments share a parameter."""
        if name in self.missing:
            self.missing.discard(name)
        else:
            self.in_parts.add(name)

    @property
    def complete(self) -> bool:
        """Whether all gradients are there for certain before the pass is over."""
        return not self.missing and not self.in_parts

    def take(self, name: str, parameter: Tensor) -> None:
        """Put an early one's gradient of this pass here as soon as it is there: what was just written lies in a near
        cache, and its memory serves the next gradient. All others are put here together when the bucket leaves, which
        is also when one that does not fit is told of.

        From now on the parameter's gradient is the place here, so that whoever still changes it changes what is sent.
        """
        gradient, view = parameter.grad, self.views[name]
        if gradient is None or gradient is view or gradient.layout != torch.strided or gradient.shape != view.shape:
            return
        with torch.no_grad():  # the pass may record a graph of its own
            view.copy_(gradient)
        parameter.grad = view
        self._taken.add(name)

    def new_gradients(self) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        """(place, gradient) of those that do not lie here yet, since zero_grad() took them out as it does by default;
        and whether some did before this pass. Places without a gradient become zero."""
        new: list[tuple[Tensor, Tensor]] = []
        held = False
        for name, parameter in self.parameters.items():
            gradient, view = parameter.grad, self.views[name]
            if gradient is view:
                held = held or name not in self._taken
            elif gradient is None:
                view.zero_()
            elif gradient.shape != view.shape or gradient.layout != torch.strided:
                raise _misfit(name, view, gradient)
            else:
                new.append((view, gradient))
        return new, held

    def gather_parameters(self, out: Tensor | None = None) -> Tensor:
        """A copy of the parameters side by side: (n,), in `out` or in scratch memory."""
        flat = scratch_like(self.flat) if out is None else out
        torch._foreach_copy_([slot.view(flat) for slot in self.layout], self._detached())
        return flat

    def scatter_parameters(self, flat: Tensor) -> None:
        """Overwrite the parameters with numbers that lie side by side: (n,)."""
        torch._foreach_copy_(self._detached(), [slot.view(flat) for slot in self.layout])

    def _detached(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.parameters.values()]

    @property
    def residual_bytes(self) -> int:
        return sum(packed.flat.nbytes for packed in self.state.values())

    @property
    def unsent(self) -> list[Tensor]:
        """What the compressor has still to send."""
        return [packed.flat for key, packed in self.state.items() if is_unsent(key)]

    def rescale(self, factor: float) -> None:
        """What is unsent will be divided by `factor` times as many workers. Where differences travel to what the others
        know of this worker, all are taken to know the last answer: so it goes on, whoever is here."""
        for state in filter(None, (self.state, self._before)):
            for key, packed in state.items():
                if is_unsent(key):
                    packed.flat.mul_(factor)
                elif (begins := begins_from(key)) != key:
                    packed.flat.copy_(state[begins].flat)

    def clear(self) -> None:
        """Optimizers do nothing without gradients."""
        self.point(set())

    def withdraw(self) -> None:
        """Take away the gradients that lie here, where an exchange has written that is given up. Others stay."""
        for name, parameter in self.parameters.items():
            if parameter.grad is self.views[name]:
                parameter.grad = None
        self._shown = self.flat._version

    def point(self, used: Set[str]) -> None:
        """Make the gradients of `used` parameters views of this buffer, and take away those of the others."""
        for name, parameter in self.parameters.items():
            parameter.grad = self.views[name] if name in used else None
        self._shown = self.flat._version

    @property
    def touched(self) -> bool:
        """Whether the gradients were written to since they were shown, as clipping does."""
        return self.flat._version != self._shown

    def commit(self, following: State, used: Set[str], correction: float, mean: Tensor | None = None) -> None:
        """Take the following state, multiply the average by `correction`, and show it to the optimizer.

        mean: the average where it does not lie here; it is not written to.

        A parameter that no rank used was not exchanged: it keeps its state and has no gradient.
        """
        for name in self.parameters.keys() - used:
            for key, packed in self.state.items():
                if name in packed.layout.by_name:
                    following[key][name].copy_(packed[name])
        self._before, self.state = self.state, following.after(self.state)
        if mean is None:
            mean = self.flat
        if correction != 1.0:
            torch.mul(mean, correction, out=self.flat)
        elif mean is not self.flat:
            self.flat.copy_(mean)
        self.point(used)

    def roll_back(self) -> None:
        """Take back the last commit: the state is again the one before, whose memory was room and was not written."""
        if self._before is not None:
            self.state, self._before = self._before.after(self.state), None

    def keep_before(self) -> None:
        """Copy what a roll-back would need out of memory that the next exchange writes."""
        if self._before is not None:
            copies = {key: FlatTensors(packed.flat.clone(), packed.layout) for key, packed in self._before.items()}
            self._before = State(copies)

    @property
    def has_new(self) -> bool:
        """Whether there are gradients that do not lie here."""
        return any(p.grad is not None and p.grad is not self.views[name] for name, p in self.parameters.items())

    @property
    def still_shown(self) -> bool:
        """Whether this is still some parameter's gradient."""
        return any(parameter.grad is self.views[name] for name, parameter in self.parameters.items())

    @property
    def zeroed(self) -> bool:
        """Whether gradients lie here that zero_grad(set_to_none=False) has cleared; a new one may have come since."""
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
            f'"{name}" has a sparse gradient, and no module said so at attach, so that its rows have a place to travel '
            f"in: set the attribute on the module that holds it, model.{name.rpartition('.')[0] or 'table'}.sparse = "
            "True, before attach; or compute the gradient with sparse=False."
        )
    return LayoutError(
        f'"{name}" was {tuple(view.shape)} at attach and is {tuple(gradient.shape)} now, so what is remembered '
        f'about it no longer means anything. Call session.reset_compressor_state("{name}") after resizing.'
    )


def state_by_name(buckets: Iterable[Bucket]) -> dict[str, dict[str, Tensor]]:
    """{parameter name: {key: tensor}} of all buckets, as views."""
    return {name: remembered for bucket in buckets for name, remembered in bucket.state_by_name().items()}


def copy_state(old: Mapping[str, Mapping[str, Tensor]], new: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Overwrite all of `new` by what `old` has under the same names."""
    for name, remembered in new.items():
        for key, tensor in remembered.items():
            tensor.copy_(old[name][key])


def arrange(parameters: Mapping[str, Tensor], compressor: Compressor) -> Layout:
    """The layout of one bucket: tensors that the compressor treats alike lie side by side."""

    def group(name: str) -> int:
        return compressor.group(slot_of(name, parameters[name]))

    return Layout.of({name: parameters[name] for name in sorted(parameters, key=group)})


def slot_of(name: str, tensor: Tensor) -> Slot:
    """A tensor as a compressor may see it before it has a place."""
    return Slot(name, tuple(tensor.shape), 0, dense_stride(tensor))


def layout_text(buckets: Iterable[Bucket]) -> str:
    """A fingerprint of all buckets."""
    return ";".join(layout.fingerprint() + dtype for dtype, layout in layouts(buckets))


def layouts(buckets: Iterable[Bucket]) -> list[tuple[str, Layout]]:
    return [(dtype_name(bucket.flat.dtype), bucket.layout) for bucket in buckets]


def refuse_late_part(bucket: Bucket, name: str, sent: Sequence[Bucket]) -> None:
    """Raise LoopError where a part of a gradient comes after the others have left to be averaged."""
    if any(bucket is each for each in sent):
        raise LoopError(
            f'"{name}" was given another part of its gradient after the first had left to be averaged: reentrant '
            "activation checkpointing adds up the gradient of a parameter that several segments share in parts, "
            "and in every pass before this one it came whole. Call torch.utils.checkpoint.checkpoint(..., "
            "use_reentrant=False), or checkpoint the same segments in every step."
        )


@dataclass(frozen=True)
class BucketInput:
    """Is put into a bucket just before it leaves: share * pairs + sums_share * sums."""

    pairs: Sequence[tuple[Tensor, Tensor]] = ()  # (place in the bucket, gradient that does not lie there yet)
    share: float = 1.0
    sums: Tensor | None = None  # of the backward passes before
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
    """Sums of weighted gradients over the backward passes of one reduction before its last."""

    def __init__(self, buckets: Sequence[Bucket], accumulate: int | Callable[[], int]) -> None:
        """accumulate: backward passes of a reduction; of the one that is due, where their number changes."""
        self._buckets = buckets
        self._accumulate = accumulate
        sums = callable(accumulate) or accumulate > 1
        self._flats = [torch.zeros_like(bucket.flat) for bucket in buckets] if sums else []
        self.clear()

    def clear(self) -> None:
        self.made = 0  # backward passes that are in the sums
        self.weight = 0.0  # of all their samples
        self.used: set[str] = set()  # parameters that had a gradient

    @property
    def complete(self) -> bool:
        """Whether the next pass is the one that is sent."""
        passes = self._accumulate() if callable(self._accumulate) else self._accumulate
        return self.made >= passes - 1

    @torch.no_grad()
    def add(self, weight: float, scale: float) -> None:
        """Take the gradients away from the parameters, so that no optimizer uses them yet."""
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
        """The input that makes a bucket, by place, the mean over all samples of all passes."""
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
    """Keep gradients that an optimizer has not used yet over a reduction within the block."""
    kept = [(p, None if p.grad is None else p.grad.clone()) for p in parameters]
    yield
    for parameter, gradient in kept:
        parameter.grad = gradient


class KeptInputs:
    """What went in, by the place in a reduction: where it lay, while nothing is written there; else as a copy, in
    memory that serves one reduction after the other.

    buckets: those whose means are written elsewhere from now on, so that their inputs stay where they are.
    """

    def __init__(self, buckets: Iterable[Bucket] = ()) -> None:
        self._buckets = [*buckets]
        for bucket in self._buckets:
            bucket.keep_inputs()
        self._copies: dict[int, Tensor] = {}
        self._copied: set[int] = set()  # places of the reduction under way
        self._there: set[int] = set()  # likewise, where what went in still lies

    def clear(self) -> None:
        """Another reduction begins."""
        self._copied.clear()
        self._there.clear()

    def exchanged(self) -> None:
        """The reduction is over."""
        for bucket in self._buckets:
            bucket.exchanged()

    def trust(self, place: int) -> None:
        """What goes in at a place stays where it is: whoever is going to write there has to `keep` it before."""
        self._there.add(place)

    def keep(self, place: int, flat: Tensor) -> None:
        """Copy what goes in at a place; the first time, since it may be overwritten by the mean."""
        self._there.discard(place)
        if self.restores(place, flat):
            return
        copy = self._copies.get(place)
        if copy is None or copy.shape != flat.shape or copy.dtype != flat.dtype:
            copy = self._copies[place] = torch.empty_like(flat)
        copy.copy_(flat)
        self._copied.add(place)

    def restores(self, place: int, flat: Tensor) -> bool:
        """Put back what went in at a place, if it was kept; whether it was."""
        if place in self._copied:
            flat.copy_(self._copies[place])
        return place in self._copied or place in self._there


BUCKET_BYTES = 25 * 2**20


def assign_buckets(parameters: Mapping[str, Parameter], bucket_bytes: int = BUCKET_BYTES) -> list[dict[str, Parameter]]:
    """Which parameters share a bucket: in reverse order, since gradients appear roughly from the last to the first.

    A bucket holds one device and dtype and ends when it reaches `bucket_bytes`; larger tensors are not split.
    """
    done: list[dict[str, Parameter]] = []
    filling: dict[tuple[torch.device, torch.dtype], dict[str, Parameter]] = {}
    for name, parameter in reversed(list(parameters.items())):
        kind = (parameter.device, parameter.dtype)
        bucket = filling.setdefault(kind, {})
        bucket[name] = parameter
        if sum(p.nbytes for p in bucket.values()) >= bucket_bytes:
            done.append(filling.pop(kind))
    return done + list(filling.values())


def assign_fragments(parameters: Mapping[str, Parameter], count: int) -> list[dict[str, Parameter]]:
    """So many parts of about equal bytes: from the largest tensor on, each goes to the smallest part so far.

    In the parameters' own order within each part. Raises AttachError where there are fewer tensors than parts.
    """
    if len(parameters) < count:
        raise AttachError(
            f"{len(parameters)} tensors do not make {count} fragments, and a turn without any would be for nothing: "
            f"write fragments={len(parameters)} at most."
        )
    places: dict[str, int] = {}
    filled = [0] * count
    for name, parameter in sorted(parameters.items(), key=lambda item: -item[1].nbytes):
        place = filled.index(min(filled))
        places[name] = place
        filled[place] += parameter.nbytes
    return [{name: p for name, p in parameters.items() if places[name] == place} for place in range(count)]
