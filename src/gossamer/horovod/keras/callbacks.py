"""Callbacks for models of the package keras, by Horovod's names."""

from __future__ import annotations

import keras

from gossamer.horovod.tensorflow import callbacks

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(callbacks.BroadcastVariables, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = callbacks.BroadcastVariables.__doc__


class MetricAverageCallback(callbacks.MetricAverage, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = callbacks.MetricAverage.__doc__


class LearningRateScheduleCallback(callbacks.LearningRateSchedule, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = callbacks.LearningRateSchedule.__doc__


class LearningRateWarmupCallback(callbacks.LearningRateWarmup, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = callbacks.LearningRateWarmup.__doc__
