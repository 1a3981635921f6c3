"""Codecs of Triton's kernels: the numbers they are compared on with plain torch, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kernel_codecs import Codec, Int8Nearest, Measured, Ternary, bits, numbers
from torch import Tensor

from gossamer.base.kernels import triton as kernels
from gossamer.base.kernels.reference import float4, levels, onebit, quantize, sign_magnitude, ternary, twobit
from gossamer.base.kernels.reference.residual import Residual
from gossamer.errors import NotFinite, OutOfRange

# The interpreter's numpy tells of infinities, which kernels report in their own way.
told = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

TYPES = (torch.float32, torch.float16, torch.bfloat16)
every_type = pytest.mark.parametrize(
    ("dtype", "place"),
    [(torch.float32, "in place"), (torch.float16, "apart"), (torch.bfloat16, None)],
    ids=str,
)
KINDS = ("plain", "zeros", "equal", "tiny", "ties", "mixed", "small")
LARGE = 100_000


def codecs(module: Any = kernels) -> dict[str, dict[str, Codec]]:
    """By module of Triton's kernels, in small blocks."""
    return {
        "int8": {
            "nearest": Int8Nearest(module, quantize, "int8", (16,)),
            "stochastic": Codec(module, quantize, "int8", (64,), key=True),
        },
        "onebit": {"onebit": Codec(module, onebit, "onebit", (64,))},
        "twobit": {
            "given": Codec(module, twobit, "twobit", (64,), given=True),
            "measured": Measured(module, twobit, "twobit", (16,)),
        },
        "ternary": {f"{count} a byte": Ternary(module, ternary, "ternary", (count,)) for count in (4, 5)},
        "levels": {
            f"{count} levels": Codec(module, levels, "levels", (block, count), key=True)
            for count, block in ((1, 8), (7, 64), (127, 32), (128, 512), (2**13, 16), (2**15 - 1, 64))
        },
        "float4": {"float4": Codec(module, float4, "float4", (16,))},
        "sign_magnitude": {"sign_magnitude": Codec(module, sign_magnitude, "sign_magnitude", (8,))},
    }


CODECS = codecs()
EVERY = {f"{module}, {name}": codec for module, found in CODECS.items() for name, codec in found.items()}
every_codec = pytest.mark.parametrize("codec", EVERY.values(), ids=EVERY.keys())


def at_large(codec: Codec) -> None:
    """A large tensor in the largest blocks, one to a program, and one whose small blocks several programs share."""
    largest = replace(codec, options=(2**14, *codec.options[1:]))
    for each, size in ((largest, LARGE), (codec, 2500)):
        compared(each, numbers("plain", size), [size], numbers("plain", size, 1))


def of(module: str) -> pytest.MarkDecorator:
    """The codecs of one module."""
    return pytest.mark.parametrize("codec", CODECS[module].values(), ids=CODECS[module].keys())


def broken(**functions: Any) -> dict[str, dict[str, Codec]]:
    """All codecs of a twin, in which some functions are others."""
    return codecs(SimpleNamespace(**{name: getattr(kernels, name) for name in kernels.__all__} | functions))


def corpus(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, list[int]]:
    """Tensors of every kind side by side, some of them empty: (n,) numbers, and their sizes."""
    sizes = [0, 65, 1, 64, 7, 0, 330, 65, 9]
    kinds = [KINDS[(place + seed) % len(KINDS)] for place in range(len(sizes))]
    found = [numbers(kind, size, seed) for kind, size in zip(kinds, sizes, strict=True)]
    return torch.cat(found).to(dtype), sizes


def compared(codec: Codec, x: Tensor, sizes: Sequence[int], before: Tensor | None = None, place: str = "apart") -> None:
    """Both refuse, or everything that a codec writes has the bits of plain torch."""
    truth, found = (everything(codec, x, sizes, before, place, plain) for plain in (True, False))
    assert (truth is None) == (found is None)
    for expected, got in zip(truth or [], found or [], strict=True):
        assert expected.dtype == got.dtype
        assert torch.equal(bits(expected), bits(got))


def everything(
    codec: Codec, x: Tensor, sizes: Sequence[int], before: Tensor | None, place: str, plain: bool
) -> list[Tensor] | None:
    """A payload, what is left, and sums; None where a number cannot be sent."""
    residual = None
    if before is not None:
        owed = before.clone()
        residual = Residual(owed, owed if place == "in place" else torch.full_like(owed, torch.nan))
    try:
        payload = codec.encode(x, sizes, residual, plain=plain)
    except NotFinite:
        return None
    other = codec.encode(x.flip(0), sizes, None, plain=True)
    left = [] if residual is None else [residual.after]
    return [*payload, *left, *sums(codec, [payload, other], sizes, plain)]


def sums(codec: Codec, payloads: Sequence[tuple[Tensor, ...]], sizes: Sequence[int], plain: bool) -> list[Tensor]:
    """Of one payload, and the mean of three."""
    found = []
    for heard, divisor in ((payloads[:1], 1), ([*payloads, payloads[0]], 3)):
        found.append(torch.full((sum(sizes),), torch.nan))
        with suppress(OutOfRange):  # then nothing is written
            codec.decode(heard, sizes, found[-1], divisor, plain=plain)
    return found


def caught(twin: Codec, x: Tensor, sizes: Sequence[int], before: Tensor | None = None) -> None:
    """The comparison finds what is wrong with a twin."""
    with pytest.raises(AssertionError):
        compared(twin, x, sizes, before)
