"""Layouts: names, shapes and places of many tensors side by side in one flat buffer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gossamer.base.kernels import all_finite


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's own strides if they fill its memory without gaps, as channels_last does, else contiguous
    ones.
    """
    at = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != at:
                return contiguous_stride(tensor.shape)
            at *= size
    return tuple(tensor.stride())


@dataclass(frozen=True)
class Slot:
    """The position of one tensor in a flat buffer: `numel` elements from `offset`, viewed with `shape` and `stride`.

    Args:
        name: of the parameter.
        shape: of the tensor.
        offset: of its first element in the buffer, in elements.
        stride: of the tensor, in elements.

    Example:
        >>> gossamer.extend.Layout.of({"weight": (2, 3), "bias": (3,)}).by_name["bias"]
        Slot(name='bias', shape=(3,), offset=6, stride=(1,))
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel

    def view(self, flat: Tensor) -> Tensor:
        """This slot's view into `flat`, in the tensor's shape and strides."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)

    def flat_view(self, flat: Tensor) -> Tensor:
        """The same elements in memory order: (numel,)."""
        return flat[self.offset : self.end]


@dataclass(frozen=True)
class Layout:
    """The slots of a flat buffer of `numel` elements, in order and without gaps.

    Args:
        slots: one per tensor.

    Example:
        >>> layout = gossamer.extend.Layout.of({"weight": (2, 3), "bias": (3,)})
        >>> layout.numel, layout.names
        (9, ('weight', 'bias'))
    """

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor] | Mapping[str, Sequence[int]]) -> Layout:
        """Place tensors (or bare shapes) next to each other in the order given."""
        slots: list[Slot] = []
        offset = 0
        for name, item in tensors.items():
            shape, stride = (
                (tuple(item.shape), dense_stride(item))
                if isinstance(item, Tensor)
                else (tuple(item), contiguous_stride(item))
            )
            slots.append(Slot(name, shape, offset, stride))
            offset = slots[-1].end
        return cls(tuple(slots))

    @cached_property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(slot.numel for slot in self.slots)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.slots)

    @cached_property
    def by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots}

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def restrict(self, names: Iterable[str]) -> Layout:
        """The layout of only these tensors, in this layout's order."""
        wanted = set(names)
        slots: list[Slot] = []
        offset = 0
        for slot in self.slots:
            if slot.name in wanted:
                slots.append(Slot(slot.name, slot.shape, offset, slot.stride))
                offset += slot.numel
        return Layout(tuple(slots))

    def fingerprint(self) -> str:
        """A hash of names, shapes and order: two ranks with equal fingerprints pack the same way."""
        text = ";".join(f"{slot.name}:{slot.shape}:{slot.stride}" for slot in self.slots)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class FlatTensors:
    """Tensors in a flat buffer, with the layout that names them.

    Args:
        flat: (numel,), the buffer.
        layout: positions, names and shapes of the tensors.

    Example:
        >>> x = gossamer.extend.FlatTensors.pack({"weight": torch.ones(2, 3), "bias": torch.zeros(3)})
        >>> x.flat.shape, x["bias"]
        (torch.Size([9]), tensor([0., 0., 0.]))
    """

    flat: Tensor
    layout: Layout

    @classmethod
    def pack(cls, tensors: Mapping[str, Tensor]) -> FlatTensors:
        """Copy tensors of one dtype and device into one buffer, in order."""
        layout = Layout.of(tensors)
        example = next(iter(tensors.values()))
        packed = cls(torch.empty(layout.numel, dtype=example.dtype, device=example.device), layout)
        for name, view in packed.items():
            view.copy_(tensors[name])
        return packed

    @classmethod
    def zeros(cls, layout: Layout, *, dtype: torch.dtype, device: torch.device) -> FlatTensors:
        return cls(torch.zeros(layout.numel, dtype=dtype, device=device), layout)

    def __getitem__(self, name: str) -> Tensor:
        return self.layout.by_name[name].view(self.flat)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        for slot in self.layout:
            yield slot.name, slot.view(self.flat)

    def clone(self) -> FlatTensors:
        return FlatTensors(self.flat.clone(), self.layout)

    def restrict(self, names: Iterable[str]) -> FlatTensors:
        """Only these tensors: a view where they lie side by side, a copy where they do not."""
        return LayoutPart.of(self.layout, names).gather(self.flat)


@dataclass(frozen=True)
class LayoutPart:
    """Some tensors of a whole layout: their own layout, and where they lie in the whole."""

    layout: Layout
    slots: tuple[Slot, ...]  # the same tensors' in the whole

    @classmethod
    def of(cls, whole: Layout, names: Iterable[str]) -> LayoutPart:
        part = whole.restrict(names)
        return cls(part, tuple(whole.by_name[name] for name in part.names))

    @cached_property
    def start(self) -> int | None:
        """The offset of the first where they lie side by side in the whole; None where they lie apart."""
        if any(a.end != b.offset for a, b in pairwise(self.slots)):
            return None
        return self.slots[0].offset if self.slots else 0

    def gather(self, flat: Tensor) -> FlatTensors:
        """Only these tensors of a whole buffer: a view where they lie side by side, a copy where they lie apart."""
        if self.start is not None:
            return FlatTensors(flat[self.start : self.start + self.layout.numel], self.layout)
        return FlatTensors(torch.cat([slot.flat_view(flat) for slot in self.slots]), self.layout)

    def scatter(self, flat: Tensor, into: Tensor) -> None:
        """Copy a buffer of these tensors to where they lie in a whole one."""
        if self.start is not None:
            into[self.start : self.start + self.layout.numel].copy_(flat)
            return
        for slot, place in zip(self.layout, self.slots, strict=True):
            place.view(into).copy_(slot.view(flat))


def first_nonfinite(x: FlatTensors) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity; None where all numbers are finite."""
    if all_finite(x.flat):
        return None
    return next(slot.name for slot in x.layout if not all_finite(slot.flat_view(x.flat)))


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32, as records and messages write it."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name, with or without "torch." before it."""
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums and residuals of such numbers are kept: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as uint8: (nbytes,). A tensor of one element is contiguous with any stride."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


T = TypeVar("T")


class Itself(Generic[T]):
    """One object as the key of a cache, hashed and compared by identity.

    To hash a layout of many tensors takes as long as a small message. A cache keeps the object with its key,
    so that no other can take its place.
    """

    __slots__ = ("item",)

    def __init__(self, item: T) -> None:
        self.item = item

    def __hash__(self) -> int:
        return id(self.item)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.item is self.item
