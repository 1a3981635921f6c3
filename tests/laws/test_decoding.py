"""Decoders under payloads that no encoder made: every compressor, compiled and in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan

import pytest
import torch
from laws.decoding import check_decoders, check_messages, check_scripts
from laws.subjects import each_compressor
from support.aggregations import aggregate
from support.nightly import nightly
from torch import Tensor

from gossamer.algorithms.compressors import (
    DGC,
    Chain,
    Codec,
    Compressor,
    Feedback,
    OneBit,
    PowerSGD,
    RandomK,
    Sharded,
    TernGrad,
    TopK,
    point_to_point,
)
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.kernels import library
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload, Script
from gossamer.base.runner import simulate
from gossamer.errors import MalformedError

SEEDS = range(14)
# The first three have both types, both sizes of a group, and each of three exchanges
every_seed = pytest.mark.parametrize("seeds", [SEEDS[:3], *nightly(SEEDS[3:])], ids=["", "more seeds"])


@pytest.fixture(params=["native", "reference"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "native" and not library.LIBRARY.exists():
        pytest.skip("the compiled loops were not built")
    monkeypatch.setattr(library, "wanted_kernels", lambda: request.param)


@each_compressor
@every_seed
def test_promise_8_in_a_group(compressor: Compressor, seeds: range) -> None:
    for seed in seeds:
        check_scripts(compressor, world=3 if seed % 4 else 4, seed=seed, step=3)


@each_compressor
@every_seed
def test_promise_8_between_two_peers(compressor: Compressor, seeds: range) -> None:
    for seed in seeds:
        check_messages(compressor, seed=seed, dtype=(torch.float32, torch.float64)[seed % 5 == 0])


@each_compressor
@every_seed
def test_a_decoder_alone(compressor: Compressor, seeds: range) -> None:
    for seed in seeds:
        check_decoders(compressor, seed=seed)


# -- who, which tensor, when -------------------------------------------------------------------------------------------

NAMED: list[Compressor] = [
    Int8(block=16), OneBit(), OneBit(columns=True), TopK(density=0.5), Chain(TopK(density=0.5), Int8()), TernGrad(),
    DGC(density=0.4), DGC(density=0.4, then=Int8(block=16)), Sharded(Int8()),
]  # fmt: skip
TWO = Layout.of({"first": (64,), "second": (64,)})


def spoiled(compressor: Compressor, number: float) -> str:
    """The error of three workers, of which rank 1 sends a number that is none, in every floating-point tensor's end."""
    at = [AggregationContext(step=11, rank=rank, world=3) for rank in range(3)]
    inputs = [FlatTensors(torch.randn(128), TWO) for _ in at]
    scripts = [compressor.aggregate(x, compressor.init(x, each), each) for x, each in zip(inputs, at, strict=True)]

    def heard_from(script):  # type: ignore[no-untyped-def]
        answer = None
        while True:
            try:
                op = script.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = yield op
            answer = [answer[0], tuple(spoil(each) for each in answer[1]), *answer[2:]]

    def spoil(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        found = tensor.clone()
        found.view(-1)[-1] = number
        return found

    with pytest.raises(MalformedError) as caught:
        simulate([heard_from(script) for script in scripts])
    return str(caught.value)


@pytest.mark.parametrize("compressor", NAMED, ids=repr)
@pytest.mark.parametrize("number", [nan, inf])
def test_the_error_names_sender_and_step(compressor: Compressor, number: float) -> None:
    said = spoiled(compressor, number)
    assert "rank 1" in said
    assert "step 11" in said


@pytest.mark.parametrize("compressor", NAMED[:5], ids=repr)
def test_the_error_names_the_tensor(compressor: Compressor) -> None:
    assert "'second'" in spoiled(compressor, nan)


def test_columns_of_another_shape_are_refused() -> None:
    values, bits = OneBit(columns=True).encode(FlatTensors(torch.randn(128), TWO), AggregationContext())
    for wrong in (values.view(-1), values[:1], values.double(), values[None], values.int()):
        with pytest.raises(MalformedError):
            OneBit(columns=True).decode([(wrong, bits)], TWO, torch.empty(128))


@pytest.mark.parametrize("codec", [Int8(), OneBit(), TopK(density=0.5), Chain(TopK(density=0.5), Int8())], ids=repr)
def test_what_is_merely_too_large_to_be_added_up_skips_the_step_and_shows_where(codec: Codec) -> None:
    """Honest gradients that overflow are no damage: every rank comes to the same conclusion, and nothing is raised."""
    inputs = [torch.ones(128) for _ in range(4)]
    for x in inputs:
        x[100] = 3e38
    for staged in aggregate(codec, inputs, TWO):
        assert not staged.finite
        assert int(staged.mean.abs().argmax()) >= 64


def test_a_too_large_number_skips_the_step_where_the_own_contribution_is_decoded_as_well() -> None:
    compressor = Feedback(TopK(density=0.5), rule="ef21")
    inputs = [torch.ones(128) for _ in range(4)]
    inputs[2][100] = 3e38
    states = [compressor.init(FlatTensors(x, TWO), AggregationContext(world=4)) for x in inputs]
    assert not any(staged.finite for staged in aggregate(compressor, inputs, TWO, states))


def test_a_message_names_its_sender() -> None:
    at = AggregationContext(step=5, rank=3, world=4)
    payload = point_to_point.encode(Int8(), FlatTensors(torch.ones(128), TWO), State(), at).payload
    payload[0][1] = nan
    with pytest.raises(MalformedError, match="rank 3 in step 5 for tensor 'second'"):
        point_to_point.decode(Int8(), payload, TWO, at, torch.empty(128))


@pytest.mark.parametrize("compressor", [RandomK(density=0.5), PowerSGD(rank=1)], ids=repr)
def test_a_mean_that_is_not_finite_is_reported(compressor: Compressor) -> None:
    """Means of few numbers, in which no sender can be told apart, are looked at; a dense one would cost a pass."""
    layout, at = Layout.of({"m": (16, 8)}), AggregationContext(world=2)
    x = FlatTensors(torch.randn(128), layout)

    def deceived(script: Script) -> Script:
        answer = None
        while True:
            try:
                op = script.send(answer)
            except StopIteration as stop:
                return stop.value
            yield op
            answer = torch.full_like(op.tensors()[0], nan)

    scripts = [deceived(compressor.aggregate(x, compressor.init(x, at), at)) for _ in range(2)]
    assert not any(staged.finite for staged in simulate(scripts))


# -- the broken twins --------------------------------------------------------------------------------------------------


class Believing(TopK):
    """Adds up what comes."""

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        out.zero_()
        for values, _ in payloads:
            out[: values.numel()] += values.view(-1) / divisor


class Hasty(TopK):
    """Looks for damage only after it has begun to write."""

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        out.zero_()
        super().decode(payloads, layout, out, divisor)


@pytest.mark.parametrize(
    "check", [check_decoders, check_messages, lambda c, seed: check_scripts(c, world=3, seed=seed)]
)
def test_the_law_catches_a_decoder_that_believes(check) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        [check(Believing(density=0.1), seed=seed) for seed in range(40)]


def test_the_law_catches_a_decoder_that_writes_first() -> None:
    with pytest.raises(AssertionError, match="written before"):
        [check_decoders(Hasty(density=0.1), seed=seed) for seed in SEEDS]


def test_most_of_what_is_tried_is_read_or_refused_for_a_reason() -> None:
    """The law would hold for a decoder that refuses everything."""
    read = [check_decoders(Int8(), seed=seed) for seed in range(200)]
    assert 10 < sum(read) < 190
