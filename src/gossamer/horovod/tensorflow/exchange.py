"""Exchange: the variables of one tape or optimizer under a recipe, in steps that TensorFlow may compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from torch import Tensor

from gossamer.algorithms.strategies import GradientStage
from gossamer.engine import Session
from gossamer.errors import AttachError
from gossamer.horovod.basics import ProcessSet
from gossamer.horovod.calls import ReductionOp
from gossamer.horovod.exchange import RecipeExchange
from gossamer.horovod.tensorflow.host import host_call
from gossamer.horovod.tensorflow.ops import grouped_allreduce
from gossamer.train.engine.arrays import Array
from gossamer.train.session.array_exchange import array_of, names_of, tensor_of
from gossamer.train.session.keras_limits import refuse_tf_strategy
from gossamer.train.session.recipe_choice import Written


class VariableExchange(RecipeExchange):
    """Averages the gradients of some variables, or the variables themselves, by a recipe.

    Args:
        variables: in the same order on every rank.
        process_set, recipe, op: As for RecipeExchange.
        state: The optimizer's variables, which a rank that missed steps takes over.
        sees_steps: Whether `took_step` follows each optimizer's step. A tape does not see them, so its recipes average
            the gradients of every step.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        process_set: ProcessSet,
        recipe: Written,
        op: ReductionOp,
        state: Callable[[], Sequence[Any]] = tuple,
        sees_steps: bool = True,
    ) -> None:
        super().__init__(process_set, recipe, op)
        self.variables, self.names = list(variables), names_of(variables)
        self.state, self.sees_steps = state, sees_steps

    def holds(self, identities: set[int]) -> bool:
        return any(id(each) in identities or id(getattr(each, "value", None)) in identities for each in self.variables)

    # -- in the step ---------------------------------------------------------------------------------------------------

    def average(self, gradients: Sequence[Any]) -> tuple[list[Any], Any]:
        """The means of gradients, and whether the optimizer is to make a step with them."""
        refuse_tf_strategy()
        values = self._values()
        dtypes = [each.dtype for each in (*gradients, *values)]
        found = host_call(self._average, [*values, *gradients], [*dtypes, tf.bool, tf.bool])
        count = len(self.variables)
        means, fresh, (used, changed) = found[:count], found[count : 2 * count], found[2 * count :]
        with tf.control_dependencies([self._assign_where(changed, fresh)]):  # or a session would leave it out
            return [tf.ensure_shape(mean, each.shape) for mean, each in zip(means, gradients, strict=True)], used

    def took_step(self) -> None:
        """The optimizer made its step, or left it out as `average` returned."""
        values = self._values()
        *fresh, changed = host_call(self._took_step, values, [*(each.dtype for each in values), tf.bool])
        self._assign_where(changed, fresh)

    def _values(self) -> list[Any]:
        return [tf.convert_to_tensor(each) for each in self.variables]

    def _assign_where(self, changed: Any, values: Sequence[Any]) -> Any:
        def assign() -> Any:
            pairs = zip(self.variables, values, strict=True)
            return [variable.assign(tf.ensure_shape(new, variable.shape)) for variable, new in pairs]

        def assign_in_function() -> bool:
            assign()
            return True

        if not tf.compat.v1.executing_eagerly_outside_functions():  # tf.cond cannot assign in a graph with sessions
            return tf.group(assign())
        return tf.cond(tf.ensure_shape(changed, ()), assign_in_function, lambda: False)

    # -- on the host ---------------------------------------------------------------------------------------------------

    def _average(self, *arrays: Array) -> list[Any]:
        """Of values and gradients: means, values to continue with, whether a step is to be made, and whether values
        changed."""
        count = len(self.names)
        values, gradients = list(arrays[:count]), arrays[count:]
        changed = False
        with self.exchanging():
            if self.session is None:
                values, changed = self._taken(self._begin(values).parameters, values), True
            elif self.unused:
                values, changed = self._stepped(self.session, values)
            assert self.session is not None
            mean = self.session.give(self._named(gradients))
        self.unused = True
        if mean is None:
            # a tape's step is not left out, so its gradients are zeros
            means = [each if self.sees_steps else np.zeros_like(each) for each in gradients]
        else:
            scaled = mean if self.factor == 1 else {name: each * self.factor for name, each in mean.items()}
            means = self._taken(scaled, gradients)
        return [*means, *values, np.bool_(mean is not None), np.bool_(changed)]

    def _begin(self, values: Sequence[Array]) -> Session:
        session = self.open(self._named(values))
        stages = session.recipe.strategy.stages
        if not self.sees_steps and not all(isinstance(each, GradientStage) and not each.accumulates for each in stages):
            self.restart()
            raise AttachError(
                f"{session.recipe!r} does not average the gradients of every step, and a tape does not see the "
                "optimizer's steps. Write hvd.DistributedOptimizer(optimizer, recipe=...) in its place, or a recipe "
                "such as TopK(density=0.01)."
            )
        return session

    def _took_step(self, *values: Array) -> list[Any]:
        if self.session is None or not self.unused:
            return [*values, np.False_]
        with self.exchanging():
            found, changed = self._stepped(self.session, values)
        return [*found, np.bool_(changed)]

    def _stepped(self, session: Session, values: Sequence[Array]) -> tuple[list[Any], bool]:
        self.unused = False
        given = self._named(values)
        after = session.took_step(given)
        changed = any(after[name] is not given[name] for name in self.names)
        return (self._taken(after, values) if changed else list(values)), changed

    def _named(self, arrays: Sequence[Array]) -> dict[str, Tensor]:
        return {name: tensor_of(array) for name, array in zip(self.names, arrays, strict=True)}

    def _taken(self, tensors: Mapping[str, Tensor], like: Sequence[Array]) -> list[Any]:
        return [array_of(tensors[name], own) for name, own in zip(self.names, like, strict=True)]

    # -- the end of the data -------------------------------------------------------------------------------------------

    def end_epoch(self) -> None:
        if self.session is None:
            return
        if self.unused:
            self._took_step(*(each.numpy() for each in self.variables))
        state = {f"{number:05}": each for number, each in enumerate(self.state())}
        parameters, after = self.session.end_epoch({n: tensor_of(v.numpy()) for n, v in state.items()})
        pairs = [*zip(self.variables, (parameters[name] for name in self.names), strict=True)]
        for variable, new in [*pairs, *((state[name], new) for name, new in after.items())]:
            variable.assign(array_of(new, variable.numpy()))


def averaged(
    exchange_of: Callable[[Sequence[Any]], VariableExchange],
    gradients: Sequence[Any],
    variables: Sequence[Any],
    *,
    local: Callable[[Any], bool],
    scale_local: bool,
    sparse_as_dense: bool,
    process_set: ProcessSet,
    op: ReductionOp,
) -> tuple[list[Any], Any, VariableExchange | None]:
    """Means of gradients, where None remains None; whether to make a step; and the exchange, if any.

    Args:
        exchange_of: The exchange of some variables.
        local: Whether a variable is this rank's own. Its gradient is not sent, and divided by the number of ranks where
            `scale_local`.
        sparse_as_dense: Whether the recipe also averages gradients that are tf.IndexedSlices. Else their rows are
            gathered.
    """
    found = list(gradients)
    ranks = len(process_set.ranks)
    if exchanges_nothing(process_set):
        return found, True, None
    sent, sparse = [], []
    for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
        if gradient is None:
            continue
        if local(variable):
            found[place] = _divided(gradient, ranks) if scale_local else gradient
        elif isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense:
            sparse.append(place)
        else:
            sent.append(place)
    if sparse:
        gathered = grouped_allreduce([gradients[place] for place in sparse], op=op, process_set=process_set)
        found = _replaced(found, sparse, gathered)
    if not sent:
        return found, True, None
    exchange = exchange_of([variables[place] for place in sent])
    means, used = exchange.average([tf.convert_to_tensor(gradients[place]) for place in sent])
    return _replaced(found, sent, means), used, exchange


def exchanges_nothing(process_set: ProcessSet) -> bool:
    """Whether gradients stay as they are: this rank is alone in the set, or not in it."""
    return len(process_set.ranks) == 1 or not process_set.included()


def _replaced(values: list[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    chosen = dict(zip(places, new, strict=True))
    return [chosen.get(place, value) for place, value in enumerate(values)]


def _divided(gradient: Any, ranks: int) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(gradient.values, ranks), gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(ranks, gradient.dtype)


def check_groups(num_groups: int, groups: Any) -> None:
    """Raise ValueError for groups of gradients that cannot be; all gradients are sent together."""
    groups = groups if groups is not None else num_groups or None
    if groups is not None and not isinstance(groups, list) and not (isinstance(groups, int) and groups > 0):
        raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")
