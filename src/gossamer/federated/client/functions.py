"""Client functions: the user's training and evaluation functions of a script, what they get and return."""

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
    """Each as a float: of a number, or of a tensor or an array that holds one. Raises LoopError for anything else."""
    return {name: _plain(name, value) for name, value in metrics.items()}


def _plain(name: str, value: Any) -> float:
    with suppress(RuntimeError, ValueError, OverflowError):
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, Real):
            return float(number)
    raise LoopError(
        f"The metric {name!r} is {str(value)[:60]}, and messages and records have one number for each metric. Write "
        f'Update(samples=n, metrics={{"{name}": float(value)}}), of the mean where there are several.'
    )


def weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """The mean of numbers; finite where all of them are, however large.

    Args:
        values: at least one number.
        weights: one for each value, 0 or more, not all 0.

    Returns:
        sum(value * weight) / sum(weight). Large values are divided by a power of two first, so that no sum overflows
        and rounding stays the same.
    """
    largest = max(map(abs, values))
    scale = 2.0 ** (frexp(largest)[1] - 1) if largest > 1.0 and isfinite(largest) else 1.0
    total = sum(value / scale * weight for value, weight in zip(values, weights, strict=True))
    return total / sum(weights) * scale


@dataclass(frozen=True, kw_only=True)
class SGDSteps:
    """What a device would do in a round: one step of SGD for each batch.

    w <- w - learning_rate v,  v <- momentum v + gradient of loss(model, *batch)
    """

    loss: Callable[..., Tensor]  # loss(model, *batch): a scalar. Devices with the same function step together
    batches: Sequence[tuple[Tensor, ...]]  # any iterable of tensors or of sequences of them
    learning_rate: float
    samples: int  # that it trains on: its weight among the cohort
    momentum: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, f"learning_rate is above 0, not {self.learning_rate}")
        require(0 <= self.momentum < 1, f"momentum is in [0, 1), not {self.momentum}")
        require(type(self.samples) is int and self.samples >= 0, f"samples is 0 or more, not {self.samples!r}")
        object.__setattr__(self, "batches", tuple(_as_tuple(batch) for batch in self.batches))
        object.__setattr__(self, "metrics", plain_metrics(self.metrics))

    def run(self, model: nn.Module) -> dict[str, float]:
        """Take the steps by a plain loop; returns the metrics, with the mean loss."""
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
        return self.told(losses)

    def told(self, losses: Sequence[float]) -> dict[str, float]:
        """The metrics, with the mean of these losses unless there is one of that name."""
        return ({"loss": weighted_mean(losses, [1] * len(losses))} if losses else {}) | dict(self.metrics)


def _as_tuple(batch: Tensor | Iterable[Tensor]) -> tuple[Tensor, ...]:
    return (batch,) if isinstance(batch, Tensor) else tuple(batch)


Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a device is told of its part in a round."""

    index: int  # of the round, from 0
    client: int | None  # the device's number, from 0; None: the server evaluates
    config: Mapping[str, Any] = field(default_factory=dict)  # the user's, for this round
    seed: int = 0  # of this device's part in this round
    local_steps: int | None = None  # of the optimizer, that the recipe asks for
    local_epochs: int | None = None  # passes over the device's data, that the recipe asks for
    batches_given: int | None = field(default=None, init=False, repr=False, compare=False)  # None: it was not asked

    def batches(self, loader: Iterable[Item]) -> Iterator[Item]:
        """The batches that the recipe asks for: so many steps, beginning again where the data ends, or so many passes.

        None where the loader has none: a device without data does not count. Raises LoopError where only a later pass
        finds none.
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
                    f"Client {self.client} has no more batch to train on in round {self.index}: its loader was used up "
                    "by a pass before. Give round.batches() a DataLoader or a list, which begin anew."
                )


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a device tells of its part, beside the model that it trained."""

    samples: int  # that it trained on: its weight among the cohort; 0: it has nothing to train on, and does not count
    metrics: Mapping[str, float] = field(default_factory=dict)  # also tensors and arrays of one number

    def __post_init__(self) -> None:
        """Raises LoopError for a metric that is no number."""
        require(
            type(self.samples) is int and self.samples >= 0,
            f"samples counts what a device trained on, 0 or more, not {self.samples!r}: write "
            "Update(samples=len(data))",
        )
        if self.metrics:
            object.__setattr__(self, "metrics", plain_metrics(self.metrics))


ClientFunction = Callable[[nn.Module, Round], Update]
StepsFunction = Callable[[nn.Module, Round], SGDSteps]
MARK = "__gossamer_federated__"  # the attribute that says which part of a federation a function is
STEPS = "__gossamer_sgd_steps__"  # the attribute of a client function that holds what tells its steps
Marked = TypeVar("Marked", bound=Callable[..., Any])


@overload
def client(function: ClientFunction) -> ClientFunction: ...
@overload
def client(*, vectorized: bool) -> Callable[[Any], ClientFunction]: ...
def client(function: Any = None, *, vectorized: bool = False) -> Any:
    """Say that this function of a script is what a device does in a round; `gossamer federate` looks for it.

    It is given the model with the round's parameters and the Round, trains the model in place by its own loop, and
    returns an Update.

    vectorized: it trains nothing, and returns SGDSteps: its batches, its loss and the learning rate. A simulation
    takes the steps of many devices together; anywhere else a plain loop of SGD takes them.
    """
    if function is None:
        return partial(client, vectorized=vectorized)
    return _marked(stepping(function) if vectorized else function, "client")


def stepping(function: StepsFunction) -> ClientFunction:
    """The client function that takes by a loop the steps that `function` tells."""

    @wraps(function)
    def train(model: nn.Module, told: Round) -> Update:
        steps = checked_steps(function(model, told), told.client)
        return Update(samples=steps.samples, metrics=steps.run(model))

    setattr(train, STEPS, function)
    return train


def checked_steps(steps: Any, client: int | None) -> SGDSteps:
    """Raises LoopError for what are no SGDSteps."""
    if not isinstance(steps, SGDSteps):
        raise LoopError(
            f"The client function returned {steps!r} for client {client}, and one that is marked vectorized=True tells "
            "its steps. End it with `return gossamer.federated.SGDSteps(loss=loss, batches=batches, "
            "learning_rate=0.1, samples=len(data))`, or leave vectorized=True off."
        )
    return steps


def evaluate(function: ClientFunction) -> ClientFunction:
    """Say that this function evaluates a model: it is given the model and a Round whose client is None, and returns an
    Update whose metrics go into the record."""
    return _marked(function, "evaluate")


def model(function: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Say that this function makes the model: the same on every machine, and with the same numbers wherever it is
    called, since the first version is the server's."""
    return _marked(function, "model")


def _marked(function: Marked, part: str) -> Marked:
    setattr(function, MARK, part)
    return function


OTHER_NAME = "__gossamer_federated__"  # of a script's module where another has the name of its file


@dataclass(frozen=True, kw_only=True)
class ScriptFile:
    """What a script says of a federation."""

    train: ClientFunction
    model: Callable[[], nn.Module]  # makes the model, alike on every machine
    evaluate: ClientFunction | None = None


def load_script(path: str | Path, arguments: Sequence[str] = ()) -> ScriptFile:
    """Import a script and find its marked functions. Its own sys.argv is `arguments`.

    Its folder stays on sys.path, and its module in sys.modules: functions import when they are called, and classes are
    pickled by where they are. Raises LoopError where one is missing or there are two of a kind.
    """
    names = vars(_imported(Path(path).resolve(), [str(path), *arguments]))
    found: dict[str, Any] = {}
    for value in {id(each): each for each in names.values() if callable(each)}.values():
        part = getattr(value, MARK, None)
        if part is not None and part in found:
            raise LoopError(f"{path} marks two functions with @gossamer.federated.{part}, and one is run. Keep one.")
        if part is not None:
            found[part] = value
    for part, example in (("client", "def train(model, round): ..."), ("model", "def make_model(): ...")):
        if part not in found:
            raise LoopError(
                f"{path} marks no function with @gossamer.federated.{part}, so there is nothing to federate. Write "
                f"it above the one that it is: @gossamer.federated.{part} {example}"
            )
    return ScriptFile(train=found["client"], model=found["model"], evaluate=found.get("evaluate"))


def _imported(path: Path, argv: list[str]) -> ModuleType:
    """As `import` would, whatever the file is called and however often it is loaded; it is never "__main__"."""
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
    """The file's, unless another module has it: what it defines is then unpickled wherever it can be imported."""
    taken = sys.modules.get(path.stem)
    is_free = taken is None or getattr(taken, "__file__", None) == str(path)
    return path.stem if is_free and path.stem.isidentifier() else OTHER_NAME
