"""Shares by speed in real sessions, whose threads have a virtual clock each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.virtual_time import VirtualTime, virtual_time
from support.virtual_workers import Worker, cluster
from torch import Tensor, nn
from torch.optim import SGD

import gossamer
from gossamer.errors import AttachError, LoopError
from gossamer.train.engine.bucket_reduction import PendingReduction
from gossamer.train.engine.step_decision import control_bytes
from gossamer.train.synchronizers.speed_balance import REVIEW_STEPS, ComputeClock

SPEEDS = 1.0, 1.0, 1.0, 0.2
ENTRIES = 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return virtual_time(monkeypatch)


class Sum(nn.Module):
    """Its gradient is the mean of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ENTRIES))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).mean()


def samples(rank: int) -> Iterator[Tensor]:
    """A worker's own samples: small whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(-8, 9, (ENTRIES,), generator=generator).float()


def trained(clock: VirtualTime, recipe: str, steps: int, speeds: Any = lambda step: SPEEDS) -> list[Any]:
    """Each worker's (parameters after every step, samples of every step)."""

    def work(worker: Worker) -> tuple[list[Tensor], list[list[Tensor]]]:
        model, draw = Sum(), samples(worker.rank)
        optimizer = SGD(model.parameters(), 0.25)
        session = worker.attach(model, optimizer, recipe)
        at, seen = [], [[]]
        while session.steps < steps:
            x = torch.stack([next(draw) for _ in range(session.batch_size)])
            seen[-1].extend(x)
            clock.now += len(x) / speeds(session.steps)[worker.rank]
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if not session.accumulating:
                at.append(model.weight.detach().clone())
                seen.append([])
        return at, seen[:-1]

    return cluster(work, len(SPEEDS))


def joined(results: list[Any]) -> list[Tensor]:
    """Parameters after every step of one process that computes all workers' samples."""
    model, at = Sum(), []
    optimizer = SGD(model.parameters(), 0.25)
    for parts in zip(*(seen for _, seen in results), strict=True):
        model(torch.stack([x for part in parts for x in part])).backward()
        optimizer.step()
        optimizer.zero_grad()
        at.append(model.weight.detach().clone())
    return at


def counts(results: list[Any], step: int) -> list[int]:
    return [len(seen[step]) for _, seen in results]


@pytest.mark.parametrize("batch", ["batch=2, ", ""])
def test_steps_equal_one_process_on_the_joined_batch_bit_for_bit(clock: VirtualTime, batch: str) -> None:
    """With shares that are powers of two, which divide without rounding."""
    recipe, speeds = f"EveryStep(global_batch=32, {batch}balance=True)", (1, 0.5, 0.25, 0.25)
    results = trained(clock, recipe, 3 * REVIEW_STEPS, lambda step: speeds)
    expected = joined(results)
    for at, _ in results:
        assert all(torch.equal(mine, other) for mine, other in zip(at, expected, strict=True))
    assert counts(results, 0) == [8, 8, 8, 8]
    assert counts(results, -1) == [16, 8, 4, 4]
    assert all(sum(counts(results, step)) == 32 for step in range(3 * REVIEW_STEPS))


@pytest.mark.parametrize("batch", ["batch=2, ", ""])
def test_other_shares_equal_it_up_to_rounding(clock: VirtualTime, batch: str) -> None:
    results = trained(clock, f"EveryStep(global_batch=32, {batch}balance=True)", 2 * REVIEW_STEPS)
    assert counts(results, -1) == [10, 10, 10, 2]
    torch.testing.assert_close(results[3][0][-1], joined(results)[-1])


def test_shares_follow_when_a_machine_slows_down(clock: VirtualTime) -> None:
    def speeds(step: int) -> tuple[float, ...]:
        return (1, 1, 1, 1) if step < 2 * REVIEW_STEPS else (0.25, 1, 1, 1)

    results = trained(clock, "EveryStep(global_batch=26, balance=True)", 6 * REVIEW_STEPS, speeds)
    assert max(counts(results, 2 * REVIEW_STEPS - 1)) - min(counts(results, 2 * REVIEW_STEPS - 1)) <= 1
    assert counts(results, -1) == [2, 8, 8, 8]


def test_waiting_time_is_not_compute_time(clock: VirtualTime) -> None:
    measured = ComputeClock(torch.device("cpu"))
    for _ in range(10):
        measured.begin()
        clock.now += 3.0
        measured.end(parts=2)
        clock.now += 100.0  # waiting for others
    assert measured.part_seconds == 1.5


def test_shares_do_not_depend_on_the_time_that_workers_wait(
    clock: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the slow worker wait for 40 s per exchange, so that all their steps take 50 s of the clock."""
    wait = PendingReduction.wait

    def waited(pending: PendingReduction) -> Any:
        decision = wait(pending)
        clock.now += 0.0 if pending.reduction.transport.rank == 3 else 40.0
        return decision

    monkeypatch.setattr(PendingReduction, "wait", waited)
    results = trained(clock, "EveryStep(global_batch=32, balance=True)", 2 * REVIEW_STEPS)
    assert counts(results, -1) == [10, 10, 10, 2]


def test_a_pause_and_the_first_steps_do_not_count(clock: VirtualTime) -> None:
    measured = ComputeClock(torch.device("cpu"))
    for seconds in (50.0, 40.0, 1.0, 1.0, 600.0, 1.0):
        measured.begin()
        clock.now += seconds
        measured.end(parts=1)
    assert measured.part_seconds == 1.0


def test_compressed_gradients_are_balanced_too(clock: VirtualTime) -> None:
    results = trained(clock, "EveryStep(global_batch=32, balance=True) + TopK(1.0)", 2 * REVIEW_STEPS)
    torch.testing.assert_close(results[0][0][-1], joined(results)[-1])


def test_one_pass_too_slow_for_its_share_is_reported_with_a_remedy(clock: VirtualTime, caplog: Any) -> None:
    trained(clock, "EveryStep(global_batch=8, batch=2, balance=True)", 2 * REVIEW_STEPS, lambda step: (1, 1, 1, 0.9))
    assert "global_batch=" not in caplog.text
    trained(clock, "EveryStep(global_batch=16, batch=2, balance=True)", 2 * REVIEW_STEPS)
    assert "Write global_batch=32" in caplog.text


def test_the_report_grows_by_eight_bytes_only_with_balance(clock: VirtualTime) -> None:
    assert control_bytes(3, 0, by_speed=True) - control_bytes(3, 0) == 8


def test_balance_needs_a_number_of_samples() -> None:
    model = Sum()
    with pytest.raises(AttachError, match="EveryStep\\(global_batch=256, batch=8, balance=True\\)"):
        gossamer.attach(model, SGD(model.parameters(), 0.1), balance=True)


def test_batch_size_needs_a_global_batch() -> None:
    model = Sum()
    with (
        gossamer.attach(model, SGD(model.parameters(), 0.1)) as session,
        pytest.raises(LoopError, match="global_batch=256, balance=True"),
    ):
        _ = session.batch_size


def test_one_worker_computes_the_global_batch() -> None:
    model = Sum()
    optimizer = SGD(model.parameters(), 0.1)
    with gossamer.attach(model, optimizer, global_batch=6, balance=True) as session:
        assert session.batch_size == 6
        model(torch.ones(6, ENTRIES)).backward()
        optimizer.step()
        assert session.steps == 1
