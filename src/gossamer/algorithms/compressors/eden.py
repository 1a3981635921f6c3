"""EDEN and DRIVE: random rotation, few bits per coefficient, and a scale that makes the estimate unbiased."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Codec
from gossamer.algorithms.compressors.decoding import expect_tensors
from gossamer.algorithms.compressors.quantize import is_power_of_two, noise_key
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import Residual, hadamard
from gossamer.base.kernels.reference.bits import pack, unpack
from gossamer.base.kernels.reference.hadamard import spans
from gossamer.base.kernels.reference.residual import wanted
from gossamer.base.kernels.reference.segments import LARGEST_BLOCK, average, expect, expect_numbers, sendable
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.errors import require

# The positive half of the optimal quantization levels of a standard normal variable (Lloyd 1982, Max 1960), by bits.
LEVELS = {
    1: (0.7978845608,),
    2: (0.4527800398, 1.5104176087),
    4: (0.1283950299, 0.3880482940, 0.6567591215, 0.9423404265, 1.2562311585, 1.6180464079, 2.0690173036, 2.7326355767),
}
ROUNDS = 2  # of signs and Hadamard sums: after one, an input with two large entries has two-valued coefficients


@dataclass(frozen=True, repr=False)
class EDEN(Codec):
    """Send each coefficient of a random rotation in a few bits; unbiased, and without a residual.

    y = R x in blocks of d entries;  c_j = the level nearest to sqrt(d) y_j / |y|;  C(x) = S R^T c, S = |x|^2 / (c . y)
    R = (H D / sqrt(d))^2, H Walsh-Hadamard, D random signs, drawn by each worker in each step
    law:    x . C(x) = |x|^2 in each message; E C(x) = x for uniform rotations, and E |x - C(x)|^2 / |x|^2 is about
            0.571, 0.133, 0.0096 for 1, 2, 4 bits; the mean of n workers has 1/n of that
    bytes:  (workers - 1) (8 + sum over the tensors of ceil(N bits / 8) + 4 ceil(N / block)); the rest of a tensor is
            cut into powers of two, each with a scale
    source: Vargaftik et al. 2021, NeurIPS (DRIVE: 1 bit); Vargaftik et al. 2022, ICML (EDEN)

    The papers call the levels centroids and S the scale. The signs D are sent as a 63-bit seed. H D is not a uniform
    rotation, so a bias remains for inputs with few large entries; two rounds make it small. Each worker draws its own
    signs: with equal signs the errors would be equal, and averaging would not reduce them. The unbiased scale gives a
    single message a larger error than OneBit's. With feedback, write Rotated(OneBit(), by="hadamard").

    Args:
        bits: bits per coefficient: 1, 2 or 4.
        block: entries that are rotated together (d), a power of two, 8 or more.
        feedback: whether a recipe wraps it in Feedback.

    Example:
        >>> gossamer.EDEN(bits=2)
        EDEN(bits=2)
    """

    bits: int = 1
    block: int = 4096
    feedback: bool = False

    def __post_init__(self) -> None:
        require(
            self.bits in LEVELS,
            f"bits must be 1, 2 or 4, so that codes fill bytes, got {self.bits}. Write EDEN(bits=2).",
        )
        require(
            is_power_of_two(self.block) and 8 <= self.block <= LARGEST_BLOCK,
            f"block must be a power of two from 8 to {LARGEST_BLOCK}, got {self.block}: its entries are rotated "
            f"together. Write EDEN(bits={self.bits}, block=4096).",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        w, sizes, key = wanted(x.flat, residual), tuple(x.layout.sizes), noise_key(x, at)
        codes, scales = quantized(self._rotated(w, sizes, key), _blocks(sizes, self.block), self.bits)
        sendable_scales = sendable(scales)
        if residual is not None:
            torch.sub(w, self._meant(codes, sendable_scales, sizes, key, w.dtype), out=residual.after)
        seed = torch.tensor([key], dtype=torch.int64, device=w.device)
        return seed, sendable_scales, pack(codes, sizes, 8 // self.bits, 2**self.bits)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        expect_tensors(payloads, 3)
        sizes = tuple(layout.sizes)
        for seed, scales, _ in payloads:
            expect(seed, torch.int64, 1)
            expect_numbers(scales, (len(_blocks(sizes, self.block)),), len(payloads))
        codes = [unpack(packed, sizes, 8 // self.bits, 2**self.bits) for *_, packed in payloads]
        average(
            (
                self._meant(each, scales, sizes, 0 if seed.is_meta else int(seed), out.dtype)
                for each, (seed, scales, _) in zip(codes, payloads, strict=True)
            ),
            out,
            divisor,
        )

    def _meant(self, codes: Tensor, scales: Tensor, sizes: tuple[int, ...], key: int, dtype: torch.dtype) -> Tensor:
        levels = _levels(self.bits, dtype, codes.device)[codes.long()]
        return self._rotated(levels.mul_(_spread(scales, _blocks(sizes, self.block)).to(dtype)), sizes, key, back=True)

    def _rotated(self, x: Tensor, sizes: tuple[int, ...], key: int, *, back: bool = False) -> Tensor:
        """Return R x, or R^T x: (n,)."""
        found = torch.empty_like(x)
        draws = torch.randint(0, 2, (ROUNDS, self.block), generator=rng.generator("rotation", key), device="cpu")
        signs_of_rounds = (2 * draws - 1).to(x.device, x.dtype)
        for signs in signs_of_rounds.flip(0) if back else signs_of_rounds:
            hadamard(x, sizes, self.block, signs, found, inverse=back)
            x = found
        return found


def quantized(y: Tensor, blocks: Sequence[int], bits: int) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of coefficients y: (n,), in blocks of these lengths: (n,) int64 and (blocks,) float64."""
    y = y.double()
    owner = _spread(torch.arange(len(blocks), device=y.device), blocks)
    nothing = y.new_zeros(len(blocks))
    energy = nothing.index_add(0, owner, y.square())
    unit = (energy / torch.tensor(blocks, dtype=y.dtype, device=y.device)).sqrt()
    levels = _levels(bits, y.dtype, y.device)
    z = y / unit.where(unit > 0, torch.ones_like(unit))[owner]
    codes = torch.bucketize(z, (levels[1:] + levels[:-1]) / 2)
    product = nothing.index_add(0, owner, levels[codes] * y)
    return codes, (energy / product).where(product > 0, nothing)


def _spread(values: Tensor, blocks: Sequence[int]) -> Tensor:
    """Repeat each block's value for its entries: (blocks,) -> (n,)."""
    return values.repeat_interleave(
        torch.tensor(blocks, dtype=torch.int64, device=values.device), output_size=sum(blocks)
    )


@lru_cache(maxsize=1024)
def _blocks(sizes: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Return the lengths of the rotated blocks, in order."""
    return tuple(length for start, stop, length in spans(sizes, block) for _ in range((stop - start) // length))


def _levels(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return all levels, ascending: (2^bits,)."""
    half = torch.tensor(LEVELS[bits], dtype=dtype, device=device)
    return torch.cat([-half.flip(0), half])
