"""DiLoCo: an outer optimizer above local training, against its definition written out in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.training_loops import (
    CENTRES,
    LR,
    START,
    Trace,
    agree,
    close,
    gradient,
    heard,
    mean_of,
    quadratic,
    run,
    sgd,
)
from support.virtual_workers import cluster, network, parameters, train_step
from torch import Tensor

from gossamer import events
from gossamer.algorithms.strategies import DiLoCo, LocalSGD, Memory
from gossamer.errors import AttachError

# The model's tensors have 96, 16, 256, 16, 48 and 3 entries. By fragment, from the largest tensor on:
PLACES = {
    1: [list(range(435))],
    2: [list(range(112, 368)), [*range(112), *range(368, 435)]],
    3: [list(range(112, 368)), list(range(96)), [*range(96, 112), *range(368, 435)]],
}


def same_paths(ours: Sequence[Trace], theirs: Sequence[Trace]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip((*one.path, *one.merged), (*other.path, *other.merged), strict=True):
            assert torch.equal(a, b), "other bits"


def test_an_outer_step_of_one_without_momentum_is_local_sgd() -> None:
    local = run(LocalSGD(4), 10, rule=sgd(momentum=0.9))
    same_paths(run(DiLoCo(4, outer_learning_rate=1.0, outer_momentum=0.0), 10, rule=sgd(momentum=0.9)), local)
    with pytest.raises(AssertionError, match="other bits"):
        same_paths(run(DiLoCo(4, outer_learning_rate=0.99, outer_momentum=0.0), 10, rule=sgd(momentum=0.9)), local)


@pytest.mark.parametrize("outer", [(0.7, 0.9), (0.4, 0.0), (1.0, 0.5)])
def test_it_is_torchs_nesterov_on_the_mean_difference(outer: tuple[float, float]) -> None:
    """Bit for bit, its first step with the size (1 + momentum) lr included."""
    rate, momentum = outer
    nesterov = {"momentum": momentum, "nesterov": True} if momentum else {}
    agreed = torch.nn.Parameter(START.clone())
    optimizer = torch.optim.SGD([agreed], rate, **nesterov)  # type: ignore[arg-type]
    models = [network(0) for _ in range(3)]
    inner = [torch.optim.AdamW(model.parameters(), 0.01) for model in models]
    traces = run(
        DiLoCo(3, outer_learning_rate=rate, outer_momentum=momentum),
        9,
        rule=lambda model: torch.optim.AdamW(model.parameters(), 0.01),
    )
    for step in range(9):
        for rank, (model, local) in enumerate(zip(models, inner, strict=True)):
            train_step(model, local, step, rank)
        if step % 3 == 2:
            before = agreed.detach().clone()
            agreed.grad = mean_of([agreed.detach() - parameters(model) for model in models])
            optimizer.step()
            if step == 2:
                close(before - agreed.detach(), (1 + momentum) * rate * agreed.grad)
            for model in models:
                copy_into(model, agreed.detach())
        for trace, model in zip(traces, models, strict=True):
            assert torch.equal(trace.path[step], parameters(model)), f"other bits after step {step}"
            assert torch.equal(trace.merged[step], agreed.detach())


@torch.no_grad()
def copy_into(model: torch.nn.Module, flat: Tensor) -> None:
    sizes = [parameter.numel() for parameter in model.parameters()]
    for parameter, part in zip(model.parameters(), flat.split(sizes), strict=True):
        parameter.copy_(part.view_as(parameter))


def test_an_outer_step_of_nothing_leaves_what_is_agreed() -> None:
    for trace in run(DiLoCo(3, outer_learning_rate=0.0), 7):
        assert all(torch.equal(merged, START) for merged in trace.merged)
        assert torch.equal(trace.path[2], START)
        assert torch.equal(trace.path[5], START)
        assert not torch.equal(trace.path[6], START)


def alone(rank: int, steps: int) -> list[Tensor]:
    model = network(0)
    optimizer = sgd()(model)
    path = []
    for step in range(steps):
        train_step(model, optimizer, step, rank)
        path.append(parameters(model))
    return path


def check_apart(strategy: DiLoCo) -> None:
    for rank, trace in enumerate(run(strategy, 9)):
        for one, other in zip(trace.path, alone(rank, 9), strict=True):
            assert torch.equal(one, other), "not trained apart"


@pytest.mark.parametrize("strategy", [DiLoCo(3, mix=1.0), DiLoCo(4, mix=1.0, fragments=3, delay=2)], ids=repr)
def test_to_keep_all_of_ones_own_is_training_apart(strategy: DiLoCo) -> None:
    check_apart(strategy)
    with pytest.raises(AssertionError, match="not trained apart"):
        check_apart(DiLoCo(3, mix=0.999))


# -- the sign ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Uphill(DiLoCo):
    """Offers where parameters went with the sign turned round."""

    def offer(self, parameters: Tensor, memory: Memory) -> None:
        parameters.sub_(memory["agreed"])


def test_the_outer_step_goes_downhill() -> None:
    middle = sum(CENTRES) / 3
    for path in cluster(lambda worker: quadratic(worker, DiLoCo(5, outer_momentum=0.5), 100), 3):
        assert abs(path[-1] - middle) < 1e-3
    for path in cluster(lambda worker: quadratic(worker, Uphill(5, outer_momentum=0.5), 100), 3):
        assert abs(path[-1] - middle) > 1e3


# -- fragments that travel while training goes on ---------------------------------------------------------------------


def streaming(strategy: DiLoCo, steps: int, world: int = 3) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Algorithm 2 of Streaming DiLoCo, written out: (parameters by worker and step, agreed parameters by step)."""
    h, tau, alpha = strategy.period, strategy.delay, strategy.mix
    places = [torch.tensor(each) for each in PLACES[strategy.fragments]]
    offsets = [(p + 1) * h // strategy.fragments % h for p in range(strategy.fragments)]
    xs = [START.clone() for _ in range(world)]
    theta, m = START.clone(), torch.zeros_like(START)
    sent: dict[tuple[int, int], Tensor] = {}
    paths, agreed = [], []
    for t in range(1, steps + 1):
        xs = [x - LR * gradient(x, t - 1, rank) for rank, x in enumerate(xs)]
        for p, at in enumerate(places):
            if t % h == offsets[p]:
                sent[p, t] = mean_of([theta[at] - x[at] for x in xs])
            if (p, t - tau) in sent:
                d = sent.pop((p, t - tau))
                m[at] = strategy.outer_momentum * m[at] + d
                theta[at] -= strategy.outer_learning_rate * (d + strategy.outer_momentum * m[at])
                for x in xs:
                    x[at] = alpha * x[at] + (1 - alpha) * theta[at]
        paths.append([x.clone() for x in xs])
        agreed.append(theta.clone())
    return paths, agreed


def check_streaming(strategy: DiLoCo, expected: DiLoCo, steps: int = 17) -> None:
    paths, agreed = streaming(expected, steps)
    traces = run(strategy, steps)
    for step in range(steps):
        for trace, x in zip(traces, paths[step], strict=True):
            close(trace.path[step], x)
        close(agree([trace.merged[step] for trace in traces]), agreed[step])


STREAMING = [
    DiLoCo(6, fragments=3, delay=1, mix=0.5),
    DiLoCo(5, fragments=3, delay=4, mix=0.25, outer_momentum=0.0),
    DiLoCo(4, fragments=2, outer_learning_rate=0.4),
    DiLoCo(4, delay=3),
]


@pytest.mark.parametrize("strategy", STREAMING, ids=repr)
def test_fragments_delay_and_mix_are_streaming_diloco(strategy: DiLoCo) -> None:
    check_streaming(strategy, strategy)


@pytest.mark.parametrize(
    "twin",
    [
        DiLoCo(6, fragments=3, delay=2, mix=0.5),
        DiLoCo(6, fragments=3, delay=1, mix=0.4),
        DiLoCo(6, fragments=2, delay=1, mix=0.5),
        DiLoCo(6, fragments=3, delay=1, mix=0.5, outer_momentum=0.0),
    ],
    ids=repr,
)
def test_the_check_sees_each_of_them(twin: DiLoCo) -> None:
    with pytest.raises(AssertionError):
        check_streaming(twin, STREAMING[0])


def test_fragments_of_local_sgd_are_those_of_diloco_without_an_outer_optimizer() -> None:
    local = run(LocalSGD(4, fragments=3), 10, rule=sgd(momentum=0.9))
    same_paths(
        run(DiLoCo(4, outer_learning_rate=1.0, outer_momentum=0.0, fragments=3), 10, rule=sgd(momentum=0.9)), local
    )
    with pytest.raises(AssertionError, match="other bits"):
        same_paths(run(LocalSGD(4), 10, rule=sgd(momentum=0.9)), local)


@pytest.mark.parametrize("strategy", [LocalSGD, DiLoCo])
def test_a_period_has_a_step_for_each_fragment(strategy: type[LocalSGD] | type[DiLoCo]) -> None:
    with pytest.raises(ValueError, match=r"fragments must be at most period=4.*fragments=4"):
        strategy(4, fragments=5)
    with pytest.raises(ValueError, match=r"fragments.*0"):
        strategy(4, fragments=0)


def test_more_fragments_than_tensors_are_refused() -> None:
    with pytest.raises(AttachError, match=r"6 tensors cannot be divided into 7 fragments.*fragments=6"):
        run(DiLoCo(9, fragments=7), 1)


# -- with compressors -------------------------------------------------------------------------------------------------


def merged_and_sent(recipe: str) -> tuple[Tensor, float]:
    with heard(events.StepEnded) as ended:
        traces = run(recipe, 20)
    return agree([trace.merged[-1] for trace in traces]), sum(event.bytes_sent for event in ended)


@pytest.mark.parametrize(
    ("plain", "compressor", "nearness", "share"),
    [
        ("DiLoCo(5, outer_momentum=0.5)", "PowerSGD(2)", 0.8, 0.75),
        ("DiLoCo(5, fragments=2, delay=1, mix=0.5)", "Int8()", 0.05, 0.75),
        ("DiLoCo(5, outer_momentum=0, outer_learning_rate=1)", "TopK(0.3)", 0.8, 0.75),
    ],
)
def test_differences_are_compressed(plain: str, compressor: str, nearness: float, share: float) -> None:
    """Less is sent, everyone agrees on what, and it leads where the whole differences lead."""
    (whole, dense), (compressed, sent) = merged_and_sent(plain), merged_and_sent(f"{plain} + {compressor}")
    assert sent < share * dense
    way = (whole - START).norm()
    assert 0 < (compressed - whole).norm() < nearness * way, ((compressed - whole).norm() / way, sent / dense)


def test_nobody_owes_anything_when_everything_was_sent() -> None:
    """TopK of everything is Dense: the same bits, and empty residuals."""

    def note(trace: Trace) -> Any:
        state = trace.session.state_dict()["state"].values()
        return max(float(t.abs().max()) for each in state for key, t in each.items() if key.endswith("residual"))

    traces = run("DiLoCo(3) + TopK(1.0)", 7, note=note)
    for trace, dense in zip(traces, run("DiLoCo(3)", 7), strict=True):
        assert trace.notes == [0.0] * 7
        close(trace.path[-1], dense.path[-1])
