"""A Keras model with weights that are not trained, of which each rank has its own at first. Needs a backend."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from support.keras_data import BATCH, batches
from support.virtual_workers import Worker

from gossamer.keras import GossamerOptimizer


def fitted(worker: Worker, steps: int, epochs: int, built: bool, callbacks: list[Any]) -> keras.Model:
    """A model after fit, with the same batch in every step on every rank. built: before fit."""
    model = normalized(worker.rank, built)
    model.compile(GossamerOptimizer(keras.optimizers.SGD(0.01), "Dense()", transport=worker.transport), loss="mse")
    x, y = (np.tile(each, (steps, 1)) for each in batches("network", 0, 1))
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model


def normalized(rank: int, built: bool) -> keras.Model:
    """Each rank has its own statistics of batches, weights of a frozen layer, and seed of dropout."""
    mean, kernel = (keras.initializers.Constant(value) for value in (1000.0 * rank, rank))
    layers = [
        keras.layers.BatchNormalization(momentum=0.9, moving_mean_initializer=mean, name="normal"),
        keras.layers.Dense(2, kernel_initializer=kernel, trainable=False, name="frozen"),
        keras.layers.Dropout(0.5, seed=rank, name="dropout"),
        keras.layers.Dense(1, name="second"),
    ]
    return keras.Sequential([keras.layers.Input((6,)), *layers] if built else layers, name="m")


def closed(model: keras.Model) -> tuple[list[Any], list[Any]]:
    """The weights that are not trained, and the states of random generators."""
    model.optimizer.session.close()
    return model.non_trainable_weights, [each for each in model.non_trainable_variables if "seed" in each.path]


class CopyCounts(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the copies of weights that steps made for newcomers to an elastic run, so that no address is used twice."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        session = self.model.optimizer.session
        copies = session.__dict__.setdefault("copies", [])
        copies.append([*session._changes.saved_values.get("statistics", ())])


def weights_and_copies(model: keras.Model) -> tuple[list[Any], list[int]]:
    """The values of weights that are not trained, and the number of copies of each."""
    weights = [np.asarray(each.numpy()).ravel().tolist() for each in model.non_trainable_weights]
    copies = model.optimizer.session.__dict__["copies"]
    return weights, [len(set(map(id, each))) for each in zip(*copies, strict=True)]
