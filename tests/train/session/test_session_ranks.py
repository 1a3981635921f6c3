"""Ranks of a session that differ: in data, in weights, and where they must not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.keeping_optimizers import ListedMasterSGD, MasterSGD, ScheduleFreeSGD, Within
from support.nightly import once_each
from support.pairwise_sessions import settle
from support.sessions import sgd, train
from support.training_loops import spread
from support.virtual_workers import (
    Worker,
    agree,
    batch,
    cluster,
    loss_of,
    network,
    notices,
    parameters,
    seeded,
    train_step,
    trained_alone,
)
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gossamer
from gossamer.errors import AttachError, LoopError, MismatchError
from gossamer.train.session.session import Session

# -- uneven data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.3)"])
def test_ranks_run_out_of_data_at_different_times(recipe: str) -> None:
    def work(worker: Worker) -> tuple[Tensor, int, Tensor]:
        model = network(worker.rank)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        session = worker.attach(model, optimizer, recipe)
        for epoch in range(2):
            with session.epoch():
                for step in range([5, 2, 0][worker.rank]):
                    loss_of(model, 100 * epoch + step, worker.rank).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        moments = [state["exp_avg"].flatten() for state in optimizer.state.values()]
        return parameters(model), session.steps, torch.cat(moments)

    results = cluster(work, 3)
    agree([ended for ended, *_ in results])
    agree([moments for *_, moments in results])
    assert {steps for _, steps, _ in results} == {10}


def test_statistics_are_those_of_the_first_rank_with_data() -> None:
    batches = [2, 5, 4]

    def normed() -> nn.Sequential:
        with seeded(0):
            return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()

    def work(worker: Worker) -> Tensor:
        model = normed()
        optimizer = sgd(model, lr=0.0)
        session = worker.attach(model, optimizer)
        with session.epoch():
            for step in range(batches[worker.rank]):
                optimizer.zero_grad()
                loss_of(model, step, worker.rank).backward()
                optimizer.step()
        return torch.cat([buffer.double().flatten() for buffer in model.buffers()])

    expected = normed()
    for step in range(max(batches)):
        first = next(rank for rank, count in enumerate(batches) if step < count)
        loss_of(expected, step, first)
    means = torch.cat([buffer.double().flatten() for buffer in expected.buffers()])
    assert torch.equal(agree(cluster(work, 3)), means)


def test_saving_within_an_epoch(tmp_path: Path) -> None:
    def work(worker: Worker, batches: int) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, "TopK(0.3)")
        with session.epoch():
            for step in range(batches):
                train_step(model, optimizer, step, worker.rank)
                if step == 2:
                    session.save(tmp_path)
        return parameters(model)

    saved = agree(cluster(lambda worker: work(worker, 4), 3))
    assert torch.equal(saved, cluster(lambda worker: train(worker, "TopK(0.3)", 4), 3)[0])
    with pytest.raises(LoopError, match=r"call session\.save.* ranks 0, 1 called it.*drop_last"):
        cluster(lambda worker: work(worker, 2 if worker.rank == 2 else 4), 3)


def test_weights_make_uneven_batches_one_batch() -> None:
    sizes = [5, 3, 1]

    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd)
        for step in range(4):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank, sizes[(worker.rank + step) % 3])
            session.set_batch_weight(len(inputs))
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
        return parameters(model)

    expected = trained_alone(sgd, 4, lambda step: [batch(step, rank, sizes[(rank + step) % 3]) for rank in range(3)])
    torch.testing.assert_close(agree(cluster(work, 3)), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.2)", "LocalSGD(period=2)", "EveryStep(delay=1)", "DiLoCo(2)"])
@pytest.mark.parametrize("since", [0, 3])
def test_batch_weight_set_on_one_rank_alone_is_refused(recipe: str, since: int) -> None:
    def work(worker: Worker, everyone: bool) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, recipe)
        for step in range(6):
            optimizer.zero_grad()
            if step >= since and (everyone or worker.rank == 1):
                session.set_batch_weight(8)
            loss_of(model, step, worker.rank).backward()
            optimizer.step()
        return parameters(model)

    agree(cluster(lambda worker: work(worker, True), 3))
    with pytest.raises(
        MismatchError, match=r"not called' on ranks 0, 2.*called' on rank 1.*on every rank, or on no rank"
    ):
        cluster(lambda worker: work(worker, False), 3)


def test_equal_weights_change_no_bit() -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, "TopK(0.2)")
        for step in range(4):
            optimizer.zero_grad()
            session.set_batch_weight(7)
            loss_of(model, step, worker.rank).backward()
            optimizer.step()
        return parameters(model)

    assert torch.equal(cluster(work, 3)[0], cluster(lambda worker: train(worker, "TopK(0.2)", 4), 3)[0])


# -- ranks that are not alike ------------------------------------------------------------------------------------------


def test_optimizer_state_on_one_rank_only_is_found() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        optimizer = sgd(model)
        if worker.rank == 0:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        worker.attach(model, optimizer)

    with pytest.raises(MismatchError, match=r"optimizer.*on rank 0.*on rank"):
        cluster(work, 3)


def test_other_recipe_layout_and_learning_rate_are_found() -> None:
    with pytest.raises(MismatchError, match=r"TopK.*rank 1|rank 1.*TopK"):
        cluster(lambda worker: train(worker, "TopK(0.1)" if worker.rank == 1 else "Dense()", 1), 2)

    def wider(worker: Worker) -> None:
        model = nn.Linear(6, 3 + worker.rank)
        worker.attach(model, torch.optim.SGD(model.parameters(), 0.1))

    with pytest.raises(MismatchError, match=r"layout|names, shapes"):
        cluster(wider, 2)

    def hotter(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), sgd)
        for step in range(3):
            loss_of(model, step, worker.rank).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5 if worker.rank == 1 and step == 1 else 1.0

    with pytest.raises(MismatchError, match=r"lr=0\.1.*rank 0.*lr=0\.05.*rank 1"):
        cluster(hotter, 2)


@pytest.mark.parametrize("equal", [True, False])
def test_equal_first_batches_are_noticed(equal: bool) -> None:
    def work(worker: Worker) -> None:
        model, _, _ = worker.start(network(0), sgd)
        loss_of(model, 0, 0 if equal else worker.rank).backward()

    with notices() as said:
        cluster(work, 2)
    assert len(said) == equal
    assert all("world.shard" in message for message in said)


# -- Optimizers that keep weights of their own: the next step begins with what a mean has written into parameters

Rule = Callable[[nn.Module], torch.optim.Optimizer]
RULES: dict[str, Rule] = {
    "masters in the state": lambda model: MasterSGD(model.parameters(), lr=0.1),
    "masters in a list": lambda model: ListedMasterSGD(model.parameters(), lr=0.1),
    "within another": lambda model: Within(MasterSGD(model.parameters(), lr=0.1)),
    "none": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}
RECIPES = [
    "LocalSGD(2)",
    "LocalSGD(2) + Int8()",
    "LocalSGD(2, per_site=2)",
    "DiLoCo(2)",
    "PostLocalSGD(2, start=2)",
    "DelayedAveraging(delay=1, period=2) + TopK(0.3)",
    "Gossip(period=2) + Ring()",
    "Gossip('push-sum', period=2)",
]


def begin(worker: Worker, rule: Rule, recipe: str) -> tuple[nn.Module, Session]:
    model = network(0, torch.bfloat16)
    return model, worker.attach(model, rule(model), recipe)


def train_copies(session: Session, steps: range, rank: int) -> None:
    for step in steps:
        train_step(session.model, session.optimizer, step, rank)


def step_of_nothing(session: Session) -> tuple[Tensor, Tensor]:
    """Parameters before and after a step whose gradients are zero, of which the session does not hear."""
    before = parameters(session.model)
    for parameter in session.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in session.optimizer.param_groups:
        group["lr"], group["momentum"] = 0.0, 0.0
    inner = getattr(session.optimizer, "inner", session.optimizer)
    type(inner).step.__wrapped__(inner)  # type: ignore[attr-defined]
    return before, parameters(session.model)


@once_each("recipe, rule", RECIPES, RULES)
def test_next_step_begins_with_the_parameters_of_the_round(recipe: str, rule: str) -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor, Tensor]:
        _, session = begin(worker, RULES[rule], recipe)
        train_copies(session, range(3), worker.rank)
        alone = parameters(session.model)
        train_copies(session, range(3, 4), worker.rank)
        return alone, *step_of_nothing(session)

    found = cluster(work, 4)
    assert spread([alone.double() for alone, *_ in found]) > 0
    for _, written, begun in found:
        assert torch.equal(written, begun)


def merged_error(worker: Worker, recipe: str, rule: Rule) -> float:
    """How far what is merged is from the solution that both workers' data have together."""
    target = torch.linspace(-1, 1, 8)
    model = nn.Linear(8, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.zero_()
    session = worker.attach(model, rule(model), recipe)
    generator = torch.Generator().manual_seed(worker.rank)
    for _ in range(120):
        x = torch.randn(8, 8, generator=generator) * (torch.arange(8) % 2 == worker.rank)  # each knows half of it
        session.optimizer.zero_grad()
        (model(x.bfloat16())[:, 0].float() - x @ target).square().mean().backward()
        session.optimizer.step()
    with session.averaged_parameters(model):
        return float((model.weight.detach()[0].float() - target).abs().mean())


def test_communication_reaches_a_solution_with_masters_in_float32() -> None:
    """Each worker alone leaves half of the weights at zero, an error of 0.29."""
    for error in cluster(lambda worker: merged_error(worker, "LocalSGD(4)", RULES["masters in the state"]), 2):
        assert error < 0.02


def test_steps_smaller_than_a_rounding_error_add_up_across_rounds() -> None:
    """A bfloat16 of 1 does not hear of a step of 0.001; twenty of them, in ten rounds, move it."""

    def work(worker: Worker) -> float:
        model = nn.Linear(1, 1, bias=False).bfloat16()
        with torch.no_grad():
            model.weight.fill_(1.0)
        session = worker.attach(model, MasterSGD(model.parameters(), lr=0.001), "LocalSGD(2)")
        for _ in range(20):
            session.optimizer.zero_grad()
            model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
            session.optimizer.step()
        return float(model.weight.detach())

    assert cluster(work, 2) == [pytest.approx(0.98, abs=0.004)] * 2


def test_pairwise_gossip_moves_copies_when_it_drains_and_at_the_end() -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        _, session = begin(worker, RULES["masters in the state"], "Gossip('pairwise')")
        train_copies(session, range(6), worker.rank)
        worker.transport.all_gather_text("")
        session.close()
        return step_of_nothing(session)

    for written, begun in cluster(work, 2):
        assert torch.equal(written, begun)


def test_pairwise_gossip_brings_masters_together() -> None:
    """Steps of a learning rate of zero, each of which overwrites parameters by the masters."""

    def work(worker: Worker) -> float:
        model = nn.Linear(3, 1, bias=False).bfloat16()
        session = worker.attach(model, MasterSGD(model.parameters(), lr=0.0), "Gossip('pairwise')")
        with torch.no_grad():
            model.weight.fill_(1.0 + 2.0 * worker.rank)
        for _ in range(100):  # two that ask each other at one moment may both be declined
            session.optimizer.step()
            settle(session)
            shown = worker.transport.all_gather_text(str(parameters(model).tolist()))
            if len({*shown}) == 1:
                break
        return float(model.weight.detach()[0, 0])

    assert cluster(work, 2) == [2.0, 2.0]


def test_a_switch_and_a_resharded_checkpoint_move_copies(tmp_path: Path) -> None:
    def switched(worker: Worker) -> tuple[Tensor, Tensor]:
        _, session = begin(worker, RULES["masters in a list"], "LocalSGD(4)")
        train_copies(session, range(6), worker.rank)
        session.save(tmp_path)
        session.switch("Dense()")
        return step_of_nothing(session)

    def resharded(worker: Worker) -> tuple[Tensor, Tensor]:
        _, session = begin(worker, RULES["masters in the state"], "LocalSGD(4)")
        train_copies(session, range(6), worker.rank)
        session.load(tmp_path / "state") if worker.world == 3 else session.save(tmp_path / "state")
        return step_of_nothing(session)

    for work, world in ((switched, 2), (resharded, 2), (resharded, 3)):
        for written, begun in cluster(work, world):
            assert torch.equal(written, begun), (work, world)


# -- schedule-free -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    ["LocalSGD(4) + Int8()", "PostLocalSGD(4, start=3)", "DiLoCo(4)", "DelayedAveraging(2)", "LocalSGD(4, per_site=2)",
     "Gossip()", "Gossip('pairwise')", "ParameterServer('async')"],
)  # fmt: skip
def test_an_optimizer_that_lends_another_average_in_eval_is_refused_where_workers_train_apart(recipe: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(AttachError, match=r"ScheduleFreeSGD has train\(\) and eval\(\)") as refused:
        gossamer.attach(model, ScheduleFreeSGD(model.parameters(), lr=0.1), recipe)
    line = str(refused.value).partition("gradients: gossamer.attach(model, optimizer, ")[2].partition(");")[0]
    session = gossamer.attach(model, ScheduleFreeSGD(model.parameters(), lr=0.1), line.strip('"'))
    session.close()


def test_a_switch_to_local_steps_with_such_an_optimizer_is_refused() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        session = worker.attach(model, ScheduleFreeSGD(model.parameters(), lr=0.1), "Dense()")
        train_copies(session, range(2), worker.rank)
        session.switch("LocalSGD(4)")

    with pytest.raises(AttachError, match="ScheduleFreeSGD"):
        cluster(work, 2)


def test_in_lock_step_all_have_the_same_average() -> None:
    def work(worker: Worker) -> Tensor:
        model = network(0)
        optimizer = ScheduleFreeSGD(model.parameters(), lr=0.1)
        session = worker.attach(model, optimizer, "TopK(0.5)")
        train_copies(session, range(6), worker.rank)
        optimizer.eval()
        return parameters(model)

    assert spread(cluster(work, 2)) == 0
