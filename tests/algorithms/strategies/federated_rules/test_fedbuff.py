"""FedBuff's weights and steps."""

from __future__ import annotations

import pytest
import torch

from gossamer.algorithms.strategies.federated_rules import FedBuff, LocalWork
from gossamer.federated.server.aggregation import sum_for

WORK = LocalWork(samples=100, steps=7)


def after(strategy: FedBuff, contributions: list[tuple[float, int]], samples: int = 100) -> float:
    """The parameter that was 1, after a version of contributions (what was learned, age)."""
    total = sum_for(strategy.aggregator)
    for value, age in contributions:
        work = LocalWork(samples=samples, steps=1)
        total.add([torch.tensor([value], dtype=torch.float64)], strategy.weight(work, age), 1)
    parameters = torch.ones(1, dtype=torch.float64)
    strategy.apply(parameters, {}, total.means(), total.summary(1000))
    return parameters.item()


def test_weights_are_one_over_the_root_of_the_age_and_one() -> None:
    assert [FedBuff().weight(WORK, age) for age in (0, 3, 8, 99)] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 10])
    assert FedBuff().weight(LocalWork(samples=1, steps=1), 3) == FedBuff().weight(WORK, 3)


def test_a_version_is_the_weighted_sum_over_how_many_there_are() -> None:
    found = after(FedBuff(buffer=3, server_learning_rate=0.5), [(0.6, 0), (0.8, 3), (-0.9, 8)])
    assert found == pytest.approx(1 - 0.5 / 3 * (0.6 + 0.8 / 2 - 0.9 / 3), abs=1e-15)


def test_a_buffer_of_old_contributions_makes_shorter_steps() -> None:
    fresh, old = after(FedBuff(buffer=2), [(0.5, 0)] * 2), after(FedBuff(buffer=2), [(0.5, 3)] * 2)
    assert 1 - old == pytest.approx((1 - fresh) / 2)  # divided by the weights' sum, both would be alike


def test_it_waits_for_no_rank() -> None:
    assert FedBuff().asynchronous


@pytest.mark.parametrize("bad", [{"buffer": 0}, {"staleness": -1}, {"server_learning_rate": 0.0}])
def test_numbers_out_of_range_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="Write FedBuff"):
        FedBuff(**bad)  # type: ignore[arg-type]
