"""DistributedOptimizer: a torch optimizer that exchanges gradients, or parameters, by a Gossamer recipe."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.engine import Session
from gossamer.horovod.basics import Average, ProcessSet, global_process_set
from gossamer.horovod.calls import ReductionOp
from gossamer.horovod.compression import TensorCompressor
from gossamer.horovod.exchange import RecipeExchange, check_reduction, recipe_of
from gossamer.horovod.objects import allgather_object
from gossamer.horovod.torch.ops import (
    Compression,
    broadcast_call,
    sparse_allreduce_async,
    submit,
    synchronize,
    written,
)
from gossamer.train.engine.averaged_state import bare_copy
from gossamer.train.session.loop_scaler import ScalerWatch
from gossamer.train.session.recipe_choice import Written


class GradientExchange(RecipeExchange):
    """The gradients of one torch optimizer."""

    def __init__(
        self,
        named: Mapping[str, Tensor],
        process_set: ProcessSet,
        recipe: Written,
        op: ReductionOp,
        sparse_as_dense: bool,
        optimizer: DistributedSteps,
        inner: Optimizer,
    ) -> None:
        """inner: the optimizer that `optimizer` wraps."""
        super().__init__(process_set, recipe, op, self._make_server_optimizer)
        self._inner = inner
        self._groups: list[tuple[dict[str, Any], int]] = []  # of the servers' optimizer, and their place in `optimizer`
        self.named, self.sparse_as_dense = dict(named), sparse_as_dense
        self.identities = set(map(id, self.named.values()))
        self._optimizer = weakref.ref(optimizer)
        self._begun = False
        self.makes_step = True  # whether the optimizer makes a step with the last exchanged gradients
        self._sparse: set[str] = set()
        self._dense: dict[str, Tensor] = {}
        self._scales_loss, self._watch = False, ScalerWatch(self._scaled)

    def _scaled(self, scaler: object, optimizer: object) -> bool:
        """A GradScaler of torch acts on gradients of an optimizer. It looks for its scale in steps that are skipped."""
        self._scales_loss = self._scales_loss or optimizer is self._optimizer()
        return False

    def add(self, named: Mapping[str, Tensor]) -> None:
        """Also exchange these parameters, from the next session on."""
        self.named |= named
        self.identities |= set(map(id, named.values()))

    def holds(self, identities: set[int]) -> bool:
        """Whether one of the parameters is stored at one of these addresses."""
        return any(parameter.data_ptr() in identities for parameter in self.named.values())

    @torch.no_grad()
    def average(self) -> None:
        """Replace the gradients by the recipe's mean over all ranks."""
        if len(self.process_set.ranks) == 1:
            return
        with self.exchanging():
            self._average()

    def _average(self) -> None:
        if not self._begun:
            self._begin()
        waits = [
            (each, sparse_allreduce_async(_sparse_gradient(each), None, self.op, self.process_set))
            for name, each in self.named.items()
            if name in self._sparse
        ]
        if self.session is not None:
            self._exchange(self.session)
        for parameter, wait in waits:
            parameter.grad = wait().to(parameter.device)

    def _exchange(self, session: Session) -> None:
        if self.unused:
            self._took_step(session)
        self._follow_schedule()
        session._scales_loss = self._scales_loss
        given = {name: _gradient(parameter) for name, parameter in self._dense.items()}
        mean = session.give({name: each.to_dense() if each.is_sparse else each for name, each in given.items()})
        self.unused, self.makes_step = True, mean is not None
        for name, parameter in self._dense.items():
            self._show(parameter, given[name], None if mean is None else mean[name], session)

    def _show(self, parameter: Tensor, given: Tensor, mean: Tensor | None, session: Session) -> None:
        if not parameter.requires_grad and parameter.grad is None:
            return  # frozen since: a gradient of zeros would let momentum and weight decay change it
        if mean is None:
            if not session.accumulating:
                given = torch.full_like(parameter, torch.nan)  # so that a GradScaler skips this step, too
            parameter.grad = given
        elif given.is_sparse:
            parameter.grad = (mean * self.factor).to_sparse()
        else:
            given.copy_(mean)
            if self.factor != 1:
                given.mul_(self.factor)
            parameter.grad = given

    @torch.no_grad()
    def took_step(self) -> None:
        """Called after the optimizer's step, also if `makes_step` is False and the step was skipped."""
        if self.session is not None and self.unused:
            with self.exchanging():
                self._took_step(self.session)

    def _took_step(self, session: Session) -> None:
        self.unused = False
        self._take_over(session.took_step({name: each.detach() for name, each in self._dense.items()}))

    def _take_over(self, parameters: Mapping[str, Tensor]) -> None:
        for name, new in parameters.items():
            if new.data_ptr() != self._dense[name].data_ptr():
                self._dense[name].detach().copy_(new)

    def _begin(self) -> None:
        """Sparse gradients are gathered by sparse_allreduce_async, since recipes are about dense tensors."""
        mine = [name for name, each in self.named.items() if each.grad is not None and each.grad.is_sparse]
        found = allgather_object([] if self.sparse_as_dense else mine, process_set=self.process_set)
        self._sparse = {name for names in found for name in names}
        self._dense = {name: each for name, each in self.named.items() if name not in self._sparse}
        self._begun = True
        if sparse := [each.detach() for name, each in self.named.items() if name in self._sparse]:
            first = self.process_set.ranks[0]
            call = broadcast_call(sparse, first, self.process_set, lambda found: written(sparse, found))
            synchronize(submit(call, None, self.process_set))
        if not self._dense:
            return
        session = self.open({name: each.detach() for name, each in self._dense.items()})
        self._take_over(session.parameters)

    def _make_server_optimizer(self, tensors: list[Tensor]) -> Optimizer:
        """The optimizer of parameter servers for the session's tensors, in the groups of this rank's optimizer. The
        constructor may have other arguments than `defaults` has keys, as that of AdamW."""
        optimizer = self._optimizer()
        assert optimizer is not None, "it exchanges now"
        made, self._groups = bare_copy(self._inner), []
        tensor_of = dict(zip(map(id, self._dense.values()), tensors, strict=True))
        for place, group in enumerate(optimizer.param_groups):
            if own := [tensor_of[id(each)] for each in group["params"] if id(each) in tensor_of]:
                made.add_param_group({**_settings(group), "params": own})
                self._groups.append((made.param_groups[-1], place))
        return made

    def _follow_schedule(self) -> None:
        """Give the servers' optimizer the present settings, such as a scheduler's learning rate."""
        if (optimizer := self._optimizer()) is not None:
            for group, place in self._groups:
                group.update(_settings(optimizer.param_groups[place]))

    @torch.no_grad()
    def end_epoch(self) -> None:
        """Ranks that missed steps take over parameters and the optimizer's tensors."""
        if self.session is None:
            return
        if self.unused:
            self._took_step(self.session)
        tensors = {} if (optimizer := self._optimizer()) is None else optimizer._state_tensors()
        parameters, state = self.session.end_epoch(tensors)
        self._take_over(parameters)
        for name, new in state.items():
            tensors[name].copy_(new)

    def restart(self) -> None:
        self._begun = False
        super().restart()


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in group.items() if name not in ("params", "param_names")}


def _gradient(parameter: Tensor) -> Tensor:
    """Zero where this rank's pass did not reach the parameter."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad


def _sparse_gradient(parameter: Tensor) -> Tensor:
    """As an embedding's: rows of it."""
    gradient = _gradient(parameter)
    return gradient if gradient.is_sparse else gradient.to_sparse(1)


class DistributedSteps(Optimizer):
    """The methods that DistributedOptimizer adds to the class of the optimizer that it wraps."""

    _exchange: GradientExchange
    _parameter_names: dict[Tensor, str]
    _synchronized: bool
    _should_synchronize: bool
    backward_passes_per_step: int
    process_set: ProcessSet

    def synchronize(self) -> None:
        """Exchange gradients now, for example to clip the averaged ones before step()."""
        if self.process_set.included() and not self._synchronized:
            self._take_up_parameters()
            self._exchange.average()
        self._synchronized = True

    def _take_up_parameters(self) -> None:
        """Exchange parameters, too, that were frozen or not there before: the recipe begins again."""
        known = self._exchange.identities
        fresh = {
            self._parameter_names.setdefault(each, f"added.{i}.{j}"): each
            for i, group in enumerate(self.param_groups)
            for j, each in enumerate(group["params"])
            if id(each) not in known and each.requires_grad
        }
        if fresh:
            self._exchange.restart()
            self._exchange.add(fresh)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within the block step() exchanges nothing: synchronize() did."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange gradients and make a step, where the recipe makes one now. A closure is called once, before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are exchanged once. Write `with optimizer.skip_synchronize(): "
                    "optimizer.step()`.",
                    stacklevel=2,
                )
            self.synchronize()
        if self._exchange.makes_step or not self._synchronized:
            super().step()
        self._synchronized = False
        self._exchange.took_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own."""
        self._synchronized = False
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes add up before step(); gradients are exchanged by step() alone."""
        self.backward_passes_per_step = passes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._synchronized = False
        super().load_state_dict(state_dict)

    def _state_tensors(self) -> dict[str, Tensor]:
        """The tensors of the optimizer's state, by names that are the same on every rank."""
        return {
            f"{self._parameter_names[parameter]}/{key}": value
            for parameter, state in self.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[TensorCompressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReductionOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    recipe: Written = None,
) -> Any:
    """Wrap an optimizer: step() first exchanges gradients by the recipe. Class and parameters stay the same.

    Under recipes that average parameters, such as DiLoCo, step() exchanges those. The exchange begins in step(), or
    synchronize(), and not during the backward pass. A step with gradients that are not finite is skipped on all ranks.

    Args:
        optimizer: Any but LBFGS. The new one shares its parameter groups and state.
        named_parameters: model.named_parameters(); None: parameters are numbered.
        compression: Compression.fp16 is the recipe Dense(dtype="float16").
        backward_passes_per_step: Backward passes that add up before step().
        op: Average or Sum.
        gradient_predivide_factor: Changes rounding only in Horovod, and nothing here.
        num_groups, groups: Checked; all gradients travel together.
        sparse_as_dense: Exchange sparse gradients as dense ones.
        process_set: The ranks that exchange.
        recipe: A recipe of Gossamer; `gossamer run --recipe` replaces it. Dense() by default.

    Raises:
        ValueError: for names that are missing or not unique, and for LBFGS.
        NotImplementedError: for Adasum.
    """
    names = _checked_names(optimizer, named_parameters)
    check_reduction(op, gradient_predivide_factor, backward_passes_per_step)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss within a step. Use SGD, or Adam.")
    _check_groups(groups if groups is not None else num_groups)
    inner = type(optimizer)
    if isinstance(optimizer, DistributedSteps):
        raise ValueError("this optimizer is a DistributedOptimizer already. Wrap the optimizer of torch, once.")
    wrapped: Any = type(inner.__name__, (DistributedSteps, inner), {"__module__": __name__})
    made = wrapped.__new__(wrapped)
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)  # a scheduler's wrapper of the method of the other object
    made._parameter_names, made.process_set = names, process_set
    made.backward_passes_per_step, made.op = backward_passes_per_step, op
    made._synchronized, made._should_synchronize = False, True
    trained = {id(each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad}
    made._exchange = GradientExchange(
        {name: each for each, name in names.items() if id(each) in trained},
        process_set,
        recipe_of(recipe, compression, Compression),
        op,
        sparse_as_dense,
        made,
        optimizer,
    )
    return made


def _checked_names(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """The names of the parameters, in the order of their names, as every rank has them."""
    groups = optimizer.param_groups
    pairs: list[Any] = (
        [
            (f"allreduce.noname.{i}.{j}", each)
            for i, group in enumerate(groups)
            for j, each in enumerate(group["params"])
        ]
        if named is None
        else list(named)
    )
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter). Write model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(repeated)}. Prefix the "
            "names of each model."
        )
    known = {id(each) for _, each in pairs}
    if missing := sum(id(each) not in known for group in groups for each in group["params"]):
        raise ValueError(
            f"named_parameters was specified, but {missing} parameters of the optimizer were not named. Write "
            "model.named_parameters() of the whole model."
        )
    return {each: name for name, each in sorted(pairs, key=lambda pair: str(pair[0]))}


def _check_groups(groups: int | Sequence[Sequence[Tensor]]) -> None:
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError("groups should be a non-negative integer or a list of lists of torch.Tensor")
        return
    grouped = [each for group in groups for each in group]
    if any(not isinstance(each, Tensor) for each in grouped):
        raise ValueError("groups must consist of torch.Tensor")
    if len({id(each) for each in grouped}) < len(grouped):
        raise ValueError("A parameter can only appear once in groups")
