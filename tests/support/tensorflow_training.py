"""A small Keras model and its batches, for ranks in threads. Needs TensorFlow."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

_building = threading.Lock()  # initializers draw from one generator


def build(keras: Any, seed: int) -> Any:
    """A model in float64; each seed has its own weights."""
    with _building:
        keras.utils.set_random_seed(seed)
        layers = [keras.Input((6,)), *(keras.layers.Dense(16, "tanh") for _ in range(2)), keras.layers.Dense(3)]
        layers[1:] = [type(each).from_config({**each.get_config(), "dtype": "float64"}) for each in layers[1:]]
        return keras.Sequential(layers)


def batch(step: int, rank: int, size: int = 4) -> tuple[Any, Any]:
    random = np.random.default_rng(1000 * step + rank)
    return random.normal(size=(size, 6)), random.normal(size=(size, 3))


def joined(step: int, world: int = 2) -> tuple[Any, Any]:
    """The batches of all ranks as one."""
    x, y = zip(*(batch(step, rank) for rank in range(world)), strict=True)
    return np.concatenate(x), np.concatenate(y)


def weights(model: Any) -> Any:
    return np.concatenate([each.flatten() for each in model.get_weights()])


def agree(found: list[Any]) -> Any:
    """What all ranks have, bit for bit."""
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0])
    return found[0]
