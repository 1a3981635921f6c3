"""SyncBatchNormalization equals BatchNormalization on the joined batch, in Keras 3 and Keras 2, gradients included."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402
from support.horovod_workers import horovod  # noqa: E402

import gossamer.horovod.keras as hvd_keras  # noqa: E402
import gossamer.horovod.tensorflow as hvd  # noqa: E402
from gossamer.horovod.tensorflow.sync_batch_norm import synchronized  # noqa: E402

PACKAGES = pytest.mark.parametrize("package", ["keras", "tf_keras"])  # Keras 3 and Keras 2
SHAPES = [(2, 3, 3, 4), (5, 3, 3, 4)]  # images, for which Keras 2 fuses its own layer
BATCHES = [np.random.default_rng(rank).normal(rank, rank + 1, SHAPES[rank]).astype("float32") for rank in range(2)]


def library_of(package: str) -> Any:
    return keras if package == "keras" else pytest.importorskip("tf_keras")


def unfused(package: str) -> dict[str, bool]:
    """The fused operation of Keras 2 stores an unbiased variance."""
    return {"fused": False} if package == "tf_keras" else {}


def trained(layer: Any, batch: Any) -> list[Any]:
    """The layer's output, its statistics, and the gradient of the inputs of a loss."""
    inputs = tf.constant(batch)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        found = layer(inputs, training=True)
        loss = tf.reduce_sum(found**3)
    gradient = tape.gradient(loss, inputs)
    return [tf.convert_to_tensor(each).numpy() for each in (found, gradient, layer.moving_mean, layer.moving_variance)]


@PACKAGES
def test_ranks_normalize_by_the_statistics_of_the_joined_batch(package: str) -> None:
    library = library_of(package)
    outputs, gradients, *statistics = trained(
        library.layers.BatchNormalization(momentum=0.5, **unfused(package)), np.concatenate(BATCHES)
    )
    layer_of = synchronized(library.layers.BatchNormalization)
    ranks = horovod(lambda rank: trained(layer_of(momentum=0.5), BATCHES[rank]))
    np.testing.assert_allclose(np.concatenate([rank[0] for rank in ranks]), outputs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([rank[1] for rank in ranks]), gradients, rtol=1e-3, atol=1e-3)
    for rank in ranks:
        np.testing.assert_allclose(rank[2:], statistics, rtol=1e-5)


@PACKAGES
def test_a_channel_with_a_large_mean_is_normalized(package: str) -> None:
    layer_of = synchronized(library_of(package).layers.BatchNormalization)
    values = 4096.3 + np.arange(1000) % 2
    batch = np.stack([np.full(1000, 255.0), values], axis=1).astype("float32")
    for found, _, _, variance in horovod(lambda rank: trained(layer_of(momentum=0.0, epsilon=1e-5), batch)):
        np.testing.assert_allclose(np.abs(found), np.stack([np.zeros(1000), np.ones(1000)], axis=1), atol=0.1)
        np.testing.assert_allclose(variance, [0.0, 0.25], atol=0.01)  # Keras's own moments round this mean


@PACKAGES
def test_one_rank_normalizes_as_the_layer_of_keras(package: str) -> None:
    library = library_of(package)
    expected = trained(library.layers.BatchNormalization(**unfused(package)), BATCHES[0])
    found = trained(synchronized(library.layers.BatchNormalization)(), BATCHES[0])
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@PACKAGES
def test_a_fused_layer_is_rejected(package: str) -> None:
    with pytest.raises(ValueError, match="fused"):
        synchronized(library_of(package).layers.BatchNormalization)(fused=True)


def test_each_module_has_the_layer_of_its_package() -> None:
    assert issubclass(hvd.SyncBatchNormalization, tf.keras.layers.BatchNormalization)
    assert issubclass(hvd_keras.SyncBatchNormalization, keras.layers.BatchNormalization)


@pytest.mark.processes
@pytest.mark.new_programs
def test_the_layer_is_that_of_tf_keras_where_tensorflow_uses_it() -> None:
    pytest.importorskip("tf_keras")
    script = (
        "import tf_keras, gossamer.horovod.tensorflow as hvd\n"
        "assert isinstance(hvd.SyncBatchNormalization(), tf_keras.layers.Layer)"
    )
    subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "TF_USE_LEGACY_KERAS": "1"}, check=True, timeout=300
    )
