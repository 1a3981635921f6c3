"""DistributedOptimizer: a Keras optimizer that exchanges gradients, or variables, by a Gossamer recipe.

Optimizers of Keras 3, of Keras 2 in the package tf_keras with its legacy ones, and of tf.compat.v1.train.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gossamer.horovod.basics import Average, ProcessSet, global_process_set
from gossamer.horovod.calls import ReductionOp
from gossamer.horovod.compression import TensorCompressor
from gossamer.horovod.exchange import check_reduction, recipe_of
from gossamer.horovod.tensorflow.exchange import VariableExchange, averaged, check_groups
from gossamer.horovod.tensorflow.ops import Compression
from gossamer.train.session.recipe_choice import Written


@dataclass(frozen=True, kw_only=True)
class DistributedSettings:
    """The arguments of DistributedOptimizer."""

    recipe: Written
    op: ReductionOp
    sparse_as_dense: bool
    backward_passes_per_step: int
    average_aggregated_gradients: bool
    process_set: ProcessSet
    scale_local_gradients: bool


class GradientAggregation:
    """Adds up the gradients of several backward passes.

    Attributes:
        counter: How many passes have been added since the last step.
    """

    def __init__(self, variables: Sequence[Any], passes: int, average: bool) -> None:
        self.passes, self.average = passes, average
        with tf.init_scope():
            self.counter = tf.Variable(0, trainable=False, dtype=tf.int32)
            zeros = [tf.zeros(each.shape, each.dtype) for each in variables]
            self.sums = [tf.Variable(each, trainable=False) for each in zeros]

    def add(self, gradients: Sequence[Any], step: Callable[[list[Any]], None], between: Callable[[], Any]) -> None:
        """step: called with the sums or means in every last pass; between: called in the others."""
        for total, gradient in zip(self.sums, gradients, strict=True):
            if gradient is not None:
                total.assign_add(tf.convert_to_tensor(gradient))
        self.counter.assign_add(1)

        def last() -> bool:
            step([each / self.passes if self.average else tf.convert_to_tensor(each) for each in self.sums])
            for each in self.sums:
                each.assign(tf.zeros_like(each))
            self.counter.assign(0)
            return True

        def other() -> bool:
            between()
            return False

        tf.cond(self.counter >= self.passes, last, other)


class DistributedState:
    """The state that DistributedOptimizer adds to one optimizer."""

    def __init__(self) -> None:
        self.local: set[int] = set()  # variables without exchange of gradients
        self.exchanges: dict[tuple[int, ...], VariableExchange] = {}
        self.aggregation: GradientAggregation | None = None
        self.given: tuple[Any, VariableExchange | None] | None = None  # by compute_gradients, for the step that follows


class AveragedGradients:
    """Gradients of an optimizer, averaged by one exchange for each list of variables."""

    _distributed: DistributedSettings
    _sees_steps = True  # as for VariableExchange

    @property
    def _state(self) -> DistributedState:
        state: DistributedState = self.__dict__.setdefault(
            "_distributed_state", DistributedState()
        )  # not tracked by Keras
        return state

    @property
    def process_set(self) -> ProcessSet:
        return self._distributed.process_set

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable as it is on this rank, divided by the number of ranks."""
        self._state.local.add(id(var))

    def _averaged(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> tuple[list[Any], Any, VariableExchange | None]:
        settings, local = self._distributed, self._state.local
        return averaged(
            self._exchange_of,
            gradients,
            variables,
            local=lambda each: id(each) in local,
            scale_local=settings.scale_local_gradients,
            sparse_as_dense=settings.sparse_as_dense,
            process_set=settings.process_set,
            op=settings.op,
        )

    def _exchange_of(self, variables: Sequence[Any]) -> VariableExchange:
        """That of earlier steps with the same variables."""
        key, settings = tuple(map(id, variables)), self._distributed
        known, owner = self._state.exchanges, weakref.ref(self)

        def state() -> list[Any]:
            return [] if (optimizer := owner()) is None else variables_of(optimizer)

        if key not in known:
            known[key] = VariableExchange(
                variables, settings.process_set, settings.recipe, settings.op, state, self._sees_steps
            )
        return known[key]


class KerasSteps(AveragedGradients):
    """The methods that DistributedOptimizer adds to the class of the optimizer that it wraps."""

    @property
    def _agg_helper(self) -> GradientAggregation | None:  # Horovod's name
        return self._state.aggregation

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None, **options: Any) -> list[tuple[Any, Any]]:
        """Pairs (gradient, variable), averaged unless several backward passes add up before a step.

        Args:
            loss: a function without arguments; or a tensor, with the `tape` that recorded it.
        """
        if tape is None:
            tape = tf.GradientTape()
        if callable(loss):
            with tape:
                loss = loss()
        variables = list(var_list)
        return [*zip(self._reduced(tape.gradient(loss, variables, **options), variables), variables, strict=True)]

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """As legacy optimizers of Keras 2 call it."""
        return self.compute_gradients(loss, var_list, tape, output_gradients=grad_loss)

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Averaged gradients, from the optimizer's own method."""
        base: Any = super()
        return self._reduced(base.get_gradients(loss, params), list(params))

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if self._distributed.backward_passes_per_step > 1:
            return list(gradients)
        found, used, exchange = self._averaged(gradients, variables)
        self._state.given = used, exchange
        return found

    def _step_with(self, gradients: Sequence[Any], variables: Sequence[Any], apply: Callable[[list[Any]], Any]) -> None:
        """Exchange gradients, make a step by `apply`, and exchange variables, where the recipe does so."""
        given, self._state.given = self._state.given, None
        if given is not None:
            self._step(list(gradients), *given, apply)
        elif self._distributed.backward_passes_per_step == 1:
            self._step(*self._averaged(gradients, variables), apply)
        else:
            aggregation = self._state.aggregation
            if aggregation is None:
                aggregation = self._state.aggregation = GradientAggregation(
                    variables,
                    self._distributed.backward_passes_per_step,
                    self._distributed.average_aggregated_gradients,
                )
            owner: Any = self
            aggregation.add(
                gradients,
                lambda sums: self._step(*self._averaged(sums, variables), apply),
                lambda: owner.iterations.assign_add(1),
            )

    def _step(
        self, gradients: list[Any], used: Any, exchange: VariableExchange | None, apply: Callable[[list[Any]], Any]
    ) -> None:
        def step() -> bool:
            apply(gradients)
            return True

        if used is True:
            step()
        else:
            tf.cond(tf.ensure_shape(used, ()), step, lambda: False)
        if exchange is not None:
            exchange.took_step()


class Keras3Steps(KerasSteps):
    """For optimizers of Keras 3, which update variables in apply()."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        base: Any = super()
        own: Any = self
        variables = list(own._trainable_variables if trainable_variables is None else trainable_variables)
        create_variables(own, variables)
        self._step_with(list(grads), variables, lambda found: base.apply(found, variables))
        return own.iterations


class Keras2Steps(KerasSteps):
    """For optimizers of Keras 2, which update variables in apply_gradients()."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        own: Any = self
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        create_variables(own, variables)

        def apply(found: list[Any]) -> None:
            base.apply_gradients([*zip(found, variables, strict=True)], *args, **kwargs)

        self._step_with([gradient for gradient, _ in pairs], variables, apply)
        return own.iterations


class LegacyDistributedOptimizer(AveragedGradients, tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer of TensorFlow 1 whose compute_gradients() averages, in graphs with sessions and eagerly.

    A graph with a session does not report that a step was made, so its recipes are those of a tape.
    """

    _sees_steps = False

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool, settings: DistributedSettings) -> None:
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer, self._distributed = optimizer, settings

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Pairs (gradient, variable) of the optimizer, averaged. Arguments are those of its own method."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        means, _, _ = self._averaged([gradient for gradient, _ in pairs], variables)
        return [*zip(means, variables, strict=True)]

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own."""
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self) -> Any:
        """As the optimizer's own."""
        return self._optimizer.get_slot_names()

    def variables(self) -> Any:
        """As the optimizer's own."""
        return self._optimizer.variables()


def variables_of(optimizer: Any) -> list[Any]:
    """The variables of an optimizer of Keras 3 or 2."""
    found = optimizer.variables
    return list(found() if callable(found) else found)


def create_variables(optimizer: Any, trained: Sequence[Any]) -> None:
    """Create the variables that an optimizer of Keras 3 or 2 creates in its first step, such as moments."""
    with tf.init_scope():
        if hasattr(optimizer, "_create_all_weights"):
            optimizer._create_all_weights(trained)
        elif hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
            optimizer.build(trained)


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[TensorCompressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReductionOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    use_locking: bool = False,
    recipe: Written = None,
) -> Any:
    """Wrap an optimizer: each step first exchanges gradients by the recipe. The class stays the same.

    Under recipes that average parameters, such as DiLoCo, steps exchange those. A step with gradients that are not
    finite is skipped on all ranks. The first step gives all ranks the variables of rank 0, except those with gradients
    that are tf.IndexedSlices: call broadcast_variables for these.

    Args:
        optimizer: of Keras 3 or Keras 2; the new one shares its variables. Or one of tf.compat.v1.train, whose
            compute_gradients() then averages as DistributedGradientTape does; recipes are those of a tape.
        name, use_locking: of an optimizer of tf.compat.v1.train.
        device_dense, device_sparse: Not used.
        compression: Compression.fp16 is the recipe Dense(dtype="float16").
        sparse_as_dense: Average tf.IndexedSlices by the recipe, as dense tensors. Else their rows are gathered.
        gradient_predivide_factor: Changes rounding only in Horovod, and nothing here.
        op: Average or Sum.
        backward_passes_per_step: How many calls add up before a step.
        average_aggregated_gradients: Whether their sum is divided by their number.
        num_groups, groups: Checked; all gradients are sent together.
        process_set: The ranks that exchange.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.
        recipe: A recipe of Gossamer; `gossamer run --recipe` replaces it. Dense() by default.

    Raises:
        ValueError: for an object that is not an optimizer, and for one that is wrapped already.
        NotImplementedError: for Adasum, and for backward_passes_per_step with an optimizer of tf.compat.v1.train.
    """
    check_reduction(op, gradient_predivide_factor, backward_passes_per_step)
    check_groups(num_groups, groups)
    if isinstance(optimizer, AveragedGradients):
        raise ValueError("this optimizer is a DistributedOptimizer already. Wrap the optimizer of Keras, once.")
    if not hasattr(optimizer, "apply_gradients"):
        raise ValueError(
            f"{type(optimizer).__name__} is not a Keras optimizer. Write "
            "hvd.DistributedOptimizer(tf.keras.optimizers.Adam(1e-3))."
        )
    settings = DistributedSettings(
        recipe=recipe_of(recipe, compression, Compression),
        op=op,
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if backward_passes_per_step > 1:
            raise NotImplementedError(
                f"backward_passes_per_step needs an optimizer of Keras, and {type(optimizer).__name__} is one of "
                "TensorFlow 1. Write hvd.DistributedOptimizer(tf.keras.optimizers.Adam(1e-3), "
                f"backward_passes_per_step={backward_passes_per_step})."
            )
        return LegacyDistributedOptimizer(optimizer, name, use_locking, settings)
    inner = type(optimizer)
    steps = Keras3Steps if hasattr(optimizer, "apply") else Keras2Steps
    # the name and module of the class are the inner one's, so that a saved model loads without Horovod
    wrapped: Any = type(inner.__name__, (steps, inner), {"__module__": inner.__module__, "_distributed": settings})
    made = wrapped.__new__(wrapped)
    made.__dict__.update(optimizer.__dict__)
    return made
