"""SyncBatchNormalization: batch normalization by the statistics of the batches of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gossamer.horovod.basics import Sum, is_initialized, size
from gossamer.horovod.tensorflow.ops import allreduce


class SynchronizedStatistics:
    """Normalizes by the mean and variance over the batches of all ranks while it trains.

    Arguments are those of the BatchNormalization of Keras. Every rank runs it as often as the others. Gradients flow
    through the statistics of all ranks.

    Args:
        fused: False.

    Raises:
        ValueError: for fused=True.
    """

    _is_fused_by_default = False

    def __init__(self, fused: bool = False, **options: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True. Leave fused out.")
        options["name"] = options.get("name") or "sync_batch_normalization"
        if self._is_fused_by_default:
            options["fused"] = False
        base: Any = super()
        base.__init__(**options)

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Batches count by their number of samples. In float32 the difference of two large squares could be below 0."""
        base: Any = super()
        mean, variance = base._moments(inputs, *args, **kwargs)
        if not is_initialized() or size() == 1:
            return mean, variance
        kind, mean, variance = mean.dtype, tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
        count = tf.cast(tf.size(inputs) / tf.size(mean), tf.float64)
        sums = tf.stack([mean * count, (variance + tf.square(mean)) * count, tf.ones_like(mean) * count])
        means, squares, samples = tf.unstack(allreduce(sums, op=Sum))
        mean = means / samples
        joined = tf.maximum(squares / samples - tf.square(mean), 0.0)
        return tf.cast(mean, kind), tf.cast(joined, kind)


def synchronized(layer: Any) -> Any:
    """The SyncBatchNormalization of a Keras package. layer: its class BatchNormalization."""
    is_fused = hasattr(layer, "_fused_can_be_used")  # the layer of Keras 2, whose fused operation has no _moments
    content = {
        "__doc__": SynchronizedStatistics.__doc__,
        "__module__": __name__,
        "_is_fused_by_default": is_fused,
    }
    return type("SyncBatchNormalization", (SynchronizedStatistics, layer), content)


SyncBatchNormalization = synchronized(tf.keras.layers.BatchNormalization)
