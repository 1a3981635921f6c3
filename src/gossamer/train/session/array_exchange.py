"""Array exchange: a session of arrays as two functions of lists of arrays, for callbacks out of compiled programs.

A step that JAX or TensorFlow compiles calls `give` between the gradients and the optimizer, and `took_step` after
the optimizer. Arrays are torch tensors or numpy arrays, those of bfloat16 with the dtype of ml_dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gossamer.comm.elastic.recognition import elastic
from gossamer.comm.environment.run_settings import is_elastic
from gossamer.errors import Stopped
from gossamer.train.engine.arrays import Array, as_tensor
from gossamer.train.session import startup_checks
from gossamer.train.session.arrays import ArraySession
from gossamer.train.session.recipe_choice import Written

T = TypeVar("T")
STATISTICS = "statistics"


def names_of(variables: Sequence[Any]) -> list[str]:
    """A name for each variable: its path, such as "dense/kernel", with a number where two are alike."""
    paths = [str(getattr(each, "path", None) or each.name) for each in variables]
    return [path if paths.count(path) == 1 else f"{path}#{number}" for number, path in enumerate(paths)]


def tensor_of(array: Array) -> Tensor:
    """A tensor of the session, in the memory of `array` where possible."""
    return as_tensor(array if isinstance(array, Tensor) else np.asarray(array))


def array_of(tensor: Tensor, given: Array) -> Array:
    """A tensor of the session as an array like `given`."""
    if isinstance(given, Tensor):
        return tensor
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(given.dtype)
    return tensor.numpy()


def mean_logs(logs_of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each metric over the ranks that have it.

    Args:
        logs_of_ranks: Metrics by name, for each rank: numbers, or arrays and lists such as one number for each class.

    Returns:
        Floats and arrays by name.
    """
    values: dict[str, list[Any]] = {}
    for logs in logs_of_ranks:
        for name, value in logs.items():
            values.setdefault(name, []).append(np.asarray(value, dtype=np.float64))
    means = {name: sum(found) / len(found) for name, found in values.items()}
    return {name: mean if np.ndim(mean) else float(mean) for name, mean in means.items()}


class ArrayExchange:
    """A session of arrays as two functions of lists of arrays, for callbacks out of compiled programs.

    Args:
        moments: The optimizer's arrays. In an elastic run `took_step` is given their values after the parameters.

    Attributes:
        session: The session.
        is_elastic: Whether workers join and leave during the run.
        joined: Whether this worker joined workers that train already.
        began: Whether `begin_with` was called.
        held: In an elastic run the arrays of the loop that a newcomer receives: moments, and the epoch.
        failure: The first error of the session; later calls then send nothing.
        raises: Whether calls raise the error. JAX and TensorFlow replace it by an error of their own, so a
            caller that can raise `failure` in the training loop sets this to False.
    """

    def __init__(
        self,
        variables: Mapping[str, Array],
        recipe: Written,
        options: Mapping[str, Any],
        moments: Sequence[Array] = (),
    ) -> None:
        self.names = list(variables)
        self.began = False
        self.is_elastic = is_elastic() or elastic(options.get("transport")) is not None
        self.held: dict[str, Tensor] = {}
        if self.is_elastic:
            held = self.held
            self.hold(moments)
            self.epoch = 0
            options = {**options, "state": lambda: held}
        self.session = ArraySession({name: tensor_of(array) for name, array in variables.items()}, recipe, **options)
        self.joined = self.session._changes.handed_over
        self.held.update(self.session.state)
        self.failure: Exception | Stopped | None = None
        self.raises = True

    @property
    def epoch(self) -> int:
        """The epoch that all workers of an elastic run are in; 0 in a fixed run."""
        return int(self.held.get("epoch", 0))

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if self.is_elastic:
            self.held["epoch"] = torch.tensor(epoch)

    @property
    def moments(self) -> list[Tensor]:
        """The optimizer's arrays to continue with, in an elastic run."""
        return [tensor for name, tensor in sorted(self.held.items()) if name != "epoch"]

    def hold(self, moments: Sequence[Array]) -> None:
        """The values of the optimizer's arrays after a step, for newcomers to an elastic run."""
        if self.is_elastic:
            self.held.update({f"{number:05}": tensor_of(each).clone() for number, each in enumerate(moments)})

    def begin_with(self, statistics: Sequence[Array]) -> list[Tensor]:
        """The values to begin with of arrays that each worker changes by itself, such as statistics of batches.

        They are rank 0's, or for a newcomer to an elastic run those of a worker that trains. Every rank calls it once.

        Raises:
            MismatchError: ranks gave other shapes or dtypes.
        """
        found = [tensor_of(each).clone() for each in statistics]
        if not self.joined:
            group = self.session._group
            startup_checks.hand_out(found, group.all_gather_text, group.broadcast_)
        elif held := self.session._changes.saved_values.get(STATISTICS):
            found = [*held]
        self.began = True
        if self.is_elastic:
            self.session._changes.saved_values = {STATISTICS: [each.clone() for each in found]}
        return found

    def hold_statistics(self, statistics: Mapping[int, Array]) -> None:
        """Copy the values of these arrays after a step, for newcomers to an elastic run.

        Args:
            statistics: Arrays by their place in the list that `begin_with` was given. Copies of the others stay.
        """
        if self.is_elastic:
            held = list(self.session._changes.saved_values[STATISTICS])
            for place, array in statistics.items():
                held[place] = tensor_of(array).clone()
            self.session._changes.saved_values = {STATISTICS: held}  # at once: the communication thread reads it

    @property
    def rank(self) -> int:
        return self.session._transport.rank

    def give(self, *gradients: Array) -> list[Any]:
        """The mean of the gradients, and whether the optimizer is to make a step with it."""
        mean = self._attempt(self.session.give, gradients)
        if mean is None:
            return [*gradients, np.False_]
        return [*(array_of(mean[name], own) for name, own in zip(self.names, gradients, strict=True)), np.True_]

    def took_step(self, *parameters: Array) -> list[Array]:
        """The parameters to continue with; each is the given array itself where the session did not change it. In an
        elastic run the moments follow the parameters."""
        parameters, moments = parameters[: len(self.names)], parameters[len(self.names) :]
        self.hold(moments)
        pairs = self._attempt(self._stepped, parameters)
        if pairs is None:
            return list(parameters)
        return [
            own if after is given else array_of(after, own)
            for own, (given, after) in zip(parameters, pairs, strict=True)
        ]

    def _stepped(self, given: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        after = self.session.took_step(given)
        return [(given[name], after[name]) for name in self.names]

    def _attempt(self, call: Callable[[dict[str, Tensor]], T], arrays: Sequence[Array]) -> T | None:
        """None after an error, and after the end of training while a callback leaves the loop."""
        if self.failure is None and (self.raises or not self.session.should_stop):
            try:
                return call({name: tensor_of(array) for name, array in zip(self.names, arrays, strict=True)})
            except (Exception, Stopped) as error:
                self.failure = error
        if self.raises and self.failure is not None:
            raise self.failure
        return None

    def raise_failure(self) -> None:
        """Raise the error of an earlier call, if any."""
        if self.failure is not None:
            raise self.failure
