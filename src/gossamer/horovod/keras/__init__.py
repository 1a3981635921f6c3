"""Horovod's API for the package keras, on TensorFlow: `import gossamer.horovod.keras as hvd`.

callbacks  broadcast, averaged metrics, learning rates
elastic    KerasState, run and the callbacks that commit
"""

import keras

from gossamer.horovod.keras import callbacks, elastic
from gossamer.horovod.tensorflow.keras import functions
from gossamer.horovod.tensorflow.keras.functions import *  # noqa: F403 - the names of both Keras front ends
from gossamer.horovod.tensorflow.sync_batch_norm import synchronized

__all__ = ["SyncBatchNormalization", "callbacks", "elastic", "load_model"]
__all__ += functions.__all__

SyncBatchNormalization = synchronized(keras.layers.BatchNormalization)

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"Keras runs on {keras.backend.backend()} here, and Horovod's Keras API needs TensorFlow. Set "
        "KERAS_BACKEND=tensorflow, or write gossamer.keras.GossamerOptimizer, which runs on each backend."
    )

load_model = functions.model_loader(keras)
