"""TensorFlow: average the gradients of a tf.GradientTape, or train with a wrapped Keras optimizer, under a recipe.

    with tf.GradientTape() as tape:
        loss = loss_of(model(x), y)
    tape = gossamer.tensorflow.DistributedGradientTape(tape, "TopK(0.01)")
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

docs/how-to/integrations/tensorflow.md has the recipe of each tf.distribute strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gossamer.algorithms.strategies import GradientStage
from gossamer.comm.environment.run_settings import is_elastic
from gossamer.errors import AttachError, LayoutError
from gossamer.keras import GossamerOptimizer
from gossamer.train.engine.arrays import Array
from gossamer.train.session.array_exchange import ArrayExchange, array_of, names_of, tensor_of
from gossamer.train.session.keras_limits import refuse_tf_strategy, refuse_uninitialized, refuse_xla
from gossamer.train.session.recipe_choice import Written
from gossamer.world import init

try:
    import keras
    import tensorflow as tf
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "gossamer.tensorflow needs TensorFlow 2.20 or newer. Write pip install 'gossamer[tensorflow]'.", name=error.name
    ) from None

__all__ = ["DistributedGradientTape", "DistributedOptimizer", "broadcast_variables"]


def DistributedOptimizer(optimizer: Any, recipe: Written = None, **options: Any) -> GossamerOptimizer:  # noqa: N802 - as in Horovod
    """A tf.keras optimizer that trains together with the other workers, for model.fit and loops with apply_gradients.

    Args:
        optimizer: a Keras 3 optimizer, such as tf.keras.optimizers.Adam(1e-3).
        recipe: as for gossamer.attach; local training and servers are possible.
        options: as for gossamer.keras.GossamerOptimizer, which is returned.

    Raises:
        AttachError: Keras runs on another backend, or GossamerOptimizer raises it.

    Example:
        >>> model.compile(DistributedOptimizer(tf.keras.optimizers.Adam(1e-3), "DiLoCo(period=10)"), loss="mse")
    """
    if keras.backend.backend() != "tensorflow":
        raise AttachError(
            f"Keras runs on {keras.backend.backend()} here, so its optimizers do not step TensorFlow's variables. Set "
            "KERAS_BACKEND=tensorflow, or write gossamer.keras.GossamerOptimizer, which runs on each backend."
        )
    return GossamerOptimizer(optimizer, recipe, **options)


class DistributedGradientTape:
    """A tf.GradientTape that averages its gradients over all workers.

    It may be constructed in every step, also in a tf.function. The first call for a list of variables creates a
    session, and rank 0's values are assigned to them; later calls with these variables use it. Where a gradient was
    not finite on some rank, all ranks receive zeros. A variable without a gradient counts as zero.

    Args:
        tape: the tape that recorded the loss.
        recipe: a recipe that averages gradients in every step, with any compressor.
        options: of gossamer.engine.Session.

    Raises:
        AttachError: for recipes that average parameters, accumulate or have servers, since a tape sees no steps;
            within a tf.distribute strategy; under jit_compile=True; in an elastic run; for variables that the first
            call of a tf.function creates.
        LayoutError: where the list of variables changes.

    Example:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = DistributedGradientTape(tape, "TopK(0.01)").gradient(loss, model.trainable_variables)
    """

    def __init__(self, tape: Any, recipe: Written = None, **options: Any) -> None:
        self._tape, self._recipe, self._options = tape, recipe, options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._tape.__exit__(*raised)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """The means of the gradients of `target`, in the structure of `sources`; as tf.GradientTape.gradient."""
        refuse_xla()
        variables = tf.nest.flatten(sources)
        own = self._tape.gradient(target, variables, *args, **kwargs)
        gradients = [
            tf.zeros(each.shape, each.dtype) if gradient is None else tf.convert_to_tensor(gradient)
            for gradient, each in zip(own, variables, strict=True)
        ]
        exchange = _exchange_of(variables, self._recipe, self._options)
        for name, gradient, each in zip(exchange.names, gradients, variables, strict=True):
            if tf.as_dtype(gradient.dtype) != tf.as_dtype(each.dtype):
                raise LayoutError(
                    f'rank {exchange.rank}: the gradient of "{name}" has dtype {tf.as_dtype(gradient.dtype).name}, and '
                    f"the variable has {tf.as_dtype(each.dtype).name}. Write tf.cast(gradient, variable.dtype)."
                )
        values = [tf.convert_to_tensor(each) for each in variables]
        means = tf.numpy_function(exchange.mean, [*values, *gradients], [each.dtype for each in gradients])
        means = means if isinstance(means, list) else [means]
        shaped = [tf.ensure_shape(mean, each.shape) for mean, each in zip(means, variables, strict=True)]
        return tf.nest.pack_sequence_as(sources, shaped)


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Assign the values of rank `root_rank` to the variables of every rank, also within a tf.function.

    Every rank calls it with variables of the same shapes and dtypes in the same order.

    Args:
        variables: TensorFlow variables, such as model.variables.
        root_rank: rank with the values to assign.

    Raises:
        MismatchError: where ranks make different calls.

    Example:
        >>> broadcast_variables(model.variables)
    """
    world = init()

    def exchange(*arrays: Array) -> list[Array]:
        sent = [tensor_of(each) for each in arrays] if world.rank == root_rank else None
        return [array_of(new, own) for new, own in zip(world.broadcast(sent, root_rank) or (), arrays, strict=True)]

    values = [tf.convert_to_tensor(each) for each in variables]
    found = tf.numpy_function(exchange, values, [each.dtype for each in values])
    for variable, new in zip(variables, found if isinstance(found, list) else [found], strict=True):
        variable.assign(tf.ensure_shape(new, variable.shape))


class _TapeExchange(ArrayExchange):
    """An exchange without an optimizer: the step of one call has been made when the next one begins."""

    def __init__(self, variables: Sequence[Any], recipe: Written, options: dict[str, Any]) -> None:
        names, values = names_of(variables), [np.asarray(each) for each in variables]
        refuse_uninitialized(names, variables, values)
        super().__init__(dict(zip(names, values, strict=True)), recipe, options)
        self.recipe, self.identities = recipe, [id(each) for each in variables]
        self._given = False
        stages = self.session.recipe.strategy.stages
        if not all(isinstance(stage, GradientStage) and not stage.accumulates for stage in stages):
            self.session.close()
            raise AttachError(
                f"{self.session.recipe!r} does not average the gradients of every step, and a tape does not see the "
                "optimizer's steps. Write gossamer.tensorflow.DistributedOptimizer(optimizer, recipe) in its place, or "
                "a recipe such as TopK(density=0.01)."
            )
        for variable, name in zip(variables, names, strict=True):
            variable.assign(array_of(tensor_of(self.session.parameters[name]), np.asarray(variable)))

    def mean(self, *arrays: Array) -> list[Any]:
        """The means of gradients; arrays: the variables' values, then their gradients."""
        values, gradients = arrays[: len(self.names)], arrays[len(self.names) :]
        if self._given:
            self.took_step(*values)
        *means, used = self.give(*gradients)
        self._given = True
        return means if used else [np.zeros_like(each) for each in gradients]


ATTRIBUTE = "_gossamer_exchange"  # of the first variable, with which the session ends


def _exchange_of(variables: list[Any], recipe: Written, options: dict[str, Any]) -> _TapeExchange:
    known: _TapeExchange | None = getattr(variables[0], ATTRIBUTE, None)
    if known is None:
        refuse_tf_strategy()
        if is_elastic():
            raise AttachError(
                "workers of this run come and go, and a tape does not know the optimizer, whose moments a newcomer "
                "needs. Write optimizer = gossamer.tensorflow.DistributedOptimizer(optimizer, recipe) and a plain "
                "tf.GradientTape, or run a fixed number: gossamer run --workers 4."
            )
        with tf.init_scope():
            known = _TapeExchange(variables, recipe, options)
        setattr(variables[0], ATTRIBUTE, known)
    if known.identities != [id(each) for each in variables]:
        raise LayoutError(
            f"rank {known.rank}: the gradients are those of {names_of(variables)}, and earlier ones were those of "
            f"{known.names}, which begin with the same variable. Call tape.gradient(loss, variables) with one list of "
            "variables in every step, and pick from the result."
        )
    if known.recipe != recipe:
        raise AttachError(
            f"these variables are averaged under {known.recipe!r}, and this tape has {recipe!r}. Write the same recipe "
            "in every step."
        )
    return known
