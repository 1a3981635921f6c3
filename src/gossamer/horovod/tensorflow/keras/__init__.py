"""Horovod's API for tf.keras, on Gossamer: `import gossamer.horovod.tensorflow.keras as hvd`.

functions  calls of values, loading of models
callbacks  broadcast, averaged metrics, learning rates
elastic    KerasState, run and the callbacks that commit
"""

import tensorflow as tf

from gossamer.horovod.tensorflow.keras import callbacks, elastic, functions
from gossamer.horovod.tensorflow.keras.functions import *  # noqa: F403 - the names of both Keras front ends
from gossamer.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = ["SyncBatchNormalization", "callbacks", "elastic", "load_model"]
__all__ += functions.__all__

load_model = functions.model_loader(tf.keras)
