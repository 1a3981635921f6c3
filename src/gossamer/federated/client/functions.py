"""Client functions: the training and evaluation functions of a user's script, with their arguments and results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import count
from math import frexp, isfinite
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from gossamer.errors import LoopError, require


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Convert each metric to a float, from a number or a tensor or array of one number. Raises LoopError otherwise."""
    return {name: _plain(name, value) for name, value in metrics.items()}


def _plain(name: str, value: Any) -> float:
    with suppress(RuntimeError, ValueError, OverflowError):
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, Real):
            return float(number)
    raise LoopError(
        f"The metric {name!r} is {str(value)[:60]}; each metric must be one number. Write "
        f'Update(samples=n, metrics={{"{name}": float(value)}}), with the mean of several values.'
    )


def weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Weighted mean of numbers, finite where all of them are finite.

    Args:
        values: at least one number.
        weights: one for each value, 0 or more, not all 0.

    Returns:
        sum(value * weight) / sum(weight). Large values are first divided by a power of two, so that the sum does not
        overflow and the rounding does not change.
    """
    largest = max(map(abs, values))
    scale = 2.0 ** (frexp(largest)[1] - 1) if largest > 1.0 and isfinite(largest) else 1.0
    total = sum(value / scale * weight for value, weight in zip(values, weights, strict=True))
    return total / sum(weights) * scale


@dataclass(frozen=True, kw_only=True)
class SGDSteps:
    """Local training as data: one SGD step per batch.

    v <- momentum v + gradient of loss(model, *batch),  w <- w - learning_rate v

    A client function marked with `client(vectorized=True)` returns it. A simulation can then run the steps of many
    devices in one batched computation.

    Args:
        loss: loss(model, *batch) returns a scalar tensor. Devices with the same function step together.
        batches: the batches in order. Each is a tensor or a sequence of tensors.
        learning_rate: above 0.
        samples: number of training samples, 0 or more; the weight of this device in the cohort.
        momentum: in [0, 1).
        metrics: metrics to report. `run` and simulations add "loss", the mean loss, unless it is given.

    Raises:
        ValueError: an argument is out of range.
        LoopError: a metric is not a number.

    Example:
        >>> loss = lambda model, x: model(x).square().mean()
        >>> steps = gossamer.federated.SGDSteps(loss=loss, batches=[batch], learning_rate=0.1, samples=4)
        >>> sorted(steps.run(model))
        ['loss']
    """

    loss: Callable[..., Tensor]
    batches: Sequence[tuple[Tensor, ...]]
    learning_rate: float
    samples: int
    momentum: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, f"learning_rate must be above 0, got {self.learning_rate}")
        require(0 <= self.momentum < 1, f"momentum must be in [0, 1), got {self.momentum}")
        require(type(self.samples) is int and self.samples >= 0, f"samples must be 0 or more, got {self.samples!r}")
        object.__setattr__(self, "batches", tuple(_as_tuple(batch) for batch in self.batches))
        object.__setattr__(self, "metrics", plain_metrics(self.metrics))

    def run(self, model: nn.Module) -> dict[str, float]:
        """Run the steps on `model` in a plain loop. Returns the metrics, with the mean loss."""
        optimizer = torch.optim.SGD(
            [each for each in model.parameters() if each.requires_grad], lr=self.learning_rate, momentum=self.momentum
        )
        losses = []
        for batch in self.batches:
            optimizer.zero_grad()
            loss = self.loss(model, *batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return self.metrics_with_loss(losses)

    def metrics_with_loss(self, losses: Sequence[float]) -> dict[str, float]:
        """The metrics, with the mean of `losses` as "loss" unless that metric is set."""
        return ({"loss": weighted_mean(losses, [1] * len(losses))} if losses else {}) | dict(self.metrics)


def _as_tuple(batch: Tensor | Iterable[Tensor]) -> tuple[Tensor, ...]:
    return (batch,) if isinstance(batch, Tensor) else tuple(batch)


Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round as seen by one device.

    Attributes:
        index: number of the round, from 0.
        client: number of the device, from 0. None in an evaluation by the server.
        config: the user's configuration of this round.
        seed: random seed of this device in this round.
        local_steps: optimizer steps per round, if the recipe sets them.
        local_epochs: passes over the device's data per round, if the recipe sets them.

    Example:
        >>> round = gossamer.federated.Round(index=0, client=3, local_steps=3)
        >>> list(round.batches(["a", "b"]))
        ['a', 'b', 'a']
    """

    index: int
    client: int | None
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    local_steps: int | None = None
    local_epochs: int | None = None
    batches_given: int | None = field(default=None, init=False, repr=False, compare=False)  # None: batches() not called

    def batches(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Iterate over the batches of this round's local training.

        Yields `local_steps` batches and restarts the loader at its end, or makes `local_epochs` passes (default: 1).

        Args:
            loader: an iterable that can be iterated again, such as a DataLoader or a list.

        Returns:
            The batches. If the first pass has no batch, there is no batch at all, and the device is not counted.

        Raises:
            LoopError: a later pass has no batch, because the loader is a one-shot iterator.
        """
        object.__setattr__(self, "batches_given", self.batches_given or 0)
        left = self.local_steps
        for _ in count() if left is not None else range(self.local_epochs or 1):
            empty = True
            for batch in loader:
                if left is not None:
                    if left == 0:
                        return
                    left -= 1
                empty = False
                object.__setattr__(self, "batches_given", (self.batches_given or 0) + 1)
                yield batch
            if left == 0 or not self.batches_given:
                return
            if empty:
                raise LoopError(
                    f"Client {self.client} has no more batches in round {self.index}: an earlier pass exhausted its "
                    "loader. Give round.batches() a DataLoader or a list, which can be iterated again."
                )


@dataclass(frozen=True, kw_only=True)
class Update:
    """Result of a client function, in addition to the trained model.

    Args:
        samples: number of training samples, 0 or more; the weight of this device in the cohort. A device with 0 samples
            is not counted.
        metrics: numbers, or tensors and arrays of one number; converted to floats.

    Raises:
        ValueError: `samples` is negative or not an int.
        LoopError: a metric is not a number.

    Example:
        >>> gossamer.federated.Update(samples=128, metrics={"loss": torch.tensor(0.5)}).metrics
        {'loss': 0.5}
    """

    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            type(self.samples) is int and self.samples >= 0,
            f"samples must be the number of training samples, 0 or more, got {self.samples!r}: write "
            "Update(samples=len(data))",
        )
        if self.metrics:
            object.__setattr__(self, "metrics", plain_metrics(self.metrics))


ClientFunction = Callable[[nn.Module, Round], Update]
StepsFunction = Callable[[nn.Module, Round], SGDSteps]
MARK = "__gossamer_federated__"  # attribute of a marked function: "client", "evaluate" or "model"
STEPS = "__gossamer_sgd_steps__"  # attribute of a client function that holds its StepsFunction
Marked = TypeVar("Marked", bound=Callable[..., Any])


@overload
def client(function: ClientFunction) -> ClientFunction: ...
@overload
def client(*, vectorized: bool) -> Callable[[Any], ClientFunction]: ...
def client(function: Any = None, *, vectorized: bool = False) -> Any:
    """Mark the function that trains the model on a device in one round. `gossamer federate` looks for this mark.

    Args:
        function: called as function(model, round), where `model` has the round's parameters and `round` is a Round. It
            trains the model in place in its own loop and returns an Update.
        vectorized: the function does not train; it returns SGDSteps instead. A simulation runs the steps of many
            devices in one batched computation. Elsewhere a plain SGD loop runs them.

    Returns:
        The marked function, or a decorator if only `vectorized` is given.

    Example:
        >>> @gossamer.federated.client
        ... def train(model, round):
        ...     return gossamer.federated.Update(samples=128)
    """
    if function is None:
        return partial(client, vectorized=vectorized)
    return _marked(stepping(function) if vectorized else function, "client")


def stepping(function: StepsFunction) -> ClientFunction:
    """Wrap a function that returns SGDSteps into a client function that runs these steps in a loop."""

    @wraps(function)
    def train(model: nn.Module, metrics_with_loss: Round) -> Update:
        steps = checked_steps(function(model, metrics_with_loss), metrics_with_loss.client)
        return Update(samples=steps.samples, metrics=steps.run(model))

    setattr(train, STEPS, function)
    return train


def checked_steps(steps: Any, client: int | None) -> SGDSteps:
    """Returns `steps`. Raises LoopError if it is not an SGDSteps."""
    if not isinstance(steps, SGDSteps):
        raise LoopError(
            f"The client function returned {steps!r} for client {client}, but with vectorized=True it must return "
            "SGDSteps. End it with `return gossamer.federated.SGDSteps(loss=loss, batches=batches, "
            "learning_rate=0.1, samples=len(data))`, or leave vectorized=True off."
        )
    return steps


def evaluate(function: ClientFunction) -> ClientFunction:
    """Mark the function that evaluates the model on the server.

    Args:
        function: called as function(model, round) with `round.client` None. It returns an Update, and the metrics of
            this Update are added to the record of the round.

    Returns:
        The marked function.

    Example:
        >>> @gossamer.federated.evaluate
        ... def test(model, round):
        ...     return gossamer.federated.Update(samples=100, metrics={"accuracy": 0.9})
    """
    return _marked(function, "evaluate")


def model(function: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Mark the function that builds the model.

    Args:
        function: called without arguments. It must build the same architecture with the same initial values in every
            process. Version 0 has the server's values, and frozen parameters are not exchanged.

    Returns:
        The marked function.

    Example:
        >>> @gossamer.federated.model
        ... def build():
        ...     return torch.nn.Linear(2, 1)
    """
    return _marked(function, "model")


def _marked(function: Marked, part: str) -> Marked:
    setattr(function, MARK, part)
    return function


OTHER_NAME = "__gossamer_federated__"  # name of a script's module if another module has the name of its file


@dataclass(frozen=True, kw_only=True)
class ScriptFile:
    """The marked functions of a script."""

    train: ClientFunction
    model: Callable[[], nn.Module]
    evaluate: ClientFunction | None = None


def load_script(path: str | Path, arguments: Sequence[str] = ()) -> ScriptFile:
    """Import a script and find its marked functions.

    The script's folder stays on sys.path and its module in sys.modules, for imports inside functions and for pickling.

    Args:
        path: the script.
        arguments: sys.argv of the script, without its name.

    Raises:
        LoopError: the client or model function is missing, or two functions have the same mark.
    """
    names = vars(_imported(Path(path).resolve(), [str(path), *arguments]))
    found: dict[str, Any] = {}
    for value in {id(each): each for each in names.values() if callable(each)}.values():
        part = getattr(value, MARK, None)
        if part is not None and part in found:
            raise LoopError(
                f"{path} marks two functions with @gossamer.federated.{part}, but only one can run. Keep one."
            )
        if part is not None:
            found[part] = value
    for part, example in (("client", "def train(model, round): ..."), ("model", "def make_model(): ...")):
        if part not in found:
            raise LoopError(
                f"{path} marks no function with @gossamer.federated.{part}, which is required. Put the "
                f"decorator above it: @gossamer.federated.{part} {example}"
            )
    return ScriptFile(train=found["client"], model=found["model"], evaluate=found.get("evaluate"))


def _imported(path: Path, argv: list[str]) -> ModuleType:
    """Import a file of any name, also repeatedly; its module is never "__main__"."""
    module = ModuleType(_free_name(path))
    module.__file__ = str(path)
    if sys.path[:1] != [str(path.parent)]:
        sys.path.insert(0, str(path.parent))
    before, sys.argv = sys.argv, argv
    sys.modules[module.__name__] = module
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    except BaseException:
        sys.modules.pop(module.__name__, None)
        raise
    finally:
        sys.argv = before
    return module


def _free_name(path: Path) -> str:
    """The file's own name unless another module has it, so that other processes can unpickle its classes."""
    taken = sys.modules.get(path.stem)
    is_free = taken is None or getattr(taken, "__file__", None) == str(path)
    return path.stem if is_free and path.stem.isidentifier() else OTHER_NAME
