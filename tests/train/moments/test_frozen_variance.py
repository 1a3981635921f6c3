"""Frozen variance: entry by entry, as in 1-bit Adam, and one number a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adam_training import EPS, Adam, by_hand, close, together
from torch import Tensor

from gossamer.train.moments.first_moment import AdamRule
from gossamer.train.moments.frozen_variance import RowVariance

WARMUP = 4


def frozen(variance: str) -> str:
    return f'CompressedAdam(inner=Dense(), variance="{variance}", warmup={WARMUP})'


def direction(variance: str) -> Any:
    """Adam for `WARMUP` steps; after them momentum in units of v, or of one number a row in the place of v."""

    def moved(p: Tensor, gradient: Tensor, count: int, memory: dict[str, Any], betas: tuple[float, float]) -> Tensor:
        m, v = (memory.get(key, torch.zeros_like(p)) for key in "mv")
        m = memory["m"] = betas[0] * m + (1 - betas[0]) * gradient
        if count > WARMUP:
            return m / ((v.mean(1, keepdim=True) if variance == "rows" else v).sqrt() + EPS)
        v = memory["v"] = betas[1] * v + (1 - betas[1]) * gradient**2
        return m / (1 - betas[0] ** count) / ((v / (1 - betas[1] ** count)).sqrt() + EPS)

    return moved


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("kind", [Adam, torch.optim.AdamW])
@pytest.mark.parametrize("variance", ["frozen", "rows"])
def test_sending_all_is_momentum_sgd_in_units_of_the_variance(variance: str, kind: type[Adam], cycle: bool) -> None:
    close(together(frozen(variance), kind, cycle=cycle), by_hand(direction(variance), kind, cycle=cycle))


def test_columns_in_the_place_of_rows_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowVariance, "_variance", lambda self, known: known.mean(0, keepdim=True).expand_as(known))
    with pytest.raises(AssertionError):
        close(together(frozen("rows")), by_hand(direction("rows")))


def test_a_variance_that_moves_on_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdamRule, "step", lambda self, group, owned: [group | {"params": owned}])
    with pytest.raises(AssertionError):
        close(together(frozen("frozen")), by_hand(direction("frozen")))


def test_frozen_entry_by_entry_it_is_one_bit_adam() -> None:
    assert not torch.equal(together(frozen("rows")), together(frozen("frozen")))
    assert torch.equal(together(frozen("frozen")), together(f"OneBitAdam(warmup={WARMUP}, inner=Dense())"))
