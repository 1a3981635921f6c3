"""Subjects of the laws: every compressor, in the ways that it is used."""

from __future__ import annotations

from laws import (
    differences,
    hierarchical,
    momentum,
    per_worker,
    quantisers,
    rotated,
    same_places,
    sharded,
    sparse,
    sparse_sum,
)

from gossamer.algorithms.compressors import Dense, Feedback, PowerSGD, RandomProjection, Route, TopK
from gossamer.algorithms.compressors.int8 import Int8

EXACT = [
    Dense(),
    TopK(density=0.1),
    TopK(density=1.0),
    Int8(),
    Int8(block=7),
    PowerSGD(rank=2),
    PowerSGD(rank=100),
    RandomProjection(rank=2),
    RandomProjection(rank=100),
    RandomProjection(rank=2, feedback=False),
    Feedback(Dense()),
    Feedback(TopK(density=0.1)),
    Feedback(Int8(block=16)),
    Feedback(PowerSGD(rank=2)),
    Feedback(RandomProjection(rank=2)),
    Feedback(RandomProjection(rank=2, feedback=False)),
    Route(Feedback(RandomProjection(rank=2)), rest=Feedback(Int8()), smallest=100),
    Route(Feedback(TopK(density=0.1))),
    Route(Feedback(PowerSGD(rank=2)), rest=Feedback(Int8()), smallest=100),
    Feedback(Route(TopK(density=0.1))),
]
ROUNDED = [Dense(dtype="bfloat16"), Dense(dtype="float16"), Feedback(Dense(dtype="bfloat16"))]
FAMILIES = (
    quantisers,
    sparse,
    momentum,
    sharded,
    hierarchical,
    sparse_sum,
    same_places,
    rotated,
    differences,
    per_worker,
)
for family in FAMILIES:
    EXACT += family.EXACT
    ROUNDED += family.ROUNDED
EVERY = EXACT + ROUNDED
