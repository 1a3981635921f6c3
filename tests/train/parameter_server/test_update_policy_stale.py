"""Stale synchronous parallel: what each worker sees at each of its clocks, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from support.server_runs import CALM, Run, flat, run, whole_gradient
from torch import Tensor
from torch.nn import Parameter

from gossamer.base.peer_ops import WORKER, Peer, PeerScript, Pull
from gossamer.comm.simulation import compute
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.train.parameter_server import ServerShard, StaleSynchronousPolicy, SynchronousPolicy

WORLD, STEPS = 3, 9
BAD = VirtualNetwork(round_trip_seconds=0.02, jitter_seconds=0.02, loss=0.1, duplicate=0.2, resend_seconds=0.1)


def ballots() -> dict[str, Parameter]:
    """A row for each of two servers, a column for each contribution there may be."""
    return {"ballots": Parameter(torch.zeros(2, WORLD * STEPS, dtype=torch.float64))}


def vote(tensors: Mapping[str, Tensor], worker: int, step: int) -> dict[str, Tensor]:
    mark = torch.zeros(2, WORLD * STEPS, dtype=torch.float64)
    mark[:, worker * STEPS + step] = -1
    return {"ballots": mark}


class View(NamedTuple):
    """What a worker's parameters hold as it begins to compute its step `clock`."""

    worker: int
    clock: int
    moment: float
    seen: set[tuple[int, int]]  # contributions (worker, step)


def seen(tensors: Mapping[str, Tensor]) -> set[tuple[int, int]]:
    (rows,) = tensors.values()
    servers = [{divmod(int(place), STEPS) for place in row.nonzero()} for row in rows.detach()]
    return servers[0] & servers[1]


def watch(job: Run, worker: int, views: list[View], pushed: dict[tuple[int, int], float]) -> PeerScript:
    client, tensors = job.client(worker)
    yield from client.begin()
    client.apply_pull()
    while client.step < STEPS:
        step = client.step
        views.append(View(worker, step, (yield from compute(0)), seen(tensors)))
        yield from compute(job.seconds(worker, step))
        client.gather(vote(tensors, worker, step))
        pushed[worker, step] = yield from compute(0)
        yield from client.push_pull()
        client.apply_pull()
    yield from client.end()
    client.apply_final()
    return flat(tensors)


def random_seconds(seed: int) -> Any:
    return lambda worker, step: 0.01 + Random(seed * 10_000 + worker * 100 + step).random() ** 3


def views_of(job: Run, net: VirtualNetwork = CALM) -> tuple[list[View], dict[tuple[int, int], float]]:
    views, pushed = list[View](), dict[tuple[int, int], float]()
    trace = job.simulate({worker: partial(watch, job, worker, views, pushed) for worker in range(WORLD)}, net)
    ends = [trace.result(Peer(WORKER, worker)) for worker in range(WORLD)]
    assert all(torch.equal(end, ends[0]) for end in ends)
    torch.testing.assert_close(ends[0], torch.full_like(ends[0], 1 / WORLD))
    return views, pushed


def check_seen(staleness: int, seed: int, net: VirtualNetwork = CALM, **options: Any) -> None:
    """The law of Ho et al.: all of a worker's own before its clock, all others' before that less the staleness."""
    text = f'ParameterServer("stale", staleness={staleness})'
    job = run(text, seed=seed, make=ballots, seconds=random_seconds(seed), **options)
    views, pushed = views_of(job, net)
    assert len(views) == WORLD * STEPS
    for worker, clock, moment, found in views:
        own = {(worker, step) for step in range(clock)}
        assert own <= found, "a worker does not read its own writes"
        others = {(other, step) for other in range(WORLD) for step in range(clock - staleness)}
        assert others <= found, "a worker does not see what is older than the bound"
        if net is CALM:
            there = {each for each, sent in pushed.items() if sent < moment - net.round_trip_seconds - 1e-9}
            assert there <= found, "what has arrived is held back"


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_a_worker_sees_its_own_at_once_and_others_within_the_bound(staleness: int) -> None:
    for seed in range(6):
        check_seen(staleness, seed)
        check_seen(staleness, seed, BAD)


@dataclass(frozen=True)
class TooSoon(StaleSynchronousPolicy):
    """Lets workers go a clock too far."""

    def is_reached(self, shard: ServerShard, pull: Pull) -> bool:
        return super().is_reached(shard, replace(pull, at_least=pull.at_least - 1))


@dataclass(frozen=True)
class SeldomPublished(StaleSynchronousPolicy):
    """Shows parameters once a round."""

    def should_publish(self, shard: ServerShard) -> bool:
        return shard.version >= shard.public.version + WORLD


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (SynchronousPolicy, "its own writes"),
        (TooSoon, "older than the bound"),
        (SeldomPublished, "its own writes"),
    ],
    ids=["delayed lock step", "too soon", "seldom published"],
)
def test_what_is_not_that_is_found_out(policy: Callable[[], Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        [check_seen(2, seed, policy=lambda shard: policy()) for seed in range(6)]


def test_a_fast_workers_gradients_are_taken_at_parameters_that_move() -> None:
    """Up to the bound it waits for nobody, and there for the slowest."""
    job = run(
        'ParameterServer("stale", staleness=4)', make=ballots, seconds=lambda worker, step: 0.1 + 4.9 * (worker == 2)
    )
    views, _ = views_of(job)
    fast = [view for view in views if view.worker == 0]
    assert all(before.seen < after.seen for before, after in pairwise(fast))
    assert [view.moment < 5.0 for view in fast] == [True] * 5 + [False] * (STEPS - 5)
    assert all((2, view.clock - 5) in view.seen for view in fast[5:])


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 2.0, 5.0)])
def test_a_rounds_contributions_move_as_far_as_their_mean(weights: tuple[float, ...]) -> None:
    """Each has its share of the learning rate: with plain SGD and given gradients the end is that of lock step. What
    others weigh is known once they have contributed, so the first steps move nothing."""

    def gradient(tensors: Mapping[str, Tensor], worker: int, step: int) -> dict[str, Tensor]:
        return {name: values * (step > 4) for name, values in whole_gradient(tensors, worker, step).items()}

    stale, sync = (
        run(
            f"ParameterServer({mode})",
            seconds=random_seconds(1),
            weight=lambda worker, step: weights[worker],
            gradient=gradient,
            steps=9,
        )
        for mode in ('"stale"', '"sync"')
    )
    torch.testing.assert_close(stale.go()[0], sync.go()[0], rtol=0, atol=1e-12)


def test_who_comes_back_too_late_goes_on_at_the_slowest_ones_clock() -> None:
    """Its gradient of before is older than the bound, and nobody waits until it has caught up."""
    job = run('ParameterServer("stale", staleness=1)', steps=12, seconds=lambda worker, step: 0.1)
    (client, tensors), seen_steps = job.client(2), list[int]()

    def away() -> PeerScript:
        yield from client.begin()
        client.apply_pull()
        while client.step < job.steps:
            yield from compute(0.1)
            client.gather(whole_gradient(tensors, 2, client.step))
            if len(seen_steps) == 2:
                yield from client.leave()  # as one that was taken for lost
                yield from compute(0.55)
            seen_steps.append((yield from client.push_pull()).step)
            client.apply_pull()
        yield from client.end()

    trace = job.simulate({0: partial(job.worker, 0), 1: partial(job.worker, 1), 2: away})
    trace.result(Peer(WORKER, 2))
    assert seen_steps[:3] == [0, 1, 2]
    assert seen_steps[3] > 5
    assert job.shards[0].dropped == 1
    assert [each.step for each in job.done[0]] == list(range(12))
