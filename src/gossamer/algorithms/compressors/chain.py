"""Chain: sparse entries with quantized values."""

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
    """Select entries by `first` and send their values by `then`, which receives k values of one dimension per tensor.

    C(x)_j = then(x at the selected indices) if j is selected by first, else 0
    law:    x - C(x) is the sum of the errors of first and of then
    bytes:  (workers - 1) (coded_bytes(k, N) + the payload of then for k values), N of all tensors together
    source: Basu et al. 2019, NeurIPS

    Basu et al. compose a quantizer Q with Top_k or Rand_k (Qsparse-local-SGD).

    Args:
        first: a compressor that selects a fixed number of entries, such as TopK.
        then: codec of the values, such as Int8().

    Example:
        >>> gossamer.Chain(gossamer.TopK(density=0.01), gossamer.Int8())
        Chain(TopK(density=0.01), Int8())
    """

    first: Sparse
    then: Codec

    def __post_init__(self) -> None:
        require(
            isinstance(self.first, Sparse),
            f"first must select a fixed number of entries, got {self.first!r}. "
            "Write Chain(TopK(density=0.01), Int8()).",
        )
        require(
            isinstance(self.then, Codec),
            f"then must be an encoder and a decoder (a Codec), got {self.then!r}, which communicates to encode: ranks "
            "select different indices, so their values cannot be reduced. Write Chain(TopK(density=0.01), Int8()).",
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
        """Return the layout of the values that `first` selects: k in one dimension per tensor."""
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
            raise MalformedError("expected a payload of indices and values, got one without tensors")
        chosen = self.chosen(layout)
        sparse_decode([(self.then.decoded(payload[1:], chosen, out), payload[0]) for payload in payloads], out, divisor)
