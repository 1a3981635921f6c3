"""Weights and batches of the models that tests train in several frameworks, as numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

BATCH = 4
SHAPES = {"linear": [(4, 1)], "network": [(6, 64), (64,), (64, 1), (1,)]}
RATES = {"linear": 0.125, "network": 0.03125}  # learning rates of SGD
Floats = np.ndarray[Any, np.dtype[np.float32]]


def weights(kind: str, rank: int = 0) -> list[Floats]:
    """Initial weights; each rank has its own. Those of "linear" are integers."""
    random = np.random.default_rng(100 + rank)
    if kind == "linear":
        return [random.integers(-2, 3, shape).astype(np.float32) for shape in SHAPES[kind]]
    return [random.normal(size=shape).astype(np.float32) / 2 for shape in SHAPES[kind]]


def batches(kind: str, rank: int, steps: int) -> tuple[Floats, Floats]:
    """Inputs and targets of `steps` batches of one rank; a longer run begins with the batches of a shorter one."""
    found = []
    for step in range(steps):
        random = np.random.default_rng(1000 * step + rank)
        if kind == "linear":
            found.append((random.integers(-2, 3, (BATCH, 4)), random.integers(-3, 4, (BATCH, 1))))
        else:
            found.append((random.normal(size=(BATCH, 6)), random.normal(size=(BATCH, 1))))
    x, y = zip(*found, strict=True)
    return np.concatenate(x).astype(np.float32), np.concatenate(y).astype(np.float32)


def joined(kind: str, steps: int) -> tuple[Floats, Floats]:
    """Both ranks' batches, each step's as one of twice the size."""
    parts = [batches(kind, rank, steps) for rank in range(2)]
    x, y = (np.stack([part[i].reshape(steps, BATCH, -1) for part in parts], 1) for i in range(2))
    return x.reshape(steps * 2 * BATCH, -1), y.reshape(steps * 2 * BATCH, -1)
