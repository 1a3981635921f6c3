"""Local steps of Adam by an agreed second moment, against Local AMSGrad written out in a few lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.resumed_training import adamw, check_resume
from support.training_loops import START, Trace, close, gradient, mean_of, run, sgd
from support.virtual_workers import Worker, cluster, network
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, AdamW, Muon, Optimizer

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import DiLoCo, LocalSGD
from gossamer.errors import AttachError
from gossamer.train.moments.shared_variance import SHARED

RATE, BETAS, EPSILON = 0.01, (0.9, 0.7), 1e-8
AGREED = ["agreed", "amsgrad"]


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), RATE, BETAS, EPSILON)


def shared(trace: Trace) -> Tensor | None:
    """The second moment that steps divide by, of all parameters side by side; None before the first round."""
    states = [trace.optimizer.state[parameter] for parameter in trace.model.parameters()]
    if not all(SHARED in state for state in states):
        return None
    return torch.cat([state[SHARED].flatten() for state in states])


# -- the rule ----------------------------------------------------------------------------------------------------------


def by_hand(steps: int, period: int, second_moment: str, agreeing: int | None = None, world: int = 3) -> list[Any]:
    """[(each worker's parameters, vhat) after each step]: local m and v; x averaged every `period` steps, and vhat
    taken from the mean of v every `agreeing` steps."""
    first, second = BETAS
    xs, ms, vs = ([start.clone() for _ in range(world)] for start in (START, 0 * START, 0 * START))
    vhat: Tensor | None = None
    path = []
    for step in range(1, steps + 1):
        for rank in range(world):
            g = gradient(xs[rank], step - 1, rank)
            ms[rank] = first * ms[rank] + (1 - first) * g
            vs[rank] = second * vs[rank] + (1 - second) * g * g
            divisor = vs[rank] / (1 - second**step) if vhat is None else vhat
            xs[rank] = xs[rank] - RATE * ms[rank] / (1 - first**step) / (divisor.sqrt() + EPSILON)
        if step % period == 0:
            xs = [mean_of(xs)] * world
        if step % (agreeing or period) == 0:
            new = mean_of(vs) / (1 - second**step)
            vhat = new if vhat is None or second_moment == "agreed" else torch.maximum(vhat, new)
        path.append((list(xs), vhat))
    return path


@pytest.mark.parametrize("second_moment", AGREED)
@pytest.mark.parametrize(("period", "agreeing"), [(1, None), (3, None), (2, 4)])
def test_local_steps_divide_by_the_agreed_second_moment(second_moment: str, period: int, agreeing: int | None) -> None:
    strategy = LocalSGD(period, second_moment=second_moment, second_moment_period=agreeing)
    traces = run(strategy, 12, rule=adam, note=shared)
    for step, (xs, vhat) in enumerate(by_hand(12, period, second_moment, agreeing)):
        for trace, x in zip(traces, xs, strict=True):
            close(trace.path[step], x)
            assert (trace.notes[step] is None) == (vhat is None)
            if vhat is not None:
                close(trace.notes[step], vhat)


@pytest.mark.parametrize(("given", "other"), [("agreed", "amsgrad"), ("amsgrad", "agreed"), ("agreed", "own")])
def test_the_check_tells_the_three_second_moments_apart(given: str, other: str) -> None:
    (trace, *_) = run(LocalSGD(3, second_moment=other), 12, rule=adam)
    with pytest.raises(AssertionError):
        close(trace.path[-1], by_hand(12, 3, given)[-1][0][0])


@pytest.mark.parametrize("second_moment", AGREED)
def test_the_second_moment_is_the_same_on_all_workers_and_stands_still_between_rounds(second_moment: str) -> None:
    traces = run(LocalSGD(4, second_moment=second_moment), 14, rule=adam, note=shared)
    for step in range(3, 14):
        everywhere = [trace.notes[step] for trace in traces]
        assert all(torch.equal(everywhere[0], each) for each in everywhere[1:])
        if step % 4 != 3:
            assert torch.equal(everywhere[0], traces[0].notes[step - 1])
    falls = [
        bool((later < now).any()) for now, later in zip(traces[0].notes[3::4], traces[0].notes[7::4], strict=False)
    ]
    assert any(falls) == (second_moment == "agreed")


def test_a_mean_of_second_moments_is_not_that_of_the_mean_gradient() -> None:
    """Gradients 1 and 3 with beta2 = 0.5: the mean of v is 2.5, and v of the mean gradient is 2."""

    def work(worker: Worker) -> float:
        model = nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=torch.float64))])
        optimizer = Adam(model.parameters(), 0.1, (0.0, 0.5))
        worker.attach(model, optimizer, Recipe(strategy=LocalSGD(1, second_moment="amsgrad")))
        ((1.0 + 2 * worker.rank) * model[0].sum()).backward()
        optimizer.step()
        return float(optimizer.state[model[0]][SHARED]) * 0.5  # without the bias correction

    assert cluster(work, 2) == [2.5, 2.5]


def test_weight_decay_is_adamws() -> None:
    """Before the first round every worker makes the steps of torch's own AdamW."""
    (ours, *_) = run(LocalSGD(50, second_moment="agreed"), 6, rule=adamw)
    (theirs, *_) = run(LocalSGD(50), 6, rule=adamw)
    close(ours.path[-1], theirs.path[-1])


# -- with the rest -----------------------------------------------------------------------------------------------------


def test_it_goes_with_an_outer_step_a_delay_and_fragments() -> None:
    strategy = DiLoCo(4, outer_learning_rate=1.0, outer_momentum=0.5, fragments=2, delay=1, second_moment="agreed")
    traces = run(strategy, 16, rule=adam, note=shared)
    for step in range(8, 16):
        everywhere = [trace.notes[step] for trace in traces]
        assert all(torch.equal(everywhere[0], each) for each in everywhere[1:])


def test_a_world_of_one_is_plain_adam() -> None:
    (alone,) = run(LocalSGD(3, second_moment="amsgrad"), 7, world=1, rule=adam)
    (plain,) = run(LocalSGD(3), 7, world=1, rule=adam)
    assert torch.equal(alone.path[-1], plain.path[-1])


@pytest.mark.parametrize(
    "recipe",
    [
        "LocalSGD(4, second_moment='agreed')",
        "DiLoCo(2, outer_momentum=0.5, second_moment='amsgrad', second_moment_period=4) + Int8()",
    ],
)
def test_resumed_training_divides_by_the_same_second_moment(recipe: str) -> None:
    check_resume(recipe, [3, 4, 6])


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[Callable[[nn.Module], Optimizer], str]] = [
    (sgd(momentum=0.9), "Adam or AdamW, but this optimizer is a SGD. Leave out second_moment"),
    (lambda model: Muon([p for p in model.parameters() if p.dim() == 2], 0.1), "this optimizer is a Muon"),
    (lambda model: Adagrad(model.parameters(), 0.1), "this optimizer is a Adagrad"),
    (lambda model: AdamW(model.parameters(), amsgrad=True), 'write second_moment="amsgrad" in the recipe'),
    (lambda model: AdamW(model.parameters(), maximize=True), "maximize=True is not supported"),
]


@pytest.mark.parametrize(("rule", "why"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_optimizers_without_a_second_moment_are_refused(rule: Callable[[nn.Module], Optimizer], why: str) -> None:
    def work(worker: Worker) -> str:
        model = network(worker.rank)
        with pytest.raises(AttachError) as caught:
            worker.attach(model, rule(model), "LocalSGD(2, second_moment='agreed')")
        return str(caught.value)

    for said in cluster(work, 2):
        assert why in said


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"second_moment": "mean"}, '"own", "agreed" or "amsgrad", got \'mean\''),
        ({"second_moment": "agreed", "optimizer_state": "reset"}, 'optimizer_state="reset" drops. Omit one'),
    ],
)
@pytest.mark.parametrize("strategy", [LocalSGD, DiLoCo])
def test_a_second_moment_that_does_not_fit_is_refused(strategy: type, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        strategy(4, **options)


def test_mixing_rejects_an_agreed_second_moment() -> None:
    with pytest.raises(ValueError, match=r"mix=0.5 keeps a part.*Omit mix"):
        DiLoCo(4, mix=0.5, second_moment="agreed")
