"""1-bit quantization: every entry as its sign."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gossamer.algorithms.compressors.decoding import pairs
from gossamer.algorithms.compressors.quantize import Quantizer, is_power_of_two
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import Residual, onebit_decode, onebit_encode
from gossamer.base.kernels.reference.bits import pack, unpack
from gossamer.base.kernels.reference.residual import wanted
from gossamer.base.kernels.reference.segments import LARGEST_BLOCK, average, expect_numbers, sendable
from gossamer.base.layout import FlatTensors, Layout, Slot
from gossamer.base.ops import Payload
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class OneBit(Quantizer):
    """Send each entry's sign in one bit, with one magnitude per block, or two values per column of a matrix.

    C(x)_j = s sign(x_j), s = mean |x| over the block j is in; by columns: the mean of the entries of j's column that
    have the sign of x_j, where zeros count as positive
    law:    |x - C(x)|^2 = |x|^2 - d s^2 per block of d entries; by columns: C(x) has every column's sum and no rule
            with two values per column and this split is nearer; blocks and columns of zeros stay zero
    bytes:  (workers - 1) (ceil(N / 8) + 4 ceil(N / block)), N per tensor; by columns ceil(N / 8) + 8 cols;
            in Sharded, which a recipe adds, about 2 / workers of that
    source: Seide et al. 2014, Interspeech (columns); Karimireddy et al. 2019, ICML (the mean magnitude)

    Karimireddy et al. call this the scaled sign, |x|_1 / d sign(x). One bit encodes two signs and no zero, so a zero in
    a block with other values becomes s. With feedback the residual corrects it by -s, so the sum over the steps stays
    bounded, but an optimizer that divides by the size of gradients, such as Adam, moves the entry nevertheless. Rows of
    an embedding that no batch contained stay unchanged if blocks end with rows, that is with a `block` that divides the
    length of a row, or if Route(..., names="*embedding*") sends them uncompressed.

    The magnitude is a mean, since the root mean square is not a contraction: with it, one large entry among small ones
    makes the error larger than the tensor. Tensors of more than two dimensions are reshaped to (first, rest), those of
    fewer to one column.

    Args:
        block: entries that share a magnitude, a power of two, 8 or more.
        columns: whether to send two values per column of a matrix instead.
        feedback: whether a recipe wraps it in Feedback.

    Example:
        >>> gossamer.OneBit(block=512)
        OneBit(block=512)
    """

    block: int = 2048
    columns: bool = False
    feedback: bool = True

    def __post_init__(self) -> None:
        require(
            is_power_of_two(self.block) and 8 <= self.block <= LARGEST_BLOCK,
            f"block must be the number of entries that share a magnitude, a power of two from 8 to {LARGEST_BLOCK}, "
            f"got {self.block}. Write OneBit(block=2048).",
        )

    @property
    def reencodable(self) -> bool:
        return not self.columns  # a part of the buffer has no columns

    def suits(self, shape: Sequence[int]) -> bool:
        """Whether compression saves bytes; by columns it does not for matrices of one or two rows."""
        return not self.columns or prod(shape) // 8 + 8 * _matrix_shape(shape)[1] < 4 * prod(shape)

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        if self.columns:
            return columns_encode(x, residual)
        return onebit_encode(x.flat, x.layout.sizes, self.block, residual)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        if self.columns:
            columns_decode(pairs(payloads), layout, out, divisor)
        else:
            onebit_decode(pairs(payloads), layout.sizes, self.block, out, divisor)


def columns_encode(x: FlatTensors, residual: Residual | None = None) -> Payload:
    """Return (values, bits): (columns, 2) float32, the means of entries >= 0 and < 0; and 8 signs per byte.

    w = x + residual.before, or x; residual.after = w - the decoded payload. Raises NotFinite.
    """
    w = wanted(x.flat, residual)
    values = [w.new_empty(0, 2)]
    for slot in x.layout:
        matrix = _matrix(slot, w)
        values.append(torch.stack([_side_mean(matrix, matrix >= 0), _side_mean(matrix, matrix < 0)], 1))
    sendable_values, negative = sendable(torch.cat(values)), w < 0
    if residual is not None:
        torch.sub(w, _meant(x.layout, sendable_values, negative, w.dtype), out=residual.after)
    return sendable_values, pack(negative, x.layout.sizes, 8, 2)


def columns_decode(payloads: Sequence[tuple[Tensor, Tensor]], layout: Layout, out: Tensor, divisor: int = 1) -> None:
    """Overwrite `out`: (n,) with the sum of the decoded payloads, in the order given, divided by `divisor`.

    Raises MalformedError before anything is written.
    """
    columns = sum(_matrix_shape(slot.shape)[1] for slot in layout)
    for values, _ in payloads:
        expect_numbers(values, (columns, 2), len(payloads))
    negatives = [unpack(bits, layout.sizes, 8, 2) != 0 for _, bits in payloads]
    terms = (
        _meant(layout, values, negative, out.dtype) for (values, _), negative in zip(payloads, negatives, strict=True)
    )
    average(terms, out, divisor)


def _side_mean(matrix: Tensor, side: Tensor) -> Tensor:
    """Return the mean of each column's entries on one side of zero: (cols,), 0 without entries. Summed in float64."""
    total = torch.where(side, matrix, torch.zeros_like(matrix)).sum(0, dtype=torch.float64)
    return (total / side.sum(0).clamp(min=1)).to(matrix.dtype)


def _meant(layout: Layout, values: Tensor, negative: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the decoded values and bits: (n,)."""
    meant = torch.empty_like(negative, dtype=dtype)
    for slot, pair in zip(layout, _per_tensor(layout, values), strict=True):
        above, below = pair.to(dtype).unbind(1)
        slot.view(meant).copy_(torch.where(_matrix(slot, negative), below, above).view(slot.shape))
    return meant


def _per_tensor(layout: Layout, values: Tensor) -> Iterator[Tensor]:
    return iter(values.split([_matrix_shape(slot.shape)[1] for slot in layout]))


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, cols)."""
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (prod(shape), 1)


def _matrix(slot: Slot, flat: Tensor) -> Tensor:
    return slot.view(flat).reshape(_matrix_shape(slot.shape))
