"""Frozen variance, by rows. Entry by entry: tests/compressors/test_onebit_adam_training.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adam_training import EPS, Adam, by_hand, close, together
from torch import Tensor

from gossamer.train.moments.frozen_variance import RowVariance

WARMUP = 4
ROWS = f'CompressedAdam(inner=Dense(), variance="rows", warmup={WARMUP})'


def by_rows(p: Tensor, gradient: Tensor, count: int, memory: dict[str, Any], betas: tuple[float, float]) -> Tensor:
    """Adam for `WARMUP` steps, and then one number a row in the place of v."""
    m, v = (memory.get(key, torch.zeros_like(p)) for key in "mv")
    m = memory["m"] = betas[0] * m + (1 - betas[0]) * gradient
    if count > WARMUP:
        return m / (v.mean(1, keepdim=True).sqrt() + EPS)
    v = memory["v"] = betas[1] * v + (1 - betas[1]) * gradient**2
    return m / (1 - betas[0] ** count) / ((v / (1 - betas[1] ** count)).sqrt() + EPS)


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("kind", [Adam, torch.optim.AdamW])
def test_sending_all_is_momentum_sgd_in_units_of_rows(kind: type[Adam], cycle: bool) -> None:
    close(together(ROWS, kind, cycle=cycle), by_hand(by_rows, kind, cycle=cycle))


def test_columns_in_the_place_of_rows_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowVariance, "_variance", lambda self, known: known.mean(0, keepdim=True).expand_as(known))
    with pytest.raises(AssertionError):
        close(together(ROWS), by_hand(by_rows))


def test_frozen_entry_by_entry_it_is_one_bit_adam() -> None:
    frozen = ROWS.replace("rows", "frozen")
    assert not torch.equal(together(ROWS), together(frozen))
    assert torch.equal(together(frozen), together(f"OneBitAdam(warmup={WARMUP}, inner=Dense())"))
