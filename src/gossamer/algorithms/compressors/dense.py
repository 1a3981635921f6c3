"""Dense: every entry, in the tensor's own precision or a lower one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor, Decoder, mean_buffer_like, with_mean_in
from gossamer.algorithms.compressors.decoding import expect_tensors
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import expect_summable, half_decode, half_encode, scratch_like, within_range
from gossamer.base.layout import FlatTensors, Layout, accumulation_dtype
from gossamer.base.ops import AllReduceMean, Payload
from gossamer.errors import MalformedError, NotFinite, require

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, repr=False)
class Dense(Compressor):
    """Send every entry, uncompressed or cast to `dtype`.

    C(x) = x, or x rounded to the nearest number of dtype
    law:    |x - C(x)| <= 2^-11 |x| for float16 (normal numbers), 2^-8 |x| for bfloat16; exact otherwise
    bytes:  2 (n-1)/n N itemsize
    source: Patarasuk & Yuan 2009, JPDC (the bytes); Micikevicius et al. 2018, ICLR (half precision)

    A half-precision mean is summed in float32, divided there and rounded again, so `own` averages to it only up to half
    a unit in the last place. A value beyond float16's 65504 marks the step as not finite instead of silently becoming
    infinite.

    Args:
        dtype: "float32", "float16", "bfloat16", or None for the tensors' own dtype.

    Example:
        >>> gossamer.Dense("bfloat16")
        Dense(dtype='bfloat16')
    """

    dtype: str | None = None

    def __post_init__(self) -> None:
        require(
            self.dtype is None or self.dtype in DTYPES,
            f"dtype must be 'float32', 'float16' or 'bfloat16', got {self.dtype!r}. Write Dense(dtype='bfloat16'), or "
            "Dense() for the gradients' own dtype.",
        )

    @property
    def handles_every_shape(self) -> bool:
        return True

    @property
    def decodes_without_input(self) -> bool:
        return True

    def decoders(self, layout: Layout) -> Sequence[tuple[Decoder, Layout]] | None:
        return [(self, layout)]

    def tensors(self, layout: Layout, dtype: torch.dtype) -> int:
        return 1

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        """Overwrite `out` with the mean of tensors sent in their own dtype, or in `dtype`. Raises MalformedError."""
        dtype = out.dtype if self.dtype is None else DTYPES[self.dtype]
        expect_tensors(payloads, 1)
        for (numbers,) in payloads:
            if numbers.shape != out.shape or numbers.dtype != dtype:
                raise MalformedError(
                    f"expected {len(out)} numbers of {dtype}, got {tuple(numbers.shape)} of {numbers.dtype}"
                )
            expect_summable(numbers, len(payloads))
        out.copy_(payloads[0][0])
        for (numbers,) in payloads[1:]:
            out.add_(numbers)
        if divisor != 1:
            out.div_(divisor)

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        if self.dtype is not None and x.flat.dtype != DTYPES[self.dtype]:
            return (yield from self._cast(x.flat, DTYPES[self.dtype], at, out))
        if not within_range(x.flat, at.world):
            raise NotFinite("the input has a value that is not finite, or too large for the sum over the group")
        mean = yield AllReduceMean(x.flat, out)
        return AggregationResult(mean=mean, own_contribution=lambda: x.flat)

    def _cast(self, x: Tensor, dtype: torch.dtype, at: AggregationContext, out: Tensor | None) -> Aggregation:
        encoded = half_encode(x, dtype, at.world)
        received = yield AllReduceMean(encoded, scratch_like(encoded))
        mean = mean_buffer_like(x, out)
        finite = half_decode([received], mean)
        return with_mean_in(
            AggregationResult(
                mean=mean, own_contribution=lambda: encoded.to(accumulation_dtype(x.dtype)), finite=finite
            ),
            out,
        )
