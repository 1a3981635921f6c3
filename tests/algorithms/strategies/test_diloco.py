"""DiLoCo: an outer optimizer above local training, against its definition written out in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from support.resumed_training import adamw, check_resume
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
from support.virtual_workers import Worker, cluster, network, parameters, seeded, train_step
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
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


# -- DiLoCo with few entries: SparseLoCo by hand, and which outer momentum is cautioned against ------------------------

STEPS, WORLD = 240, 2
FEW = ["TopK(0.01)", "TopK(0.05)", "RandomK(0.1)", "PowerSGD(rank=1)", "Chain(TopK(0.05), SignMagnitude())"]
MOST = ["Dense()", "TopK(0.1)", "OneBit()", "Int8()", "Float4()", "TernGrad()", "TopK(0.01, feedback=False)"]


def student(seed: int) -> nn.Module:
    with seeded(seed):
        return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4)).double()


@lru_cache
def loss(compressor: str, momentum: float) -> float:
    """What a student has learnt of a teacher after STEPS, 8 to a round."""

    def work(worker: Worker) -> float:
        x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        with torch.no_grad():
            y = 3 * student(5)(x)
        model = student(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker.attach(model, optimizer, f"DiLoCo(8, outer_momentum={momentum}) + {compressor}")
        picks = torch.Generator().manual_seed(worker.rank)
        for _ in range(STEPS):
            pick = torch.randint(0, 256, (16,), generator=picks)
            optimizer.zero_grad()
            mse_loss(model(x[pick]), y[pick]).backward()
            optimizer.step()
        with torch.no_grad():
            return float(mse_loss(model(x), y))

    return cluster(work, WORLD)[0]


def caution(text: str, world: int | None = None) -> str | None:
    recipe = resolve(text, world)
    return recipe.strategy.caution(recipe.compressor)


@pytest.mark.parametrize("compressor", FEW)
def test_outer_momentum_and_little_of_a_difference_are_reported(compressor: str) -> None:
    for world in (None, 2, 64):
        told = caution(f"DiLoCo(8) + {compressor}", world)
        assert told is not None
        assert "write DiLoCo(period=8, outer_learning_rate=1.0, outer_momentum=0.0), as in" in told
        for momentum in (0.0, 0.5):
            assert caution(f"DiLoCo(8, outer_momentum={momentum}) + {compressor}", world) is None


@pytest.mark.parametrize("compressor", MOST)
def test_what_leaves_little_behind_or_nothing_waiting_is_not(compressor: str) -> None:
    for world in (None, 2, 64):
        assert caution(f"DiLoCo(8) + {compressor}", world) is None
    assert caution("LocalSGD(8) + TopK(0.01)", 4) is None


@pytest.mark.parametrize("compressor", ["RandomK(0.1)", "PowerSGD(rank=1)"])
def test_what_is_told_does_worse_than_without_momentum(compressor: str) -> None:
    """And what is written instead does not."""
    without, calm, momentous = (loss(compressor, momentum) for momentum in (0.0, 0.5, 0.9))
    assert momentous > 1.15 * without
    assert calm < 1.15 * without


@pytest.mark.parametrize("compressor", ["Dense()", "OneBit()"])
def test_what_is_not_gains_by_momentum(compressor: str) -> None:
    assert loss(compressor, 0.9) < loss(compressor, 0.0)


# -- SparseLoCo --------------------------------------------------------------------------------------------------------

CHUNK, KEPT, DECAY, PERIOD = 64, 0.25, 0.95, 3
CODE = f"Feedback(Chain(TopK({KEPT}, chunk={CHUNK}), BinMeans()), decay={DECAY})"
SPARSE = f"DiLoCo({PERIOD}, outer_learning_rate=0.7, outer_momentum=0.0) + Route({CODE}, rest={CODE})"


def told(a: Tensor) -> Tensor:
    """q = Q(TopK(a)) of one tensor: the largest entries of each run, then bins of 1.5 standard deviations."""
    chosen = torch.zeros_like(a, dtype=torch.bool)
    for run_of_a, mark in zip(a.split(CHUNK), chosen.split(CHUNK), strict=True):
        mark[run_of_a.abs().topk(max(1, round(KEPT * len(run_of_a)))).indices] = True
    values = a[chosen]
    width = 1.5 * values.std() if len(values) > 1 else torch.ones(())
    codes = ((values - values.mean()) / width + 2).round().clamp(0, 3)
    for code in codes.unique():
        values[codes == code] = values[codes == code].mean()
    return torch.zeros_like(a).masked_scatter(chosen, values)


def sparseloco_by_hand(steps: int, decay: float = DECAY, world: int = 3) -> list[Tensor]:
    """Equations 1.1 to 1.5 of the paper: what all agree on after each step, of workers with AdamW inside."""
    sizes = [parameter.numel() for parameter in network(0).parameters()]
    models = [network(0) for _ in range(world)]
    inner = [adamw(model) for model in models]
    theta, left = START.clone(), [torch.zeros_like(START) for _ in range(world)]
    path = []
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            train_step(model, optimizer, step, rank)
        if step % PERIOD == PERIOD - 1:
            wanted = [decay * e + theta - parameters(model) for e, model in zip(left, models, strict=True)]
            sent = [torch.cat([told(part) for part in a.split(sizes)]) for a in wanted]
            left = [a - q for a, q in zip(wanted, sent, strict=True)]
            theta = theta - 0.7 * mean_of(sent)
            for model in models:
                nn.utils.vector_to_parameters(theta.clone(), model.parameters())
        path.append(theta)
    return path


def test_sparseloco_is_its_paper_with_adamw_inside() -> None:
    traces = run(SPARSE, 4 * PERIOD, rule=adamw)
    for trace in traces:
        for ours, theirs in zip(trace.merged, sparseloco_by_hand(4 * PERIOD), strict=True):
            close(ours, theirs, 1e-6)
    with pytest.raises(AssertionError):
        close(traces[0].merged[-1], sparseloco_by_hand(4 * PERIOD, decay=1.0)[-1], 1e-6)


def test_sparseloco_that_sends_everything_is_local_sgd() -> None:
    whole = "DiLoCo(3, outer_learning_rate=1.0, outer_momentum=0.0) + Feedback(TopK(1.0, chunk=64), decay=0.95)"
    for ours, theirs in zip(run(whole, 7, rule=adamw), run("LocalSGD(3)", 7, rule=adamw), strict=True):
        close(ours.path[-1], theirs.path[-1])


def test_sparseloco_resumes_bit_for_bit() -> None:
    check_resume(SPARSE, [4, 6])
    with pytest.raises(AssertionError, match="another way"):
        check_resume(SPARSE, [4], forget_the_residual)


def forget_the_residual(state: Any) -> None:
    for kept in state["state"].values():
        for key, tensor in kept.items():
            if key.endswith("residual"):
                tensor.zero_()
