"""Each tensor takes the way that suits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor

from gossamer.compressors.base import Compressor, Decoder, Ownership
from gossamer.compressors.dense import Dense
from gossamer.core.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.core.coalesce import coalesce
from gossamer.core.layout import FlatTensors, Layout, Slot, accumulation_dtype
from gossamer.errors import require
from gossamer.kernels import scratch_for, scratch_like


@dataclass(frozen=True, repr=False)
class Route(Compressor):
    """Compress the tensors worth it; send those of one dimension, or below `smallest` entries, by `rest`.

    way(x) = inner if x has two dimensions, at least `smallest` entries, suits inner, and is none of `names`; else rest
    law:    the laws of both
    bytes:  the sum of both, in as many messages as the longer of them
    source: Lin et al. 2018, ICLR (biases and norms stay dense)

    `names` is a pattern of names as in a shell: "*.embedding.*" sends every embedding by `rest`, whatever its shape.
    """

    inner: Compressor
    rest: Compressor = Dense()
    smallest: int = 256
    names: str | None = None

    def __post_init__(self) -> None:
        require(self.smallest >= 0, f"smallest counts entries, not {self.smallest}")

    @property
    def handles_every_shape(self) -> bool:
        return True

    def completed(self, complete: Callable[[Compressor], Compressor]) -> Compressor:
        return replace(self, inner=self.inner.completed(complete), rest=self.rest.completed(complete))

    @property
    def decodes_without_input(self) -> bool:
        return all(way.decodes_without_input for way in self.ways)

    def decoders(self, layout: Layout) -> Sequence[tuple[Decoder, Layout]] | None:
        parts = [way.decoders(part) for way, part in zip(self.ways, self._parts(layout), strict=True) if len(part)]
        return None if None in parts else [each for part in parts if part is not None for each in part]

    def _parts(self, layout: Layout) -> list[Layout]:
        return [layout.restrict(names) for names in self._names(layout)]

    @property
    def ways(self) -> tuple[Compressor, Compressor]:
        return self.inner, self.rest

    def group(self, slot: Slot) -> int:
        named = self.names is not None and fnmatchcase(slot.name, self.names)
        worth = len(slot.shape) >= 2 and slot.numel >= self.smallest and self.inner.suits(slot.shape)
        return 0 if worth and not named else 1

    def owns_momentum(self, slot: Slot) -> Ownership | None:
        return self.ways[self.group(slot)].owns_momentum(slot)

    def _names(self, layout: Layout) -> list[list[str]]:
        return [[slot.name for slot in layout if self.group(slot) == way] for way in range(len(self.ways))]

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        return State(
            {
                f"{way}.{key}": value
                for way, (compressor, names) in enumerate(zip(self.ways, self._names(like.layout), strict=True))
                if names
                for key, value in compressor.init(like.restrict(names), at).items()
            }
        )

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        mean = scratch_like(x.flat) if out is None else out
        taken = [
            (way, compressor, x.restrict(names), FlatTensors(mean, x.layout).restrict(names))
            for way, (compressor, names) in enumerate(zip(self.ways, self._names(x.layout), strict=True))
            if names
        ]
        parts: list[AggregationResult] = yield from coalesce(
            [compressor.aggregate(part, state.part(f"{way}."), at, into.flat) for way, compressor, part, into in taken]
        )
        for *_, into in taken:
            for name, view in into.items():
                target = x.layout.by_name[name].view(mean)
                if target.data_ptr() != view.data_ptr():
                    target.copy_(view)
        layouts = [part.layout for _, _, part, _ in taken]
        return AggregationResult(
            mean=mean,
            own_contribution=lambda: _joined(
                x.layout, [FlatTensors(part.own, at) for part, at in zip(parts, layouts, strict=True)]
            ),
            owes=_joint_debt(x.layout, list(zip(parts, layouts, strict=True))),
            next_state=State(
                {
                    f"{way}.{key}": value
                    for (way, *_), staged in zip(taken, parts, strict=True)
                    for key, value in staged.next_state.items()
                }
            ),
            finite=all(staged.finite for staged in parts),
        )


def _joined(layout: Layout, parts: Sequence[FlatTensors]) -> Tensor:
    """The parts' tensors in the places that they have in `layout`: (n,)."""
    flat = parts[0].flat
    whole = scratch_for(layout.numel, accumulation_dtype(flat.dtype), flat.device)
    if sum(part.layout.numel for part in parts) < layout.numel:
        whole.zero_()
    for part in parts:
        for name, view in part.items():
            layout.by_name[name].view(whole).copy_(view)
    return whole


def _joint_debt(whole: Layout, parts: Sequence[tuple[AggregationResult, Layout]]) -> Callable[[], Tensor] | None:
    """Computes what the parts owe together, in the places that it has in `whole`; None where they owe nothing."""
    owing = [(staged.owes, layout) for staged, layout in parts if staged.owes is not None]
    return (lambda: _joined(whole, [FlatTensors(owes(), layout) for owes, layout in owing])) if owing else None
