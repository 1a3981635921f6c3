"""Epochs of data: one rank alone iterates its loader, and all ranks still draw from one shuffle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.virtual_workers import Worker, cluster, network, notices
from torch import Tensor
from torch.utils.data import DataLoader

import gossamer.train.session.session as session_module
from gossamer.train.world_state import WorldState

DATA = torch.arange(32.0)
RECIPES = ["Dense()", "TopK(0.5)", "LocalSGD(period=2)", "DiLoCo(period=3)", "Gossip()", "DelayedAveraging(2)"]
LATER = "trained on a later epoch of the data"


class Training:
    """A worker's model, session and loader."""

    def __init__(self, worker: Worker, recipe: str, data: Tensor = DATA, batch: int = 4, **options: Any) -> None:
        self.world = WorldState(rank=worker.rank, size=worker.world, local_rank=worker.rank, device=torch.device("cpu"))
        self.loader = DataLoader(data, batch_size=batch, sampler=self.world.shard(data))  # type: ignore[arg-type]
        self.model, self.optimizer, self.session = worker.start(
            network(), lambda model: torch.optim.SGD(model.parameters(), 1e-5), recipe, world=self.world, **options
        )

    def loop(self) -> list[float]:
        """The samples of one iteration over the loader."""
        seen = []
        for batch in self.loader:
            self.model(batch.double()[:, None].expand(-1, 6)).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen += batch.tolist()
        return seen

    def epoch(self) -> list[float]:
        with self.session.epoch():
            return self.loop()

    def evaluate(self) -> None:
        for batch in self.loader:
            with torch.no_grad():
                self.model(batch.double()[:, None].expand(-1, 6))


def assert_covered(by_rank: list[list[list[float]]], epochs: int = 3) -> None:
    for epoch in range(epochs):
        assert sorted(sample for each in by_rank for sample in each[epoch]) == DATA.tolist(), f"in epoch {epoch}"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", ["a batch", "an evaluation"])
def test_what_one_rank_draws_outside_of_the_block_does_not_count(recipe: str, way: str) -> None:
    def work(worker: Worker) -> list[list[float]]:
        training, seen = Training(worker, recipe), []
        for _ in range(3):
            if worker.rank == 0:
                next(iter(training.loader)) if way == "a batch" else training.evaluate()
            seen.append(training.epoch())
        return seen

    with notices() as said:
        assert_covered(cluster(work, 2))
    assert not [text for text in said if LATER in text]


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "Gossip()"])
def test_an_iteration_within_the_block_is_reported_and_the_next_epoch_is_agreed_on(recipe: str) -> None:
    def work(worker: Worker) -> list[list[float]]:
        training = Training(worker, recipe)
        with training.session.epoch():
            if worker.rank == 1:
                next(iter(training.loader))
            training.loop()
        return [training.epoch() for _ in range(3)]

    with notices() as said:
        assert_covered(cluster(work, 2))
    assert [text[:6] for text in said if LATER in text] == ["rank 1"]


@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=2)"])
@pytest.mark.parametrize("verify", ["warn", "stop", "off"])
def test_without_the_block_a_difference_is_reported_once(recipe: str, verify: str) -> None:
    def work(worker: Worker) -> None:
        training = Training(worker, recipe, verify=verify)
        for _ in range(3):
            if worker.rank == 0:
                next(iter(training.loader))
            training.loop()

    with notices() as said:
        cluster(work, 3)
    told = [text for text in said if LATER in text]
    assert len(told) == (verify != "off")
    assert all(text.startswith("rank 0 ") and "`with session.epoch():`" in text for text in told)


def test_iterations_of_all_ranks_are_not_reported() -> None:
    def work(worker: Worker) -> None:
        training = Training(worker, "Dense()")
        for _ in range(40):  # 80 half epochs are more than a report counts
            next(iter(training.loader))
            training.loop()

    with notices() as said:
        cluster(work, 2)
    assert not [text for text in said if LATER in text]


def test_loops_whose_ranks_have_different_numbers_of_batches_are_not_reported() -> None:
    """Without session.epoch(), until a number of steps: rank 0 has 11 batches an epoch and rank 1 has 10."""

    def work(worker: Worker) -> None:
        training, steps = Training(worker, "Dense()", torch.arange(21.0), batch=1), 0
        while steps < 60:
            for batch in training.loader:
                training.model(batch.double()[:, None].expand(-1, 6)).mean().backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
                steps += 1
                if steps == 60:
                    break

    with notices() as said:
        cluster(work, 2)
    assert not [text for text in said if LATER in text]


def test_a_checkpoint_after_one_ranks_evaluation_resumes_with_one_shuffle(tmp_path: Any) -> None:
    def interrupted(worker: Worker) -> None:
        training = Training(worker, "Dense()")
        training.epoch()
        if worker.rank == 0:
            training.evaluate()
        training.session.save(tmp_path)

    def resumed(worker: Worker) -> list[list[float]]:
        training = Training(worker, "Dense()")
        training.session.load(tmp_path)
        if worker.rank == 0:
            next(iter(training.loader))
        return [training.epoch() for _ in range(2)]

    def straight(worker: Worker) -> list[list[float]]:
        training = Training(worker, "Dense()")
        return [training.epoch() for _ in range(3)][1:]

    cluster(interrupted, 2)
    found = cluster(resumed, 2)
    assert_covered(found, 2)
    assert found == cluster(straight, 2)


def test_the_agreement_is_what_the_next_epoch_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with each rank's own number alone, the epochs after an iteration within the block differ."""
    own = session_module.uneven_inputs.leave_epoch
    monkeypatch.setattr(
        session_module.uneven_inputs, "leave_epoch", lambda world, group, together: own(world, group, together=False)
    )

    def work(worker: Worker) -> list[list[float]]:
        training = Training(worker, "Dense()")
        with training.session.epoch():
            if worker.rank == 1:
                next(iter(training.loader))
            training.loop()
        return [training.epoch()]

    with pytest.raises(AssertionError, match="in epoch 0"):
        assert_covered(cluster(work, 2), 1)
