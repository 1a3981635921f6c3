"""Benchmark cases: every compressor, with hyperparameters that suit the benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gossamer.algorithms.compressors import Compressor, Feedback
from gossamer.algorithms.recipes.catalog import NOUNS
from gossamer.algorithms.recipes.parser import parse
from gossamer.base.term import Term

Variants = Mapping[str, Sequence[str]]

# For normally distributed gradients. Of the wrappers only the one that encodes twice: others cost as much as the
# wrapped compressor and a few additions. No projections: they are PowerSGD's first product and its last.
KERNELS: Variants = {
    "Dense": ["Dense(dtype='bfloat16')"],
    "Int8": ["Int8()", "Int8(stochastic=True)"],
    "TwoBit": ["TwoBit()", "TwoBit(adaptive=True)"],
    "TopK": ["TopK(density=0.01)", "TopK(density=0.001)"],
    "RandomK": ["RandomK(density=0.01)"],
    "ARCTopK": ["ARCTopK(density=0.01)"],
    "SharedMask": ["SharedMask(density=0.01)"],
    "Threshold": ["Threshold(value=4.0, capacity=0.01)"],
    "Chain": ["Chain(TopK(density=0.01), Int8())", "Chain(TopK(density=0.01), SignMagnitude())"],
    "BinMeans": [],  # plain torch only; like EDEN without its rotation
    "EDEN": [],
    "RandomProjection": [],
    "Feedback": [],
    "Hierarchical": [],
    "PerWorker": [],
    "Rotated": [],
    "Route": [],
    "Sharded": ["Sharded(TopK(density=0.01))", "Sharded(Int8())"],
    "SparseSum": ["SparseSum(TopK(density=0.01))"],
    "Warmup": [],
    "Adaptive": [],
    "AdamUpdate": [],
    "CompressedAdam": [],
    "MicroAdam": [],
    "OneBitAdam": [],
    "DeMo": [],
}


def case_texts(variants: Variants) -> list[str]:
    """Texts of all compressors: those of `variants` by class, else with default parameters."""
    names = [name for name, noun in NOUNS.items() if noun.kind == Compressor.kind]
    return [text for name in names for text in variants.get(name, [f"{name}()"])]


def with_feedback(text: str) -> Compressor:
    """Parse a compressor, and wrap it in Feedback if a recipe would."""
    (term,) = parse(text).terms
    return Feedback(_compressor(term)) if _compressor(term).wants_feedback else _compressor(term)


def _compressor(term: Term) -> Compressor:
    assert isinstance(term, Compressor), f"{term!r} is not a compressor"
    return term
