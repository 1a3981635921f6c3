"""Callbacks for models of tf.keras, by Horovod's names."""

from __future__ import annotations

import tensorflow as tf

from gossamer.horovod.tensorflow import callbacks

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(callbacks.BroadcastVariables, tf.keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = callbacks.BroadcastVariables.__doc__


class MetricAverageCallback(callbacks.MetricAverage, tf.keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = callbacks.MetricAverage.__doc__


class LearningRateScheduleCallback(callbacks.LearningRateSchedule, tf.keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = callbacks.LearningRateSchedule.__doc__


class LearningRateWarmupCallback(callbacks.LearningRateWarmup, tf.keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = callbacks.LearningRateWarmup.__doc__
