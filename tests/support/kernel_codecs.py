"""Codes in a few bits: every codec in plain torch and compiled, and numbers that loops stumble over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.base import rng
from gossamer.base.kernels import library, packed_bytes, quantize
from gossamer.base.kernels.reference import levels, onebit, ternary, twobit
from gossamer.base.kernels.reference import quantize as quantise
from gossamer.base.kernels.reference.residual import Residual
from gossamer.errors import NotFinite, OutOfRange

KEY = rng.address("tests", "quantise")
SIZES = (12, 0, 1, 37, 300, 8)


@dataclass(frozen=True)
class Codec:
    """One pair of functions in plain torch or compiled, with all but the data fixed."""

    module: Any
    truth: Any
    name: str
    options: tuple[object, ...]
    key: bool = False
    given: bool = False  # a scale per block that does not come from the encoder

    def encode(self, x: Tensor, sizes: Sequence[int], residual: Residual | None, *, plain: bool) -> tuple[Tensor, ...]:
        function = getattr(self.truth if plain else self.module, f"{self.name}_encode")
        arguments = (*self.options, *self._given(sizes), *((KEY,) if self.key else ()))
        payload = function(x, sizes, *arguments, residual)
        return payload if isinstance(payload, tuple) else (*self._given(sizes), payload)

    def decode(
        self, payloads: Sequence[tuple[Tensor, ...]], sizes: Sequence[int], out: Tensor, divisor: int, *, plain: bool
    ) -> None:
        function = getattr(self.truth if plain else self.module, f"{self.name}_decode")
        function(payloads, sizes, *self.options, out, divisor)

    def _given(self, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        if not self.given:
            return ()
        count = packed_bytes(sizes, int(str(self.options[0])))
        return (torch.linspace(0.2, 0.9, max(count, 1))[:count],)


@dataclass(frozen=True)
class Ternary(Codec):
    def encode(self, x: Tensor, sizes: Sequence[int], residual: Residual | None, *, plain: bool) -> tuple[Tensor, ...]:
        module = self.truth if plain else self.module
        w = x if residual is None else x + residual.before
        scales = module.magnitudes(w, sizes)
        if residual is None:
            return scales, module.ternary_encode(w, sizes, scales, KEY, *self.options)
        return scales, module.ternary_encode(w, sizes, scales, KEY, *self.options, residual.after)

    def decode(
        self, payloads: Sequence[tuple[Tensor, ...]], sizes: Sequence[int], out: Tensor, divisor: int, *, plain: bool
    ) -> None:
        module = self.truth if plain else self.module
        packed = [(codes,) for _, codes in payloads]
        module.ternary_decode(packed, payloads[0][0], sizes, *self.options, out, divisor)


class Measured(Codec):
    """TwoBit with thresholds that the encoder finds."""

    def encode(self, x: Tensor, sizes: Sequence[int], residual: Residual | None, *, plain: bool) -> tuple[Tensor, ...]:
        module = self.truth if plain else self.module
        found: tuple[Tensor, ...] = module.twobit_measured_encode(x, sizes, *self.options, 0.37, residual)
        return found


class Int8Nearest(Codec):
    def encode(self, x: Tensor, sizes: Sequence[int], residual: Residual | None, *, plain: bool) -> tuple[Tensor, ...]:
        module = self.truth if plain else self.module
        return module.int8_encode(x, sizes, *self.options, None, residual)


fast = quantize
CODECS = {
    "int8": Int8Nearest(fast, quantise, "int8", (16,)),
    "int8, blocks of 7": Int8Nearest(fast, quantise, "int8", (7,)),
    "int8, stochastic": Codec(fast, quantise, "int8", (256,), key=True),
    "onebit": Codec(fast, onebit, "onebit", (64,)),
    "onebit, large blocks": Codec(fast, onebit, "onebit", (2048,)),
    "twobit": Codec(fast, twobit, "twobit", (64,), given=True),
    "twobit, large blocks": Codec(fast, twobit, "twobit", (2048,), given=True),
    "twobit, measured": Measured(fast, twobit, "twobit", (16,)),
    "twobit, measured in large blocks": Measured(fast, twobit, "twobit", (2048,)),
    "ternary, four a byte": Ternary(fast, ternary, "ternary", (4,)),
    "ternary, five a byte": Ternary(fast, ternary, "ternary", (5,)),
    **{
        f"levels {count}": Codec(fast, levels, "levels", (block, count), key=True)
        for count, block in ((1, 8), (3, 64), (7, 512), (127, 512), (128, 16), (2**14, 64), (2**15 - 1, 2048))
    },
}
MALFORMED = {  # a byte that no encoder writes, by codec; every byte means something to the others
    "twobit": 0b00010000,
    "ternary, four a byte": 0b11000000,
    "ternary, five a byte": 243,
    "levels 1": 0b00001100,
    "levels 127": 255,
}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
compiled = pytest.mark.skipif(not library.LIBRARY.exists(), reason="the kernels were not compiled here")


def numbers(kind: str, n: int, seed: int = 0) -> Tensor:
    """Plain ones, or such as loops stumble over."""
    generator = rng.generator("numbers", kind, seed)
    x = torch.randn(n, generator=generator)
    pick = torch.randint(0, 8, (n,), generator=generator)
    match kind:
        case "tiny":
            return x * 2.0**-140
        case "small":
            return x * 2.0**-120
        case "huge":
            return x.clamp(-2, 2) * 2.0**115
        case "ties":
            return (x * 4).round() / 2
        case "zeros":
            return torch.where(pick < 4, 0.0, -0.0)
        case "equal":
            return torch.where(pick < 4, 1 / 3, -1 / 3)
        case "mixed":
            edges = torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, -1e-30, 1e30, 1.0])
            return torch.where(x.abs() < 1, edges[pick], x)
    return x


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32) if x.dtype == torch.float32 else x


SUMS = ((0,), (0, 1, 0))  # which payloads are added up; of these, the mean is taken


def run(
    codec: Any, x: Tensor, before: Tensor | None, sizes: Sequence[int], sums: Sequence[Sequence[int]], *, plain: bool
) -> list[Tensor] | None:
    """Everything a codec computes, or None where it refuses."""
    residual = None if before is None else Residual(before, torch.empty_like(before))
    try:
        payload = codec.encode(x, sizes, residual, plain=plain)
    except NotFinite:
        return None
    payloads = payload, codec.encode(x.flip(0).contiguous(), sizes, None, plain=plain)
    found = [*payload] if residual is None else [*payload, residual.after]
    for added in sums:
        found.append(torch.full_like(x, math.nan))
        heard = [payloads[each] for each in added]
        with suppress(OutOfRange):  # then nothing is written
            codec.decode(heard, sizes, out=found[-1], divisor=max(1, len(added)), plain=plain)
    return found


def same(
    codec: Any, x: Tensor, before: Tensor | None, sizes: Sequence[int], sums: Sequence[Sequence[int]] = SUMS
) -> None:
    """Compiled loops give what plain torch gives, bit for bit."""
    truth, found = (run(codec, x, before, sizes, sums, plain=plain) for plain in (True, False))
    assert (truth is None) == (found is None)
    for expected, got in zip(truth or [], found or [], strict=True):
        assert expected.dtype == got.dtype
        assert torch.equal(bits(expected), bits(got))
