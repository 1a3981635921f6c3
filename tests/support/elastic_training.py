"""Training in elastic groups: recipes of every strategy, loops whose workers come and go, what must be alike then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from support.elastic_groups import ElasticRun, Join, Loss
from support.nightly import nightly
from support.sessions import RECIPES, sgd
from support.virtual_workers import Worker, loss_of, network, parameters
from torch import Tensor

from gossamer.train.session.session import Session

STEPS = 6
GRADIENTS = [
    *RECIPES,
    "EveryStep(accumulate=2) + TopK(0.2)",
    "Feedback(Sharded(Int8()))",
    "Feedback(Sharded(Int8()), rule='ef21')",
    "Feedback(SparseSum(TopK(0.2)))",
]
ROUNDS = [
    "EveryStep(delay=1)",
    "EveryStep(delay=1) + TopK(0.2)",
    "LocalSGD(2)",
    "LocalSGD(2) + TopK(0.1)",
    "DiLoCo(2) + Int8()",
    "DiLoCo(4, fragments=2)",
    "DiLoCo(4, fragments=2, delay=1)",
    "DiLoCo(4, fragments=2, delay=1) + Feedback(Sharded(OneBit()))",
    "LocalSGD(2) + Feedback(Sharded(OneBit()))",
    "DelayedAveraging(2)",
    "DelayedAveraging(2) + TopK(0.2)",
    "PostLocalSGD(start=2, period=2)",
    "Gossip() + Ring()",
    "Gossip(period=2) + TopK(0.2) + Ring()",
    "Gossip('push-sum') + Exponential(one_peer=True)",
    "NoLoCo(2) + RandomPeers()",
]
EVERY = [*GRADIENTS, *ROUNDS]
# Recovery depends on what a strategy exchanges and what a compressor remembers: one recipe of each; the others nightly
REPRESENTATIVES = [
    "Dense()",
    "TopK(0.1)",
    "PowerSGD(rank=2)",
    "SharedMask(density=0.1)",
    "Feedback(Sharded(Int8()))",
    "EveryStep(accumulate=2) + TopK(0.2)",
    "EveryStep(delay=1) + TopK(0.2)",
    "LocalSGD(2) + TopK(0.1)",
    "DiLoCo(4, fragments=2, delay=1) + Feedback(Sharded(OneBit()))",
    "DelayedAveraging(2) + TopK(0.2)",
    "Gossip(period=2) + TopK(0.2) + Ring()",
]
# One of each way to exchange, for faults of which `each_recipe` runs some
FEW = [
    "TopK(0.1)",
    "PowerSGD(rank=2)",
    "Feedback(Sharded(Int8()))",
    "EveryStep(delay=1) + TopK(0.2)",
    "DiLoCo(4, fragments=2, delay=1) + Feedback(Sharded(OneBit()))",
    "Gossip(period=2) + TopK(0.2) + Ring()",
]


def by_day(recipes: Sequence[str]) -> pytest.MarkDecorator:
    """These recipes; nightly, every one."""
    return pytest.mark.parametrize("recipe", [*recipes, *nightly(*(each for each in EVERY if each not in recipes))])


each_recipe, few_recipes = by_day(REPRESENTATIVES), by_day(FEW)
IN_STEP = [*GRADIENTS, *ROUNDS[:2]]  # parameters are alike after every step


@dataclass
class Told:
    """What one worker has in the end."""

    steps: int
    agreed: Tensor  # parameters as the workers agree on them
    own: Tensor
    session: Session
    seen: dict[str, Any] = field(default_factory=dict)


def trained(recipe: Any, worker: Worker, steps: int = STEPS, **options: Any) -> Told:
    """From where the others stand, until `steps` are made."""
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe, **options)
    passes = 2 if "accumulate=2" in str(recipe) else 1
    while session.steps < steps:
        step = session.steps
        for part in range(passes):
            loss_of(model, 10 * step + part, worker.rank).backward()
            if part + 1 < passes:
                continue
            optimizer.step()
            optimizer.zero_grad()
    return told(session)


def told(session: Session, **seen: Any) -> Told:
    session._synchronizer.flush()  # as nobody does at the end of a run; a round that lands nowhere would tell nothing
    session._synchronizer.end_run()
    with session.averaged_parameters(session.model):
        agreed = parameters(session.model)
    return Told(session.steps, agreed, parameters(session.model), session, seen)


@cache
def operations(recipe: str, world: int = 3) -> int:
    """How many of a run in which nobody is lost."""
    run = ElasticRun(world)
    run(partial(trained, recipe))
    return run.members.operations[0, 2]


@contextmanager
def again(*about: object) -> Iterator[None]:
    """Add to whatever is raised the line that shows it again."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"Again: {', '.join(map(repr, about))}")
        raise


def check_alike(results: Sequence[Told | None], steps: int = STEPS) -> list[Told]:
    """Those who are there in the end made as many steps, and agree on every bit."""
    here = [each for each in results if each is not None]
    assert here, "nobody is left"
    assert {each.steps for each in here} == {steps}, [each.steps for each in here]
    for each in here[1:]:
        assert torch.equal(each.agreed, here[0].agreed), "survivors hold different bits"
    assert torch.isfinite(here[0].agreed).all()
    return here


def check_run(
    recipe: Any,
    world: int,
    losses: Sequence[Loss] = (),
    join: Join | None = None,
    newcomers: int = 0,
    work: Callable[[Any, Worker], Told] = trained,
) -> list[Told]:
    """Of a run with faults, those who are there in the end."""
    with again(recipe, world, list(losses), join, newcomers):
        return check_alike(ElasticRun(world, losses, newcomers, join)(partial(work, recipe)))
