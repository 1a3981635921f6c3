"""A session on virtual workers: the loop stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.sessions import RECIPES, alone, sgd, train
from support.virtual_workers import Worker, agree, batch, cluster, joined, loss_of, network, notices, parameters
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import gossamer.train.session.session as session_module
from gossamer.algorithms.compressors import TopK
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.errors import Stopped
from gossamer.train.session.session import Session
from gossamer.train.synchronizers.gradients import GradientPhase
from gossamer.train.world_state import WorldState


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_dense_equals_one_process_on_the_joined_batch(world: int, set_to_none: bool) -> None:
    together = agree(cluster(lambda worker: train(worker, set_to_none=set_to_none), world))
    torch.testing.assert_close(together, alone(world), atol=1e-12, rtol=1e-12)


def test_the_large_batch_law_catches_a_missing_exchange() -> None:
    def lonely(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd)
        for step in range(5):
            optimizer.zero_grad()
            with session.no_sync():
                loss_of(model, step, worker.rank).backward()
            session._synchronizer.phase = GradientPhase.FINISHED  # type: ignore[attr-defined]  # the twin forgets to exchange
            optimizer.step()
        return parameters(model)

    with pytest.raises(AssertionError):
        torch.testing.assert_close(cluster(lonely, 3)[0], alone(3), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", [2, 3])
def test_workers_agree_bit_for_bit_and_learn(recipe: str, world: int) -> None:
    ended = agree(cluster(lambda worker: train(worker, recipe, 8), world))
    assert torch.isfinite(ended).all()
    assert not torch.equal(ended, parameters(network(0)))


def test_a_world_of_one_is_plain_training() -> None:
    for recipe in RECIPES:
        assert torch.equal(cluster(lambda worker, r=recipe: train(worker, r), 1)[0], alone(1))


def test_state_dict_and_class_stay() -> None:
    def work(worker: Worker) -> None:
        model = network()
        keys, kind, module_list = list(model.state_dict()), type(model), list(model.named_modules())
        optimizer = sgd(model)
        session = worker.attach(model, optimizer)
        assert (list(model.state_dict()), type(model), list(model.named_modules())) == (keys, kind, module_list)
        assert session.steps == 0

    cluster(work, 2)


def test_no_feedback_means_nothing_to_remember() -> None:
    def work(worker: Worker) -> dict[str, Any]:
        model = network(0)
        return worker.attach(model, sgd(model), TopK(density=0.5, feedback=False)).state_dict()

    assert cluster(work, 2)[0]["state"] == {}


# -- what people do around backward ------------------------------------------------------------------------------------


def test_clipping_scheduling_groups_and_nesterov() -> None:
    def loop(
        model: nn.Module, backward: Callable[[int], None], attach: Callable[[torch.optim.Optimizer], Any]
    ) -> Tensor:
        first, rest = list(model.parameters())[:2], list(model.parameters())[2:]
        optimizer = torch.optim.SGD(
            [{"params": first, "lr": 0.2}, {"params": rest, "weight_decay": 0.1}], lr=0.1, momentum=0.9, nesterov=True
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=8)
        attach(optimizer)
        for step in range(8):
            optimizer.zero_grad()
            backward(step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            scheduler.step()
        return parameters(model)

    def work(worker: Worker) -> Tensor:
        model = network(worker.rank)

        def backward(step: int) -> None:
            loss_of(model, step, worker.rank).backward()

        return loop(model, backward, lambda optimizer: worker.attach(model, optimizer))

    model = network(0)

    def backward_on_all(step: int) -> None:
        inputs, targets = joined(batch(step, rank) for rank in range(3))
        mse_loss(model(inputs), targets).backward()

    torch.testing.assert_close(
        agree(cluster(work, 3)), loop(model, backward_on_all, lambda optimizer: None), atol=1e-12, rtol=1e-12
    )


@pytest.mark.parametrize("world", [1, 3])
def test_clip_norm_is_clip_grad_norm(world: int) -> None:
    def by_hand(worker: Worker) -> Tensor:
        model, optimizer, _ = worker.start(network(0), sgd)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
        return parameters(model)

    clipped = cluster(lambda worker: train(worker, None, 4, clip_norm=0.2), world)[0]
    assert torch.equal(cluster(by_hand, world)[0], clipped)
    assert not torch.equal(clipped, cluster(lambda worker: train(worker, None, 4), world)[0])


@pytest.mark.parametrize("world", [1, 3])
def test_everyone_stops_after_the_same_step(world: int) -> None:
    def loop(worker: Worker, session: Session) -> None:
        with session.epoch():
            for step in range(100 if worker.rank != 1 else 3):
                session.optimizer.zero_grad()
                loss_of(session.model, step, worker.rank).backward()
                if step == 5 and worker.rank == world - 1:
                    session.request_stop()
                session.optimizer.step()

    def work(worker: Worker) -> tuple[int, Tensor]:
        model = network(0)
        session = worker.attach(model, sgd(model))
        loop(worker, session)
        assert session.should_stop
        with pytest.raises(Stopped), session.epoch():
            pytest.fail("another epoch began")
        return session.steps, parameters(model)

    results = cluster(work, world)
    assert len({steps for steps, _ in results}) == 1
    assert 6 <= results[0][0] <= 7
    agree([ended for _, ended in results])


def test_a_forked_child_is_inert() -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd)
        session._group.pid += 1
        session._step_hooks._pid += 1
        session._synchronizer._watch._pid += 1
        loss_of(model, 0, worker.rank).backward()
        optimizer.step()
        assert session.steps == 0
        session.close()  # does nothing in a child
        assert session in open_sessions()
        session._group.pid -= 1
        return parameters(model)

    results = cluster(work, 2)
    assert not torch.equal(results[0], results[1]), "a forked child talked"


@pytest.mark.parametrize(
    ("old", "new", "use"),
    [
        ("merged", "averaged_parameters", lambda old, session: old(session.model).__enter__() is session.model),
        (
            "weight",
            "set_batch_weight",
            lambda old, session: old(8) or session._synchronizer.controls.weight == 8,
        ),
        ("ask_to_stop", "request_stop", lambda old, session: old() is None and session._synchronizer.asked_to_stop),
        ("stopping", "should_stop", lambda old, session: old is session.should_stop),
        ("reset", "reset_compressor_state", lambda old, session: old("0.weight") is None),
    ],
)
def test_former_names_warn_and_equal_the_new_names(old: str, new: str, use: Callable[[Any, Session], bool]) -> None:
    def work(worker: Worker) -> bool:
        _, _, session = worker.start(network(), sgd, "TopK(0.1)")
        with pytest.warns(DeprecationWarning, match=rf"Write session\.{new}\.") as warned:
            found = getattr(session, old)
        assert warned[0].filename == __file__
        return use(found, session)

    assert cluster(work, 1) == [True]


# -- Epochs of data: one rank alone iterates its loader, and all ranks still draw from one shuffle ---------------------

DATA = torch.arange(32.0)
EPOCH_RECIPES = ["Dense()", "TopK(0.5)", "LocalSGD(period=2)", "DiLoCo(period=3)", "Gossip()", "DelayedAveraging(2)"]
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
        for samples in self.loader:
            self.model(samples.double()[:, None].expand(-1, 6)).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen += samples.tolist()
        return seen

    def epoch(self) -> list[float]:
        with self.session.epoch():
            return self.loop()

    def evaluate(self) -> None:
        for samples in self.loader:
            with torch.no_grad():
                self.model(samples.double()[:, None].expand(-1, 6))


def assert_covered(by_rank: list[list[list[float]]], epochs: int = 3) -> None:
    for epoch in range(epochs):
        assert sorted(sample for each in by_rank for sample in each[epoch]) == DATA.tolist(), f"in epoch {epoch}"


@pytest.mark.parametrize("recipe", EPOCH_RECIPES)
@pytest.mark.parametrize("way", ["a batch", "an evaluation"])
def test_draws_of_one_rank_outside_of_the_block_do_not_count(recipe: str, way: str) -> None:
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


@pytest.mark.parametrize("recipe", [recipe for recipe in EPOCH_RECIPES if recipe != "Gossip()"])
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


def test_uneven_loops_by_steps_are_not_reported() -> None:
    """Without session.epoch(), until a number of steps: rank 0 has 11 batches an epoch and rank 1 has 10."""

    def work(worker: Worker) -> None:
        training, steps = Training(worker, "Dense()", torch.arange(21.0), batch=1), 0
        while steps < 60:
            for samples in training.loader:
                training.model(samples.double()[:, None].expand(-1, 6)).mean().backward()
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


def test_mutant_without_agreement_on_epochs_repeats_samples(monkeypatch: pytest.MonkeyPatch) -> None:
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
