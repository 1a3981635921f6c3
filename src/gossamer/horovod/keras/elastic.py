"""Elastic training of models of the package keras: KerasState, run and the callbacks that commit."""

from __future__ import annotations

import keras

from gossamer.horovod.tensorflow import callbacks
from gossamer.horovod.tensorflow.callbacks import callback_class
from gossamer.horovod.tensorflow.elastic import ObjectState, State, TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

KerasState = TensorFlowKerasState
Callback = keras.callbacks.Callback

CommitStateCallback = callback_class(callbacks.CommitState, "CommitStateCallback", Callback, __name__)
UpdateBatchStateCallback = callback_class(callbacks.UpdateBatchState, "UpdateBatchStateCallback", Callback, __name__)
UpdateEpochStateCallback = callback_class(callbacks.UpdateEpochState, "UpdateEpochStateCallback", Callback, __name__)
