"""Local training: runs the user's loop with hooks on its optimizers, and rejects loops that a strategy cannot use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gossamer.algorithms.strategies.federated_rules import FederatedStrategy, LocalWork
from gossamer.algorithms.strategies.federated_rules.base import Memory
from gossamer.base.layout import FlatTensors
from gossamer.base.peer_ops import PeerScript
from gossamer.base.torch_hooks import OPTIMIZER_STEP, OPTIMIZER_STEPPED
from gossamer.errors import LoopError
from gossamer.events import notice
from gossamer.federated.client.functions import ClientFunction, Round, Update
from gossamer.federated.client.script import ClientScript, Train, Trained
from gossamer.federated.model_state import ModelState


class _References(NamedTuple):
    """Reference values of the gradient correction, on the device of the gradients."""

    anchor: FlatTensors
    shared: Mapping[str, FlatTensors]
    memory: Mapping[str, FlatTensors]


class LocalTraining:
    """One device's training in one round.

    The user's loop stays unchanged. Hooks count each step of any optimizer that holds a parameter of the model, and
    correct its gradients just before the step (the proximal term of FedProx, the control variates of SCAFFOLD). Some
    strategies are only correct for certain steps, such as plain SGD. A loop with other steps raises LoopError.
    """

    def __init__(
        self,
        strategy: FederatedStrategy,
        state: ModelState,
        model: nn.Module,
        anchor: Tensor,
        shared: Memory,
        memory: Memory,
    ) -> None:
        self._strategy, self._layout = strategy, state.layout
        self._names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._steps = dict.fromkeys(self._names.values(), 0)
        self._rates = dict.fromkeys(self._names.values(), 0.0)
        self._anchor, self._shared, self._memory = anchor, shared, memory
        self._references: dict[torch.device, _References] = {}
        self._checks_steps = strategy.changes_gradients or strategy.why_plain_sgd is not None

    def work(self, samples: int) -> LocalWork:
        """The local work: the largest number of steps of any parameter, and the mean learning rate."""
        rate = sum(self._rates.values()) / max(sum(self._steps.values()), 1)
        return LocalWork(samples=samples, steps=max(self._steps.values(), default=0), learning_rate=rate)

    @contextmanager
    def watching(self) -> Iterator[LocalTraining]:
        """Hook the steps of every optimizer while the user's loop runs. Raises LoopError for steps that the strategy
        does not support."""
        hooks = [OPTIMIZER_STEPPED.subscribe(self._after_step)]
        if self._checks_steps:
            hooks.append(OPTIMIZER_STEP.subscribe(self._before_step))
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()
        if self._checks_steps:
            self._check_steps()

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trained = [each for group in optimizer.param_groups for each in group["params"] if each in self._names]
        if not trained:
            return
        self._check_optimizer(optimizer)
        if not self._strategy.changes_gradients:
            return
        self._check_step(optimizer, (*args[1:], *kwargs.values()))
        for parameter in trained:
            name = self._names[parameter]
            if parameter.grad is None:  # unused in this device's loss
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                raise LoopError(
                    f"{name} has a sparse gradient, but {self._strategy!r} corrects all entries. Write "
                    "nn.Embedding(..., sparse=False)."
                )
            anchor, shared, memory = self._references_on(parameter.device)
            self._strategy.correct(parameter.grad, parameter, anchor[name], _views(shared, name), _views(memory, name))

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._names:
                    self._steps[self._names[parameter]] += 1
                    self._rates[self._names[parameter]] += float(group["lr"])

    def _references_on(self, device: torch.device) -> _References:
        if device not in self._references:

            def moved(flat: Tensor) -> FlatTensors:
                return FlatTensors(flat.to(device), self._layout)

            self._references[device] = _References(
                moved(self._anchor),
                {key: moved(flat) for key, flat in self._shared.items()},
                {key: moved(flat) for key, flat in self._memory.items()},
            )
        return self._references[device]

    # Training loops that a strategy cannot correct.

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        why = self._strategy.why_plain_sgd
        plain = isinstance(optimizer, SGD) and not any(group["momentum"] for group in optimizer.param_groups)
        if why is not None and not plain:
            with_momentum = " with momentum" * isinstance(optimizer, SGD)
            raise LoopError(
                f"{why}, but {type(optimizer).__name__}{with_momentum} is not plain SGD. Write torch.optim.SGD("
                f"model.parameters(), lr=0.1), or train by a recipe that works with any optimizer, such as "
                "FedProx(mu=0.01)."
            )

    def _check_step(self, optimizer: Optimizer, arguments: tuple[Any, ...]) -> None:
        """Raise LoopError for steps that use other gradients than those stored before the step."""
        name = type(optimizer).__name__
        if any(callable(each) for each in arguments):
            raise LoopError(
                f"{name}.step was given a closure, which computes gradients after {self._strategy!r} has changed them. "
                "Call loss.backward() and then optimizer.step()."
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            raise LoopError(
                f"{name} unscales gradients itself, after {self._strategy!r} has changed them. Call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer)."
            )
        if any(group.get("maximize") for group in optimizer.param_groups):
            raise LoopError(
                f"{name} maximizes, but {self._strategy!r} corrects gradients for a minimizer. Leave "
                "maximize=True out, and call (-loss).backward()."
            )

    def _check_steps(self) -> None:
        """Raise LoopError if parameters moved without optimizer steps, or with unequal steps or learning rates."""
        strategy, own = self._strategy, {name: each for each, name in self._names.items()}
        moved = {name for name, each in own.items() if not self._steps[name] and self._has_moved(name, each)}
        if moved:
            raise LoopError(
                f"{min(moved)} was trained without a step of a torch optimizer, but {type(strategy).__name__} corrects "
                "each step. Call optimizer.step() in place of the code that changes it, or use FedAvg()."
            )
        seen = {name for name, steps in self._steps.items() if steps}
        counts = {self._steps[name] for name in seen} if strategy.why_plain_sgd else set()
        rates = {self._rates[name] for name in seen} if strategy.uses_learning_rate else set()
        if max(len(counts), len(rates)) > 1:
            raise LoopError(
                f"parameters were trained with several learning rates or numbers of steps, but "
                f"{strategy.why_plain_sgd}, with one of each for all parameters. Put all parameters into one group of "
                "one optimizer, or write FedProx(mu=0.01)."
            )

    def _has_moved(self, name: str, parameter: nn.Parameter) -> bool:
        with torch.no_grad():
            anchor = FlatTensors(self._anchor, self._layout)[name]
            return not torch.equal(parameter, anchor.to(parameter.device, parameter.dtype))


def _views(memory: Mapping[str, FlatTensors], name: str) -> Memory:
    return {key: packed[name] for key, packed in memory.items()}


class TrainingCheck:
    """Checks the training of all devices in one process, and gives each notice once."""

    def __init__(self, strategy: FederatedStrategy) -> None:
        self._strategy = strategy
        self._noticed: set[str] = set()

    def samples(self, task: Round, work: LocalWork, touched: bool) -> int:
        """Number of samples that count: 0 for a device without batches.

        Args:
            `task`: the round that the client function received.
            work: the samples and steps of the training.
            touched: whether the parameters changed or have gradients.

        Raises:
            LoopError: the device reports samples, but its model was not trained.
        """
        if not work.samples:
            return 0
        if work.steps or touched:
            if task.batches_given is None:
                self._check_length(task, work)
            return work.samples
        if task.batches_given == 0:
            self._notice(
                "no batch",
                f"Client {task.client} has {work.samples} samples and no batch to train on in round {task.index}: its "
                "loader is empty, or was exhausted in an earlier round. Such devices do not count. Give "
                "round.batches() a DataLoader or a list, and leave drop_last off.",
            )
            return 0
        raise LoopError(
            f"Client {task.client} reported {work.samples} training samples in round {task.index}, but the model "
            "that it was given did not change. Train that model, not a copy or another network: "
            "torch.optim.SGD(model.parameters(), lr=0.1). For a device without training data, "
            "return Update(samples=0)."
        )

    def _check_length(self, task: Round, work: LocalWork) -> None:
        """Give notice of a client function that ignores the length of training in the recipe."""
        strategy = self._strategy
        name = "local_steps" if strategy.local_steps is not None else "local_epochs"
        length = getattr(strategy, name)
        if length is None or work.steps == strategy.local_steps:
            return
        self._notice(
            "length",
            f"The recipe sets {name}={length}, but the client function did not call round.batches(), so it decides "
            f"itself how long a device trains. Write `for batch in round.batches(loader):`, or leave {name} out of the "
            f"recipe. (Ignore this if the function reads round.{name} itself.)",
        )

    def _notice(self, about: str, text: str) -> None:
        if about not in self._noticed:
            self._noticed.add(about)
            notice(text)


Answer = Callable[[Train], Trained]


class Trainer:
    """Trains one model for any number of devices, one after another."""

    def __init__(
        self, model: nn.Module, state: ModelState, strategy: FederatedStrategy, function: ClientFunction
    ) -> None:
        self._model, self._state, self._strategy, self._function = model, state, strategy, function
        self._check = TrainingCheck(strategy)
        self._rounds_off = any(each.dtype != state.dtype for each in state.tensors(model).values())

    def __call__(self, op: Train) -> Trained:
        """Raises LoopError if the function does not return an Update, or trains another model."""
        self._state.write(op.anchor, self._model)
        anchor = self._state.read(self._model).flat if self._rounds_off else op.anchor
        task = round_of(op, self._strategy)
        local = LocalTraining(self._strategy, self._state, self._model, anchor, op.shared, op.memory)
        began = time.perf_counter()
        self._model.train()
        with local.watching():
            update = self._function(self._model, task)
        if not isinstance(update, Update):
            raise LoopError(
                f"The client function returned {update!r} for client {op.client}, but it must return an Update with "
                "the number of samples. End it with `return gossamer.federated.Update(samples=len(data))`."
            )
        flat = self._state.read(self._model).flat
        work = local.work(update.samples)
        return Trained(
            flat=flat,
            anchor=anchor if self._rounds_off else None,
            work=replace(work, samples=self._check.samples(task, work, not work.steps and self._touched(flat, anchor))),
            metrics=dict(update.metrics),
            seconds=time.perf_counter() - began,
        )

    def _touched(self, flat: Tensor, anchor: Tensor) -> bool:
        """Whether parameters changed or have gradients without a step (a gradient scaler may skip all steps)."""
        return not torch.equal(flat, anchor) or any(each.grad is not None for each in self._model.parameters())


def round_of(op: Train, strategy: FederatedStrategy) -> Round:
    """The Round that a client function receives."""
    return Round(
        index=op.task.round,
        client=op.client,
        config=op.task.config,
        seed=op.task.seed,
        local_steps=strategy.local_steps,
        local_epochs=strategy.epochs,
    )


def answered(script: ClientScript, train: Answer) -> PeerScript:
    """Answer the Train ops of a device's script by `train`, so that any runner of peer scripts can run it."""
    answer: Any = None
    try:
        while True:
            op = script.send(answer)
            answer = train(op) if isinstance(op, Train) else (yield op)
    except StopIteration as stop:
        return stop.value
