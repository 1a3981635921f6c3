"""SyncBatchNormalization: batch normalization by the statistics of the batches of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gossamer.horovod.basics import Sum, is_initialized, size
from gossamer.horovod.tensorflow.ops import allreduce


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """Normalizes by the mean and variance over the batches of all ranks while it trains.

    Arguments are those of tf.keras.layers.BatchNormalization. Every rank runs it as often as the others. Gradients flow
    through the statistics of all ranks.

    Args:
        fused: False.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True. Leave fused out.")
        kwargs["name"] = kwargs.get("name") or "sync_batch_normalization"
        if tf.keras.__version__.startswith("2"):
            kwargs["fused"] = fused
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Batches count by their number of samples."""
        mean, variance = super()._moments(inputs, *args, **kwargs)
        if not is_initialized() or size() == 1:
            return mean, variance
        count = tf.cast(tf.size(inputs) / tf.size(mean), mean.dtype)
        sums = tf.stack([mean * count, (variance + tf.square(mean)) * count, tf.ones_like(mean) * count])
        means, squares, samples = tf.unstack(allreduce(sums, op=Sum))
        mean = means / samples
        return mean, squares / samples - tf.square(mean)
