"""Elastic training of models of the package keras: KerasState, run and the callbacks that commit."""

from __future__ import annotations

import keras

from gossamer.horovod.tensorflow import callbacks
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


class KerasState(TensorFlowKerasState):
    __doc__ = TensorFlowKerasState.__doc__


class CommitStateCallback(callbacks.CommitState, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = callbacks.CommitState.__doc__


class UpdateBatchStateCallback(callbacks.UpdateBatchState, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = callbacks.UpdateBatchState.__doc__


class UpdateEpochStateCallback(callbacks.UpdateEpochState, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = callbacks.UpdateEpochState.__doc__
