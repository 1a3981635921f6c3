"""Weight copies: which tensors of an optimizer are copies of its parameters, and how they are moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support.keeping_optimizers import ListedMasterSGD, Lookahead, MasterSGD, Within
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.train.engine.weight_copies import WeightCopies

Rule = Callable[[Iterable[Parameter]], Optimizer]


def stepped(rule: Rule, dtype: torch.dtype = torch.float32, steps: int = 3) -> tuple[list[Parameter], Optimizer]:
    generator = torch.Generator().manual_seed(1)
    parameters = [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((4, 3), (5,), (3, 4))]
    optimizer = rule(parameters)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        optimizer.step()
    return parameters, optimizer


def write(copies: WeightCopies, parameters: list[Parameter], factor: float = 0.5) -> None:
    with copies.following(parameters), torch.no_grad():
        for parameter in parameters:
            parameter.mul_(factor)


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [value.clone() for value in kept if isinstance(value, Tensor)]


@pytest.mark.parametrize(
    "rule",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.9, centered=True),
        lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
        lambda parameters: torch.optim.LBFGS(parameters, lr=0.1),
    ],
    ids=["SGD", "AdamW", "Adagrad", "RMSprop", "Rprop", "LBFGS"],
)
def test_moments_are_no_copies(rule: Rule) -> None:
    if "LBFGS" in str(type(rule([Parameter(torch.ones(1))]))):
        parameters: list[Parameter] = [Parameter(torch.randn(3))]
        optimizer = rule(parameters)
        optimizer.step(lambda: parameters[0].square().sum())  # type: ignore[arg-type, return-value]
    else:
        parameters, optimizer = stepped(rule)
    before = tensors_of(optimizer)
    write(WeightCopies(optimizer), parameters)
    assert all(torch.equal(old, new) for old, new in zip(before, tensors_of(optimizer), strict=True))


def test_momentum_that_weight_decay_has_made_like_its_parameter_is_no_copy() -> None:
    parameters = [Parameter(torch.randn(5))]
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=0.1)
    for _ in range(40):
        parameters[0].grad = torch.zeros(5)
        optimizer.step()
    before = optimizer.state[parameters[0]]["momentum_buffer"].clone()
    torch.testing.assert_close(before, parameters[0].detach(), rtol=0.1, atol=0)
    write(WeightCopies(optimizer), parameters)
    assert torch.equal(optimizer.state[parameters[0]]["momentum_buffer"], before)


class Counting(Optimizer):
    """Counts the steps of each parameter, under a key of its own."""

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("updates", torch.zeros(())).add_(1)


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("rule", [torch.optim.Adam, torch.optim.NAdam, torch.optim.ASGD, Counting])
def test_count_of_steps_near_a_parameter_of_one_number_is_no_copy(rule: Rule, others: int) -> None:
    if rule is Counting and not others:
        pytest.skip("nothing tells its count from a copy")
    parameters = [Parameter(torch.tensor(1.0)), *(Parameter(torch.full((3,), 9.0)) for _ in range(others))]
    optimizer = rule(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    copies = {"ax"}  # of ASGD
    before = [{key: torch.as_tensor(each).clone() for key, each in state.items()} for state in optimizer.state.values()]
    write(WeightCopies(optimizer), parameters)
    for old, new in zip(before, optimizer.state.values(), strict=True):
        assert [key for key in old if not torch.equal(old[key], torch.as_tensor(new[key]))] == [*copies & old.keys()]


def copies_in(optimizer: Any) -> list[Tensor]:
    optimizer = getattr(optimizer, "inner", optimizer)
    if isinstance(optimizer, ListedMasterSGD):
        return [each for group in optimizer.masters for each in group]
    key = "slow" if isinstance(optimizer, Lookahead) else "ax" if isinstance(optimizer, torch.optim.ASGD) else "master"
    return [state[key] for state in optimizer.state.values()]


@pytest.mark.parametrize(
    "rule",
    [
        lambda parameters: MasterSGD(parameters, lr=0.1),
        lambda parameters: ListedMasterSGD(parameters, lr=0.1),
        lambda parameters: ListedMasterSGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1),
        lambda parameters: Within(Within(MasterSGD(parameters, lr=0.1))),
        lambda parameters: Lookahead(parameters, lr=0.1),
        lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    ],
    ids=["state", "list", "lists by group", "within others", "slow weights", "average"],
)
def test_copies_move_as_far_as_their_parameters(rule: Rule) -> None:
    parameters, optimizer = stepped(rule)
    inner = optimizer.inner if isinstance(optimizer, Within) else optimizer
    before, moved = [each.clone() for each in copies_in(inner)], [parameter.detach() * -0.5 for parameter in parameters]
    write(WeightCopies(optimizer), parameters)
    for old, new, by in zip(before, copies_in(inner), moved, strict=True):
        torch.testing.assert_close(new, old + by)


def test_a_wider_copy_is_rounded_to_what_was_written_and_keeps_the_rest() -> None:
    parameters, optimizer = stepped(lambda each: MasterSGD(each, lr=0.1), torch.bfloat16)
    masters = copies_in(optimizer)
    rest = [master - parameter.float() for master, parameter in zip(masters, parameters, strict=True)]
    assert all(each.any() for each in rest)
    write(WeightCopies(optimizer), parameters, 1.0)  # overwritten by the same numbers
    for master, parameter, each in zip(masters, parameters, rest, strict=True):
        assert torch.equal(master - parameter.float(), each)
    write(WeightCopies(optimizer), parameters, 2.0**-9)  # the rest is larger than a rounding error now
    for master, parameter in zip(masters, parameters, strict=True):
        assert torch.equal(master.bfloat16(), parameter.detach())


def test_before_the_first_step_nothing_is_taken_for_granted() -> None:
    parameters, optimizer = stepped(lambda each: MasterSGD(each, lr=0.1), steps=0)
    copies = WeightCopies(optimizer)
    write(copies, parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    write(copies, parameters)
    assert all(torch.equal(*pair) for pair in zip(copies_in(optimizer), parameters, strict=True))


@pytest.mark.parametrize("late", ["unused", "added"])
def test_copies_that_are_made_after_the_first_write_move_too(late: str) -> None:
    first, second = Parameter(torch.randn(4)), Parameter(torch.randn(3))
    optimizer = MasterSGD([first] if late == "added" else [first, second], lr=0.1)
    copies = WeightCopies(optimizer)
    optimizer.step()
    if late == "added":
        write(copies, [first])
        optimizer.add_param_group({"params": [second]})
    else:
        del optimizer.state[second]  # as most optimizers, which make state with the first gradient
        write(copies, [first, second])
    optimizer.step()
    write(copies, [first, second])
    assert all(torch.equal(optimizer.state[each]["master"], each) for each in (first, second))


def test_without_an_optimizer_there_is_nothing_to_move() -> None:
    model = nn.Linear(2, 2)
    write(WeightCopies(), list(model.parameters()))
