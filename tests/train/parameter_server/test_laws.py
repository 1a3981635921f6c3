"""What parameter servers promise, each with a twin that breaks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from support.server_runs import NoDeduplication, Run, flat, parameters, run, whole_gradient
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from gossamer.base.peer_ops import Push, Receipt
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.train.parameter_server import ServerShard, SynchronousPolicy, UpdatePolicy
from gossamer.train.parameter_server.from_recipe import policy_for

START = flat(parameters())
REPEATED = VirtualNetwork(round_trip_seconds=0.01, duplicate=1.0, jitter_seconds=0.05, resend_seconds=0.3)


def random_seconds(seed: int) -> Any:
    return lambda worker, step: 0.01 + Random(seed * 10_000 + worker * 100 + step).random() ** 3


# -- sync is one process on the joined batch --------------------------------------------------------------------------


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    """Of one to three rows, so that workers differ in weight."""
    generator = torch.Generator().manual_seed(100 * worker + step)
    rows = 1 + (worker + step) % 3
    draw = torch.randn(rows, 7, generator=generator, dtype=torch.float64)
    return draw[:, :6], draw[:, 6:]


def loss_gradient(tensors: Mapping[str, Tensor], batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
    hidden = torch.tanh(inputs @ leaves["weight"].T + leaves["bias"])
    loss = ((hidden @ leaves["out"].T * leaves["scale"] - targets) ** 2).mean()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def regression() -> dict[str, Parameter]:
    tensors = parameters({"weight": (5, 6), "bias": (5,), "out": (1, 5), "scale": ()})
    return {name: Parameter(tensor.detach() / 9) for name, tensor in tensors.items()}


OPTIMIZERS = {
    "momentum": lambda tensors: SGD(tensors, 0.02, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adamw": lambda tensors: AdamW(
        [{"params": list(tensors)[:2]}, {"params": list(tensors)[2:], "weight_decay": 0.0, "lr": 0.3}], 0.1
    ),
}


def joined(optimizer: str, world: int, steps: int) -> Tensor:
    tensors = regression()
    rule = OPTIMIZERS[optimizer](tensors.values())
    for step in range(steps):
        gradients = loss_gradient(tensors, [batch(worker, step) for worker in range(world)])
        for name, tensor in tensors.items():
            tensor.grad = gradients[name]
        rule.step()
    return flat(tensors)


def check_joined(name: str, steps: int = 8, net: VirtualNetwork | None = None, **options: Any) -> Run:
    job = run(
        'ParameterServer("sync")',
        steps=steps,
        make=regression,
        gradient=lambda tensors, worker, step: loss_gradient(tensors, [batch(worker, step)]),
        **{"optimizer": OPTIMIZERS[name], "weight": lambda worker, step: len(batch(worker, step)[0])} | options,
    )
    for end in job.go(net):
        assert (end - joined(name, 3, steps)).abs().max() < 1e-12
    return job


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", [None, REPEATED], ids=["once", "replayed"])
def test_sync_is_one_process_on_the_joined_batch(optimizer: str, net: VirtualNetwork | None) -> None:
    check_joined(optimizer, net=net)


def test_the_joined_batch_sees_weights_and_groups() -> None:
    with pytest.raises(AssertionError):
        check_joined("adamw", weight=lambda worker, step: 1.0)
    with pytest.raises(AssertionError):
        check_joined("momentum", optimizer=OPTIMIZERS["adamw"])


@dataclass(frozen=True)
class Forgetful(SynchronousPolicy):
    """Takes what comes again for something new."""

    def receive_gradient(self, shard: ServerShard, push: Push) -> Receipt:
        if shard.answer_log.version_of(push.stamp) is None:
            return super().receive_gradient(shard, push)
        shard.take(push.stamp, shard.version + 1, push.about, push.payload)
        shard.apply()
        return Receipt(version=shard.version)


def test_promise_18_pushes_that_come_twice_change_nothing() -> None:
    """Bit for bit; and a server without deduplication is found out."""
    once, twice = run('ParameterServer("sync")'), run('ParameterServer("sync")')
    for one, other in zip(once.go(), twice.go(REPEATED), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(AssertionError):
        check_joined("momentum", net=REPEATED, policy=lambda shard: Forgetful())


def test_learning_rates_follow_the_workers_schedule() -> None:
    def falling(tensors: Any) -> Any:
        return SGD(tensors, 4.0)

    job = run('ParameterServer("sync")', world=1, servers=3, steps=3, optimizer=falling)

    def gradient(tensors: Mapping[str, Tensor], worker: int, step: int) -> Mapping[str, Tensor]:
        job.clients[worker]._optimizer.param_groups[0]["lr"] = 4.0 / 2**step
        return whole_gradient(tensors, worker, step)

    job.gradient = gradient
    (end,) = job.go()
    steps = [flat(whole_gradient(regular(), 0, step)) * 4.0 / 2**step for step in range(3)]
    assert torch.equal(end, START - steps[0] - steps[1] - steps[2])


def regular() -> Mapping[str, Tensor]:
    return parameters()


# -- async: every gradient once ---------------------------------------------------------------------------------------


def everything(job: Run) -> Tensor:
    """The sum of all gradients there were."""
    return sum((flat(whole_gradient(regular(), w, t)) for w in range(job.world) for t in range(job.steps)), START * 0)


def check_once(job: Run, net: VirtualNetwork | None = None) -> None:
    """w_T = w_0 - lr sum of all gradients, and the age of each is what the receipts say it is."""
    for end in job.go(net):
        assert torch.equal(end, START - everything(job))
    for number, shard in job.shards.items():
        ages: Counter[int] = Counter()
        for worker, path in job.done.items():
            known = job.begun[worker][number]
            for exchanged in path:
                ages[exchanged.applied[number] - 1 - known] += 1
                known = exchanged.versions[number]
        assert shard.staleness == ages
        assert shard.version == job.world * job.steps
    versions = sorted(exchanged.applied[0] for path in job.done.values() for exchanged in path)
    assert versions == list(range(1, job.world * job.steps + 1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("net", [None, REPEATED], ids=["once", "replayed"])
def test_async_applies_every_gradient_once(seed: int, net: VirtualNetwork | None) -> None:
    check_once(run("ParameterServer()", seed=seed, world=4, seconds=random_seconds(seed)), net)


def test_async_without_deduplication_is_found_out() -> None:
    with pytest.raises(AssertionError):
        check_once(
            run("ParameterServer()", policy=lambda shard: NoDeduplication(), seconds=random_seconds(0)), REPEATED
        )


def test_ages_are_those_that_were_injected() -> None:
    """Three workers in turns: after the first round, everyone's gradient is two versions old; a slow one's is older."""
    job = run("ParameterServer()", servers=1, steps=4, seconds=lambda worker, step: 0.3 + 0.1 * worker * (step == 0))
    job.go()
    assert job.shards[0].staleness == {0: 1, 1: 1, 2: 10}
    job = run("ParameterServer()", world=2, servers=1, steps=4, seconds=lambda worker, step: 0.1 + 0.9 * worker)
    job.go()
    assert job.shards[0].staleness == {0: 7, 4: 1}


def check_damped(text: str) -> None:
    """Worker 1's first gradient is four versions old: a learning rate of 1 becomes a quarter."""
    job = run(text, world=2, servers=1, steps=4, seconds=lambda worker, step: 0.1 + 0.9 * worker)
    first, _ = job.go()
    quarter = flat(whole_gradient(regular(), 1, 0)) * 0.75
    assert torch.equal(first, START - everything(job) + quarter)


def test_damping_divides_the_learning_rate_by_the_age() -> None:
    check_damped("ParameterServer(damping=True)")
    with pytest.raises(AssertionError):
        check_damped("ParameterServer()")


# -- stale: nobody runs ahead by more ---------------------------------------------------------------------------------


def test_stale_by_nothing_is_sync() -> None:
    texts = (
        'ParameterServer("sync")',
        'ParameterServer("stale", staleness=0)',
        'ParameterServer("stale", staleness=1)',
    )
    sync, none, one = (run(text, seconds=random_seconds(3), optimizer=OPTIMIZERS["adamw"]) for text in texts)
    for job in (sync, none, one):
        job.go()
    for worker in range(3):
        assert all(map(torch.equal, sync.paths[worker], none.paths[worker]))
        assert not all(map(torch.equal, sync.paths[worker], one.paths[worker]))


class Spread:
    """How far workers were apart when one began a step: how many it had pushed more than the slowest, at most."""

    def __init__(self, job: Run) -> None:
        self.pushed, self.widest, self.world = Counter[int](), 0, job.world
        job.seconds, job.gradient = self.starts(job.seconds), self.ends

    def starts(self, seconds: Any) -> Any:
        def started(worker: int, step: int) -> float:
            self.widest = max(self.widest, step - min(self.pushed[each] for each in range(self.world)))
            return float(seconds(worker, step))

        return started

    def ends(self, tensors: Mapping[str, Tensor], worker: int, step: int) -> Mapping[str, Tensor]:
        self.pushed[worker] = step + 1
        return whole_gradient(tensors, worker, step)


def widest(staleness: int, seeds: range, early: int = 0) -> int:
    """Over random schedules; early: steps that a worker may begin too soon."""
    found = 0
    for seed in seeds:
        job = run(f'ParameterServer("stale", staleness={staleness})', steps=9, servers=1, seconds=random_seconds(seed))
        if early:
            job.policy = lambda shard: too_soon(policy_for(shard), early)
        spread = Spread(job)
        job.go()
        found = max(found, spread.widest)
    return found


def too_soon(policy: UpdatePolicy, early: int) -> UpdatePolicy:
    """The same, but pulls are answered so many clocks too soon."""
    kind: Any = type(policy)

    class TooSoon(kind):  # type: ignore[misc]
        def is_reached(self, shard: ServerShard, pull: Any) -> bool:
            return bool(super().is_reached(shard, replace(pull, at_least=pull.at_least - early)))

    return TooSoon()


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_workers_are_never_further_apart_and_do_get_there(staleness: int) -> None:
    assert widest(staleness, range(6)) == staleness
    with pytest.raises(AssertionError):
        assert widest(staleness, range(6), early=1) == staleness
    if staleness:
        with pytest.raises(AssertionError):
            assert widest(staleness, range(6), early=-1) == staleness


# -- backup workers ---------------------------------------------------------------------------------------------------


def check_backup(job: Run, backup: int) -> None:
    """In each round the gradients of all but the slowest so many count, and no more is lost."""
    job.go()
    for shard in job.shards.values():
        assert shard.version == job.steps
        assert shard.dropped == backup * job.steps
        assert shard.staleness.total() == (job.world - backup) * job.steps
    for worker, path in job.done.items():
        late = worker >= job.world - backup
        assert all((applied == -1) == late for each in path for applied in each.applied)


def test_backup_drops_so_many_and_no_more() -> None:
    def seconds(worker: int, step: int) -> float:
        return 0.3 + 0.02 * worker

    check_backup(run('ParameterServer("sync", backup=1)', world=4, steps=4, seconds=seconds), 1)
    check_backup(run('ParameterServer("sync", backup=2)', world=4, steps=4, seconds=seconds), 2)
    with pytest.raises(AssertionError):
        check_backup(run('ParameterServer("sync")', world=4, steps=4, seconds=seconds), 1)


# -- conservation -----------------------------------------------------------------------------------------------------

COMPRESSORS = ["TopK(0.2)", "OneBit()", "Int8()", "Float4()", "RandomK(0.2)", "TwoBit(2.0)", "PowerSGD(1)"]


def owed(job: Run) -> Tensor:
    """What all workers still owe."""
    total = START * 0
    for client in job.clients.values():
        left = {name: torch.zeros_like(tensor.detach()) for name, tensor in client._tensors.items()}
        for shard_client in client.shard_clients:
            values = []
            for state, block in zip(shard_client.states, shard_client.gradients, strict=True):
                values.append(torch.zeros_like(block.flat))
                for key, packed in state.items():
                    if key.endswith("residual"):
                        for name, view in packed.items():
                            block.layout.by_name[name].view(values[-1]).copy_(view)
            shard_client.scatter(tuple(values), left)
        total = total + flat(left)
    return total


def check_conserved(job: Run, owes: bool = True) -> None:
    (end, *_) = job.go(REPEATED)
    given = everything(job)
    assert (START - end + owed(job) * owes - given).abs().max() < 1e-9


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_what_was_applied_and_what_is_owed_is_what_was_given(compressor: str) -> None:
    text = f"ParameterServer(pull=Int8()) + Route(Feedback({compressor}), smallest=0)"
    check_conserved(run(text, steps=5, seconds=random_seconds(1)))
    if compressor != "Int8()":
        with pytest.raises(AssertionError):
            check_conserved(run(text, steps=5, seconds=random_seconds(1)), owes=False)
