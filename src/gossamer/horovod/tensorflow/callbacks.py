"""Callbacks: the common behavior of the callbacks of gossamer.horovod.keras and gossamer.horovod.tensorflow.keras.

Both modules add the class keras.callbacks.Callback of their package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gossamer.horovod.basics import rank, size
from gossamer.horovod.elastic import ElasticState
from gossamer.horovod.tensorflow.functions import allgather_object, broadcast_variables
from gossamer.horovod.tensorflow.optimizer import variables_of
from gossamer.train.session.array_exchange import mean_logs

Logs = dict[str, Any] | None


class KerasCallback:
    """The attributes that Keras sets."""

    model: Any
    params: Any


def callback_class(behavior: type[KerasCallback], name: str, base: Any, module: str) -> Any:
    """A public class of a behavior and the Callback of a Keras package."""
    return type(name, (behavior, base), {"__doc__": behavior.__doc__, "__module__": module})


class BroadcastVariables(KerasCallback):
    """Gives every rank the variables of one rank after the first batch, when the optimizer has its own.

    Args:
        root_rank: The rank that sends.
        device: Not used.
        local_variables: Variables to leave as they are.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank, self.broadcast_done = root_rank, False
        given = [] if local_variables is None else local_variables
        given = list(given) if isinstance(given, Sequence) else [given]
        if any(not hasattr(each, "assign") for each in given):
            raise ValueError("All local variables must be of tf.Variable type.")
        self._local = {id(each) for each in given}

    def register_local_var(self, var: Any) -> None:
        """Leave a variable as it is on this rank."""
        self._local.add(id(var))

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self.broadcast_done:
            return
        for variables in (self.model.variables, variables_of(self.model.optimizer)):
            broadcast_variables([each for each in variables if id(each) not in self._local], self.root_rank)
        self.broadcast_done = True


class MetricAverage(KerasCallback):
    """Replaces the metrics of an epoch by their means over the ranks that have them. Later callbacks read the means.

    Args:
        device: Not used.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs:
            logs.update(mean_logs(allgather_object({name: np.asarray(value) for name, value in logs.items()})))


class LearningRateSchedule(KerasCallback):
    """Sets the learning rate to initial_lr * multiplier(epoch) from start_epoch until before end_epoch.

    Args:
        initial_lr: The learning rate at the start of training.
        multiplier: A function of the epoch, or the base of an exponential decay.
        start_epoch, end_epoch: The first epoch, and that after the last; None: no end.
        staircase: Whether the rate changes at the start of an epoch; else with every batch, by a fraction of the epoch.
        momentum_correction: Whether the momentum of a step is multiplied by the ratio of the rates. This needs an
            optimizer that stores its momentum in a variable, such as tf.keras.optimizers.legacy.SGD; the momentum of
            others is a constant of the compiled step.
        steps_per_epoch: None: as Keras counts them.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.current_epoch = 0
        self._momentum: float | None = None  # to restore after the batch

    def on_train_begin(self, logs: Logs = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not autodetect the number of steps per epoch. Pass steps_per_epoch to "
                    f"{type(self).__name__}()."
                )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if self.staircase and batch == 0:
            self._adjust(self.current_epoch)
        elif not self.staircase:
            assert self.steps_per_epoch
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, after = self._rate(), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = after
        momentum = getattr(optimizer, "momentum", None)
        if self.momentum_correction and isinstance(momentum, tf.Variable) and before:
            self._momentum = float(momentum.numpy())
            momentum.assign(self._momentum * after / before)

    def _rate(self) -> float:
        return float(tf.convert_to_tensor(self.model.optimizer.learning_rate))

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._momentum is not None:
            self.model.optimizer.momentum.assign(self._momentum)
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate from initial_lr / size() to initial_lr in the first epochs, batch by batch.

    Args:
        initial_lr: The learning rate after the warmup.
        warmup_epochs: How many epochs it lasts.
        momentum_correction, steps_per_epoch: As for LearningRateScheduleCallback.
        verbose: 1 prints the rate at the end.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch
            epoch += 1.0 / self.steps_per_epoch  # round numbers at the ends of epochs
            return 1.0 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")


class BestModel(KerasCallback):
    """Saves the model when a metric of an epoch is the best so far, on rank 0 only. Every rank may have the callback.

    The trainer sets the attribute filepath before training. Callbacks before this one, such as MetricAverageCallback,
    change the metric.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: As for the ModelCheckpoint of Keras.

    Attributes:
        filepath: The file, such as "best.keras", or "best.weights.h5" with save_weights_only=True.

    Raises:
        ValueError: when training begins on rank 0 and filepath is not set.

    Example:
        >>> best = hvd.callbacks.BestModelCheckpoint(monitor="val_loss")
        >>> best.filepath = "best.keras"
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        *,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        base: Any = super()
        base.__init__(
            filepath="best.weights.h5" if save_weights_only else "best.keras",  # Keras requires one here
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: Any = None

    def on_train_begin(self, logs: Logs = None) -> None:
        if rank() == 0 and self.filepath is None:
            raise ValueError('BestModelCheckpoint has no file. Write callback.filepath = "best.keras" before fit().')
        base: Any = super()
        base.on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        base: Any = super()
        if rank() == 0:
            base.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        base: Any = super()
        if rank() == 0:
            base.on_epoch_end(epoch, logs)


# -- elastic -----------------------------------------------------------------------------------------------------------


class CommitState(KerasCallback):
    """Commits the state after every so many batches, and at the end of an epoch.

    Args:
        state: The state.
        batches_per_commit: How many batches are between commits.
    """

    def __init__(self, state: ElasticState, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit, self.batches_remaining = state, batches_per_commit, batches_per_commit

    def on_train_begin(self, logs: Logs = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.commit()


class UpdateBatchState(KerasCallback):
    """Sets state.batch to the number of the batch, and to 0 at the end of an epoch.

    Args:
        state: A state with the attribute batch.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if self.params.get("steps"):
            self.steps_per_epoch = self.steps_per_epoch or self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.batch = 0


class UpdateEpochState(KerasCallback):
    """Sets state.epoch to the number of epochs that ended, over all calls of fit.

    Args:
        state: A state with the attribute epoch.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self.initial_epoch = state, state.epoch

    def on_train_begin(self, logs: Logs = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
