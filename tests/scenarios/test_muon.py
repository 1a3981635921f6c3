"""Muon and AdamW as one optimizer, under a strategy in which workers train apart and speak in few bits."""

from __future__ import annotations

import pytest
import torch
from examples.muon import Both, muon
from support.resumed_training import check_resume
from support.training_loops import Trace, agree, run
from support.virtual_workers import Worker, cluster
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gossamer.errors import LoopError

COMPRESSORS = ["Float4()", "OneBit()", "TwoBit(adaptive=True)", "TopK(0.1)", "Dense()"]


def both(model: nn.Module) -> Optimizer:
    return muon(dict(model.named_parameters()), 0.01)


def moved(trace: Trace) -> bool:
    return not torch.equal(trace.path[-1], trace.path[0])


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_resumed_training_goes_the_same_way(compressor: str) -> None:
    """In the middle of a period, with residuals, outer momentum, and both optimizers' states."""
    check_resume(f"DiLoCo(period=4) + {compressor}", [3, 6], rule=both)


class Forgetful(Both):
    """Goes on with the states that its parts had before a checkpoint was loaded."""

    def _share(self) -> None:
        if not hasattr(self, "shared"):
            super()._share()
            self.shared = True


def test_the_check_catches_parts_that_keep_a_state_of_their_own() -> None:
    def forgetful(model: nn.Module) -> Optimizer:
        return Forgetful(*both(model).parts)  # type: ignore[attr-defined]

    with pytest.raises(AssertionError, match="another way"):
        check_resume("DiLoCo(period=4)", [6], rule=forgetful)


def test_both_make_the_steps_that_they_would_make_apart() -> None:
    def apart(model: nn.Module) -> tuple[Optimizer, ...]:
        return both(model).parts  # type: ignore[attr-defined,no-any-return]

    def train(model: nn.Module, optimizers: tuple[Optimizer, ...]) -> list[Tensor]:
        for step in range(5):
            x = torch.full((2, 6), 1.0 + step)
            model(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2))

    one, other = build(), build()
    together, alone = train(one, (both(one),)), train(other, apart(other))
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(together, build().parameters(), strict=True))


def test_workers_agree_after_each_period() -> None:
    traces = run("DiLoCo(period=4) + OneBit()", 8, rule=both)
    assert all(map(moved, traces))
    agree([trace.path[-1] for trace in traces])
    agree([trace.merged[5] for trace in traces])


def test_two_optimizers_side_by_side_are_told_to_become_one() -> None:
    def side_by_side(model: nn.Module) -> Optimizer:
        first, *others = model.parameters()
        inner = AdamW(others)
        inner.register_step_pre_hook(lambda *_: None)
        outer = AdamW([first])
        outer.register_step_post_hook(lambda *_: inner.step())
        return outer

    with pytest.raises(LoopError, match="write one class"):
        run("DiLoCo(period=4)", 2, rule=side_by_side)


# -- EF21-Muon ---------------------------------------------------------------------------------------------------------

SHARE, STEP = 0.25, 0.05


def plain_muon(parameters: list[nn.Parameter]) -> Optimizer:
    """Muon without momentum: the spectral norm's descent direction of what it is given."""
    return torch.optim.Muon(parameters, STEP, weight_decay=0.0, momentum=0.0, nesterov=False)


def ef21_muon_by_hand(targets: list[Tensor], steps: int, kept: int) -> list[Tensor]:
    """Gruntkowska et al. 2025 with a plain way down: M_j <- (1 - b) M_j + b g_j; R_j = C(M_j - G_j); G_j += R_j;
    X <- X + t LMO(mean G_j). Worker j's loss is |X - target_j|^2 / 2."""
    x = nn.Parameter(torch.zeros_like(targets[0]))
    optimizer, path = plain_muon([x]), []
    momenta = [x.detach() - target for target in targets]  # M_j begins with the first gradient
    known = [torch.zeros_like(target) for target in targets]
    for step in range(steps):
        for rank, target in enumerate(targets):
            if step:
                momenta[rank] = (1 - SHARE) * momenta[rank] + SHARE * (x.detach() - target)
            difference = (momenta[rank] - known[rank]).flatten()
            places = difference.abs().topk(kept).indices
            known[rank] = known[rank] + torch.zeros_like(difference).index_copy(0, places, difference[places]).view_as(
                x
            )
        x.grad = torch.stack(known).mean(0)
        optimizer.step()
        path.append(x.detach().clone())
    return path


def test_ef21_and_muon_without_momentum_are_ef21_muon() -> None:
    targets = [torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def work(worker: Worker) -> list[Tensor]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(6, 8))])
        optimizer = plain_muon(list(model.parameters()))
        recipe = f"Route(Feedback(TopK(0.125), rule='ef21', momentum={SHARE}), smallest=0)"
        worker.attach(model, optimizer, recipe)
        path = []
        for _ in range(8):
            optimizer.zero_grad()
            (0.5 * (model[0] - targets[worker.rank]).square().sum()).backward()
            optimizer.step()
            path.append(model[0].detach().clone())
        return path

    wanted = ef21_muon_by_hand(targets, 8, kept=6)
    for path in cluster(work, 3):
        for ours, theirs in zip(path, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(path[-1], ef21_muon_by_hand(targets, 8, kept=48)[-1], atol=1e-3, rtol=1e-2)
