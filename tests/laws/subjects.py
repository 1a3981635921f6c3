"""Subjects of the laws: every compressor, in the ways that it is used."""

from __future__ import annotations

import re

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
from support.nightly import once_each

from gossamer.algorithms.compressors import Compressor, Dense, Feedback, PowerSGD, RandomProjection, Route, TopK
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


def _form(compressor: Compressor) -> str:
    """Its classes and options without numbers, but for those with which all or no entries are sent."""
    return re.sub(r"\d[\d.,-]*", lambda found: found[0] if found[0] in ("0.0", "1.0", "100") else "#", repr(compressor))


def _contains(outer: str, form: str, compressor: Compressor) -> bool:
    """Whether laws of the outer compressor run this one's code; Feedback calls another method than `aggregate`."""
    if "aggregate" in vars(type(compressor)):
        outer = outer.replace(f"Feedback({form}", "")
    return form in outer and form != outer


_FORMS = [_form(each) for each in EVERY]
# Another subject contains it, or differs in numbers only
CONTAINED = [
    each
    for place, (each, form) in enumerate(zip(EVERY, _FORMS, strict=True))
    if form in _FORMS[:place] or any(_contains(outer, form, each) for outer in _FORMS)
]
each_compressor = once_each("compressor", EVERY, not_by_day=CONTAINED)
