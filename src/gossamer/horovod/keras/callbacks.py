"""Callbacks for models of the package keras, by Horovod's names."""

from __future__ import annotations

import keras

from gossamer.horovod.tensorflow import callbacks
from gossamer.horovod.tensorflow.callbacks import callback_class

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

Callback = keras.callbacks.Callback

BestModelCheckpoint = callback_class(
    callbacks.BestModel, "BestModelCheckpoint", keras.callbacks.ModelCheckpoint, __name__
)
BroadcastGlobalVariablesCallback = callback_class(
    callbacks.BroadcastVariables, "BroadcastGlobalVariablesCallback", Callback, __name__
)
LearningRateScheduleCallback = callback_class(
    callbacks.LearningRateSchedule, "LearningRateScheduleCallback", Callback, __name__
)
LearningRateWarmupCallback = callback_class(
    callbacks.LearningRateWarmup, "LearningRateWarmupCallback", Callback, __name__
)
MetricAverageCallback = callback_class(callbacks.MetricAverage, "MetricAverageCallback", Callback, __name__)
