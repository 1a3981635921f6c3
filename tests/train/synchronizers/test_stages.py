"""Buckets of a stage: which stages begin with a small one, and states that were saved with other buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from support.elastic_groups import ElasticRun, Join
from support.nightly import once_each
from support.sessions import sgd
from support.virtual_workers import Worker, agree, cluster, network, parameters
from torch import Tensor, nn
from torch.nn import Parameter

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import CheckpointError
from gossamer.train.engine.bucket import BUCKET_BYTES, FIRST_BYTES
from gossamer.train.session.session_base import SessionBase
from gossamer.train.synchronizers.gradients import GradientSynchronizer
from gossamer.train.synchronizers.stages import divide_parameters

WORLD, STEPS = 3, 6
SIDE = 256
SHAPES = [(300,), *[(SIDE, SIDE)] * 5]  # four matrices of float32 fill a first bucket
LAST_FOUR, REST, ALL = {"5", "4", "3", "2"}, {"1", "0"}, set("012345")


def large_model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    return nn.ParameterList(Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES)


def directions(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """The gradient of each parameter is a direction, so nothing is rounded in an order that threads could change."""
    optimizer.zero_grad()
    pairs = zip(model.parameters(), directions(step, rank), strict=True)
    sum((parameter * direction).sum() for parameter, direction in pairs).backward()  # type: ignore[union-attr]
    optimizer.step()


def buckets_of(session: SessionBase) -> list[set[str]]:
    return [set(bucket.parameters) for bucket in session._synchronizer.buckets]


# -- which parameters share a bucket -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "buckets"),
    [
        ("Dense()", [LAST_FOUR, REST]),
        ("EveryStep(accumulate=2) + Int8()", [LAST_FOUR, REST]),
        ("PostLocalSGD(period=2, start=9)", [LAST_FOUR, REST]),
        ("EveryStep(delay=1)", [ALL]),
        ("LocalSGD(2)", [ALL]),
        ("Gossip() + Ring()", [ALL]),
    ],
)
def test_recipes_that_send_during_backward_begin_with_a_bucket_of_1_mib(
    recipe: str, buckets: Sequence[set[str]]
) -> None:
    def work(worker: Worker) -> list[set[str]]:
        return buckets_of(worker.start(large_model(), sgd, recipe)[2])

    assert cluster(work, WORLD) == [buckets] * WORLD


@pytest.mark.parametrize(("first_bytes", "sent"), [(FIRST_BYTES, [0, 1]), (BUCKET_BYTES, [0, 0])])
def test_the_first_bucket_is_sent_while_backward_computes_the_other_gradients(
    first_bytes: int, sent: Sequence[int]
) -> None:
    """From the second pass on; the first one shows which gradients arrive in several parts."""

    def work(worker: Worker) -> list[int]:
        model, optimizer, session = worker.start(large_model(), sgd, "Dense()")
        session._enter_restored_stage(0, first_bytes)
        synchronizer, found = session._synchronizer, list[int]()
        assert isinstance(synchronizer, GradientSynchronizer)

        def note(parameter: Tensor) -> None:
            assert synchronizer._pending is not None
            found.append(synchronizer._pending.sent)

        model.get_parameter("1").register_post_accumulate_grad_hook(note)
        for step in range(2):
            take_step(model, optimizer, step, worker.rank)
        return found

    assert cluster(work, WORLD) == [sent] * WORLD


def test_a_small_model_has_one_bucket_as_without_a_first_one() -> None:
    stage, small = resolve("Dense()").strategy.steady_stage, dict(network().named_parameters())
    (((found,),), ((before,),)) = (divide_parameters(stage, small, size) for size in (FIRST_BYTES, BUCKET_BYTES))
    assert list(found) == list(before) == list(reversed(small))


# -- states with other buckets -----------------------------------------------------------------------------------------


@dataclass
class Trained:
    """One worker after its last step. kept: its state after some steps."""

    path: Tensor
    buckets: list[set[str]]
    kept: dict[int, Any] = field(default_factory=dict)


def train(
    worker: Worker,
    recipe: str,
    first: int,
    *,
    saved: Sequence[Mapping[str, Any]] = (),
    first_bytes: int | None = None,
    keep: Sequence[int] = (),
    last: int = STEPS,
) -> Trained:
    """saved: states to continue from; first_bytes: of a run that began in a version with this constant."""
    model, optimizer, session = worker.start(large_model(), sgd, resolve(recipe, WORLD))
    if first_bytes is not None:
        session._enter_restored_stage(0, first_bytes)
    if saved:
        own = saved[min(worker.rank, len(saved) - 1)]
        model.load_state_dict(own["model"])
        optimizer.load_state_dict(deepcopy(own["optimizer"]))  # it would train with these tensors
        session.load_state_dict(*(each["session"] for each in saved) if len(saved) > worker.world else [own["session"]])
    kept = {}
    for step in range(first, last):
        take_step(model, optimizer, step, worker.rank)
        if step + 1 in keep:
            parts = {"model": model, "optimizer": optimizer, "session": session}
            kept[step + 1] = deepcopy({name: part.state_dict() for name, part in parts.items()})  # type: ignore
    return Trained(parameters(model), buckets_of(session), kept)


def states_after(runs: Sequence[Trained], step: int, *, earlier_version: bool = False) -> list[Any]:
    """By rank. An earlier version did not write the size of the first bucket."""
    found = deepcopy([each.kept[step] for each in runs])
    for each in found:
        if earlier_version:
            del each["session"]["first_bytes"]
    return found


@once_each(
    "recipe, first_bytes",
    [
        "Dense()",
        "Int8()",
        "Float4()",
        "TopK(density=0.01)",
        "PowerSGD(rank=2)",
        "DiLoCo(period=2) + OneBit()",
        "RandomK(density=0.01)",  # a bucket's first name is in its random seed
        "EveryStep(accumulate=2) + RandomK(density=0.01)",
        "PostLocalSGD(period=2, start=2) + Int8()",
    ],
    [BUCKET_BYTES, FIRST_BYTES],
)
def test_promise_17_training_continues_bit_for_bit_with_the_buckets_of_its_checkpoint(
    recipe: str, first_bytes: int
) -> None:
    """Interrupted twice: the second state is written by a session that took over the first."""
    whole = cluster(lambda worker: train(worker, recipe, 0, first_bytes=first_bytes, keep=[3]), WORLD)
    saved = states_after(whole, 3, earlier_version=first_bytes == BUCKET_BYTES)
    resumed = cluster(lambda worker: train(worker, recipe, 3, saved=[saved[worker.rank]], keep=[5]), WORLD)
    again = states_after(resumed, 5)
    twice = cluster(lambda worker: train(worker, recipe, 5, saved=[again[worker.rank]]), WORLD)
    for runs in zip(whole, resumed, twice, strict=True):
        assert all(each.buckets == runs[0].buckets for each in runs)
        assert agree([each.path for each in runs]).isfinite().all()


def test_mutant_that_keeps_its_own_buckets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cluster(lambda worker: train(worker, "Dense()", 0, first_bytes=BUCKET_BYTES, keep=[3]), WORLD)
    saved = states_after(whole, 3)
    for each in saved:
        each["session"]["first_bytes"] = FIRST_BYTES
    with pytest.raises(CheckpointError, match="layout is"):
        cluster(lambda worker: train(worker, "Dense()", 3, saved=[saved[worker.rank]]), WORLD)


def test_negative_control_other_buckets_change_the_bits_of_random_choices() -> None:
    recipe = "RandomK(density=0.01)"
    large, small = (
        cluster(lambda worker, size=size: train(worker, recipe, 0, first_bytes=size), WORLD)[0].path
        for size in (BUCKET_BYTES, FIRST_BYTES)
    )
    assert not torch.equal(large, small)


def test_fewer_workers_continue_with_the_buckets_of_the_checkpoint() -> None:
    recipe = "Float4()"
    whole = cluster(lambda worker: train(worker, recipe, 0, first_bytes=BUCKET_BYTES, keep=[3]), WORLD)
    saved = states_after(whole, 3, earlier_version=True)
    from_new = cluster(lambda worker: train(worker, recipe, 3, saved=saved), WORLD - 1)
    from_old = cluster(lambda worker: train(worker, recipe, 3, saved=saved, first_bytes=BUCKET_BYTES), WORLD - 1)
    assert from_new[0].buckets == [ALL]
    agree([each.path for each in (*from_new, *from_old)])


@pytest.mark.parametrize(("world", "buckets"), [(1, []), (WORLD, [ALL])])
def test_the_state_of_one_worker_is_restored_by_any_number(world: int, buckets: Sequence[set[str]]) -> None:
    alone = cluster(lambda worker: train(worker, "Dense()", 0, first_bytes=BUCKET_BYTES, keep=[3]), 1)
    saved = states_after(alone, 3, earlier_version=True)
    found = cluster(lambda worker: train(worker, "Dense()", 3, saved=saved), world)
    assert [each.buckets for each in found] == [buckets] * world
    path = agree([each.path for each in found])
    assert torch.equal(path, alone[0].path) == (world == 1)


def test_a_session_begins_a_switched_recipe_with_a_small_first_bucket_and_saves_it() -> None:
    def loaded(worker: Worker, state: Any, following: str | None = None) -> tuple[list[set[str]], Any]:
        _, _, session = worker.start(large_model(), sgd, "Dense()")
        session.load_state_dict(state)
        if following is not None:
            assert buckets_of(session) == [ALL]
            session.switch(following)
        return buckets_of(session), deepcopy(session.state_dict())

    whole = cluster(lambda worker: train(worker, "Dense()", 0, first_bytes=BUCKET_BYTES, keep=[3], last=3), WORLD)
    saved = [each["session"] for each in states_after(whole, 3, earlier_version=True)]
    switched = cluster(lambda worker: loaded(worker, saved[worker.rank], "Int8()"), WORLD)
    again = cluster(lambda worker: loaded(worker, switched[worker.rank][1]), WORLD)
    assert [buckets for buckets, _ in (*switched, *again)] == [[LAST_FOUR, REST]] * 2 * WORLD


def test_a_session_of_arrays_continues_with_the_buckets_of_its_state() -> None:
    def step(session: Any, arrays: dict[str, Any], step: int, rank: int) -> dict[str, Any]:
        named = zip(arrays, directions(step, rank), strict=True)
        means = session.give({name: each.numpy() for name, each in named})
        moved: dict[str, Any] = session.took_step({name: array - means[name] for name, array in arrays.items()})
        return moved

    def work(worker: Worker) -> tuple[Tensor, Tensor, list[set[str]]]:
        first = {str(place): np.zeros(shape, np.float32) for place, shape in enumerate(SHAPES)}
        session, arrays = worker.arrays(first, "RandomK(density=0.01)"), first
        session._enter_restored_stage(0, BUCKET_BYTES)
        for number in range(STEPS):
            arrays = step(session, arrays, number, worker.rank)
            if number == 2:
                state = session.state_dict()
                del state["first_bytes"]
        again = worker.arrays(first, "RandomK(density=0.01)")
        resumed = again.load_state_dict(state)
        for number in range(3, STEPS):
            resumed = step(again, resumed, number, worker.rank)
        twice = worker.arrays(first, "RandomK(density=0.01)")
        twice.load_state_dict(again.state_dict())
        assert buckets_of(twice) == buckets_of(again)  # type: ignore[arg-type]
        found = (torch.cat([torch.as_tensor(each).flatten() for each in some.values()]) for some in (arrays, resumed))
        return *found, buckets_of(again)  # type: ignore

    for whole, resumed, buckets in cluster(work, 2):
        assert buckets == [ALL]
        assert torch.equal(whole, resumed)


# -- newcomers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["Dense()", "RandomK(density=0.01)"])
def test_promise_13_a_newcomer_takes_over_the_buckets_of_the_others(recipe: str) -> None:
    """The others have loaded a checkpoint of an earlier version."""

    def work(worker: Worker) -> Trained:
        model, optimizer, session = worker.start(large_model(), sgd, recipe)
        if worker.rank < worker.world:
            session._enter_restored_stage(0, BUCKET_BYTES)
        while session.steps < STEPS:
            take_step(model, optimizer, session.steps, worker.rank)
        return Trained(parameters(model), buckets_of(session))

    found = ElasticRun(2, newcomers=1, join=Join(op=6))(work)
    assert [each.buckets for each in found] == [[ALL]] * 3
    agree([each.path for each in found])
