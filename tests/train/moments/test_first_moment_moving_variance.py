"""Moving variance: with all that there is to know, it is AdamS, and Adam."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adam_training import EPS, Adam, by_hand, by_torch, close, together
from torch import Tensor

from gossamer.algorithms.compressors import CompressedAdam
from gossamer.base.layout import Slot
from gossamer.train.moments import first_moment
from gossamer.train.moments.first_moment import AgreedVariance, MomentumVariance

ADAMS = 'CompressedAdam(inner=Dense(), variance="momentum")'
AGREED = 'CompressedAdam(inner=Dense(), variance="agreed")'


def adams(p: Tensor, gradient: Tensor, count: int, memory: dict[str, Any], betas: tuple[float, float]) -> Tensor:
    """Zhang et al. 2025, written plainly: the moment before, and no bias correction."""
    before = memory.get("m", torch.zeros_like(p))
    memory["m"] = betas[0] * before + (1 - betas[0]) * gradient
    return memory["m"] / ((betas[1] * before**2 + (1 - betas[1]) * gradient**2).sqrt() + EPS)


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("kind", [Adam, torch.optim.AdamW])
def test_sending_all_is_adams(kind: type[Adam], cycle: bool) -> None:
    close(together(ADAMS, kind, cycle=cycle), by_hand(adams, kind, cycle=cycle))


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("kind", [Adam, torch.optim.AdamW])
def test_sending_all_is_adam_itself(kind: type[Adam], cycle: bool) -> None:
    close(together(AGREED, kind, cycle=cycle), by_torch(kind, cycle=cycle))


def test_a_variance_of_the_new_moment_would_be_found() -> None:
    """The step of the twin: v' of m', which is not known before the gradient."""

    def late(p: Tensor, gradient: Tensor, count: int, memory: dict[str, Any], betas: tuple[float, float]) -> Tensor:
        memory["m"] = betas[0] * memory.get("m", torch.zeros_like(p)) + (1 - betas[0]) * gradient
        return memory["m"] / ((betas[1] * memory["m"] ** 2 + (1 - betas[1]) * gradient**2).sqrt() + EPS)

    with pytest.raises(AssertionError):
        close(together(ADAMS), by_hand(late))


def test_a_missing_bias_correction_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_moment, "corrections", lambda state, group: (1.0, 1.0))
    with pytest.raises(AssertionError):
        close(together(AGREED), by_torch())


def step_of(rule: type[MomentumVariance | AgreedVariance], gradients: list[list[float]]) -> tuple[Tensor, Any]:
    """A parameter of zeros after some steps of lr 1, betas 0.5 and 0.75, eps 0.5; and the optimizer's state of it."""
    p = torch.nn.Parameter(torch.zeros(len(gradients[0]), dtype=torch.float64))
    optimizer = Adam([p], lr=1.0, betas=(0.5, 0.75), eps=0.5)
    variance = "momentum" if rule is MomentumVariance else "agreed"
    owner = CompressedAdam(variance=variance).owns_momentum(Slot("p", (1,), 0, (1,)))
    made = rule(optimizer, {"p": p}, owner, warns=False)
    for steps, gradient in enumerate(gradients, 1):
        p.grad = torch.tensor(gradient, dtype=torch.float64)
        made.before(steps)
        optimizer.step()
        made.after()
    return p.detach(), optimizer.state[p]


def test_two_steps_of_adams_by_hand() -> None:
    """m: 1, 1; v: 0.75 * 0 + 0.25 * 4 = 1, then 0.75 * 1 + 0.25 * 1 = 1; so steps of 1 / 1.5."""
    moved, state = step_of(MomentumVariance, [[2.0], [1.0]])
    close(moved, torch.tensor([-4 / 3], dtype=torch.float64))
    assert (float(state["exp_avg"]), float(state["exp_avg_sq"]), float(state["step"])) == (1.0, 1.0, 2.0)


def test_a_variance_stays_where_nothing_arrived() -> None:
    """The first entry gets 2 and 0: m 1, 0.5, and v 1, 1; the second has v 1, 0.75 + 0.25 = 1."""
    moved, state = step_of(AgreedVariance, [[2.0, 2.0], [0.0, 2.0]])
    assert state["exp_avg_sq"].tolist() == [1.0, 1.75]
    divisor = (1 / (1 - 0.75**2)) ** 0.5 + 0.5
    first = (1 / 0.5) / ((1 / 0.25) ** 0.5 + 0.5)
    close(moved[0], torch.tensor(-first - 0.5 / 0.75 / divisor, dtype=torch.float64))
