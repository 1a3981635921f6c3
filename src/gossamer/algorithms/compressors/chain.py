"""Chain: few entries, whose values travel in few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Codec
from gossamer.algorithms.compressors.topk import Sparse, chosen, require_places
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import Residual, encode_places, sparse_decode
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.errors import MalformedError, require


@dataclass(frozen=True, repr=False)
class Chain(Codec):
    """Choose entries by `first` and send their values by `then`, which sees k values of one dimension per tensor.

    C(x)_j = then(x at the chosen places) if j is chosen by first, else 0
    law:    what first leaves and what then loses add up to x - C(x)
    bytes:  (workers - 1) (coded_bytes(k, N) + what then sends for k values), N of all tensors together
    source: Basu et al. 2019, NeurIPS
    """

    first: Sparse
    then: Codec

    def __post_init__(self) -> None:
        require(
            isinstance(self.first, Sparse),
            f"{self.first!r} does not choose a fixed number of entries, so nothing could be left to send by "
            f"{self.then!r}. Write Chain(TopK(density=0.01), Int8()).",
        )
        require(
            isinstance(self.then, Codec),
            f"{self.then!r} is more than an encoder and a decoder: it agrees with the group on the way, and values at "
            "places that differ from rank to rank leave nothing to agree on. Write Chain(TopK(density=0.01), Int8()).",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.first.wants_feedback

    def denser(self) -> Sequence[Chain]:
        return [replace(self, first=first) for first in self.first.denser()]

    def counts(self, sizes: Sequence[int]) -> Sequence[int]:
        return self.first.counts(sizes)

    def with_counts(self, counts: tuple[int, ...]) -> Chain | None:
        first = self.first.with_counts(counts)
        return None if first is None else replace(self, first=first)

    def chosen(self, layout: Layout) -> Layout:
        """The layout of the values that `first` chooses: k in one dimension per tensor."""
        return chosen(layout.names, tuple(self.first.counts(layout.sizes)))

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        require_places(x.layout)
        places, values = self.first.select(x, at, residual)
        lost = None if residual is None else torch.zeros_like(values)
        inner = self.then.encode(
            FlatTensors(values, self.chosen(x.layout)), at, None if lost is None else Residual(lost, lost)
        )
        if residual is not None and lost is not None:
            residual.after.index_copy_(0, places.long(), lost)
        return encode_places(places, x.layout.numel), *inner

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        if not all(payloads):
            raise MalformedError("a payload without tensors came, and places and values were due")
        chosen = self.chosen(layout)
        sparse_decode([(self.then.decoded(payload[1:], chosen, out), payload[0]) for payload in payloads], out, divisor)
