"""A codec per worker: one exact mean of messages in several codecs, with the same bits on every rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from laws.laws import LAYOUT, Group
from support.aggregations import aggregate
from torch import Tensor

from gossamer.algorithms.compressors import (
    EDEN,
    QSGD,
    BinMeans,
    Chain,
    Codec,
    Compressor,
    Dense,
    Feedback,
    Float4,
    OneBit,
    PerWorker,
    PowerSGD,
    RandomK,
    Rotated,
    Sharded,
    SignMagnitude,
    TernGrad,
    Threshold,
    TopK,
    TwoBit,
)
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.recipes.catalog import NOUNS
from gossamer.algorithms.recipes.recipe import recipe, resolve
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather, AllToAll
from gossamer.base.runner import price
from gossamer.errors import GossamerError, MalformedError, MismatchError, RecipeError

CODECS: list[Codec] = [
    Int8(block=16),
    Int8(stochastic=True),
    Float4(),
    OneBit(block=16),
    OneBit(columns=True),
    TwoBit(),
    BinMeans(),
    SignMagnitude(),
    QSGD(levels=3),
    EDEN(),
    TopK(density=0.1),
    TopK(density=0.05, chunk=32),
    Chain(TopK(density=0.1), Int8()),
]
PAIRS = list(product(CODECS, CODECS))


def test_every_codec_of_the_catalog_is_tested() -> None:
    codecs = {noun for noun in NOUNS.values() if issubclass(noun, Codec) and noun is not Threshold}
    assert codecs <= {type(codec) for codec in CODECS}


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_equal_codecs_give_the_bits_of_the_codec_alone(codec: Codec) -> None:
    pair = PerWorker(codec, slow=codec, ranks=1)
    ways: list[tuple[Compressor, Compressor]] = [(codec, pair), (Feedback(codec), Feedback(pair))]
    if codec.reencodable:
        ways += [(Sharded(codec), Sharded(pair)), (Feedback(Sharded(codec)), Feedback(Sharded(pair)))]
    for plain, table in ways:
        one, other = (Group(each, 3, dtype=torch.float32) for each in (plain, table))
        for _ in range(3):
            gradients = one.gradients()
            for a, b in zip(one.aggregate(gradients), other.aggregate(gradients), strict=True):
                assert torch.equal(a.mean, b.mean)
                assert torch.equal(a.own, b.own)


@pytest.mark.parametrize(("usual", "slow"), PAIRS, ids=repr)
def test_the_mean_is_that_of_each_workers_own_decoded_message(usual: Codec, slow: Codec) -> None:
    check_mean(PerWorker(usual, slow=slow, ranks="1,3"))


@pytest.mark.parametrize(
    ("usual", "slow"), [pair for pair in PAIRS if all(codec.reencodable for codec in pair)], ids=repr
)
def test_sharded_ranks_agree_on_every_pair_of_codecs(usual: Codec, slow: Codec) -> None:
    group = Group(Feedback(Sharded(PerWorker(usual, slow=slow, ranks="1,3"))), 4, dtype=torch.float32)
    for _ in range(2):
        staged = group.aggregate(group.gradients())
        assert all(torch.equal(each.mean, staged[0].mean) for each in staged)


def check_mean(compressor: Compressor, world: int = 4) -> None:
    group = Group(compressor, world, dtype=torch.float32)
    staged = group.aggregate(group.gradients())
    exact = torch.stack([each.own.double() for each in staged]).mean(0)
    for each in staged:
        assert torch.equal(each.mean, staged[0].mean)
        torch.testing.assert_close(each.mean.double(), exact, rtol=1e-6, atol=1e-6)


@dataclass(frozen=True, repr=False)
class ByReceiver(PerWorker):
    """A mutant: rank `me` decodes all messages by its own codec."""

    me: int = 0

    def senders(self, world: int) -> Sequence[tuple[Codec, Sequence[int]]]:
        return [(self.of(self.me), range(world))]


@pytest.mark.parametrize("slow", [OneBit(block=16), Int8(block=32), Float4()], ids=repr)
def test_decoding_by_the_receivers_codec_is_caught(slow: Codec) -> None:
    scripts = [ByReceiver(Int8(block=16), slow=slow, ranks=1, me=rank) for rank in range(2)]
    inputs = [torch.randn(LAYOUT.numel) for _ in scripts]
    with pytest.raises((MalformedError, MismatchError)):
        aggregate(_ByRank(tuple(scripts)), inputs, LAYOUT)


@dataclass(frozen=True, repr=False)
class _ByRank(Compressor):
    each: tuple[Compressor, ...]

    def aggregate(self, x, state, at, out=None):  # type: ignore[no-untyped-def]
        return self.each[at.rank].aggregate(x, state, at, out)


@pytest.mark.parametrize("slow", [Float4(), TopK(density=1.0)], ids=repr)
def test_the_mean_of_exact_codecs_is_exact(slow: Codec) -> None:
    layout = Layout.of({"weight": (16, 32)})
    powers = [torch.randint(0, 6, (512,), generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    inputs = [3 * torch.where(power == 0, 0.0, 2.0**power) for power in powers]
    for staged in aggregate(PerWorker(TopK(density=1.0), slow=slow, ranks=2), inputs, layout):
        assert torch.equal(staged.mean.double(), torch.stack(inputs).double().sum(0) / 3)


def test_each_worker_keeps_the_error_of_its_own_codec() -> None:
    group = Group(Feedback(PerWorker(TopK(density=1.0), slow=OneBit(), ranks=2)), 3)
    staged = group.aggregate(given := group.gradients())
    for rank, (each, x) in enumerate(zip(staged, given, strict=True)):
        residual = group.states[rank]["residual"].flat
        torch.testing.assert_close(each.own + residual, x)
        assert bool(residual.any()) == (rank == 2)


@dataclass(frozen=True, repr=False)
class Unchecked(Codec):
    """A codec of a script: it sends everything, and does not check whether sums overflow."""

    number: int = 0

    def encode(self, x, at, residual=None):  # type: ignore[no-untyped-def]
        return (x.flat.clone(),)

    def decode(self, payloads, layout, out, divisor=1):  # type: ignore[no-untyped-def]
        out.copy_(sum(numbers for (numbers,) in payloads) / divisor)


@pytest.mark.parametrize("slow", [Unchecked(number=1), Int8()], ids=repr)
def test_the_sum_of_two_codecs_may_overflow_and_is_reported(slow: Codec) -> None:
    for size, finite in ((3e38, False), (1e30, True)):
        inputs = [torch.full((LAYOUT.numel,), size) for _ in range(2)]
        for staged in aggregate(PerWorker(Unchecked(), slow=slow, ranks=1), inputs, LAYOUT):
            assert staged.finite == finite


def test_an_invalid_message_names_its_sender() -> None:
    compressor, x = PerWorker(Int8(), slow=OneBit(), ranks="1"), FlatTensors(torch.ones(LAYOUT.numel), LAYOUT)
    script = compressor.aggregate(x, {}, AggregationContext(world=3))  # type: ignore[arg-type]
    op = next(script)
    assert isinstance(op, AllGather)
    scales, bits = OneBit().encode(x, AggregationContext())
    with pytest.raises(MalformedError, match="rank 1"):
        script.send([op.payload, (scales[:-1], bits), op.payload])


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_each_worker_sends_the_bytes_of_its_codec() -> None:
    x = FlatTensors(torch.empty(LAYOUT.numel, device="meta"), LAYOUT)
    for around in (lambda codec: codec, Sharded):
        at = AggregationContext(world=4)
        usual, slow = (
            sum(cost.bytes_sent for cost in price(around(codec).aggregate(x, {}, at), 4))  # type: ignore[operator]
            for codec in (Int8(), OneBit())
        )
        table = around(PerWorker(Int8(), slow=OneBit(), ranks="1,2"))
        found = [
            sum(cost.bytes_sent for cost in price(table.aggregate(x, {}, replace(at, rank=rank)), 4, rank))  # type: ignore[operator]
            for rank in range(4)
        ]
        assert found == [usual, slow, slow, usual]


def test_operations_of_several_forms_are_joined_and_split() -> None:
    x = FlatTensors(torch.ones(LAYOUT.numel), LAYOUT)
    for around in (lambda codec: codec, Sharded):
        first = next(around(PerWorker(Int8(), ranks=1)).aggregate(x, {}, AggregationContext(world=2)))  # type: ignore[operator]
        other = next(around(PerWorker(Float4(), ranks=0)).aggregate(x, {}, AggregationContext(world=2)))  # type: ignore[operator]
        assert isinstance(first, AllGather | AllToAll)
        assert first.coalescing_key() == other.coalescing_key()
        joint, split = first.join([other, first])
        meta: list[tuple[Tensor, ...]] = joint.meta_answer(2, 0)
        parts = split(meta)
        for op, received in zip((other, first), parts, strict=True):
            for got, due in zip(received, op.meta_answer(2, 0), strict=True):
                assert [(each.shape, each.dtype) for each in got] == [(each.shape, each.dtype) for each in due]


# -- the term ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "slow"),
    [
        ("ranks=3", {3}),
        ("ranks='1,3'", {1, 3}),
        ("ranks='4-6'", {4, 5, 6}),
        ("ranks='0, 2-3'", {0, 2, 3}),
        ("ranks=''", set()),
    ],
)
def test_ranks_select_workers(text: str, slow: set[int]) -> None:
    (term,) = recipe(f"PerWorker(Int8(), {text})").terms
    assert isinstance(term, PerWorker)
    assert {rank for rank in range(8) if term.of(rank) == OneBit()} == slow


def test_hosts_select_workers_by_full_or_first_name() -> None:
    hosts = ["node1.lab", "laptop", "home-4.lan", "node1x"]
    assert PerWorker(Int8(), hosts="laptop,home-*").placed(hosts, ()) == PerWorker(Int8(), ranks="1,2")
    assert PerWorker(Int8(), hosts="node1").placed(hosts, ()) == PerWorker(Int8(), ranks="0")
    assert PerWorker(Int8(), hosts="Laptop, HOME-*").placed(hosts, ()) == PerWorker(Int8(), ranks="1,2")
    assert PerWorker(Int8(), hosts="macbook").placed(["desk", "MacBook.local"], ()) == PerWorker(Int8(), ranks="1")


def test_uplinks_select_workers_below_a_rate() -> None:
    uplinks = [1e9, 20e6, 5e6, 1e6]
    assert PerWorker(Int8(), below="20mbit").placed((), uplinks) == PerWorker(Int8(), ranks="2,3")
    three = PerWorker(PerWorker(Int8(), slow=Float4(), below="50mbit"), below="2mbit").placed((), uplinks)
    assert [three.of(rank) for rank in range(4)] == [Int8(), Float4(), Float4(), OneBit()]


def test_without_measurements_the_ranks_must_be_written() -> None:
    with pytest.raises(RecipeError, match="ranks=3"):
        PerWorker(Int8(), below="20mbit").placed(["a", "b"], ())


@pytest.mark.parametrize(
    "codec",
    [
        Dense(),
        PowerSGD(rank=2),
        RandomK(density=0.1),
        TernGrad(),
        Feedback(Int8()),
        Rotated(Int8()),
        Threshold(value=0.1),
    ],
    ids=repr,
)
def test_compressors_that_need_all_ranks_are_rejected(codec: Compressor) -> None:
    for fields in ({"usual": codec}, {"usual": Int8(), "slow": codec}):
        with pytest.raises(ValueError, match="PerWorker"):
            PerWorker(**fields, ranks=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "ranks=1, hosts='laptop'",
        "ranks='x'",
        "ranks='3-1'",
        "ranks=-1",
        "ranks='0-99999999'",
        "hosts=''",
        "hosts='a,,b'",
        "hosts='a, ,b'",
        "below='20'",
        "below='fast'",
    ],
)
def test_invalid_selections_are_rejected(arguments: str) -> None:
    with pytest.raises(RecipeError, match="Write"):
        recipe(f"PerWorker(Int8(), {arguments})")


@pytest.mark.parametrize(
    "text",
    [
        "PerWorker(Int8(), ranks=1) + Gossip()",
        "PerWorker(Int8(), ranks=1) + Gossip('pairwise')",
        "PerWorker(Int8(), ranks=1) + ParameterServer()",
        "ParameterServer(push=PerWorker(Int8(), ranks=1))",
        "Hierarchical(PerWorker(Int8(), ranks=1), per_node=2)",
        "Hierarchy(PerWorker(Int8(), ranks=1), per_node=2)",
        "Chain(TopK(density=0.01), PerWorker(Int8(), ranks=1))",
        "PerWorker(Int8(), ranks=1) + FedAvg(fraction=0.1, local_steps=2)",
    ],
)
def test_recipes_without_one_gather_of_all_workers_are_rejected(text: str) -> None:
    with pytest.raises((RecipeError, GossamerError), match=r"PerWorker|codec"):
        resolve(text, 4)


def test_a_rank_beyond_the_group_is_rejected() -> None:
    with pytest.raises(RecipeError, match=re.escape("0 to 3")):
        resolve("PerWorker(Int8(), ranks=4)", 4)
    assert resolve("PerWorker(Int8(), ranks=4)", 5)


def test_a_recipe_adds_feedback_and_shards() -> None:
    wrapped = resolve("PerWorker(Int8(), ranks=1)", 4).compressor
    assert repr(wrapped) == "Route(Feedback(Sharded(PerWorker(Int8(), ranks=1))))"
    assert resolve(repr(wrapped), 4).compressor == wrapped
    assert repr(resolve("PerWorker(TopK(density=0.01), ranks=1)", 4).compressor) == (
        "Route(Feedback(PerWorker(TopK(density=0.01), ranks=1)))"
    )
