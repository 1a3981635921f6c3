"""Int8 and QSGD: what they send, and that random rounding is unbiased, in size and in address."""

from __future__ import annotations

import pytest
import torch
from laws.unbiased import check_unbiased, draws_of

from gossamer.algorithms.compressors import Codec, Compressor, OneBit, TwoBit
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.qsgd import QSGD
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import Residual
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.errors import MalformedError

RANDOM: list[Codec] = [Int8(block=64, stochastic=True), QSGD(block=64), QSGD(levels=3, block=64)]
CODECS: list[Codec] = [*RANDOM, Int8(), OneBit(), OneBit(columns=True), TwoBit(), TwoBit(adaptive=True)]
SPREAD = torch.linspace(-1.37, 1.61, 64)
OUTLIER = torch.cat([torch.linspace(-0.5, 0.5, 63), torch.tensor([-7.0])])


def packed(**tensors: torch.Tensor) -> FlatTensors:
    return FlatTensors.pack(tensors)


def decoded(codec: Codec, x: FlatTensors, at: AggregationContext | None = None) -> torch.Tensor:
    return codec.decoded(codec.encode(x, at or AggregationContext()), x.layout, x.flat)


class Nearest(QSGD):
    """Rounds to a level before it pretends to draw one."""

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        unit = x.flat.abs().max() / self.levels
        return super().encode(FlatTensors((x.flat / unit).round() * unit, x.layout), at, residual)


@pytest.mark.parametrize("x", [SPREAD, OUTLIER], ids=["spread", "outlier"])
@pytest.mark.parametrize("codec", RANDOM, ids=repr)
def test_unbiased(codec: Codec, x: torch.Tensor) -> None:
    check_unbiased(codec, x)


@pytest.mark.parametrize("twin", [Int8(block=64), Nearest(levels=127, block=64), Nearest(levels=3, block=64)], ids=repr)
def test_unbiased_catches(twin: Compressor) -> None:
    with pytest.raises(AssertionError, match="wrong on average"):
        check_unbiased(twin, SPREAD, draws=4000)


@pytest.mark.parametrize("block", [16, 64, 512])
@pytest.mark.parametrize("levels", [1, 2, 5, 16, 127])
def test_variance_of_qsgd(levels: int, block: int) -> None:
    x = torch.randn(block, generator=torch.Generator().manual_seed(block)).double()
    bound = min(block / levels**2, block**0.5 / levels) * float(x.square().sum())
    drawn = draws_of(QSGD(levels=levels, block=block), x, 2000)
    error = (drawn - x).square().sum(1)
    part = (x.abs() * levels / x.norm()) % 1
    expected = float((part * (1 - part)).sum() * (x.norm() / levels) ** 2)
    assert expected <= bound
    assert abs(float(error.mean()) - expected) <= 4.5 * float(error.std()) / 2000**0.5
    if levels == 16:
        coarse = draws_of(QSGD(levels=1, block=block), x, 2000)
        assert float((coarse - x).square().sum(1).mean()) > bound, "the bound would not notice fewer levels"


def test_error_of_int8() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    scale = float(x.abs().max()) / 127
    nearest = decoded(Int8(block=4096), packed(x=x)) - x
    drawn = decoded(Int8(block=4096, stochastic=True), packed(x=x)) - x
    assert float(nearest.abs().max()) <= scale / 2 * 1.001
    assert scale / 2 * 1.5 < float(drawn.abs().max()) <= scale * 1.001
    ratio = float(drawn.square().mean() / nearest.square().mean())
    assert ratio == pytest.approx(2, abs=0.2)


@pytest.mark.parametrize("codec", RANDOM, ids=repr)
def test_noise_is_addressed(codec: Codec) -> None:
    x = SPREAD.repeat(4)
    state = torch.get_rng_state()
    base = decoded(codec, packed(a=x), AggregationContext(seed=1, step=2, rank=3))
    assert torch.equal(base, decoded(codec, packed(a=x), AggregationContext(seed=1, step=2, rank=3, world=9)))
    for at in (
        AggregationContext(seed=2, step=2, rank=3),
        AggregationContext(seed=1, step=3, rank=3),
        AggregationContext(seed=1, step=2, rank=0),
    ):
        assert not torch.equal(base, decoded(codec, packed(a=x), at))
    assert not torch.equal(base, decoded(codec, packed(b=x), AggregationContext(seed=1, step=2, rank=3)))
    assert torch.equal(state, torch.get_rng_state()), "torch's global generator was touched"


@pytest.mark.parametrize("codec", RANDOM, ids=repr)
def test_workers_draw_on_their_own(codec: Codec) -> None:
    """So their errors cancel: the mean of 16 is four times as good."""
    x = SPREAD.repeat(100)
    errors = torch.stack([decoded(codec, packed(a=x), AggregationContext(rank=rank)) - x for rank in range(16)])
    gain = float(errors.square().mean() / errors.mean(0).square().mean())
    assert gain == pytest.approx(16, rel=0.15)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_bare_values_and_empty_tensors(codec: Codec) -> None:
    """A codec needs no matrices: another compressor may hand it a list of values."""
    for layout in (Layout.of({"values": (37,)}), Layout.of({"a": (0,), "b": (3,), "c": (0, 4), "d": (), "e": (2, 0)})):
        x = FlatTensors(torch.linspace(-1, 1, layout.numel), layout)
        left = torch.empty(layout.numel)
        payload = codec.encode(x, AggregationContext(), Residual(torch.zeros(layout.numel), left))
        out = codec.decoded(payload, layout, x.flat)
        torch.testing.assert_close(out + left, x.flat)
        blank = codec.encode(FlatTensors(x.flat.to("meta"), layout), AggregationContext())
        assert [(t.shape, t.dtype) for t in blank] == [(t.shape, t.dtype) for t in payload]
    nothing = Layout(())
    codec.decode([codec.encode(FlatTensors(torch.empty(0), nothing), AggregationContext())], nothing, torch.empty(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_half_precision(codec: Codec, dtype: torch.dtype) -> None:
    x = packed(a=SPREAD.to(dtype), b=OUTLIER.to(dtype))
    out = decoded(codec, x)
    assert out.dtype == torch.float32
    assert torch.equal(out, decoded(codec, FlatTensors(x.flat.float(), x.layout)))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_malformed_payloads_write_nothing(codec: Codec) -> None:
    x = packed(a=SPREAD, b=OUTLIER)
    good = codec.encode(x, AggregationContext())
    for place in range(len(good)):
        bad = tuple(t[:-1] if each == place else t for each, t in enumerate(good))
        out = torch.full_like(x.flat, 7)
        with pytest.raises(MalformedError):
            codec.decode([good, bad], x.layout, out)
        assert (out == 7).all()


def test_who_wants_feedback() -> None:
    assert Int8().wants_feedback
    assert not Int8(feedback=False).wants_feedback
    assert not Int8(stochastic=True).wants_feedback
    assert not QSGD().wants_feedback
    assert QSGD(feedback=True).wants_feedback


@pytest.mark.parametrize("levels", [0, -1, 2**15])
def test_levels_are_refused(levels: int) -> None:
    with pytest.raises(ValueError, match=r"Write QSGD\(levels=127\)"):
        QSGD(levels=levels)


@pytest.mark.parametrize("block", [0, 3, 500, -8])
def test_blocks_are_refused(block: int) -> None:
    with pytest.raises(ValueError, match=r"Write QSGD\(block=512\)"):
        QSGD(block=block)
    with pytest.raises(ValueError, match=r"Write OneBit\(block=2048\)"):
        OneBit(block=block)


def test_most_levels_there_are() -> None:
    x = packed(a=SPREAD)
    torch.testing.assert_close(decoded(QSGD(levels=2**15 - 1), x), SPREAD, atol=1e-3, rtol=0)
