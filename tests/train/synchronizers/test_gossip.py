"""Gossip sessions: equal to the rules by hand, and together where they must be."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gossip_rounds import Lopsided
from support.gossip_sessions import merged_of, pass_through, start
from support.resumed_training import check_resume, train
from support.training_loops import LR, START, Trace, agree, close, gradient, heard, run, sgd
from support.virtual_workers import Worker, batch, cluster, loss_of, network, parameters, seeded
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer import events
from gossamer.algorithms.gossip.rules import MASS
from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.algorithms.strategies import Gossip
from gossamer.algorithms.topologies import Topology
from gossamer.errors import AttachError, LoopError, NonFiniteError, Stopped
from gossamer.train.engine.step_decision import Presence
from gossamer.train.session.session import Session
from gossamer.train.synchronizers.gossip import GossipAveraging
from gossamer.train.synchronizers.gossip_round import RoundHeader, check

# -- what neighbours come to ------------------------------------------------------------------------------------------


def by_hand(topology: Topology, steps: int, world: int) -> list[Tensor]:
    """x_i <- sum_j W_ij (x_j - lr g_j(x_j)), by matrices: (world, n) after each step."""
    xs, path = START.repeat(world, 1), []
    for step in range(steps):
        moved = torch.stack([x - LR * gradient(x, step, rank) for rank, x in enumerate(xs)])
        xs = topology.mixing(world, step) @ moved
        path.append(xs)
    return path


def check_by_hand(recipe: str, theirs: str | None = None) -> None:
    traces, path = run(recipe, 6, world=4), by_hand(resolve(theirs or recipe).topology, 6, 4)
    for step, together in enumerate(path):
        close(torch.stack([trace.path[step] for trace in traces]), together)
        close(agree([trace.merged[step] for trace in traces]), together.mean(0))


@pytest.mark.parametrize(
    "recipe",
    [
        "Gossip() + Ring()",
        "Gossip() + Complete()",
        "Gossip() + Exponential(one_peer=True)",
        "Gossip() + RandomPeers()",
        "Gossip() + Groups(size=2)",
        "Gossip() + Groups(size=3)",
        "Gossip(step_size=1.0) + TopK(density=1.0) + Ring()",
        "Gossip('push-sum') + Exponential()",
    ],
)
def test_sessions_mix_as_the_matrices_do(recipe: str) -> None:
    check_by_hand(recipe)


def test_the_check_catches_other_neighbours() -> None:
    with pytest.raises(AssertionError, match="not close"):
        check_by_hand("Gossip() + Ring()", "Gossip() + Complete()")
    with pytest.raises(AssertionError, match="not close"):
        check_by_hand("Gossip(step_size=1.0) + Dense(dtype='float32') + Ring()")


def test_everyone_a_neighbour_is_averaging_parameters() -> None:
    ours, theirs = run("Gossip()", 6), run("LocalSGD(1)", 6)
    for one, other in zip(ours, theirs, strict=True):
        close(torch.stack(one.path), torch.stack(other.path))
    with pytest.raises(AssertionError, match="not close"):
        close(ours[0].path[-1], run("Gossip(period=2) + Ring()", 6)[0].path[-1])


def test_periods_are_counted_in_backward_passes() -> None:
    with heard(events.StepEnded) as ended:
        run("Gossip(period=3) + Ring()", 6)
    talked = {event.step for event in ended if event.bytes_sent > 1000}
    assert talked >= {3, 6}


def merged_after(recipe: Any, steps: int = 5, world: int = 4) -> tuple[list[Trace], list[float]]:
    with heard(events.Logged) as logged:
        traces = run(recipe, steps, world=world, rule=sgd(momentum=0.9))
    return traces, [event.values["consensus_distance"] for event in logged if event.step == steps]


@pytest.mark.parametrize("recipe", ["Gossip() + Ring()", "Gossip() + TopK(0.2) + Ring()"])
def test_merged_parameters_are_the_mean_of_all(recipe: str) -> None:
    traces, distances = merged_after(recipe)
    last = torch.stack([trace.path[-1] for trace in traces])
    close(agree([trace.merged[-1] for trace in traces]), last.mean(0), 1e-14)
    wanted = sqrt(float((last - last.mean(0)).square().sum() / 4))
    assert distances == pytest.approx([wanted] * 4)
    assert wanted > 1e-3


def test_push_sum_merges_by_mass_on_any_graph() -> None:
    recipe = Recipe(strategy=Gossip("push-sum"), topology=Lopsided())
    traces, _ = merged_after(recipe, world=5)
    states = [trace.session.state_dict()["state"] for trace in traces]
    masses = torch.cat([state["0.weight"][f"mixing.{MASS}"] for state in states])
    assert float(masses.sum()) == pytest.approx(5, abs=1e-13)
    assert len(set(masses.tolist())) > 1
    last = torch.stack([trace.path[-1] for trace in traces])
    merged = agree([trace.merged[-1] for trace in traces])
    close(merged, (masses[:, None] * last).sum(0) / 5, 1e-13)
    with pytest.raises(AssertionError, match="not close"):
        close(merged, last.mean(0), 1e-13)


def test_averages_on_such_a_graph_are_refused() -> None:
    with pytest.raises(AttachError, match=r'Write Gossip\("push-sum"\) \+ Lopsided\(\)'):
        run(Recipe(strategy=Gossip(), topology=Lopsided()), 1, world=5)


def normed(worker: Worker, recipe: str, steps: int = 3) -> tuple[Tensor, Tensor]:
    """(running means as they would be alone in one step, and as they are) after steps on unequal data."""
    with seeded(worker.rank):
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    session = worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.0), recipe)
    norm: Any = model[1]
    for step in range(steps):
        inputs, targets = batch(step, worker.rank)
        before = norm.running_mean.clone()
        mse_loss(model(inputs + worker.rank), targets).backward()
        alone = norm.running_mean.clone()
        session.optimizer.step()
    assert not torch.equal(before, alone)
    return alone, norm.running_mean.clone()


@pytest.mark.parametrize("recipe", ["Gossip() + Ring()", "Gossip() + Int8() + Ring()", "Gossip('push-sum') + Ring()"])
def test_running_statistics_are_mixed_too(recipe: str) -> None:
    alone, mixed = zip(*cluster(lambda worker: normed(worker, recipe), 4), strict=True)
    close(torch.stack(mixed), resolve("Gossip() + Ring()").topology.mixing(4) @ torch.stack(alone))
    with pytest.raises(AssertionError, match="not close"):
        close(torch.stack(mixed), torch.stack(alone))


class Masked(nn.Module):
    """With a constant buffer that is not finite, and running statistics, which are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.mask + self.norm(self.linear(x))[:, None], dim=-1).sum(1)


def masked(worker: Worker, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    with seeded(worker.rank):
        model = Masked()
    session = worker.attach(model, torch.optim.SGD(model.parameters(), lr=LR), recipe)
    for step in range(7):
        loss_of(model, step, worker.rank).backward()
        session.optimizer.step()
        session.optimizer.zero_grad()
    session.close()
    assert isinstance(model.norm.running_mean, Tensor)
    return parameters(model), model.norm.running_mean, torch.isneginf(model.get_buffer("mask"))


@pytest.mark.parametrize(
    "recipe",
    [
        "Gossip()",
        "Gossip('push-sum')",
        "Gossip('pairwise')",
        "LocalSGD(1)",
        "DelayedAveraging(1)",
        "EveryStep(delay=1)",
    ],
)
def test_masks_that_are_infinite_stay_as_they_are(recipe: str) -> None:
    ended = cluster(lambda worker: masked(worker, recipe), 2)
    assert all(bool(x.isfinite().all()) for x, _, _ in ended)
    assert all(infinite.tolist() == torch.ones(3, 3).triu(1).bool().tolist() for _, _, infinite in ended)
    if "delay" not in recipe.lower():  # what is still under way at the end is dropped
        close(ended[0][1], ended[1][1])


# -- the loop's bad days ----------------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_stays_local_and_is_reported() -> None:
    def work(worker: Worker) -> tuple[int, Tensor]:
        session = start(worker, "Gossip() + Ring()")
        next(session.model.parameters()).register_hook(
            lambda gradient: gradient * float("nan") if worker.rank == 1 and session.steps == 2 else gradient
        )
        pass_through(session, range(5), worker.rank)
        return session.steps, parameters(session.model)

    with heard(events.Skipped) as skipped:
        ended = cluster(work, 4)
    assert [(event.step, event.rank, event.tensor) for event in skipped] == [(3, 1, "0.weight")]
    assert all(steps == 5 and bool(x.isfinite().all()) for steps, x in ended)


def test_worker_with_parameters_that_are_not_finite_is_named_and_ends() -> None:
    def ruin(session: Session, step: int) -> None:
        if session._transport.rank == 1 and step > 0:
            next(session.model.parameters()).data.fill_(float("inf"))

    def work(worker: Worker) -> None:
        pass_through(start(worker, "Gossip() + Ring()"), range(8), worker.rank, ruin)

    with pytest.raises(NonFiniteError, match=r'values were not finite 5 steps in a row.*"0\.weight" on rank 1'):
        cluster(work, 4)


def scaled_step(
    worker: Worker,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    overflows: bool,
) -> None:
    optimizer.zero_grad()
    inputs, targets = batch(step, worker.rank, dtype=torch.float32)
    loss = mse_loss(model(inputs), targets) * (torch.inf if overflows else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("overflow", [1, 4])  # of five steps
def test_a_step_that_a_scaler_skips_is_followed_by_its_round(overflow: int) -> None:
    def work(worker: Worker) -> tuple[int, Tensor]:
        model = network(worker.rank, torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
        session = worker.attach(model, optimizer, "Gossip() + Ring()", scaler=scaler)
        for step in range(5):
            scaled_step(worker, step, model, optimizer, scaler, overflows=(step, worker.rank) == (overflow, 1))
        return session.steps, merged_of(session)

    ended = cluster(work, 3)
    assert [steps for steps, _ in ended] == [5] * 3
    assert bool(agree([merged for _, merged in ended]).isfinite().all())


def stopped_beside(overflow: int, recipe: str = "Gossip() + Ring()") -> None:
    """One rank asks for the end while the scaler of another skips a step: all end after the same one."""

    def work(worker: Worker) -> tuple[int, Tensor]:
        model = network(worker.rank, torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
        session = worker.attach(model, optimizer, recipe, scaler=scaler)

        def until_told() -> None:
            for step in range(20):
                if (step, worker.rank) == (2, 0):
                    session.request_stop()
                scaled_step(worker, step, model, optimizer, scaler, overflows=(step, worker.rank) == (overflow, 1))

        with pytest.raises(Stopped):
            until_told()
        return session.steps, merged_of(session)

    ended = cluster(work, 3)
    assert len({steps for steps, _ in ended}) == 1
    assert bool(agree([merged for _, merged in ended]).isfinite().all())


@pytest.mark.parametrize("overflow", range(2, 7))
def test_all_stop_after_the_same_step_also_where_a_scaler_skips_it(overflow: int) -> None:
    stopped_beside(overflow)


def test_a_round_that_waits_for_the_step_after_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GossipAveraging, "step_skipped", lambda self: None)
    with pytest.raises((AssertionError, LoopError)):
        test_a_step_that_a_scaler_skips_is_followed_by_its_round(1)


def uneven(worker: Worker, recipe: str, batches: Sequence[int]) -> tuple[int, Tensor]:
    session = start(worker, recipe)
    for epoch in range(2):
        with session.epoch():
            pass_through(session, range(10 * epoch, 10 * epoch + batches[worker.rank]), worker.rank)
    return session.steps, merged_of(session)


@pytest.mark.parametrize("recipe", ["Gossip() + Ring()", "Gossip(period=3) + TopK(0.2) + Ring()"])
def test_a_rank_that_has_run_out_of_data_keeps_its_neighbours_company(recipe: str) -> None:
    ended = cluster(lambda worker: uneven(worker, recipe, [3, 5, 1, 9]), 4)
    agree([merged for _, merged in ended])
    steps = {steps for steps, _ in ended}
    assert len(steps) == 1
    assert steps.pop() >= 18


@pytest.mark.parametrize("steps", [2, 3])  # the others are in a round among neighbours, or of all
def test_without_epoch_the_difference_is_refused(steps: int) -> None:
    def work(worker: Worker) -> None:
        session = start(worker, "Gossip() + Ring()")
        pass_through(session, range(steps + (worker.rank == 2)), worker.rank)
        merged_of(session)

    with pytest.raises(
        LoopError, match=r"rank . called session\.averaged_parameters\(\) or session\.close\(\).*session\.epoch\(\)"
    ):
        cluster(work, 4)


def test_neighbours_must_be_in_the_same_round() -> None:
    heads = {rank: RoundHeader(7, 14, Presence.TRAINING, False) for rank in range(3)}
    check(heads)
    check({rank: head._replace(presence=Presence.SAVING) for rank, head in heads.items()})
    check(heads | {2: heads[2]._replace(presence=Presence.OUT_OF_DATA, passes=13)})
    with pytest.raises(LoopError, match=r"rank 0 in 7, rank 1 in 7, rank 2 in 8.*session\.load\(directory\)"):
        check(heads | {2: heads[2]._replace(number=8)})
    waiting = {rank: head._replace(presence=Presence.SAVING) for rank, head in heads.items()}
    with pytest.raises(LoopError, match="same number of steps"):
        check(waiting | {1: waiting[1]._replace(passes=13)})


def test_all_stop_after_the_same_step() -> None:
    def work(worker: Worker) -> int:
        session = start(worker, "Gossip() + Ring()")

        def ask(session: Session, step: int) -> None:
            if worker.rank == 3 and step == 5:
                session.request_stop()

        with pytest.raises(Stopped):
            pass_through(session, range(20), worker.rank, ask)
        return session.steps

    assert cluster(work, 4) == [8] * 4  # the first round after that in which all meet


@pytest.mark.parametrize(("well", "digests"), [(True, 1), (False, 4)])
def test_digest_after_success_is_of_the_mean(well: bool, digests: int) -> None:
    def work(worker: Worker) -> None:
        session = start(worker, "Gossip() + Ring()")
        pass_through(session, range(2), worker.rank)
        session.__exit__(None if well else ValueError, None, None)

    with heard(events.Closed) as closed:
        cluster(work, 4)
    assert len({event.digest for event in closed}) == digests


# -- Gossip resumed: training goes the same way, with the same workers or others ---------------------------------------


@pytest.mark.parametrize(
    ("recipe", "after", "world"),
    [
        ("Gossip() + Ring()", [3], 3),
        ("Gossip(period=3) + TopK(0.2) + Ring()", [2, 7], 4),
        ("Gossip() + PowerSGD(2) + Ring()", [5], 3),
        ("Gossip('push-sum', period=2) + Exponential(one_peer=True)", [3], 3),
        ("Gossip() + RandomPeers()", [5], 4),
    ],
)
def test_resumed_training_goes_the_same_way(recipe: str, after: Sequence[int], world: int) -> None:
    check_resume(recipe, after, world=world)


def test_resumed_push_sum_goes_the_same_way_where_masses_differ() -> None:
    check_resume(Recipe(strategy=Gossip("push-sum"), topology=Lopsided()), [3], world=4)  # type: ignore[arg-type]


def no_mass(session: Any) -> None:
    for kept in session["state"].values():
        kept[f"mixing.{MASS}"].fill_(1.0)


def nothing_public(session: Any) -> None:
    for kept in session["state"].values():
        kept["mixing.hat"].zero_()


def no_pull(session: Any) -> None:
    for kept in session["state"].values():
        kept["mixing.pull"].zero_()


def first_round(session: Any) -> None:
    session["progress"]["round"] = 1


@pytest.mark.parametrize(
    ("recipe", "spoil"),
    [
        (Recipe(strategy=Gossip("push-sum"), topology=Lopsided()), no_mass),
        ("Gossip() + TopK(0.2) + Ring()", nothing_public),
        ("Gossip() + TopK(0.2) + Ring()", no_pull),
        ("Gossip() + RandomPeers()", first_round),
    ],
    ids=["mass", "hat", "pull", "round"],
)
def test_mutants_of_resume_are_detected(recipe: Any, spoil: Any) -> None:
    with pytest.raises(AssertionError, match="another way"):
        check_resume(recipe, [4], spoil, world=4)


@pytest.mark.parametrize("recipe", ["Gossip() + Ring()", "Gossip() + Int8() + Ring()", "Gossip('push-sum') + Ring()"])
def test_other_workers_begin_with_the_mean(recipe: str, tmp_path: Path) -> None:
    before = cluster(lambda worker: train(worker, recipe, 0, 4, save=tmp_path), 4)
    with heard(events.Noticed) as noticed:
        after = cluster(lambda worker: begun_again(worker, recipe, tmp_path), 2)
    mean = torch.stack([path[-1] for path, *_ in before]).mean(0)
    for begun, merged in after:
        close(begun, mean, 1e-12)
        assert torch.equal(merged, after[0][1])
    assert ["parameters are the mean" in event.message for event in noticed] == [True]


def begun_again(worker: Worker, recipe: str, directory: Path) -> tuple[Tensor, Tensor]:
    model = network(worker.rank)
    session = worker.attach(model, torch.optim.AdamW(model.parameters(), lr=0.01), recipe)
    assert session.load(directory) == {"made": 4}
    begin = parameters(model)
    pass_through(session, range(4, 7), worker.rank)
    return begin, merged_of(session)


def test_resized_parameters_begin_again_and_the_rest_continues() -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        session = start(worker, "Gossip() + TopK(0.2) + Ring()")
        pass_through(session, range(3), worker.rank)
        session.optimizer.zero_grad()
        session.model.get_parameter("4.bias").data = torch.full((3,), float(worker.rank), dtype=torch.float64)
        session.reset_compressor_state("4.bias")
        pass_through(session, range(3, 6), worker.rank)
        state = session.state_dict()["state"]
        return torch.cat([state[name]["mixing.pull"].flatten() for name in sorted(state)]), merged_of(session)

    pulls, merged = zip(*cluster(work, 4), strict=True)
    agree(merged)
    assert float(torch.stack(pulls).sum(0).abs().max()) < 1e-13, "the copies no longer fit"
