"""Local steps by speed: numbers of steps, weights, and the position in the common schedule."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.virtual_time import VirtualTime, virtual_time
from support.virtual_workers import Worker, cluster, seeded
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import gossamer
from gossamer.train.synchronizers.speed_balance import WARM_UP, LocalPace

from .test_speed_balance import ENTRIES, Sum, samples

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return virtual_time(monkeypatch)


@pytest.mark.parametrize("period", [1, 4, 6, 24])
def test_n_local_steps_are_one_period(period: int) -> None:
    for steps in range(1, period + 1):
        pace, position, seen = LocalPace(period, 7, CPU), 7, []
        pace._next = steps
        for _ in range(3 * steps):
            position = pace.advance(position)
            seen.append(position)
        assert seen[steps - 1 :: steps] == [7 + period, 7 + 2 * period, 7 + 3 * period]
        assert all(before < after for before, after in pairwise(seen))


def test_a_change_begins_with_the_next_period() -> None:
    pace = LocalPace(6, 0, CPU)
    assert pace.advance(0) == 1
    assert pace.adapt([1.0, 2.0], [0, 1], rank=1)
    assert [pace.advance(1), pace.advance(2), pace.advance(3), pace.advance(4), pace.advance(5)] == [2, 3, 4, 5, 6]
    assert [pace.advance(6), pace.advance(8), pace.advance(10)] == [8, 10, 12]


def test_noise_changes_no_steps_and_other_members_begin_with_equal_ones() -> None:
    pace = LocalPace(20, 0, CPU)
    assert pace.adapt([1.0, 5.0], [0, 1], rank=1)
    assert pace.shares == (20, 4)
    assert not pace.adapt([1.0, 4.5], [0, 1], rank=1)
    assert not pace.adapt([1.0, 0.0], [0, 1], rank=1)
    assert pace.adapt([1.0, 2.0], [0, 1], rank=1)
    assert pace.shares == (20, 10)
    assert not pace.adapt([1.0, 0.0, 2.0], [0, 2, 1], rank=2)
    assert pace.shares == (20, 20, 20)


@pytest.mark.parametrize("claimed", [float("nan"), float("inf"), -1.0, 0.0])
def test_an_invalid_time_changes_no_steps(claimed: float) -> None:
    pace = LocalPace(20, 0, CPU)
    assert pace.adapt([1, 1, 2], (0, 1, 2), rank=0)
    assert pace.adapt([1, 1, claimed], (0, 1, 2), rank=0) is False
    assert pace.shares == (20, 20, 10)


def test_a_wrong_time_is_limited() -> None:
    pace = LocalPace(100, 0, CPU)
    assert pace.adapt([1, 1, 1, 1e-9], (0, 1, 2, 3), rank=0)
    assert pace.shares == (3, 3, 3, 100)
    assert pace.adapt([1, 1, 1, 1e9], (0, 1, 2, 3), rank=0)
    assert pace.shares == (100, 100, 100, 3)


@pytest.mark.parametrize(("position", "begins"), [(20, 27), (7, 7), (27, 27), (28, 47)])
def test_changed_shares_are_reported_with_the_step_after_which_they_apply(position: int, begins: int) -> None:
    """Periods of 20 steps that begin at step 7."""
    seen: list[gossamer.events.Event] = []
    unsubscribe = gossamer.events.subscribe(seen.append)
    try:
        pace = LocalPace(20, 7, CPU)
        pace.adapt([1.0, 5.0], [0, 1], rank=1, position=position)
        pace.adapt([1.0, 5.0], [0, 1], rank=1, position=position + 20)
    finally:
        unsubscribe()
    changed, logged = (each for each in seen if not isinstance(each, gossamer.events.Noticed))
    assert (changed.step, changed.shares) == (begins, (20, 4))  # type: ignore[attr-defined]
    assert logged.values == {"local_steps": 4}  # type: ignore[attr-defined]


def test_the_slowest_worker_makes_at_least_one_step_and_the_period_to_write_is_reported(caplog: Any) -> None:
    pace = LocalPace(4, 0, CPU)
    pace.adapt([1.0, 40.0], [0, 1], rank=0)
    assert "Write period=40 or more" in caplog.text
    pace = LocalPace(4, 0, CPU)
    pace.adapt([1.0, 40.0], [0, 1], rank=1)
    assert pace.advance(0) == 4


def trained(clock: VirtualTime, recipe: str, speeds: tuple[float, ...], periods: int, period: int) -> list[Any]:
    """Each worker's (agreed parameters, mean gradients by local step, local steps, virtual time) of every period."""

    def work(worker: Worker) -> list[Any]:
        model, draw = Sum(), samples(worker.rank)
        optimizer = SGD(model.parameters(), 0.25)
        session = worker.attach(model, optimizer, recipe)
        found: list[Any] = [(model.weight.detach().clone(), [], 0.0)]
        gradients: list[Tensor] = []
        while session.steps < periods * period:
            x = next(draw).unsqueeze(0)
            clock.now += 1 / speeds[worker.rank]
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            gradients.append(x[0])
            if session.steps % period == 0:
                found.append((model.weight.detach().clone(), gradients, clock.now))
                gradients = []
        return found

    return cluster(work, len(speeds))


@pytest.mark.parametrize(
    "recipe", ["LocalSGD(8, balance=True)", "DiLoCo(8, outer_learning_rate=1.0, outer_momentum=0.0, balance=True)"]
)
def test_workers_make_steps_in_proportion_to_their_speed_and_count_by_samples(clock: VirtualTime, recipe: str) -> None:
    speeds = 1.0, 0.5, 0.25, 0.125
    results = trained(clock, recipe, speeds, periods=6, period=8)
    assert [len(each[1][1]) for each in results] == [8, 8, 8, 8]
    assert [len(each[-1][1]) for each in results] == [8, 4, 2, 1]
    for number in range(1, 7):
        before = results[0][number - 1][0]
        ends = [before - 0.25 * sum(each[number][1], torch.zeros(ENTRIES)) for each in results]
        weights = [len(each[number][1]) for each in results]
        mean = sum(weight * end for weight, end in zip(weights, ends, strict=True)) / sum(weights)
        for each in results:
            torch.testing.assert_close(each[number][0], mean)
    last = [each[-1][2] - each[-2][2] for each in results]
    assert max(last) == min(last), "all workers end a period at the same time"


def test_equal_speeds_equal_plain_local_sgd_bit_for_bit(clock: VirtualTime) -> None:
    balanced = trained(clock, "LocalSGD(4, balance=True)", (1.0, 1.0, 1.0), periods=5, period=4)
    plain = trained(clock, "LocalSGD(4)", (1.0, 1.0, 1.0), periods=5, period=4)
    for mine, other in zip(balanced, plain, strict=True):
        assert all(torch.equal(a[0], b[0]) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize(
    "recipe",
    [
        "LocalSGD(8, balance=True, fragments=2) + Float4()",
        "DiLoCo(8, balance=True, fragments=4, delay=1) + OneBit()",
        "LocalSGD(8, balance=True, optimizer_state='average')",
        "DiLoCo(8, balance=True, averaging='radial')",
    ],
)
def test_fragments_delay_and_moments_work_with_unequal_steps(clock: VirtualTime, recipe: str) -> None:
    """All workers agree bit for bit after their last period."""
    speeds = 1.0, 0.4, 0.2

    def work(worker: Worker) -> Tensor:
        with seeded(1):
            model = nn.Sequential(nn.Linear(ENTRIES, 2), nn.Tanh(), nn.Linear(2, 1))
        optimizer, draw = AdamW(model.parameters(), 0.01), samples(worker.rank)
        session = worker.attach(model, optimizer, recipe)
        while session.steps < 48:
            clock.now += 1 / speeds[worker.rank]
            model(next(draw)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with session.averaged_parameters(model):
            return nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    first, *others = cluster(work, 3)
    assert all(torch.equal(first, each) for each in others)


def test_aligned_momentum_uses_steps_of_equal_length(clock: VirtualTime) -> None:
    """Workers with equal gradients have equal momenta, although they make 8, 4 and 2 steps: nothing is corrected."""
    speeds = 1.0, 0.5, 0.25

    def work(worker: Worker) -> tuple[Tensor, int]:
        model = Sum()
        optimizer = SGD(model.parameters(), 0.125, momentum=0.5)
        session = worker.attach(model, optimizer, "LocalSGD(8, balance=True, optimizer_state='align')")
        steps, warm = 0, 8 * (WARM_UP + 3)
        while session.steps < warm + 8:
            clock.now += 1 / speeds[worker.rank]
            model(torch.ones(1, ENTRIES)).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += session.steps > warm
        return optimizer.state[model.weight]["momentum_buffer"].clone(), steps

    results = cluster(work, 3)
    assert [steps for _, steps in results] == [8, 4, 2]
    for momentum, _ in results:
        torch.testing.assert_close(momentum, torch.full((ENTRIES,), 2.0), atol=0.02, rtol=0)


def test_a_loop_may_end_within_a_period(clock: VirtualTime) -> None:
    """The fast worker ends at position 18, the slow one at the round of position 24, which needs both."""
    speeds = 1.0, 0.125

    def work(worker: Worker) -> tuple[int, Tensor]:
        model, draw = Sum(), samples(worker.rank)
        optimizer = SGD(model.parameters(), 0.25)
        with worker.attach(model, optimizer, "LocalSGD(8, balance=True)") as session:
            while session.steps < 8 * (WARM_UP + 3) + 2:
                clock.now += 1 / speeds[worker.rank]
                model(next(draw).unsqueeze(0)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return session.steps, model.weight.detach().clone()

    (steps, first), (others_steps, second) = cluster(work, 2)
    assert steps == others_steps
    assert torch.equal(first, second)


def test_a_checkpoint_keeps_the_number_of_local_steps(clock: VirtualTime, tmp_path: Path) -> None:
    speeds, path = (1.0, 0.25), tmp_path / "saved"

    def work(worker: Worker) -> tuple[int, Tensor, Tensor]:
        model, draw = Sum(), samples(worker.rank)
        optimizer = SGD(model.parameters(), 0.25)
        session = worker.attach(model, optimizer, "LocalSGD(8, balance=True)")

        def train(until: int) -> int:
            made = 0
            while session.steps < until:
                clock.now += 1 / speeds[worker.rank]
                model(next(draw).unsqueeze(0)).backward()
                optimizer.step()
                optimizer.zero_grad()
                made += 1
            return made

        train(48)
        session.save(path)
        draw = samples(worker.rank + 10)
        train(56)
        without = model.weight.detach().clone()
        session.load(path)
        draw = samples(worker.rank + 10)
        made = train(56)
        return made, without, model.weight.detach().clone()

    for (made, without, resumed), expected in zip(cluster(work, 2), (8, 2), strict=True):
        assert made == expected
        assert torch.equal(without, resumed)


def test_sites_are_refused() -> None:
    with pytest.raises(ValueError, match="without per_site"):
        gossamer.LocalSGD(8, per_site=2, balance=True)
