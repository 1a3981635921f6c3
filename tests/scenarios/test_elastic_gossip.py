"""Gossip in elastic runs: a round counts for all workers or for none, sums are conserved, and resumes are exact."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.elastic_groups import ElasticRun, Join, Killed, Loss
from support.elastic_training import Told, again, check_alike, check_run, operations, told
from support.gossip_rounds import Flock
from support.nightly import nightly
from support.sessions import sgd
from support.virtual_workers import Worker, loss_of, network, notices, parameters, seeded, train_step
from torch import Tensor, nn

from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.algorithms.strategies.base import GossipStrategy
from gossamer.algorithms.topologies import Topology
from gossamer.base.layout import Layout
from gossamer.errors import AttachError, GossamerError, MismatchError
from gossamer.train import checkpoint
from gossamer.train.session.recipe_choice import refuse_inelastic
from gossamer.train.session.session import Session
from gossamer.train.synchronizers import gossip
from gossamer.train.synchronizers.gossip import GossipAveraging
from gossamer.train.world_state import WorldState

STEPS, SHAPE = 5, (4, 16)
RECIPES = [
    "Gossip(step_size=0.5) + Ring()",
    "Gossip(step_size=0.5) + TopK(0.25) + Ring()",
    "Gossip('push-sum') + Exponential(one_peer=True)",
    "NoLoCo(period=1) + Ring()",
]
HEARD: list[tuple[bool, frozenset[int]]] = [
    (False, frozenset()),
    (True, frozenset()),
    (True, frozenset({0})),
    (True, frozenset({2})),
]


def gradient(step: int, number: int) -> Tensor:
    """Small whole numbers, the same wherever the parameters are. step: from 1."""
    generator = torch.Generator().manual_seed(100 * step + number)
    return 64.0 * torch.randint(-8, 9, SHAPE, generator=generator).double()


# -- one loss or one newcomer: as by hand, to the bit -----------------------------------------------------------------


@dataclass
class Trail:
    """One worker's parameters after every step, and the members of the group then."""

    after: dict[int, Tensor] = field(default_factory=dict)
    members: dict[int, tuple[int, ...]] = field(default_factory=dict)
    merged: Tensor | None = None


def descend(recipe: Any, paths: dict[int, Trail], worker: Worker, steps: int = STEPS) -> Trail:
    with seeded(0):
        model = nn.Linear(SHAPE[1], SHAPE[0], bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session = worker.attach(model, optimizer, recipe)
    path = paths.setdefault(worker.rank, Trail())
    while session.steps < steps:
        optimizer.zero_grad()
        (model.weight * gradient(session.steps + 1, worker.rank)).sum().backward()
        optimizer.step()
        path.after[session.steps] = model.weight.detach().clone().flatten()
        path.members[session.steps] = tuple(session._group.comm_thread.members(worker.transport.world))
    with session.averaged_parameters(model):
        path.merged = model.weight.detach().clone().flatten()
    return path


def by_hand(
    recipe: str, members: Callable[[int], Sequence[int]], first: Sequence[int], steps: int = STEPS
) -> dict[int, Tensor]:
    """Parameters in the end by number. members: of the round of a step; first: before training."""
    found = resolve(recipe)
    assert isinstance(found.strategy, GossipStrategy)
    rule, here = found.strategy.rule(found.compressor), [*first]
    layout = Layout.of({"weight": SHAPE})
    flock = Flock(rule, found.topology, [torch.zeros(layout.numel, dtype=torch.float64) for _ in here], layout)
    for step in range(1, steps + 1):
        following = [*members(step)]
        lost = bool({*here} - {*following})
        stay = [each for each in here if each in following]

        def change(here: Sequence[int] = here, stay: Sequence[int] = stay, following: Any = following) -> None:
            flock.change([here.index(each) for each in stay], len(following) - len(stay))

        if following != here and not lost:
            change()  # newcomers come before a step
        for place, number in enumerate(here if lost else following):
            flock.xs[place] = flock.xs[place] - gradient(step, number).flatten()
        if lost:
            change()  # a loss is seen in its round
        here = following
        flock.round()
    return dict(zip(here, flock.xs, strict=True))


def matches(paths: dict[int, Trail], theirs: dict[int, Tensor], ended: Sequence[int]) -> bool:
    return all(torch.equal(paths[number].after[STEPS], theirs[number]) for number in ended)


def check_loss(recipe: str, loss: Loss, world: int = 3) -> None:
    """The lost worker took part in the rounds before some step, and in no later one, on all others."""
    paths: dict[int, Trail] = {}
    with again(recipe, loss):
        results = ElasticRun(world, loss)(partial(descend, recipe, paths))
        everyone, others = range(world), [each for each in range(world) if each != loss.victim]
        if results[loss.victim] is not None:
            return  # the run was over
        assert all(results[each] is not None for each in others)
        found = [
            step
            for step in range(1, STEPS + 2)
            if matches(paths, by_hand(recipe, lambda s, step=step: everyone if s < step else others, everyone), others)
        ]
        assert len(found) == 1, "a round counts for some of the workers"
        merged = [paths[each].merged for each in others]
        assert all(torch.equal(each, merged[0]) for each in merged)


@pytest.mark.parametrize("recipe", RECIPES)
def test_promise_21_a_round_with_a_loss_counts_for_all_or_for_none(recipe: str) -> None:
    paths: dict[int, Trail] = {}
    run = ElasticRun(3)
    run(partial(descend, recipe, paths))
    ops = run.members.operations[0, 2]
    random = Random(recipe)
    for op in range(3, ops - 1, 2):
        answered, deaf = random.choice(HEARD)
        check_loss(
            recipe, Loss(victim=random.choice([0, 1, 2]) if not deaf else 1, op=op, answered=answered, deaf=deaf)
        )


@pytest.mark.parametrize(("recipe", "lost"), [("Gossip() + Ring()", "Deviations"), ("LocalSGD(1)", "Unsent residuals")])
def test_a_notice_says_what_was_lost_with_a_worker(recipe: str, lost: str) -> None:
    with notices() as said:
        ElasticRun(3, Loss(victim=1, op=6))(partial(descend, recipe, {}))
    assert [each for each in said if "rank 1 of 3 was lost" in each and lost in each]


FAILURES = (AssertionError, GossamerError, ValueError, TypeError, IndexError, KeyError)


def check_losses(ops: Iterable[int], **options: Any) -> None:
    for op in ops:
        check_loss("Gossip() + Ring()", Loss(victim=1, op=op, **options))


def test_a_loss_while_first_batches_are_compared() -> None:
    """In the first round only, by those who have not completed it."""
    for deaf in (frozenset({0}), frozenset({2})):
        check_losses([2], answered=True, deaf=deaf)


def test_mutant_without_the_headers_of_all_a_round_counts_for_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fixed group: a worker that has its messages goes on, whether others have theirs or not."""
    monkeypatch.setattr("support.elastic_groups.SECONDS", 3.0)
    rounds = gossip.gossip_round

    def alone(*args: Any, atomic: bool, all_meet: bool) -> Generator[Any, Any, Any]:
        return rounds(*args, all_meet=False)

    monkeypatch.setattr(gossip, "gossip_round", alone)
    with pytest.raises(FAILURES):
        check_losses(range(4, 10), answered=True, deaf=frozenset({2}))


def test_mutant_a_script_that_cannot_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    run = GossipAveraging._run

    def once(self: GossipAveraging, script: Callable[[], Any], *, admits: bool = False) -> Any:
        made = script()
        return run(self, lambda: made, admits=admits)

    monkeypatch.setattr(GossipAveraging, "_run", once)
    monkeypatch.setattr("support.elastic_groups.SECONDS", 3.0)
    with pytest.raises(FAILURES):
        check_losses(range(4, 8))


def check_join(recipe: str, op: int, member: int) -> int:
    """The step before which the newcomer came, with the mean of the others; 0 if none was left to admit it."""
    paths: dict[int, Trail] = {}
    with again(recipe, op, member):
        results = ElasticRun(2, newcomers=1, join=Join(op=op, member=member))(partial(descend, recipe, paths))
        if results[2] is None:
            return 0
        before = range(2)
        found = [
            step
            for step in range(1, STEPS + 2)
            if matches(paths, by_hand(recipe, lambda s, step=step: range(3) if s >= step else before, before), range(3))
        ]
        assert len(found) == 1, "a newcomer begins elsewhere"
        return found[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_promise_13_a_newcomer_begins_at_the_mean(recipe: str) -> None:
    found = [check_join(recipe, op, op % 2) for op in range(3, 13, 3)]
    assert len({*found} - {0, STEPS + 1}) > 1, "all came before the same step"


def test_mutant_a_newcomer_that_keeps_the_parameters_of_another_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GossipAveraging, "joined", lambda self: self._run(self._admission) and None)
    with pytest.raises(AssertionError, match="a newcomer begins elsewhere"):
        test_promise_13_a_newcomer_begins_at_the_mean("Gossip(step_size=0.5) + Ring()")


@pytest.mark.parametrize("recipe", ["Gossip()", "Gossip(step_size=1.0) + TopK(density=1.0)"])
def test_complete_and_lossless_is_local_sgd_with_every_step_averaged(recipe: str) -> None:
    """Also over a worker that leaves after a step, and one that comes."""

    def left(recipe: str, worker: Worker) -> Tensor | None:
        model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
        for step in range(6):
            if (step, worker.rank) == (3, 1):
                worker.transport.leave()  # type: ignore[attr-defined]
                return None
            train_step(model, optimizer, step, worker.rank)
        return torch.cat([each.detach().flatten() for each in model.parameters()]) if session else None

    def ends(recipe: str) -> list[Tensor]:
        return [each for each in ElasticRun(3)(partial(left, recipe)) if each is not None]

    ours, theirs = ends(recipe), ends("LocalSGD(1)")
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-13, rtol=0)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(ends("Gossip(step_size=0.5)")[0], theirs[0], atol=1e-13, rtol=0)


# -- schedules as drawn -----------------------------------------------------------------------------------------------

DRAWN = ["Gossip() + Ring()", "Gossip(step_size=0.5) + TopK(0.25) + Ring()", "Gossip() + RandomPeers()"]


def drawn(seed: int) -> tuple[str, int, list[Loss], Join | None]:
    random = Random(seed)
    recipe, world = random.choice(DRAWN), random.randint(2, 4)
    join = Join(op=random.randrange(3, 12), member=0) if random.random() < 0.5 else None
    losses = []
    for group, first in ((2, 3), (4, 3)):
        victim = random.randrange(1 if join and group == 2 else 0, world)
        answered = random.random() < 0.6
        deaf = frozenset(random.sample([each for each in range(world) if each != victim], random.randint(0, world - 1)))
        op = random.randrange(first, 14)
        losses.append(
            Loss(victim=victim, op=op, answered=answered, deaf=deaf if answered else frozenset(), group=group)
        )
    return recipe, world, losses[: random.randint(0, 2 if world > 2 else 1)], join


def check_sums(paths: dict[int, Trail], ended: Sequence[int]) -> int:
    """Of every round, all agree on who took part, and the sum is kept. Returns how many rounds were compared."""
    compared = 0
    for step in range(1, STEPS + 1):
        told = {path.members[step] for path in paths.values() if step in path.members}
        assert len(told) == 1, f"of the round of step {step}, the workers that took part are {told}"
        (members,) = told
        if not all(step in paths[each].after for each in members):
            continue  # one was lost as soon as the round was over
        before = {each: paths[each].after[step - 1] for each in members if step - 1 in paths[each].after}
        before |= {each: torch.zeros_like(paths[each].after[step]) for each in members if step == 1}
        joined = [each for each in members if each not in before]
        if not before:
            continue
        mean = torch.stack([*before.values()]).sum(0) / len(before)
        start = torch.stack([before.get(each, mean) for each in members]).sum(0)
        moved = torch.stack([gradient(step, each).flatten() for each in members]).sum(0)
        after = torch.stack([paths[each].after[step] for each in members]).sum(0)
        torch.testing.assert_close(after, start - moved, atol=1e-9, rtol=0, msg=f"step {step}: {members}, {joined}")
        compared += 1
    last = [paths[each].merged for each in ended]
    assert all(torch.equal(each, last[0]) for each in last if each is not None)
    return compared


def check_drawn(seed: int) -> int:
    recipe, world, losses, join = drawn(seed)
    paths: dict[int, Trail] = {}
    with again(seed, recipe, world, losses, join):
        run = ElasticRun(world, losses, 1 if join else 0, join)
        ended = [number for number, each in enumerate(run(partial(descend, recipe, paths))) if each is not None]
        return check_sums(paths, ended)


SEEDS = 30


def check_seeds(seeds: Iterable[int]) -> int:
    return sum(map(check_drawn, seeds))


@pytest.mark.parametrize("first", [0, *nightly(*range(SEEDS, 40 * SEEDS, SEEDS))])
def test_sums_are_kept_over_drawn_losses_and_joins(first: int) -> None:
    assert check_seeds(range(first, first + SEEDS)) > 3 * SEEDS


def test_mutant_copies_that_do_not_begin_again_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = GossipAveraging._renewed

    def stale(self: GossipAveraging, parts: Any) -> Iterator[Any]:
        following = yield from renewed(self, parts)
        for part, before in zip(following, parts, strict=True):
            part.memory = before.memory
        return following

    monkeypatch.setattr(GossipAveraging, "_renewed", stale)
    with pytest.raises(AssertionError, match="step"):
        check_seeds(range(SEEDS))


# -- other loops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_world_of_one_continues(recipe: str) -> None:
    op = operations(recipe, 2) // 2
    assert len(check_run(recipe, 2, [Loss(victim=1, op=op)])) == 1
    assert len(check_run(recipe, 2, [Loss(victim=0, op=op, answered=True, deaf=frozenset({1}))])) == 1


def test_buffers_of_a_newcomer_are_the_mean_of_the_others() -> None:
    seen: dict[int, Tensor] = {}

    def normed(worker: Worker) -> Tensor:
        with seeded(worker.rank):
            model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        session = worker.attach(model, sgd(model), "Gossip() + Ring()")
        if worker.rank == 2:
            seen[2] = model[1].running_mean.clone()
        while session.steps < STEPS:
            session.optimizer.zero_grad()
            loss_of(model, session.steps, worker.rank).backward()
            if worker.rank < 2 and 2 not in seen:
                seen[worker.rank] = model[1].running_mean.clone()
            session.optimizer.step()
        with session.averaged_parameters(model):
            return model[1].running_mean.clone()

    results = ElasticRun(2, newcomers=1, join=Join(op=6))(normed)
    assert all(torch.equal(each, results[0]) for each in results)
    torch.testing.assert_close(seen[2], (seen[0] + seen[1]) / 2, atol=1e-15, rtol=0)


class Tracking(nn.Module):
    """With a frozen copy that the script changes, as momentum encoders have: it is averaged from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.copy = nn.Parameter(torch.zeros(3, 16, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * (1 + self.copy.mean())


def with_frozen(worker: Worker) -> Any:
    model = Tracking()
    session = worker.attach(model, sgd(model), "Gossip() + Ring()")
    while session.steps < STEPS:
        step = session.steps
        train_step(model, session.optimizer, step, worker.rank)
        with torch.no_grad():
            model.copy.lerp_(model.net[-1].weight, 0.1)
        with session.averaged_parameters(model):
            agreed = model.copy.clone()
    return Told(session.steps, agreed.flatten(), parameters(model), session)


def test_frozen_parameters_that_change_are_those_of_the_group() -> None:
    for op in (4, 10, 16, 22):
        with again(op):
            here = check_alike(ElasticRun(2, newcomers=1, join=Join(op=op))(with_frozen), STEPS)
            assert len(here) == 3
            assert here[0].agreed.any()


def with_adam(states: dict[int, list[Tensor]], worker: Worker) -> Any:
    model = network(worker.rank)
    session = worker.attach(model, torch.optim.Adam(model.parameters(), lr=0.01), "Gossip() + Ring()")

    def note() -> None:
        states[worker.rank] = [each.clone() for state in session.optimizer.state.values() for each in state.values()]

    if worker.rank == 2:
        note()
    while session.steps < STEPS:
        session.optimizer.zero_grad()
        loss_of(model, session.steps, worker.rank).backward()
        if 2 not in states:
            note()
        session.optimizer.step()
    return told(session)


def test_a_newcomer_has_the_optimizer_state_of_one_worker() -> None:
    states: dict[int, list[Tensor]] = {}
    check_alike(ElasticRun(2, newcomers=1, join=Join(op=6))(partial(with_adam, states)), STEPS)
    assert states[2]
    assert all(torch.equal(one, other) for one, other in zip(states[2], states[0], strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(states[2], states[1], strict=True))


def test_mutant_a_newcomer_without_the_optimizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hash is compared with the worker's whose state it received, and the others train on."""
    take_up = Session._take_up

    def forgetful(self: Session, alike: Any, own: Any) -> None:
        take_up(self, alike, own)
        self.optimizer.state.clear()

    def work(worker: Worker) -> Any:
        if worker.rank < 2:
            return with_adam({}, worker)
        with pytest.raises(MismatchError, match="differs from the group's after the transfer"):
            with_adam({}, worker)
        raise Killed

    monkeypatch.setattr(Session, "_take_up", forgetful)
    check_alike(ElasticRun(2, newcomers=1, join=Join(op=6))(work), STEPS)


# -- checkpoints ------------------------------------------------------------------------------------------------------

SAVED_AT, LAST = 3, 6


def world_of(worker: Worker) -> WorldState:
    return WorldState(rank=worker.rank, size=worker.world, local_rank=0, device=torch.device("cpu"))


def saving(directory: Path, recipe: str, worker: Worker) -> Any:
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe, world=world_of(worker))
    while session.steps < LAST:
        train_step(model, optimizer, session.steps, worker.transport.rank)
        if session.steps == SAVED_AT:
            session.save(directory)
    return told(session)


def resumed(directory: Path, recipe: str, worker: Worker) -> Any:
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe, world=world_of(worker))
    session.load(directory)
    assert session.steps == SAVED_AT
    while session.steps < LAST:
        train_step(model, optimizer, session.steps, worker.transport.rank)
    return told(session)


def check_resumed(recipe: str, directory: Path, op: int, loss: Loss) -> bool:
    """Whether the survivors had all written the checkpoint, so that it was compared."""
    with again(recipe, loss):
        here = check_alike(ElasticRun(3, loss)(partial(saving, directory, recipe)), LAST)
        if len(here) == 3 or checkpoint.writers(directory, SAVED_AT) != 2:
            return False
        back = check_alike(ElasticRun(2)(partial(resumed, directory, recipe)), LAST)
        assert all(torch.equal(one.own, other.own) for one, other in zip(back, here, strict=True)), "resumed elsewhere"
        return True


CHOCO = "Gossip(step_size=0.5) + TopK(0.25) + Ring()"


@pytest.mark.parametrize("recipe", [CHOCO, *nightly("NoLoCo(period=2) + Ring()", "Gossip('push-sum') + Exponential()")])
def test_resumed_runs_continue_to_the_bit_after_losses_and_while_saving(recipe: str, tmp_path: Path) -> None:
    run = ElasticRun(3)
    run(partial(saving, tmp_path / "whole", recipe))
    compared = 0
    for op in range(5, run.members.operations[0, 2] - 2, 3):
        loss = Loss(victim=1, op=op, answered=op % 2 > 0, deaf=frozenset({2}) if op % 2 else frozenset())
        compared += check_resumed(recipe, tmp_path / str(op), op, loss)
    assert compared > 2


def test_mutant_a_checkpoint_that_forgets_a_loss_while_it_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    progress = GossipAveraging.progress
    monkeypatch.setattr(GossipAveraging, "progress", lambda self: {**progress(self), "outdated": False})
    with pytest.raises(AssertionError, match="resumed elsewhere"):
        test_resumed_runs_continue_to_the_bit_after_losses_and_while_saving(CHOCO, tmp_path)
    shutil.rmtree(tmp_path, ignore_errors=True)


# -- refused ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Cube(Topology):
    """A hypercube: its number of workers is a power of two."""

    def sends_to(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:  # noqa: A002
        if world & (world - 1):
            raise ValueError(f"a cube has 1, 2, 4, 8 corners, not {world}")
        return tuple(sorted(rank ^ (1 << bit) for bit in range(world.bit_length() - 1)))


def test_a_topology_without_edges_for_some_number_of_workers_is_refused_at_attach() -> None:
    recipe = Recipe(strategy=resolve("Gossip()").strategy, topology=Cube())
    refuse_inelastic(recipe, [1, 2, 4])
    with pytest.raises(AttachError, match=r"(?s)may have 3 workers: Cube\(\) has no edges.*Exponential\(\)"):
        refuse_inelastic(recipe, range(2, 9))


def test_a_topology_without_edges_after_a_loss_ends_the_run_in_one_line() -> None:
    """Past MAX, or below MIN at the end, where attach could not know."""
    recipe = Recipe(strategy=resolve("Gossip()").strategy, topology=Cube())
    with pytest.raises(AttachError, match=r"Cube\(\) has no edges for 3 workers") as caught:
        ElasticRun(4, Loss(victim=1, op=8))(partial(descend, recipe, {}))
    assert "\n" not in str(caught.value)


def test_pairs_are_refused_and_lock_step_is_not() -> None:
    with pytest.raises(AttachError, match="without lock step"):
        refuse_inelastic(resolve("Gossip('pairwise')"))
    for recipe in chain(RECIPES, ["Gossip(period=4) + Torus()", "NoLoCo(period=8) + RandomPeers()"]):
        refuse_inelastic(resolve(recipe), range(1, 9))
    with pytest.raises(AttachError, match="nodes would change"):
        refuse_inelastic(resolve("Gossip() + Hierarchy(per_node=2)"), range(1, 9))
