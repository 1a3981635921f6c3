"""Chained codecs: the second one encodes the first one's values, and nothing is lost between them."""

from __future__ import annotations

import pytest
import torch
from laws.laws import check_conservation, check_own
from torch import Tensor

from gossamer.algorithms.compressors import (
    Chain,
    Codec,
    Compressor,
    Dense,
    Feedback,
    OneBit,
    RandomK,
    Sharded,
    TernGrad,
    TopK,
    TwoBit,
)
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.qsgd import QSGD
from gossamer.algorithms.compressors.threshold import Threshold
from gossamer.algorithms.recipes.parser import parse
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import Residual, decode_places
from gossamer.base.layout import FlatTensors, Layout
from gossamer.errors import MalformedError

LAYOUT = Layout.of({"matrix": (20, 30), "empty": (0,), "one": (1,), "vector": (400,)})
AT = AggregationContext(step=3, seed=1, rank=1, world=2)
COUNTS = [60, 0, 1, 40]
SECOND = [Int8(), Int8(block=16), QSGD(), OneBit(), OneBit(columns=True), TwoBit(threshold=0.5)]
SECOND += [TopK(density=0.5), Threshold(value=1.0, capacity=0.5)]


def numbers(seed: int = 0) -> Tensor:
    return torch.randn(LAYOUT.numel, generator=rng.generator("chain", seed))


def test_the_second_codec_sees_the_values_of_each_tensor() -> None:
    chain = Chain(TopK(density=0.1), Int8())
    seen = chain.chosen(LAYOUT)
    assert seen.names == LAYOUT.names
    assert [slot.shape for slot in seen] == [(count,) for count in COUNTS]


@pytest.mark.parametrize("then", SECOND, ids=repr)
def test_what_is_sent_stands_at_the_chosen_places(then: Codec) -> None:
    x, first = numbers(), TopK(density=0.1)
    chain = Chain(first, then)
    payload = chain.encode(FlatTensors(x, LAYOUT), AT)
    places, values = first.select(FlatTensors(x, LAYOUT), AT)
    inner = Layout.of({name: (count,) for name, count in zip(LAYOUT.names, COUNTS, strict=True)})
    expected = torch.zeros_like(x)
    expected[places.long()] = then.decoded(then.encode(FlatTensors(values, inner), AT), inner, x)
    assert torch.equal(chain.decoded(payload, LAYOUT, x), expected)
    assert torch.equal(decode_places(payload[0], sum(COUNTS), LAYOUT.numel), places)


@pytest.mark.parametrize("aliased", [False, True])
@pytest.mark.parametrize("then", SECOND, ids=repr)
def test_both_losses_are_left(then: Codec, aliased: bool) -> None:
    x, before = numbers(), numbers(1)
    wanted = x + before
    residual = Residual(before, before if aliased else torch.empty_like(x))
    chain = Chain(TopK(density=0.1), then)
    payload = chain.encode(FlatTensors(x, LAYOUT), AT, residual)
    own = chain.decoded(payload, LAYOUT, x)
    torch.testing.assert_close(residual.after + own, wanted, atol=1e-6, rtol=0)
    unreported = own == 0
    assert torch.equal(residual.after[unreported], wanted[unreported]), "what did not travel was changed"


class Forgetful(Chain):
    """A twin that forgets what the second codec lost."""

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> tuple[Tensor, ...]:
        payload = super().encode(x, at, residual)
        if residual is not None:
            places = decode_places(payload[0], sum(self.first.counts(x.layout.sizes)), x.layout.numel)
            residual.after[places.long()] = 0
        return payload


def test_conservation_catches_a_forgotten_second_loss() -> None:
    with pytest.raises(AssertionError):
        check_conservation(Feedback(Forgetful(TopK(density=0.1), Int8())), 3)


def test_means_are_sums_over_the_divisor() -> None:
    chain = Chain(TopK(density=0.1), Int8())
    payloads = [chain.encode(FlatTensors(numbers(seed), LAYOUT), AT) for seed in range(4)]
    out = torch.full((LAYOUT.numel,), torch.nan)
    chain.decode(payloads, LAYOUT, out, 4)
    parts = [chain.decoded(payload, LAYOUT, out) / 4 for payload in payloads]
    assert torch.equal(out, parts[0] + parts[1] + parts[2] + parts[3])


def test_malformed_parts_are_refused_before_anything_is_written() -> None:
    chain, out = Chain(TopK(density=0.1), Int8()), numbers()
    kept = out.clone()
    good = chain.encode(FlatTensors(numbers(1), LAYOUT), AT)
    coded, scales, codes = good
    broken = [
        (torch.full_like(coded, 255), scales, codes),
        (coded[:-1], scales, codes),
        (coded, scales[:-1], codes),
        (coded, scales, codes[:-1]),
        (coded, scales, codes.to(torch.uint8)),
    ]
    for payload in broken:
        with pytest.raises(MalformedError):
            chain.decode([good, payload], LAYOUT, out)
        assert torch.equal(out, kept)


def test_sizes_follow_from_the_layout() -> None:
    for then in SECOND:
        chain = Chain(TopK(density=0.1), then)
        payload = chain.encode(FlatTensors(numbers(), LAYOUT), AT)
        on_meta = chain.encode(FlatTensors(numbers().to("meta"), LAYOUT), AT)
        assert [(each.shape, each.dtype) for each in payload] == [(each.shape, each.dtype) for each in on_meta]


@pytest.mark.parametrize("inner", [Chain(TopK(density=0.1), Int8()), Threshold(value=1.0)], ids=repr)
def test_parts_of_buckets_are_chained_too(inner: Codec) -> None:
    check_own(Sharded(inner), 3)
    check_conservation(Feedback(Sharded(inner)), 3)


@pytest.mark.parametrize("first", [Int8(), RandomK(density=0.1), Threshold(value=1.0), Dense()], ids=repr)
def test_the_first_must_choose(first: Compressor) -> None:
    with pytest.raises(ValueError, match=r"select a fixed number .* Write Chain\(TopK\(density=0.01\), Int8\(\)\)"):
        Chain(first, Int8())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "then", [Dense(), RandomK(density=0.1), TernGrad(), Feedback(Int8()), Sharded(Int8())], ids=repr
)
def test_the_second_must_be_a_codec(then: Compressor) -> None:
    with pytest.raises(ValueError, match="an encoder and a decoder"):
        Chain(TopK(density=0.1), then)  # type: ignore[arg-type]


def test_it_wants_feedback_as_the_first_does() -> None:
    assert Chain(TopK(density=0.1), QSGD()).wants_feedback
    assert not Chain(TopK(density=0.1, feedback=False), Int8()).wants_feedback


def test_both_come_without_names_in_text() -> None:
    (term,) = parse("Chain(TopK(0.01), Int8)").terms
    assert term == Chain(TopK(density=0.01), Int8())
    assert repr(term) == "Chain(TopK(density=0.01), Int8())"
