"""Data by speed: with balance=True the parts of an epoch follow the shares of a step, in real sessions.

Each worker's thread has a virtual clock. A step ends when the last worker has computed its part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support.changing_group import FetchingAhead
from support.nightly import nightly
from support.virtual_time import VirtualTime, virtual_time
from support.virtual_workers import Worker, cluster, notices
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset

from gossamer.train.sampler import progress
from gossamer.train.synchronizers.speed_balance import REVIEW_STEPS
from gossamer.train.world_state import WorldState

SPEEDS = 1.0, 1.0, 1.0, 0.2  # samples per virtual second
SAMPLES, BATCH, STEP, EPOCHS = 960, 2, 32, 2
IDEAL = SAMPLES / sum(SPEEDS)  # virtual seconds of an epoch in which no worker waits
RECIPE = f"EveryStep(global_batch={STEP}, batch={BATCH}, balance=True)"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return virtual_time(monkeypatch)


class Numbers(IterableDataset[int]):
    def __init__(self, total: int) -> None:
        self._total = total

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._total))


class Training:
    """A worker's loop over its part of the data, and a diary: (epoch, step, samples) of each pass."""

    def __init__(self, worker: Worker, clock: VirtualTime, way: str = "loader", recipe: str = RECIPE) -> None:
        self.rank, self.clock, self.diary = worker.rank, clock, list[tuple[int, int, list[int]]]()
        place = {"rank": worker.rank, "size": worker.world, "local_rank": worker.rank}
        self.world = WorldState(**place, device=torch.device("cpu"))
        options = {"stratify": [number % 2 for number in range(SAMPLES)]} if way == "stratified" else {}
        self.shard: Any = self.world.shard(Numbers(SAMPLES) if way == "stream" else range(SAMPLES), **options)
        self.model = nn.Linear(1, 1)
        self.optimizer = SGD(self.model.parameters(), 1e-9)
        self.session = worker.attach(self.model, self.optimizer, recipe, world=self.world)
        data = {"dataset": self.shard} if way == "stream" else {"dataset": range(SAMPLES), "sampler": self.shard}
        self.loader: Any = (FetchingAhead if "ahead" in way else DataLoader)(**data, batch_size=BATCH)
        if "tracked" in way:
            self.loader = self.session.track(self.loader)

    def make_pass(self, epoch: int, batch: Tensor, speed: float | None = None) -> None:
        self.diary.append((epoch, self.session.steps, batch.tolist()))
        self.clock.now += len(batch) / (speed or SPEEDS[self.rank])
        self.session.set_batch_weight(len(batch))
        self.model(batch.float()[:, None]).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epoch(self, epoch: int, speed: float | None = None) -> None:
        with self.session.epoch():
            for batch in self.loader:
                self.make_pass(epoch, batch, speed)


def trained(clock: VirtualTime, way: str = "loader") -> list[Training]:
    def work(worker: Worker) -> Training:
        training = Training(worker, clock, way)
        for epoch in range(EPOCHS):
            training.epoch(epoch)
        return training

    return cluster(work, len(SPEEDS))


def of_epoch(training: Training, epoch: int) -> list[tuple[int, list[int]]]:
    return [(step, samples) for at, step, samples in training.diary if at == epoch]


def assert_used_once(workers: list[Training], epoch: int) -> None:
    used = Counter(sample for each in workers for _, samples in of_epoch(each, epoch) for sample in samples)
    assert used == Counter(range(SAMPLES))


def steps_apart(workers: list[Training], epoch: int) -> int:
    """Between the last steps of the workers."""
    last = [of_epoch(each, epoch)[-1][0] for each in workers]
    return max(last) - min(last)


def seconds(workers: list[Training], epoch: int) -> float:
    """Virtual time of an epoch: each step takes as long as the last worker computes."""
    counts = Counter[tuple[int, int]]()
    for each in workers:
        for step, samples in of_epoch(each, epoch):
            counts[step, each.rank] += len(samples)
    return sum(
        max(counts[step, rank] / speed for rank, speed in enumerate(SPEEDS)) for step in {step for step, _ in counts}
    )


@pytest.mark.parametrize("way", ["loader", "tracked, ahead", "stream", *nightly("ahead", "tracked")])
def test_all_workers_end_an_epoch_together_in_nearly_the_ideal_time(clock: VirtualTime, way: str) -> None:
    workers = trained(clock, way)
    for epoch in range(EPOCHS):
        assert_used_once(workers, epoch)
        kept = 3 if way == "ahead" and epoch == 0 else 0  # fetched batches that the slow worker keeps
        assert steps_apart(workers, epoch) <= 1 + kept
    assert seconds(workers, 1) <= 1.1 * IDEAL
    assert len({training.session.steps for training in workers}) == 1


@pytest.mark.parametrize("recipe", ["LocalSGD(8, balance=True)", "DiLoCo(8, fragments=2, balance=True)"])
def test_local_steps_by_speed_divide_the_data_too(clock: VirtualTime, recipe: str) -> None:
    """All workers use every sample once, and end the second epoch within two rounds, at nearly the same time."""

    def work(worker: Worker) -> tuple[Training, float]:
        training = Training(worker, clock, recipe=recipe)
        training.epoch(0)
        before = clock.now
        training.epoch(1)
        return training, clock.now - before

    workers, times = zip(*cluster(work, len(SPEEDS)), strict=True)
    for epoch in range(EPOCHS):
        assert_used_once(list(workers), epoch)
    assert steps_apart(list(workers), 1) < 16
    assert max(times) <= 1.1 * IDEAL


def test_one_pass_of_the_size_that_the_session_names(clock: VirtualTime) -> None:
    def work(worker: Worker) -> Training:
        training = Training(worker, clock, recipe=f"EveryStep(global_batch={STEP}, balance=True)")
        for epoch in range(EPOCHS):
            with training.session.epoch():
                indices = iter(training.shard)
                while batch := [*islice(indices, training.session.batch_size)]:
                    training.make_pass(epoch, torch.tensor(batch))
        return training

    workers = cluster(work, len(SPEEDS))
    for epoch in range(EPOCHS):
        assert_used_once(workers, epoch)
        assert steps_apart(workers, epoch) <= 1
    assert seconds(workers, 1) <= 1.1 * IDEAL


def test_a_loop_until_a_number_of_steps_stays_together(clock: VirtualTime) -> None:
    """Without session.epoch()."""

    def work(worker: Worker) -> Training:
        training = Training(worker, clock)
        while training.session.steps < 3 * SAMPLES // STEP:
            for batch in training.loader:
                training.make_pass(training.shard.epoch, batch)
                if training.session.steps == 3 * SAMPLES // STEP:
                    break
        return training

    workers = cluster(work, len(SPEEDS))
    used = Counter((epoch, each) for worker in workers for epoch, _, samples in worker.diary for each in samples)
    assert max(used.values()) == 1
    assert sum(used.values()) == 3 * SAMPLES
    assert len({worker.diary[-1][0] for worker in workers}) == 1


def test_with_equal_parts_of_the_data_the_slow_worker_ends_alone(
    clock: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the test above."""
    own = progress.regrouped
    monkeypatch.setattr(progress, "regrouped", lambda positions, change: own(positions, change._replace(widths=())))
    workers = trained(clock)
    assert_used_once(workers, 1)
    assert seconds(workers, 1) >= 3 * IDEAL


def test_parts_follow_a_machine_that_slows_down_in_an_epoch(clock: VirtualTime) -> None:
    def work(worker: Worker) -> Training:
        training = Training(worker, clock)
        training.epoch(0)
        training.epoch(1, 0.1 if worker.rank == 0 else None)
        training.epoch(2, 0.1 if worker.rank == 0 else None)
        return training

    workers = cluster(work, len(SPEEDS))
    for epoch in range(3):
        assert_used_once(workers, epoch)
        assert steps_apart(workers, epoch) <= 1
    counts = [len(of_epoch(each, 2)) for each in workers]
    assert counts[0] < counts[1] / 4


def test_samples_of_a_last_step_are_not_lost(clock: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of samples is no multiple of a step, nor of a batch. Passes of a last, incomplete step count for the
    first step of the next epoch, so that ends differ by one more step."""
    monkeypatch.setitem(globals(), "SAMPLES", 971)
    workers = trained(clock)
    for epoch in range(EPOCHS):
        assert_used_once(workers, epoch)
        assert steps_apart(workers, epoch) <= 2


def test_an_evaluation_outside_of_the_epoch_keeps_equal_parts(clock: VirtualTime) -> None:
    def work(worker: Worker) -> list[int]:
        training = Training(worker, clock)
        held_out = training.world.shard(range(40))
        seen = []
        for epoch in range(EPOCHS):
            seen.append(len([*held_out]))
            training.epoch(epoch)
        return [*seen, len([*held_out]), len(training.shard)]

    results = cluster(work, len(SPEEDS))
    assert [each[:-1] for each in results] == [[10] * 3] * 4
    assert [each[-1] for each in results] == [300, 300, 300, 60]


def test_stratified_parts_stay_equal_with_one_notice(clock: VirtualTime) -> None:
    with notices() as said:
        workers = trained(clock, "stratified")
    assert_used_once(workers, 1)
    assert len([text for text in said if "stratify" in text]) == 1
    assert {len(of_epoch(each, 1)) for each in workers} == {SAMPLES // 4 // BATCH}


def test_ranks_with_different_shards_keep_equal_parts_with_a_notice(clock: VirtualTime) -> None:
    def work(worker: Worker) -> Training:
        training = Training(worker, clock)
        more = [training.world.shard(range(40)) for _ in range(worker.rank == 0)]
        for epoch in range(EPOCHS):
            training.epoch(epoch)
        assert len(more) == (worker.rank == 0)
        return training

    with notices() as said:
        workers = cluster(work, len(SPEEDS))
    assert_used_once(workers, 1)
    assert len([text for text in said if "different numbers of calls of world.shard" in text]) == 1


def test_a_switch_to_equal_shares_divides_equally(clock: VirtualTime) -> None:
    def work(worker: Worker) -> list[int]:
        training = Training(worker, clock)
        training.epoch(0)
        before = len(training.shard)
        training.session.switch("Dense()")
        return [before, len(training.shard)]

    assert cluster(work, len(SPEEDS)) == [[300, 240]] * 3 + [[60, 240]]


@pytest.mark.parametrize("resumed", [4, 3])
def test_a_checkpoint_in_the_middle_of_an_epoch(clock: VirtualTime, tmp_path: Path, resumed: int) -> None:
    """Resumed by as many workers, or by others."""
    until = REVIEW_STEPS + 4

    def interrupted(worker: Worker) -> Training:
        training = Training(worker, clock)
        with training.session.epoch():
            for batch in training.loader:
                training.make_pass(0, batch)
                if training.session.steps == until:
                    break
            training.session.save(tmp_path)
        return training

    def continued(worker: Worker) -> tuple[Training, int]:
        training = Training(worker, clock)
        training.session.load(tmp_path)
        share = len(training.shard)
        training.epoch(0)
        training.epoch(1)
        return training, share

    begun = cluster(interrupted, 4)
    results = cluster(continued, resumed)
    workers = [training for training, _ in results]
    assert_used_once([*begun, *workers], 0)
    assert_used_once(workers, 1)
    if resumed == 4:
        assert [share for _, share in results][3] < results[0][1]
        assert seconds(workers, 0) <= 1.1 * IDEAL * (1 - until * STEP / SAMPLES)
