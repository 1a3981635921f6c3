"""Each tensor takes the way that suits it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.compressors.base import Compressor, wide
from gossamer.compressors.dense import Dense
from gossamer.errors import require
from gossamer.fuse import fuse
from gossamer.layout import Packed, Slot
from gossamer.words import Aggregation, At, Staged, State


@dataclass(frozen=True, repr=False)
class Route(Compressor):
    """Compress the tensors worth it; send those of one dimension, or below `smallest` entries, by `rest`.

    way(x) = inner if x has two dimensions, at least `smallest` entries, and suits inner; else rest
    law:    the laws of both
    bytes:  the sum of both, in as many messages as the longer of them
    source: Lin et al. 2018, ICLR (biases and norms stay dense)
    """

    inner: Compressor
    rest: Compressor = Dense()
    smallest: int = 256

    def __post_init__(self) -> None:
        require(self.smallest >= 0, f"smallest counts entries, not {self.smallest}")

    @property
    def ways(self) -> tuple[Compressor, Compressor]:
        return self.inner, self.rest

    def group(self, slot: Slot) -> int:
        worth = len(slot.shape) >= 2 and slot.numel >= self.smallest and self.inner.suits(slot.shape)
        return 0 if worth else 1

    def _names(self, x: Packed) -> list[list[str]]:
        return [[slot.name for slot in x.layout if self.group(slot) == way] for way in range(len(self.ways))]

    def init(self, like: Packed, at: At) -> State:
        return {
            f"{way}.{key}": value
            for way, (compressor, names) in enumerate(zip(self.ways, self._names(like), strict=True))
            if names
            for key, value in compressor.init(like.restrict(names), at).items()
        }

    def aggregate(self, x: Packed, state: State, at: At, out: Tensor | None = None) -> Aggregation:
        mean = torch.empty_like(x.flat) if out is None else out
        taken = [
            (way, compressor, x.restrict(names), Packed(mean, x.layout).restrict(names))
            for way, (compressor, names) in enumerate(zip(self.ways, self._names(x), strict=True))
            if names
        ]
        parts: list[Staged] = yield from fuse(
            [compressor.aggregate(part, _inner(state, way), at, into.flat) for way, compressor, part, into in taken]
        )
        own = torch.empty_like(x.flat, dtype=wide(x.flat.dtype))
        for (_, _, part, into), staged in zip(taken, parts, strict=True):
            for name, view in Packed(staged.own, part.layout).items():
                x.layout.by_name[name].of(own).copy_(view)
            for name, view in into.items():
                target = x.layout.by_name[name].of(mean)
                if target.data_ptr() != view.data_ptr():
                    target.copy_(view)
        return Staged(
            mean=mean,
            own=own,
            next_state={
                f"{way}.{key}": value
                for (way, *_), staged in zip(taken, parts, strict=True)
                for key, value in staged.next_state.items()
            },
            finite=all(staged.finite for staged in parts),
        )


def _inner(state: State, way: int) -> State:
    prefix = f"{way}."
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
