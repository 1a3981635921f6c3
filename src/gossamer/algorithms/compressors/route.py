"""Route: compress large tensors, and send the others by another compressor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache

from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor, Decoder
from gossamer.algorithms.compressors.dense import Dense
from gossamer.algorithms.compressors.ownership import Ownership
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import scratch_for, scratch_like
from gossamer.base.layout import FlatTensors, Itself, Layout, LayoutPart, Slot, accumulation_dtype
from gossamer.base.ops import coalesce
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class Route(Compressor):
    """Compress tensors of two or more dimensions and `smallest` or more entries by `inner`; send the others by `rest`.

    way(x) = inner if x has two or more dimensions and at least `smallest` entries, suits inner, and does not match
    `names`; else rest
    law:    the laws of both
    bytes:  the sum of both, in as many messages as the longer of them
    source: Lin et al. 2018, ICLR (biases and norms stay dense)

    Recipes add Route around compressors that do not handle tensors of every shape.

    Args:
        inner: compressor of the large tensors.
        rest: compressor of the others.
        smallest: fewest entries of a tensor that `inner` compresses.
        names: shell pattern of parameter names sent by `rest`: "*.embedding.*" selects every embedding, of any shape.

    Example:
        >>> gossamer.Route(gossamer.TopK(density=0.01), names="*.embedding.*")
        Route(TopK(density=0.01), names='*.embedding.*')
    """

    inner: Compressor
    rest: Compressor = Dense()
    smallest: int = 256
    names: str | None = None

    def __post_init__(self) -> None:
        require(
            self.smallest >= 0,
            f"smallest must be a number of entries, 0 or more, got {self.smallest}. "
            "Write Route(TopK(density=0.01), smallest=256).",
        )

    @property
    def handles_every_shape(self) -> bool:
        return True

    def completed(self, complete: Callable[[Compressor], Compressor]) -> Compressor:
        return replace(self, inner=self.inner.completed(complete), rest=self.rest.completed(complete))

    @property
    def decodes_without_input(self) -> bool:
        return all(way.decodes_without_input for way in self.ways)

    def decoders(self, layout: Layout) -> Sequence[tuple[Decoder, Layout]] | None:
        parts = [self.ways[way].decoders(part.layout) for way, part in self.parts(layout)]
        return None if None in parts else [each for part in parts if part is not None for each in part]

    def parts(self, layout: Layout) -> Sequence[tuple[int, LayoutPart]]:
        """Return the tensors of each way: (index in `ways`, part), without ways that no tensor takes."""
        return _divided(Itself(self), Itself(layout))

    @property
    def ways(self) -> tuple[Compressor, Compressor]:
        return self.inner, self.rest

    def group(self, slot: Slot) -> int:
        named = self.names is not None and fnmatchcase(slot.name, self.names)
        worth = len(slot.shape) >= 2 and slot.numel >= self.smallest and self.inner.suits(slot.shape)
        return 0 if worth and not named else 1

    def owns_momentum(self, slot: Slot) -> Ownership | None:
        return self.ways[self.group(slot)].owns_momentum(slot)

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        return State(
            {
                f"{way}.{key}": value
                for way, part in self.parts(like.layout)
                for key, value in self.ways[way].init(part.gather(like.flat), at).items()
            }
        )

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        mean = scratch_like(x.flat) if out is None else out
        taken = [(way, part, part.gather(mean)) for way, part in self.parts(x.layout)]
        parts: list[AggregationResult] = yield from coalesce(
            [
                self.ways[way].aggregate(part.gather(x.flat), state.part(f"{way}."), at, into.flat)
                for way, part, into in taken
            ]
        )
        for _, part, into in taken:
            if part.start is None:
                part.scatter(into.flat, mean)
        places = [part for _, part, _ in taken]
        return AggregationResult(
            mean=mean,
            own_contribution=lambda: _joined(
                x.layout, [(part, staged.own) for part, staged in zip(places, parts, strict=True)]
            ),
            owes=_joint_debt(x.layout, list(zip(places, parts, strict=True))),
            next_state=State(
                {
                    f"{way}.{key}": value
                    for (way, _, _), staged in zip(taken, parts, strict=True)
                    for key, value in staged.next_state.items()
                }
            ),
            finite=all(staged.finite for staged in parts),
        )


@lru_cache(maxsize=256)
def _divided(route: Itself[Route], layout: Itself[Layout]) -> tuple[tuple[int, LayoutPart], ...]:
    """Cached: the same objects are passed at every step."""
    named: tuple[list[str], list[str]] = [], []
    for slot in layout.item:
        named[route.item.group(slot)].append(slot.name)
    return tuple((way, LayoutPart.of(layout.item, names)) for way, names in enumerate(named) if names)


def _joined(layout: Layout, parts: Sequence[tuple[LayoutPart, Tensor]]) -> Tensor:
    """Copy the parts' tensors to their places in `layout`: (n,)."""
    flat = parts[0][1]
    whole = scratch_for(layout.numel, accumulation_dtype(flat.dtype), flat.device)
    if sum(part.layout.numel for part, _ in parts) < layout.numel:
        whole.zero_()
    for part, tensors in parts:
        part.scatter(tensors, whole)
    return whole


def _joint_debt(whole: Layout, parts: Sequence[tuple[LayoutPart, AggregationResult]]) -> Callable[[], Tensor] | None:
    """Return a function that computes the parts' `owes` in the places of `whole`; None without any."""
    undelivered = [(part, staged.owes) for part, staged in parts if staged.owes is not None]
    return (lambda: _joined(whole, [(part, owes()) for part, owes in undelivered])) if undelivered else None
