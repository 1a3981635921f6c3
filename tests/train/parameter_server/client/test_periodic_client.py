"""AsyncDiLoCo in virtual time: it is DiLoCo if all workers are merged, and delayed Nesterov if each is alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.async_diloco_runs import LocalRun, ballots, local_run, vote
from support.server_runs import CALM, flat
from torch import Tensor
from torch.nn import Parameter

from gossamer.algorithms.strategies import AGREED, DiLoCo
from gossamer.algorithms.strategies.async_diloco import AsyncDiLoCo
from gossamer.base.peer_ops import WORKER, Peer
from gossamer.comm.simulation.faulty_network import Kill, Restart, VirtualNetwork
from gossamer.errors import AttachError
from gossamer.train.parameter_server import ServerShard
from gossamer.train.parameter_server.client.periodic_client import PeriodicClient
from gossamer.train.parameter_server.update_policy import QuorumPolicy

SHAPES = {"weight": (5, 6), "bias": (5,), "out": (1, 5)}


def network() -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for name, shape in SHAPES.items()
    }


@torch.no_grad()
def descend(tensors: Mapping[str, Tensor], worker: int, step: int) -> None:
    """A step of SGD on the worker's own batch."""
    generator = torch.Generator().manual_seed(100 * worker + step)
    draw = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    with torch.enable_grad():
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        hidden = torch.tanh(draw[:, :6] @ leaves["weight"].T + leaves["bias"])
        loss = ((hidden @ leaves["out"].T - draw[:, 6:]) ** 2).mean()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
    for tensor, gradient in zip(tensors.values(), gradients, strict=True):
        tensor.detach().sub_(gradient, alpha=0.05)


def diloco(strategy: DiLoCo, world: int, steps: int) -> list[list[Tensor]]:
    """By worker, the parameters after each step of DiLoCo, by its rules for flat tensors."""
    models = [network() for _ in range(world)]
    memories = [strategy.begin(flat(model)) for model in models]
    paths: list[list[Tensor]] = [[] for _ in models]
    for step in range(steps):
        for worker, model in enumerate(models):
            descend(model, worker, step)
        if (step + 1) % strategy.period == 0:
            offers = [memory[AGREED] - flat(model) for memory, model in zip(memories, models, strict=True)]
            for model, memory in zip(models, memories, strict=True):
                mean = sum(offers[1:], offers[0].clone()) / world
                parameters = flat(model)
                strategy.land(parameters, memory, mean, None)
                start = 0
                for tensor in model.values():
                    tensor.detach().copy_(parameters[start : start + tensor.numel()].view_as(tensor))
                    start += tensor.numel()
        for path, model in zip(paths, models, strict=True):
            path.append(flat(model))
    return paths


def check_diloco(text: str, world: int = 3, **options: Any) -> None:
    job = local_run(text, world=world, steps=13, make=network, local_step=descend, **options)
    trace = job.simulate({number: lambda number=number: job.at_once(number) for number in range(world)})
    for worker, path in enumerate(diloco(DiLoCo(4, 0.7, 0.9), world, 12)):
        trace.result(Peer(WORKER, worker))
        torch.testing.assert_close(job.paths[worker][:12], path, rtol=0, atol=1e-12)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("world", [1, 3])
def test_merges_of_all_workers_with_answers_at_once_are_diloco(world: int, servers: int) -> None:
    check_diloco(f"AsyncDiLoCo(period=4, quorum={world})", world, servers=servers)


@pytest.mark.parametrize("more", ["grace=3.0", "weighting='samples'"])
def test_grace_and_weighting_change_nothing_among_equal_workers(more: str) -> None:
    check_diloco(f"AsyncDiLoCo(period=4, quorum=3, {more})", weight=lambda worker, step: 8.0)


def test_a_momentum_per_contribution_is_not_diloco(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a merge that counts as a part of the workers delays the momentum."""
    monkeypatch.setattr(AsyncDiLoCo, "merge", lambda self, weights, staleness, present: (weights, 1 / present))
    with pytest.raises(AssertionError):
        check_diloco("AsyncDiLoCo(period=4, quorum=3)")


def test_a_quorum_above_the_number_of_workers_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(AttachError, match=r"Write AsyncDiLoCo\(period=4, quorum=3\)"):
        local_run("AsyncDiLoCo(period=4, quorum=5)", make=network).local_client(0)


# -- at different speeds -----------------------------------------------------------------------------------------------


def speeds(*relative: float) -> Any:
    return lambda worker, step: 0.1 / relative[worker]


def unequal(text: str, steps: int = 40, **options: Any) -> LocalRun:
    world = options.setdefault("world", 4)
    options.setdefault("seconds", speeds(*[1.0] * (world - 1), 0.2))
    return local_run(text, steps=steps, make=ballots(world, steps), local_step=vote(steps), **options)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("text", ["", ", quorum=2", ", quorum=3, grace=2.0", ", quorum=4", ", grace=8.0"])
def test_no_worker_waits_for_another_one(text: str, servers: int) -> None:
    job = unequal(f"AsyncDiLoCo(period=5{text})", servers=servers)
    job.in_background(most_seconds=100.0)
    for worker, finished in job.finished.items():
        own = sum(job.seconds(worker, step) for step in range(job.steps))
        assert finished == pytest.approx(own, abs=0.2)
    merged = {shard.merged for shard in job.shards.values()}
    assert merged == {4 * 40.0}, "every local step is merged once"
    assert all(not shard.pending for shard in job.shards.values())


def test_single_workers_merge_at_once_and_a_slow_one_is_late() -> None:
    job = unequal("AsyncDiLoCo(period=5)", servers=1)
    job.in_background()
    assert job.shards[0].staleness.total() == sum(job.counted.values()) / 5
    assert max(job.shards[0].staleness) >= 12, "a slow worker's contribution missed those of the fast ones"


@pytest.mark.parametrize("fragments", [2, 3])
@pytest.mark.parametrize("quorum", [1, 2, 4])
def test_fragments_are_merged_in_turn_and_each_step_once(fragments: int, quorum: int) -> None:
    shapes = {f"tensor {number}": (1, 160) for number in range(3)}

    def make() -> dict[str, Parameter]:
        return {name: Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in shapes.items()}

    def step(tensors: Mapping[str, Tensor], worker: int, number: int) -> None:
        for tensor in tensors.values():
            tensor.detach()[:, 40 * worker + number] -= 1

    text = f"AsyncDiLoCo(period=6, quorum={quorum}, fragments={fragments}, outer_momentum=0.0, outer_learning_rate=1.0)"
    job = local_run(text, world=4, servers=1, steps=40, make=make, local_step=step, seconds=speeds(1, 1, 0.7, 0.2))
    job.in_background(most_seconds=200.0)
    shard = job.shards[0]
    assert shard.merged == pytest.approx(4 * 40)
    values = torch.cat([block.flat for block in shard.blocks])
    assert bool(((values < 0) & (values >= -1 - 1e-9)).all())
    sizes = {shard.spec.blocks[number].layout.numel for number in range(len(shard.blocks))}
    assert max(sizes) < sum(block.layout.numel for block in shard.spec.blocks)


class Endless(QuorumPolicy):
    """The negative control: a grace window without an end."""

    def _deadline(self, shard: ServerShard) -> float:
        return float("inf")


@pytest.mark.parametrize("quorum", [1, 2])
def test_a_grace_window_ends(quorum: int) -> None:
    """Worker 3 is connected and does not send for 30 s; the others are merged meanwhile."""

    def run(policy: Any = None) -> int:
        stalled = {3: 30.0}
        job = unequal(
            f"AsyncDiLoCo(period=5, quorum={quorum}, grace=5.0)", servers=1, policy=policy,
            seconds=lambda worker, step: stalled.get(worker, 0.1) if step == 10 else 0.1,
        )  # fmt: skip
        job.in_background(CALM, most_seconds=60.0)
        return min(len(job.waits[worker]) for worker in range(3))

    assert run() >= 4
    assert run(lambda shard: Endless(AsyncDiLoCo(period=5, quorum=quorum))) <= 2


def test_grace_collects_more_workers_than_the_quorum() -> None:
    def merges(text: str) -> int:
        job = unequal(text, servers=1, seconds=lambda worker, step: 0.1 + 0.004 * worker)
        job.in_background()
        return job.shards[0].version

    assert merges("AsyncDiLoCo(period=5, grace=4.0)") < 0.6 * merges("AsyncDiLoCo(period=5)")


def test_a_lost_worker_does_not_hold_up_a_quorum_of_all() -> None:
    job = unequal("AsyncDiLoCo(period=5, quorum=4)", servers=2, seconds=speeds(1, 1, 1, 1))
    net = VirtualNetwork(round_trip_seconds=0.01, dead_after_seconds=1.0, faults=(Kill(Peer(WORKER, 1), 1.2),))
    job.in_background(net, most_seconds=100.0)
    assert set(job.finished) == {0, 2, 3}
    assert max(max(waits) for waits in job.waits.values()) < 2.0


@pytest.mark.parametrize("servers", [1, 4])
def test_a_worker_that_returns_begins_at_the_steps_that_it_has_sent(servers: int) -> None:
    job = local_run(
        "AsyncDiLoCo(period=1)", world=2, servers=servers, steps=40, make=ballots(2, 80, tensors=4), local_step=vote(80)
    )
    faults = (Kill(Peer(WORKER, 1), 1.2), Restart(Peer(WORKER, 1), 2.0))
    job.in_background(VirtualNetwork(round_trip_seconds=0.01, faults=faults), most_seconds=100.0)
    assert 9 <= job.first_steps[1] <= 12, "it had made 11 or 12 steps"


@pytest.mark.parametrize("quorum", [1, 2, 4])
def test_each_fragment_is_sent_in_turn(quorum: int) -> None:
    sent: list[int] = []
    text = f"AsyncDiLoCo(period=6, quorum={quorum}, fragments=3)"
    job = local_run(text, world=4, servers=1, steps=60, make=network, seconds=speeds(1, 1, 1, 0.2))

    class Noting(QuorumPolicy):
        def apply(self, shard: ServerShard) -> None:
            sent.extend(each.fragment or 0 for each in shard.due.values())
            super().apply(shard)

    job.policy = lambda shard: Noting(AsyncDiLoCo(period=6, quorum=quorum, fragments=3))
    job.in_background(most_seconds=200.0)
    counts = [sent.count(fragment) for fragment in range(3)]
    assert min(counts) > 0.8 * max(counts)


def test_answers_of_workers_of_equal_speed_contain_each_fragment_about_once() -> None:
    def received(text: str) -> float:
        job = local_run(text, world=3, servers=1, steps=60, make=network, seconds=speeds(1, 1, 1))
        job.in_background(most_seconds=100.0)
        return sum(each.bytes_received for done in job.done.values() for each in done)

    assert received("AsyncDiLoCo(period=6, fragments=3)") < 1.5 * received("AsyncDiLoCo(period=6)")


def test_workers_that_wait_with_other_fragments_do_not_block_a_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two workers sends another fragment first, so that neither is merged together with the other one."""

    class Faithful(QuorumPolicy):
        """The negative control: it counts on workers that wait for another merge."""

        def _awaited(self, shard: ServerShard) -> set[int]:
            return set(shard.members).difference(shard.due)

    def run(policy: type[QuorumPolicy]) -> int:
        job = local_run("AsyncDiLoCo(period=6, quorum=2, fragments=2)", world=2, servers=1, steps=40, make=network)
        job.policy = lambda shard: policy(AsyncDiLoCo(period=6, quorum=2, fragments=2))
        job.in_background(most_seconds=100.0)
        return min(len(job.waits.get(worker, ())) for worker in range(2))

    original = PeriodicClient._next_fragment
    monkeypatch.setattr(
        PeriodicClient, "_next_fragment", lambda self, number: (original(self, number) + self._worker) % 2
    )
    assert run(QuorumPolicy) > 5
    assert run(Faithful) == 0
