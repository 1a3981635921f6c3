"""A worker's copy of what is public is the server's, byte for byte, whenever it asks."""

from __future__ import annotations

from random import Random

import pytest
import torch
from support.direct_server import same_tensors

from gossamer.algorithms.compressors import (
    Chain,
    Compressor,
    Dense,
    Float4,
    OneBit,
    PowerSGD,
    RandomK,
    Route,
    SignMagnitude,
    TopK,
    TwoBit,
    Warmup,
)
from gossamer.algorithms.compressors.distortion import relative_error
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.qsgd import QSGD
from gossamer.algorithms.compressors.threshold import Threshold
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import payload_bytes
from gossamer.base.peer_ops import Pulled
from gossamer.errors import MalformedError
from gossamer.train.parameter_server.delta_chain import DeltaChain, PublicParameters, Replica, Snapshot

PULLS: list[Compressor] = [
    Dense(dtype="bfloat16"),
    Int8(),
    Int8(stochastic=True),
    QSGD(levels=127),
    Float4(),
    OneBit(),
    TwoBit(threshold=0.5),
    TopK(density=0.1),
    Threshold(value=0.5),
    RandomK(density=0.1),
    SignMagnitude(),
    PowerSGD(rank=2),
    Chain(TopK(density=0.1), Int8()),
    Route(TopK(density=0.05), smallest=0),
    Warmup(TopK(density=0.1), steps=10),
]


def blocks(dtype: torch.dtype) -> tuple[FlatTensors, ...]:
    generator = torch.Generator().manual_seed(5)
    first = {"weight": torch.randn(24, 16, generator=generator), "bias": torch.randn(7, generator=generator)}
    second = {"other": torch.randn(3, 8, generator=generator)}
    return tuple(FlatTensors.pack({name: t.to(dtype) for name, t in each.items()}) for each in (first, second))


def moved(values: tuple[FlatTensors, ...], version: int) -> None:
    generator = torch.Generator().manual_seed(version)
    for block in values:
        block.flat.add_(torch.randn(len(block.flat), generator=generator).to(block.flat.dtype), alpha=0.1)


def check_replicas(pull: Compressor, dtype: torch.dtype = torch.float32, versions: int = 50) -> list[int]:
    """Three workers ask at random times; returns what their answers had in bytes."""
    values, random, costs = blocks(dtype), Random(3), []
    public = DeltaChain(pull, values, seed=7)
    replicas = [Replica(values, pull, seed=7) for _ in range(3)]
    for version in range(1, versions + 1):
        moved(values, version)
        public.publish(version, values)
        for worker, replica in enumerate(replicas):
            if random.random() < 1 / (1 + 3 * worker):
                pulled = public.pulled_since(replica.version)
                costs.append(payload_bytes(pulled.payload))
                replica.update(pulled)
                assert replica.version == version
                same_tensors([each.flat for each in replica.values], public.snapshot())
    return costs


@pytest.mark.parametrize("pull", PULLS, ids=repr)
def test_copies_are_what_is_public(pull: Compressor) -> None:
    costs = check_replicas(pull)
    snapshot = sum(4 * len(block.flat) for block in blocks(torch.float32))
    assert max(costs) <= snapshot
    assert relative_error(pull, "lost") <= 1.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_copies_in_other_dtypes(dtype: torch.dtype) -> None:
    check_replicas(Int8(), dtype, versions=9)


class Forgetful(DeltaChain):
    """Follows what it meant rather than what was said."""

    def _append_delta(self, version: int, values: tuple[FlatTensors, ...]) -> None:  # type: ignore[override]
        super()._append_delta(version, values)
        for mine, x in zip(self._blocks, values, strict=True):
            mine.flat.lerp_(x.flat, 1e-6)


def test_the_check_sees_one_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "DeltaChain", Forgetful)
    with pytest.raises(AssertionError, match="other bits"):
        check_replicas(Int8())


@pytest.mark.parametrize("pull", [TopK(density=0.05), OneBit(), Int8()], ids=repr)
def test_what_a_link_loses_is_in_the_next(pull: Compressor) -> None:
    """Parameters that stand still are reached, without feedback."""
    values = blocks(torch.float64)
    public = DeltaChain(pull, values, seed=0)
    moved(values, 1)
    lost = []
    for version in range(1, 41):
        public.publish(version, values)
        lost.append(sum(float((known - x.flat).norm()) for known, x in zip(public.snapshot(), values, strict=True)))
    assert lost[-1] < lost[0] / 8
    assert sorted(lost, reverse=True) == lost


def test_links_are_kept_while_they_are_cheaper_than_everything() -> None:
    values = blocks(torch.float32)
    public = DeltaChain(TopK(density=0.1), values, seed=0)
    for version in range(1, 31):
        moved(values, version)
        public.publish(version, values)
    snapshot = payload_bytes(public.snapshot())
    kept = [known for known in range(31) if payload_bytes(public.pulled_since(known).payload) < snapshot]
    assert kept == list(range(kept[0], 31))
    assert 1 < len(kept) < 30
    assert payload_bytes(public.pulled_since(30).payload) == 0
    assert payload_bytes(public.pulled_since(-1).payload) == snapshot


def test_parameters_as_they_are() -> None:
    """One copy for all who ask; who knows them hears that nothing changed; training goes on beside it."""
    values = blocks(torch.float32)
    public: PublicParameters = Snapshot(values)
    replica = Replica(values, None, seed=0)
    replica.update(public.pulled_since(replica.version))
    same_tensors([each.flat for each in replica.values], [each.flat for each in values])
    moved(values, 1)
    assert public.pulled_since(0).payload == ()
    public.publish(1, values)
    one, other = public.pulled_since(0), public.pulled_since(-1)
    moved(values, 2)
    assert all(a is b for a, b in zip(one.payload, other.payload, strict=True))
    replica.update(one)
    same_tensors([each.flat for each in replica.values], public.snapshot())
    assert not torch.equal(replica.values[0].flat, values[0].flat)


def test_training_that_diverged_is_told_as_it_is() -> None:
    values = blocks(torch.float32)
    public = DeltaChain(Int8(), values, seed=0)
    values[0].flat[3] = float("inf")
    public.publish(1, values)
    replica = Replica(values, Int8(), seed=0)
    replica.update(public.pulled_since(0))
    assert torch.isinf(replica.values[0].flat[3])


@pytest.mark.parametrize(
    "about",
    [
        *("", "[]", '{"links": 3}', '{"links": null}', '{"links": [[0, 1]]}'),
        *('{"links": [[5, 6, [2, 2]]]}', '{"links": [[0, 1, [9, -7]]]}'),
    ],
)
def test_nonsense_is_refused(about: str) -> None:
    values = blocks(torch.float32)
    replica = Replica(values, Int8(), seed=0)
    replica.update(DeltaChain(Int8(), values, seed=0).pulled_since(-1))
    before = [each.flat.clone() for each in replica.values]
    with pytest.raises(MalformedError):
        replica.update(Pulled(version=1, payload=(torch.zeros(3), torch.zeros(3)), about=about))
    same_tensors([each.flat for each in replica.values], before)
