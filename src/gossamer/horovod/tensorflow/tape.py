"""DistributedGradientTape: a tf.GradientTape that averages gradients over the ranks by a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from gossamer import tensorflow
from gossamer.horovod.basics import Average, ProcessSet, global_process_set
from gossamer.horovod.calls import ReductionOp
from gossamer.horovod.compression import TensorCompressor
from gossamer.horovod.exchange import check_reduction, recipe_of
from gossamer.horovod.tensorflow.exchange import VariableExchange, averaged, check_groups, exchanges_nothing
from gossamer.horovod.tensorflow.ops import Compression, grouped_allreduce
from gossamer.train.session.recipe_choice import Written

ATTRIBUTE = "_gossamer_horovod_exchanges"  # of the first variable, with which the exchange ends


class DistributedTape(tensorflow.DistributedGradientTape):
    """The tape that `DistributedGradientTape` returns. It may be constructed again in every step."""

    def __init__(
        self,
        tape: Any,
        recipe: Written,
        op: ReductionOp,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        scale_local_gradients: bool,
    ) -> None:
        super().__init__(tape, recipe)
        self.op, self.sparse_as_dense, self.process_set = op, sparse_as_dense, process_set
        self.scale_local_gradients = scale_local_gradients
        self._local: set[int] = set()

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable as it is on this rank, divided by the number of ranks."""
        self._local.add(id(source))

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **options: Any,
    ) -> Any:
        """The means of the gradients of `target`, in the structure of `sources`.

        Args:
            target, sources, output_gradients, options: As for tf.GradientTape.gradient. Where some sources are not
                variables, the gradients are averaged by allreduce and not by the recipe.
            use_generic_names: Not used.
        """
        variables = tf.nest.flatten(sources)
        own = self._tape.gradient(target, variables, output_gradients, **options)
        if all(map(_is_variable, variables)):
            means, _, _ = averaged(
                self._exchange_of,
                own,
                variables,
                local=lambda each: id(each) in self._local,
                scale_local=self.scale_local_gradients,
                sparse_as_dense=self.sparse_as_dense,
                process_set=self.process_set,
                op=self.op,
            )
        else:
            means = self._reduced(own)
        return tf.nest.pack_sequence_as(sources, means)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Pairs (variable, gradient): of registered local sources, and of all others."""
        found = zip(sources, self.gradient(target, sources, output_gradients, use_generic_names), strict=True)
        pairs = [(id(source) in self._local, (source, gradient)) for source, gradient in found]
        return [pair for local, pair in pairs if local], [pair for local, pair in pairs if not local]

    def _reduced(self, gradients: Sequence[Any]) -> list[Any]:
        if exchanges_nothing(self.process_set):
            return list(gradients)
        sent = {place: each for place, each in enumerate(gradients) if each is not None}
        reduced = grouped_allreduce([*sent.values()], op=self.op, process_set=self.process_set) if sent else []
        found = dict(zip(sent, reduced, strict=True))
        return [found.get(place) for place in range(len(gradients))]

    def _exchange_of(self, variables: Sequence[Any]) -> VariableExchange:
        """That of earlier steps with the same variables."""
        known = variables[0].__dict__.setdefault(ATTRIBUTE, {})
        key = (tuple(map(id, variables)), self.process_set, self.op, repr(self._recipe))
        if key not in known:
            known[key] = VariableExchange(variables, self.process_set, self._recipe, self.op, sees_steps=False)
        exchange: VariableExchange = known[key]
        return exchange


def _is_variable(source: Any) -> bool:
    return isinstance(source, tf.Variable) or isinstance(getattr(source, "value", None), tf.Variable)  # or Keras 3's


def DistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[TensorCompressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReductionOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    recipe: Written = None,
) -> DistributedTape:
    """Wrap a tape: gradient() averages over the ranks by the recipe, also within a tf.function.

    The first call for a list of variables assigns rank 0's values to them, except to those with gradients that are
    tf.IndexedSlices: call broadcast_variables for these. If a gradient is not finite on some rank, all ranks receive
    zeros. None gradients stay None.

    Args:
        gradtape: the tf.GradientTape that records the loss.
        device_dense, device_sparse: Not used.
        compression: Compression.fp16 is the recipe Dense(dtype="float16").
        sparse_as_dense: Average tf.IndexedSlices by the recipe, as dense tensors. Else their rows are gathered.
        op: Average or Sum.
        gradient_predivide_factor: Changes rounding only in Horovod, and nothing here.
        num_groups, groups: Checked; all gradients are sent together.
        process_set: The ranks that exchange.
        scale_local_gradients: Whether gradients of local sources are divided by the number of ranks.
        recipe: A recipe of Gossamer that averages the gradients of every step; `gossamer run --recipe` replaces it.
            Dense() by default.

    Raises:
        NotImplementedError: for Adasum.
        AttachError: for recipes that average parameters, accumulate or have servers; within a tf.distribute strategy;
            under jit_compile=True.
    """
    check_reduction(op, gradient_predivide_factor, 1)
    check_groups(num_groups, groups)
    recipe = recipe_of(recipe, compression, Compression)
    return DistributedTape(gradtape, recipe, op, sparse_as_dense, process_set, scale_local_gradients)


def PartialDistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[TensorCompressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReductionOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    *,
    recipe: Written = None,
) -> DistributedTape:
    """As `DistributedGradientTape`, without averaging the variables of some layers.

    Args:
        local_layers: A Keras layer or several. Their variables are not averaged.
    """
    tape = DistributedGradientTape(
        gradtape,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        recipe=recipe,
    )
    for variable in local_variables(local_layers):
        tape.register_local_source(variable)
    return tape


def local_variables(layers: Any) -> list[Any]:
    """The trainable variables of one Keras layer or several. Raises ValueError for other objects."""
    given = [] if layers is None else list(layers) if isinstance(layers, Iterable) else [layers]
    if any(not hasattr(each, "trainable_weights") for each in given):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    return [variable for layer in given for variable in layer.trainable_weights]
