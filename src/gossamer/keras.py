"""Keras 3: train a Keras model under any recipe, on the torch, JAX and TensorFlow backends, by an unchanged model.fit.

    optimizer = gossamer.keras.GossamerOptimizer(keras.optimizers.Adam(1e-3), "TopK(0.01)")
    model.compile(optimizer, loss="mse")
    model.fit(x, y, callbacks=[gossamer.keras.GossamerCallback()])

The arrays travel by a `gossamer.engine.Session`, so all backends send the same bytes.
See docs/how-to/integrations/keras.md.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.engine import Session
from gossamer.errors import AttachError, CheckpointError, LayoutError
from gossamer.events import notice
from gossamer.train.checkpoint import coordinated, runs
from gossamer.train.checkpoint.agreement import SharedStep
from gossamer.train.engine.arrays import Array
from gossamer.train.session.array_exchange import ArrayExchange, array_of, mean_logs, names_of, tensor_of
from gossamer.train.session.keras_limits import (
    compiled_step_error,
    loss_scaling_error,
    refuse_strategies,
    refuse_uninitialized,
    refuse_xla,
)
from gossamer.train.session.recipe_choice import Written
from gossamer.train.session.session_checkpoint import about

try:
    import keras
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "gossamer.keras needs Keras 3. Write pip install 'gossamer[keras]'.", name=error.name
    ) from None

if "tensorflow" in sys.modules:  # its LLVM and that of triton end the process where triton comes second
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type] # as if it were missing; torch then does without it

__all__ = ["GossamerCallback", "GossamerOptimizer"]

NEW_OPTIMIZER = (
    "After a change of the model's variables compile it again on every rank, with a new optimizer: "
    "model.compile(gossamer.keras.GossamerOptimizer(keras.optimizers.Adam(1e-3), recipe), loss=...)"
)


def _numpy(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else np.asarray(value)


# -- the optimizer -----------------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable(package="gossamer")
class GossamerOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """A Keras optimizer that averages gradients or parameters over all workers by a recipe.

    Every rank builds the same model and compiles it with this optimizer. Rank 0's parameters are the initial ones.
    Gradients are averaged before `inner` clips and applies them. A variable without a gradient counts as zero. To load
    a saved model with this optimizer begins a session, too, so all ranks do it; on one rank write
    keras.models.load_model(path, compile=False).

    Args:
        inner: the Keras optimizer that makes the steps, or its name, such as "adam".
        recipe: as for gossamer.attach; GOSSAMER_RECIPE overrides it.
        name: of this optimizer.
        options: options of gossamer.engine.Session, such as seed, verify and server_optimizer. A saved model does not
            contain them.

    Raises:
        AttachError: for float16 loss scaling, gradient accumulation by Keras, tf.distribute, keras.distribution,
            jit_compile=True on the TensorFlow and torch backends, a model that is not built before the first step on
            TensorFlow, and unsupported arguments of gossamer.engine.Session.
        LayoutError: where the model's variables or the gradients are not those that the optimizer was built with.

    Example:
        >>> optimizer = GossamerOptimizer(keras.optimizers.SGD(0.1), "DiLoCo(period=10) + Float4()")
        >>> model.compile(optimizer, loss="mse")
    """

    def __init__(self, inner: Any, recipe: Written = None, *, name: str | None = None, **options: Any) -> None:
        super().__init__(learning_rate=0.0, name=name)
        inner = keras.optimizers.get(inner)
        if isinstance(inner, keras.optimizers.LossScaleOptimizer):
            raise loss_scaling_error()
        if inner.gradient_accumulation_steps:
            raise AttachError(
                f"{type(inner).__name__}(gradient_accumulation_steps={inner.gradient_accumulation_steps}) adds up "
                "gradients that were sent already. Leave it out, and let the recipe accumulate before it sends: "
                f"EveryStep(accumulate={inner.gradient_accumulation_steps})."
            )
        self.recipe, self.options = recipe, options
        self.inner = inner
        self._exchange: ArrayExchange | None = None

    @property
    def session(self) -> Session:
        """The session of the model's parameters, once the optimizer is built."""
        return self.exchange.session

    @property
    def exchange(self) -> ArrayExchange:
        if self._exchange is None:
            raise AttachError(
                "this GossamerOptimizer has no session before it is built. Call model.fit(...), or "
                "optimizer.build(model.trainable_variables)."
            )
        return self._exchange

    # -- Keras's protocol of an optimizer that wraps another one

    @property
    def loss_scale_factor(self) -> float:
        return 1.0  # not None: on TensorFlow an assignment of the present value would not reach the setter

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        if "inner" in self.__dict__:  # LossScaleOptimizer sets it on the optimizer that it wraps
            raise loss_scaling_error()

    @property
    def variables(self) -> list[Any]:
        return [*self._variables, *self.inner.variables]

    @property
    def learning_rate(self) -> Any:
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        return self.inner.iterations

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        self.inner.exclude_from_weight_decay(var_list, var_names)

    def scale_loss(self, loss: Any) -> Any:
        return self.inner.scale_loss(loss)

    def finalize_variable_values(self, var_list: Any) -> None:
        self.inner.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        written = self.recipe if self.recipe is None or isinstance(self.recipe, str) else repr(self.recipe)
        return {"name": self.name, "inner": keras.saving.serialize_keras_object(self.inner), "recipe": written}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> GossamerOptimizer:
        inner = keras.saving.deserialize_keras_object(config["inner"], custom_objects=custom_objects)
        return cls(inner, config["recipe"], name=config["name"])

    # -- building

    def build(self, variables: Sequence[Any]) -> None:
        """Create the session; rank 0's parameters are assigned to `variables`."""
        if self.built:
            return
        variables = list(variables)
        refuse_strategies()
        self.inner.build(variables)
        super().build(variables)
        self._forms = [_form(each) for each in variables]
        names = names_of(variables)
        with _outside_graph():
            values = [_numpy(each.value) for each in variables]
            refuse_uninitialized(names, variables, values)
            moments = [_numpy(each.value) for each in self.inner.variables]
            self._exchange = ArrayExchange(dict(zip(names, values, strict=True)), self.recipe, self.options, moments)
            self.set_parameters(self.session.parameters)
            if self._exchange.joined:
                _assign(self.inner.variables, self._exchange.moments)

    def set_parameters(self, arrays: Mapping[str, Array]) -> None:
        """Assign arrays by name to the variables."""
        for variable, name in zip(self._trainable_variables, self.exchange.names, strict=True):
            variable.assign(array_of(arrays[name], _numpy(variable.value)))

    def parameters(self) -> dict[str, Tensor]:
        """Copies of the variables, by name."""
        return {
            name: tensor_of(_numpy(variable.value)).clone()
            for variable, name in zip(self._trainable_variables, self.exchange.names, strict=True)
        }

    def _handed_over(self) -> list[Any]:
        """The variables whose values a newcomer to an elastic run receives after each step, next to the parameters."""
        return list(self.inner.variables) if self.exchange.is_elastic else []

    def hold_moments(self) -> None:
        """Show a newcomer to an elastic run the values that the inner optimizer has now."""
        self.exchange.hold([_numpy(each.value) for each in self._handed_over()])

    # -- steps

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Average, make the step of the inner optimizer, and take over the parameters that the workers agree on."""
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if not self.built:
            self.build(variables)
        self._refuse_other(variables)
        gradients = self._whole(list(grads), variables)
        step = {"torch": self._step_in_torch, "jax": self._step_in_jax, "tensorflow": self._step_in_tensorflow}
        step[keras.backend.backend()](gradients, variables)
        self._iterations.assign_add(1)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        forms = [_form(each)[1:] for each in trainable_variables]
        if self.built and forms != [form[1:] for form in self._forms]:
            names = [form[0] for form in self._forms] + [f"variable {number}" for number in range(len(forms))]
            raise self._other_variables([(name, *form) for name, form in zip(names, forms, strict=False)])
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)

    def _step_in_torch(self, gradients: list[Any], variables: list[Any]) -> None:
        if torch.compiler.is_compiling():
            raise compiled_step_error("torch")
        with torch.no_grad():
            *mean, used = self.exchange.give(*gradients)
            if used:
                self.inner.apply(mean, variables)
            stepped = [each.value.detach() for each in variables]
            moments = [each.value.detach() for each in self._handed_over()]
            after = self.exchange.took_step(*stepped, *moments)
            for variable, own, new in zip(variables, stepped, after, strict=True):
                if new is not own:
                    variable.assign(new)

    def _step_in_jax(self, gradients: list[Any], variables: list[Any]) -> None:
        import jax
        from jax.experimental import io_callback

        forms = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in gradients]
        flag = jax.ShapeDtypeStruct((), np.bool_)
        *mean, used = io_callback(self.exchange.give, [*forms, flag], *gradients, ordered=True)
        changed = [*variables, *self.inner.variables]
        before = [each.value for each in changed]
        self.inner.apply(mean, variables)
        for variable, old in zip(changed, before, strict=True):
            variable.assign(jax.numpy.where(used, variable.value, old))
        stepped = [each.value for each in (*variables, *self._handed_over())]
        for variable, new in zip(
            variables, io_callback(self.exchange.took_step, forms, *stepped, ordered=True), strict=True
        ):
            variable.assign(new)

    def _step_in_tensorflow(self, gradients: list[Any], variables: list[Any]) -> None:
        import tensorflow as tf

        refuse_xla()
        gradients = [tf.convert_to_tensor(each) for each in gradients]
        kinds = [each.dtype for each in gradients]
        *mean, used = tf.numpy_function(self.exchange.give, gradients, [*kinds, tf.bool])
        mean = [tf.ensure_shape(each, variable.shape) for each, variable in zip(mean, variables, strict=True)]
        tf.cond(tf.ensure_shape(used, ()), lambda: _nothing(self.inner.apply(mean, variables)), lambda: False)
        stepped = [tf.convert_to_tensor(each) for each in (*variables, *self._handed_over())]
        after = tf.numpy_function(self.exchange.took_step, stepped, kinds)
        for variable, new in zip(variables, after if isinstance(after, list) else [after], strict=True):
            variable.assign(tf.ensure_shape(new, variable.shape))

    # -- refusals

    def _whole(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return a gradient for each variable, zeros for variables without one."""
        self._filter_empty_gradients(gradients, variables)  # Keras's own warning
        found = [
            keras.ops.zeros(variable.shape, variable.dtype) if gradient is None else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        for (name, shape, dtype), gradient in zip(self._forms, found, strict=True):
            kind = keras.backend.standardize_dtype(gradient.dtype)
            if kind != dtype:
                raise LayoutError(
                    f'rank {self.exchange.rank}: the gradient of "{name}" has dtype {kind}, and the variable, of shape '
                    f"{shape}, has {dtype}. Write keras.ops.cast(gradient, {dtype!r}) before optimizer.apply."
                )
        return found

    def _refuse_other(self, variables: list[Any]) -> None:
        known = [self._trainable_variables_indices.get(self._var_key(each)) for each in variables]
        forms = [_form(each) for each in variables]
        if known != [*range(len(self._forms))] or forms != self._forms:
            raise self._other_variables(forms)

    def _other_variables(self, forms: list[Any]) -> LayoutError:
        new, gone = ([f for f in a if f not in b] for a, b in ((forms, self._forms), (self._forms, forms)))
        differences = "; ".join(
            f"{how} " + ", ".join(f'"{name}" of shape {shape}, {dtype}' for name, shape, dtype in found)
            for how, found in (("new:", new), ("missing:", gone))
            if found
        )
        return LayoutError(
            f"rank {self.exchange.rank}: the variables are not those that GossamerOptimizer was built with "
            f"({differences or 'same names, other objects or another order'}), so their gradients would be averaged "
            f"with those of other variables. {NEW_OPTIMIZER}."
        )


def _nothing(_: Any) -> bool:
    return False


def _form(variable: Any) -> tuple[str, tuple[int, ...], str]:
    name = str(getattr(variable, "path", None) or getattr(variable, "name", ""))
    return name, tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)


def _outside_graph() -> Any:
    """A context in which variables have values also while TensorFlow traces a function."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.init_scope()
    return torch.no_grad()


# -- the callback ------------------------------------------------------------------------------------------------------


class GossamerCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends epochs, averages metrics, evaluates averaged parameters and saves checkpoints, on all ranks together.

    - Weights that are not trained, such as BatchNormalization's statistics, begin with rank 0's values. A newcomer to
      an elastic run receives those of another worker.
    - Ranks may have different numbers of batches: at the end of an epoch a rank waits for the others, and a rank that
      missed steps takes over parameters and the optimizer's state.
    - Logs of an epoch are means over all ranks, before later callbacks read them.
    - Validation, and evaluate(..., callbacks=[callback]), uses the averaged parameters, which local training has only
      at the end of a round. After fit the model keeps them, or their moving averages with use_ema=True of an optimizer
      whose gradients are averaged in every step.
    - Errors of the session are raised as Gossamer's, also on the JAX and TensorFlow backends.

    Args:
        checkpoint: a folder that all ranks write to after each epoch, and continue from when fit begins. The model
            must be built before fit.
        keep: how many checkpoints stay.
        average_metrics: whether logs are averaged. A metric that only some ranks have, such as that of a validation on
            rank 0, is their mean, and all ranks receive it.

    Example:
        >>> model.fit(x, y, epochs=3, callbacks=[GossamerCallback(checkpoint="runs/1")])
    """

    def __init__(
        self, checkpoint: str | os.PathLike[str] | None = None, *, keep: int = 2, average_metrics: bool = True
    ) -> None:
        super().__init__()
        self.folder, self.keep, self.average_metrics = checkpoint, keep, average_metrics
        self._run: str | None = None
        self._in_epoch = self._continues = False
        self._own: dict[str, Tensor] | None = None  # parameters while averaged ones are in the model

    @property
    def optimizer(self) -> GossamerOptimizer:
        optimizer = self.model.optimizer
        if not isinstance(optimizer, GossamerOptimizer):
            raise AttachError(
                f"GossamerCallback needs a GossamerOptimizer, and this model has {type(optimizer).__name__}. "
                "Write model.compile(gossamer.keras.GossamerOptimizer(optimizer, recipe), loss=...)."
            )
        return optimizer

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self.optimizer
        if self.model.built and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        if optimizer.built:
            self._agree_on_statistics()
            optimizer.exchange.raises = False
        if optimizer.built and optimizer.exchange.joined:
            optimizer.exchange.joined = False
            self._continue_at(optimizer.exchange.epoch)
        elif self.folder is not None:
            self._load()

    def _continue_at(self, epoch: int) -> None:
        self.model._initial_epoch = epoch  # as keras.callbacks.BackupAndRestore does
        self._continues = True

    def _forget_epoch(self) -> None:
        """Let the next fit begin at its own first epoch: Keras would keep that of this one."""
        if self._continues:
            self.model._initial_epoch, self._continues = None, False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._forget_epoch()
        self._in_epoch = True
        if self.optimizer.built:
            self.optimizer.exchange.epoch = epoch
            self._hold_statistics(frozen=True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        exchange = self.optimizer.exchange
        exchange.raises = False
        exchange.raise_failure()
        self._agree_on_statistics()
        self._hold_statistics()
        if exchange.session.should_stop:
            self.model.stop_training = True

    def _agree_on_statistics(self) -> None:
        """Begin with the frozen weights and the statistics of batches that rank 0 has, or the others of a newcomer."""
        exchange = self.optimizer.exchange
        if not exchange.began:
            variables = self._statistics()
            _assign(variables, exchange.begin_with([_numpy(each.value) for each in variables]))

    def _hold_statistics(self, *, frozen: bool = False) -> None:
        """Copy untrained weights for newcomers to an elastic run. frozen: also those of frozen layers, which steps do
        not change."""
        exchange = self.optimizer.exchange
        if exchange.is_elastic and exchange.began and self.model.non_trainable_weights:
            layers = () if frozen else self.model._flatten_layers()
            unchanged = {id(each) for layer in layers for each in layer._trainable_variables}
            weights = enumerate(self._statistics())
            exchange.hold_statistics({at: _numpy(each.value) for at, each in weights if id(each) not in unchanged})

    def _statistics(self) -> list[Any]:
        """Weights that are not trained, without the states of random generators, which each rank has of its own."""
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()  # during fit a compiled step has their values
        return list(self.model.non_trainable_weights)

    def on_test_begin(self, logs: Any = None) -> None:
        optimizer = self.optimizer
        if not optimizer.built:
            return
        self._end_epoch(validates=True)
        self._own = optimizer.parameters()
        optimizer.set_parameters(optimizer.session.averaged_parameters())

    def on_test_end(self, logs: Any = None) -> None:
        if self._own is not None:
            self.optimizer.set_parameters(self._own)
            self._own = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._end_epoch()
        logs = {} if logs is None else logs
        if self.average_metrics:
            logs.update(self._mean(logs))
        numbers = {name: keras.ops.convert_to_numpy(value) for name, value in logs.items()}
        self.optimizer.session.log(**{name: float(value) for name, value in numbers.items() if not value.ndim})
        if self.folder is not None:
            self._save(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        self._forget_epoch()
        optimizer = self.optimizer
        if optimizer.built:
            optimizer.exchange.raises = True
            optimizer.set_parameters(optimizer.session.averaged_parameters())
            self._assign_moving_averages()

    def _assign_moving_averages(self) -> None:
        """Assign the weights' moving averages over the steps again, as Keras did at the end of fit."""
        inner, recipe = self.optimizer.inner, self.optimizer.session.recipe
        stage = recipe.strategy.steady_stage
        if not inner.use_ema or not int(inner.iterations):  # servers make the steps in its place
            return
        if stage.averages_gradients_at_once and not stage.scheduled:
            self.optimizer.finalize_variable_values(self.model.trainable_variables)
        else:
            notice(
                f"{type(inner).__name__}(use_ema=True) has moving averages of this rank's own weights under "
                f"{recipe!r}, so the model keeps the averaged parameters of all ranks in their place."
            )

    def _end_epoch(self, *, validates: bool = False) -> None:
        """Wait until every rank is out of data; once for each epoch. If a rank `validates`, all compute the averaged
        parameters with it, whether or not they validate."""
        if not self._in_epoch:
            return
        self._in_epoch = False
        if keras.backend.backend() == "jax":
            import jax

            jax.effects_barrier()  # all callbacks that JAX has dispatched have run
        optimizer = self.optimizer
        optimizer.exchange.raise_failure()
        if optimizer.session.should_stop:
            return
        parameters, slots = optimizer.session.end_epoch(_saved(optimizer.variables))
        optimizer.set_parameters(parameters)
        _assign(optimizer.variables, [*slots.values()])
        optimizer.hold_moments()
        session = optimizer.session
        together = session.recipe.strategy.local_parameters and session._synchronizer.in_step
        if together and "validates" in session._group.all_gather_text("validates" if validates else "trains"):
            session.averaged_parameters()

    def _mean(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: keras.ops.convert_to_numpy(value).tolist() for name, value in logs.items()}
        return mean_logs([json.loads(text) for text in self.optimizer.session._group.all_gather_text(json.dumps(own))])

    # -- checkpoints

    def _save(self, epoch: int) -> None:
        optimizer, session = self.optimizer, self.optimizer.session
        state, gather_text = session.state_dict(), session._group.all_gather_text
        del state["loop"]  # the optimizer's variables are there by themselves
        tree = {
            **coordinated.states({}),
            "session": state,
            "world": {},
            "optimizer": _saved(optimizer.variables),
            "model": _saved(self.model.non_trainable_variables),  # the session has the others
            "mine": {"epoch": epoch + 1},
        }

        def save() -> None:
            assert self.folder is not None
            self._run = runs.agree_on_name(gather_text, self._run)
            at = SharedStep(os.fspath(self.folder), state["step"], optimizer.exchange.rank, gather_text)
            coordinated.save(at, tree, about(state, self._run), self.keep)

        session._group.whole(save)

    def _load(self) -> None:
        optimizer = self.optimizer
        if not optimizer.built:
            raise CheckpointError(
                "the model has no variables yet, so no checkpoint can be loaded into it. Call model.build(input_shape) "
                "before model.fit(...)."
            )
        session = optimizer.session

        def load() -> Any:
            gather_text, world = session._group.all_gather_text, session._transport.world
            assert self.folder is not None
            return coordinated.load(self.folder, optimizer.exchange.rank, world, gather_text)

        found = session._group.whole(load)
        if found is None:
            return
        folder = os.fspath(self.folder or "")
        self._run = found.run
        saved_variables = {"optimizer": optimizer.variables, "model": self.model.non_trainable_variables}
        for part, variables in saved_variables.items():
            if [each.shape for each in found.tree[part].values()] != [tuple(each.shape) for each in variables]:
                raise CheckpointError(
                    f"rank {optimizer.exchange.rank}: in the checkpoint in {folder!r} the {part} has "
                    "other variables than in this run. Compile the same model with the same optimizer, or begin in an "
                    "empty folder."
                )
        coordinated.put_back({}, found.tree)
        optimizer.set_parameters(session.load_state_dict(*found.sessions))
        for part, variables in saved_variables.items():
            _assign(variables, [*found.tree[part].values()])
        optimizer.hold_moments()
        self._continue_at(found.tree["mine"]["epoch"])


def _saved(variables: Sequence[Any]) -> dict[str, Tensor]:
    return {f"{number:05}": tensor_of(_numpy(each.value)).clone() for number, each in enumerate(variables)}


def _assign(variables: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    for variable, tensor in zip(variables, tensors, strict=True):
        variable.assign(array_of(tensor, _numpy(variable.value)))
