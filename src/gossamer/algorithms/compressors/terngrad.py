"""TernGrad: unbiased quantization of every entry to less than two bits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor, mean_buffer_like, with_mean_in
from gossamer.algorithms.compressors.decoding import decode_received, expect_tensors, pairs, sent_by
from gossamer.algorithms.compressors.quantize import noise_key
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import Residual, magnitudes, squares, ternary_decode, ternary_encode
from gossamer.base.kernels.reference.segments import blocks, expect_numbers
from gossamer.base.layout import FlatTensors, accumulation_dtype
from gossamer.base.ops import AllGather, Payload
from gossamer.errors import OutOfRange, require

BLOCK = 2048  # entries that are summed together
SETTLING = 2.0  # smallest clip without feedback: rounding equal entries loses (clip - 1) of their energy


@dataclass(frozen=True, repr=False)
class TernGrad(Compressor):
    """Send each entry as +s, -s or 0, at random and unbiased, with one scale s per tensor that all workers share.

    C(x)_j = s sign(x_j) b_j, P(b_j = 1) = |x_j| / s, s = max |x| over the tensor and the workers
    law:    E C(x) = x, E |C(x) - x|^2 = s |x|_1 - |x|^2; workers mean / s is a whole number
    bytes:  (workers - 1) (4 + ceil(N / per_byte)), N per tensor, in two messages
    source: Wen et al. 2017, NeurIPS

    s is the paper's scaler s_t with scaler sharing. Since s is shared, the sums are of whole numbers, and the mean has
    the same bits in any order of summation. With `clip`, s is at most clip sigma of a worker, where sigma is the root
    mean square of its tensor around zero, and larger entries count as s: less noise, but a bias for heavy tails. The
    paper clips each worker's gradient at 2.5 standard deviations before scales are shared. This implementation clips
    the shared scale, by the root mean square: the same for a mean of zero, except that a worker whose sigma is below
    the largest is clipped less. By default nothing is clipped.

    A recipe adds Feedback only if clip is below 2. From 2 on, the noise of a residual can exceed the residual, which
    then grows by its own rounding: Feedback around clip=2.5 can diverge.

    Args:
        clip: limit of s, in root mean squares of the tensor; None: no clipping.
        per_byte: entries per byte: 5 (base 3) or 4 (two bits each).
        feedback: whether a recipe wraps it in Feedback, if clip is below 2.

    Example:
        >>> gossamer.TernGrad(clip=2.5)
        TernGrad(clip=2.5)
    """

    clip: float | None = None
    per_byte: int = 5
    feedback: bool = True

    def __post_init__(self) -> None:
        require(
            self.clip is None or 0 < self.clip < float("inf"),
            f"clip must be a number of root mean squares of a tensor, above 0, got {self.clip}. Write "
            "TernGrad(clip=2.5), or TernGrad() for no clipping.",
        )
        require(
            self.per_byte in (4, 5),
            f"per_byte must be the entries per byte, 4 (two bits each) or 5 (digits of base three), got "
            f"{self.per_byte}. Write TernGrad(per_byte=5).",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.feedback and self.clip is not None and self.clip < SETTLING

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        return self._aggregate(x, at, out, None)

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        wanted = torch.add(x.flat, residual.before, out=residual.after)
        into = out if out is not None and out.dtype == wanted.dtype else None
        staged = yield from self._aggregate(FlatTensors(wanted, x.layout), at, into, residual.after)
        return with_mean_in(staged, out)

    def _aggregate(
        self, x: FlatTensors, at: AggregationContext, out: Tensor | None, after: Tensor | None
    ) -> Aggregation:
        """Aggregate x; `after`, if given, receives the residual and may be x.flat."""
        sizes = x.layout.sizes
        received = yield AllGather((self._scales(x),))
        scales = _largest_scales(received, len(sizes), at)
        local = ternary_encode(x.flat, sizes, scales, noise_key(x, at), self.per_byte, after)
        numel, dtype, device = x.layout.numel, accumulation_dtype(x.flat.dtype), x.flat.device
        payloads = yield AllGather((local,))

        def own() -> Tensor:
            decoded = torch.empty(numel, dtype=dtype, device=device)
            ternary_decode([(local,)], scales, sizes, self.per_byte, decoded)
            return decoded

        def decode(messages: Sequence[Payload], into: Tensor) -> None:
            both = pairs(messages)  # (scales, codes) of each rank, with equal scales
            ternary_decode([(codes,) for _, codes in both], both[0][0], sizes, self.per_byte, into, at.world)

        mean = mean_buffer_like(x.flat, out)
        finite = decode_received(decode, [(scales, *payload) for payload in payloads], x.layout, mean, at)
        return with_mean_in(AggregationResult(mean=mean, own_contribution=own, finite=finite), out)

    def _scales(self, x: FlatTensors) -> Tensor:
        """Return this worker's scale of each tensor: (tensors,) float32. Raises NotFinite."""
        largest = magnitudes(x.flat, x.layout.sizes)
        if self.clip is None:
            return largest
        return torch.minimum(largest, (self.clip * _root_mean_squares(x)).float())


def _largest_scales(received: Sequence[Payload], tensors: int, at: AggregationContext) -> Tensor:
    """Return the group's scales: (tensors,) float32. Raises MalformedError.

    Scales that are too large for the sum are found by decoding.
    """
    for rank, payload in enumerate(received):
        with suppress(OutOfRange), sent_by(rank, at):
            expect_tensors([payload], 1)
            expect_numbers(payload[0], (tensors,), at.world)
    return torch.stack([scales for (scales,) in received]).amax(0)


def _root_mean_squares(x: FlatTensors) -> Tensor:
    """Return the root mean square of each tensor: (tensors,) float64."""
    sizes = x.layout.sizes
    spans = squares(x.flat, sizes, BLOCK).split([blocks([size], BLOCK) for size in sizes])
    energies = [x.flat.new_empty(0, dtype=torch.float64), *(span.sum().view(1) for span in spans)]
    return (torch.cat(energies) / x.flat.new_tensor(sizes, dtype=torch.float64).clamp(min=1)).sqrt()
