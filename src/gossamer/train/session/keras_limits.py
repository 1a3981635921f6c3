"""Limits of Keras and TensorFlow: what their sessions cannot support, with the line to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gossamer.errors import AttachError
from gossamer.train.engine.arrays import Array


def loss_scaling_error() -> AttachError:
    """The error about an optimizer that scales the loss."""
    return AttachError(
        "a LossScaleOptimizer skips steps by the gradients of one rank alone, so ranks would make different numbers of "
        "steps. Keras adds it under mixed_float16. Train in bfloat16: "
        "keras.config.set_dtype_policy('mixed_bfloat16'); or write model.compile(optimizer, auto_scale_loss=False)."
    )


def compiled_step_error(backend: str) -> AttachError:
    """The error about a training step that a backend compiles as a whole."""
    return AttachError(
        f"jit_compile=True compiles the whole training step on the {backend} backend, and a compiled step cannot call "
        "Gossamer, which sends between the gradients and the optimizer. Write model.compile(optimizer, loss=..., "
        "jit_compile=False), or @tf.function without jit_compile=True."
    )


def refuse_xla() -> None:
    """Raise AttachError while TensorFlow traces a function that XLA is to compile."""
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise compiled_step_error("tensorflow")


def refuse_uninitialized(names: Sequence[str], variables: Sequence[Any], values: Sequence[Array]) -> None:
    """Raise AttachError for variables that TensorFlow creates while it traces the first step: they have no values."""
    for name, variable, value in zip(names, variables, values, strict=True):
        if tuple(value.shape) != tuple(variable.shape):
            raise AttachError(
                f'"{name}" of shape {tuple(variable.shape)} has no value yet, because the first training step creates '
                "the model's variables, so rank 0's cannot be sent before it. Write model.build((None, 8)), with the "
                "shape of your inputs, before the first step."
            )


def refuse_strategies() -> None:
    """Raise AttachError for a backend that does not train, or one that distributes the model itself."""
    import keras

    backend = keras.backend.backend()
    if backend not in ("torch", "jax", "tensorflow"):
        raise AttachError(f"Keras's {backend} backend does not train. Set KERAS_BACKEND=torch, jax or tensorflow.")
    if keras.distribution.distribution() is not None:
        raise AttachError(
            "keras.distribution places one program on several devices, and Gossamer averages between processes. "
            "Write keras.distribution.set_distribution(None), and start one process for each device: "
            "gossamer run --workers 4 train.py."
        )
    if backend == "tensorflow":
        refuse_tf_strategy()


def refuse_tf_strategy() -> None:
    """Raise AttachError within the scope of a tf.distribute strategy."""
    import tensorflow as tf

    if tf.distribute.has_strategy():
        raise AttachError(
            f"{type(tf.distribute.get_strategy()).__name__} averages gradients itself, and Gossamer would average them "
            "a second time. Build the model outside of strategy.scope(), and start one process for each replica: "
            'gossamer run --workers 4 train.py. The recipe of each strategy: "TensorFlow" in the documentation.'
        )
