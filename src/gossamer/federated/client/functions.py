"""Client functions: the user's training and evaluation functions, what they are told and what they tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import count
from typing import Any, TypeVar, overload

from torch import nn

from gossamer.errors import LoopError, require
from gossamer.federated.client.metrics import plain_metrics
from gossamer.federated.client.sgd_steps import SGDSteps

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
        self._count_batches(0)
        left = self.local_steps
        for _ in count() if left is not None else range(self.local_epochs or 1):
            empty = True
            for batch in loader:
                if left is not None:
                    if left == 0:
                        return
                    left -= 1
                empty = False
                self._count_batches(1)
                yield batch
            if left == 0 or not self.batches_given:
                return
            if empty:
                raise LoopError(
                    f"Client {self.client} has no more batch to train on in round {self.index}: its loader was used up "
                    "by a pass before. Give round.batches() a DataLoader or a list, which begin anew."
                )

    def _count_batches(self, more: int) -> None:
        object.__setattr__(self, "batches_given", (self.batches_given or 0) + more)


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
