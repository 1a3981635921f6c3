"""Local training: runs a device's own loop with hooks on its optimizers, and refuses loops that train otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gossamer.algorithms.strategies.federated import FederatedStrategy, LocalWork
from gossamer.algorithms.strategies.federated.base import Memory
from gossamer.base.layout import FlatTensors
from gossamer.base.peer_ops import PeerScript
from gossamer.errors import LoopError
from gossamer.events import notice
from gossamer.federated.client.functions import ClientFunction, Round, Update
from gossamer.federated.client.script import ClientScript, Train, Trained
from gossamer.federated.model_state import ModelState


class _References(NamedTuple):
    """What gradients are corrected by, where they are computed."""

    anchor: FlatTensors
    shared: Mapping[str, FlatTensors]
    memory: Mapping[str, FlatTensors]


class LocalTraining:
    """One device's training in one round.

    The user's loop is left as it is. Each step of any optimizer that holds a parameter of the model is counted, and its
    gradients are changed just before it, as FedProx and SCAFFOLD want it. Where a strategy follows from how the loop
    steps, a loop that steps otherwise is refused with LoopError: what it sent would not be what the strategy averages.
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
        """The work on so many samples: the steps of the parameter that made the most, the mean learning rate."""
        rate = sum(self._rates.values()) / max(sum(self._steps.values()), 1)
        return LocalWork(samples=samples, steps=max(self._steps.values(), default=0), learning_rate=rate)

    @contextmanager
    def watching(self) -> Iterator[LocalTraining]:
        """Hooks on every optimizer's steps, while the user's loop runs. Raises LoopError where it stepped in a way that
        the strategy cannot follow."""
        hooks = [register_optimizer_step_post_hook(self._after_step)]
        if self._checks_steps:
            hooks.append(register_optimizer_step_pre_hook(self._before_step))
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()
        if self._checks_steps:
            self._check_steps()

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ours = [each for group in optimizer.param_groups for each in group["params"] if each in self._names]
        if not ours:
            return
        self._check_optimizer(optimizer)
        if not self._strategy.changes_gradients:
            return
        self._check_step(optimizer, (*args[1:], *kwargs.values()))
        for parameter in ours:
            name = self._names[parameter]
            if parameter.grad is None:  # its loss has no part in it, and everyone's may
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                raise LoopError(
                    f"{name} has a sparse gradient, and {self._strategy!r} changes all of its entries. Write "
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

    # What a strategy cannot follow.

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        why = self._strategy.why_plain_sgd
        plain = isinstance(optimizer, SGD) and not any(group["momentum"] for group in optimizer.param_groups)
        if why is not None and not plain:
            with_momentum = " with momentum" * isinstance(optimizer, SGD)
            raise LoopError(
                f"{why}, and {type(optimizer).__name__}{with_momentum} goes another. Write torch.optim.SGD("
                f"model.parameters(), lr=0.1), or train by a recipe for which any optimizer will do, such as "
                "FedProx(mu=0.01)."
            )

    def _check_step(self, optimizer: Optimizer, arguments: tuple[Any, ...]) -> None:
        """Refuse steps whose gradients are not those that lie there before."""
        name = type(optimizer).__name__
        if any(callable(each) for each in arguments):
            raise LoopError(
                f"{name}.step was given a closure, which computes gradients after {self._strategy!r} has changed them. "
                "Call loss.backward() and then optimizer.step()."
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            raise LoopError(
                f"{name} takes the scale out of gradients by itself, after {self._strategy!r} has changed them. Call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer)."
            )
        if any(group.get("maximize") for group in optimizer.param_groups):
            raise LoopError(
                f"{name} goes up its gradients, and {self._strategy!r} changes them for who goes down. Leave "
                "maximize=True out, and call (-loss).backward()."
            )

    def _check_steps(self) -> None:
        """Refuse a loop whose steps were not seen, or were not alike for all parameters."""
        strategy, own = self._strategy, {name: each for each, name in self._names.items()}
        moved = {name for name, each in own.items() if not self._steps[name] and self._has_moved(name, each)}
        if moved:
            raise LoopError(
                f"{min(moved)} was trained without a step of a torch optimizer, and {type(strategy).__name__} follows "
                "from what is done at each. Write optimizer.step() in place of what changes it, or FedAvg()."
            )
        seen = {name for name, steps in self._steps.items() if steps}
        counts = {self._steps[name] for name in seen} if strategy.why_plain_sgd else set()
        rates = {self._rates[name] for name in seen} if strategy.uses_learning_rate else set()
        if max(len(counts), len(rates)) > 1:
            raise LoopError(
                f"parameters were trained with several learning rates or numbers of steps, and "
                f"{strategy.why_plain_sgd}, which is one for all of them. Put all parameters into one group of one "
                "optimizer, or write FedProx(mu=0.01)."
            )

    def _has_moved(self, name: str, parameter: nn.Parameter) -> bool:
        with torch.no_grad():
            anchor = FlatTensors(self._anchor, self._layout)[name]
            return not torch.equal(parameter, anchor.to(parameter.device, parameter.dtype))


def _views(memory: Mapping[str, FlatTensors], name: str) -> Memory:
    return {key: packed[name] for key, packed in memory.items()}


class TrainingCheck:
    """Of one process, which notices each thing once, however many devices and rounds it trains."""

    def __init__(self, strategy: FederatedStrategy) -> None:
        self._strategy = strategy
        self._noticed: set[str] = set()

    def samples(self, told: Round, work: LocalWork, touched: bool) -> int:
        """The samples that count: none of a device that has no batch to train on.

        touched: whether the model is another than it was given, or has gradients. Raises LoopError where it is not, and
        its device says that it trained.
        """
        if not work.samples:
            return 0
        if work.steps or touched:
            if told.batches_given is None:
                self._check_length(told, work)
            return work.samples
        if told.batches_given == 0:
            self._notice(
                "no batch",
                f"Client {told.client} has {work.samples} samples and no batch to train on in round {told.index}: its "
                "loader is empty, or was used up by a round before. Such devices do not count. Give round.batches() a "
                "DataLoader or a list, and leave drop_last off.",
            )
            return 0
        raise LoopError(
            f"Client {told.client} says that it trained on {work.samples} samples in round {told.index}, and the model "
            "that it was given is as it was, so nothing would be learned of them. Train that model, and no copy or "
            "other network: torch.optim.SGD(model.parameters(), lr=0.1). Of a device that has nothing to train on, "
            "return Update(samples=0)."
        )

    def _check_length(self, told: Round, work: LocalWork) -> None:
        """Notice a function that cannot know how long the recipe wants it to train."""
        strategy = self._strategy
        name = "local_steps" if strategy.local_steps is not None else "local_epochs"
        length = getattr(strategy, name)
        if length is None or work.steps == strategy.local_steps:
            return
        self._notice(
            "length",
            f"The recipe says {name}={length}, and the client function never called round.batches(), so devices train "
            f"for as long as it likes. Write `for batch in round.batches(loader):`, or leave {name} out of the recipe. "
            f"(A function that goes by round.{name} itself is right as it is.)",
        )

    def _notice(self, about: str, text: str) -> None:
        if about not in self._noticed:
            self._noticed.add(about)
            notice(text)


Answer = Callable[[Train], Trained]


class Trainer:
    """Trains one model for any number of devices, one after another: a device is its data, and the model is given."""

    def __init__(
        self, model: nn.Module, state: ModelState, strategy: FederatedStrategy, function: ClientFunction
    ) -> None:
        self._model, self._state, self._strategy, self._function = model, state, strategy, function
        self._check = TrainingCheck(strategy)
        self._rounds_off = any(each.dtype != state.dtype for each in state.tensors(model).values())

    def __call__(self, op: Train) -> Trained:
        """Raises LoopError where the function returns no Update, or trains another model."""
        self._state.write(op.anchor, self._model)
        anchor = self._state.read(self._model).flat if self._rounds_off else op.anchor
        told = round_of(op, self._strategy)
        local = LocalTraining(self._strategy, self._state, self._model, anchor, op.shared, op.memory)
        began = time.perf_counter()
        self._model.train()
        with local.watching():
            update = self._function(self._model, told)
        if not isinstance(update, Update):
            raise LoopError(
                f"The client function returned {update!r} for client {op.client}, and a device has to tell how many "
                "samples it trained on. End it with `return gossamer.federated.Update(samples=len(data))`."
            )
        flat = self._state.read(self._model).flat
        work = local.work(update.samples)
        return Trained(
            flat=flat,
            anchor=anchor if self._rounds_off else None,
            work=replace(work, samples=self._check.samples(told, work, not work.steps and self._touched(flat, anchor))),
            metrics=dict(update.metrics),
            seconds=time.perf_counter() - began,
        )

    def _touched(self, flat: Tensor, anchor: Tensor) -> bool:
        """Whether the loop trained this model without a step: a scaler of gradients may have skipped all of them."""
        return not torch.equal(flat, anchor) or any(each.grad is not None for each in self._model.parameters())


def round_of(op: Train, strategy: FederatedStrategy) -> Round:
    """What a device is told of its part."""
    return Round(
        index=op.task.round,
        client=op.client,
        config=op.task.config,
        seed=op.task.seed,
        local_steps=strategy.local_steps,
        local_epochs=strategy.epochs,
    )


def answered(script: ClientScript, train: Answer) -> PeerScript:
    """A device's script whose Train is answered here, so that any runner of peers can run it."""
    answer: Any = None
    try:
        while True:
            op = script.send(answer)
            answer = train(op) if isinstance(op, Train) else (yield op)
    except StopIteration as stop:
        return stop.value
