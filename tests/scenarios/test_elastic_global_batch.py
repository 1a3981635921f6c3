"""A global batch in an elastic run: which samples are in a step while workers come and go, read off its gradient.

Parameter i has a gradient only where sample i is in the step, and the mean over k samples makes it 1 / k.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from support.elastic_groups import ElasticRun, Join, Loss
from support.virtual_workers import Worker, cluster, notices
from torch import Tensor, nn

from gossamer.train.synchronizers.gradients import AdmissionGate

STEPS, GLOBAL, BATCH = 8, 24, 2
LATE = Join(op=-1)  # worker 0 lets newcomers begin half-way, in whatever group it is by then
KEPT = f"EveryStep(global_batch={GLOBAL}, batch={BATCH})"


class OnePerSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2 * STEPS * GLOBAL, dtype=torch.float64))

    def forward(self, samples: Tensor) -> Tensor:
        return self.weight[samples]


@dataclass
class Seen:
    """The samples of every step, as each worker finds them in its gradient; batches are drawn from one queue."""

    steps: dict[int, list[frozenset[int]]] = field(default_factory=dict)
    before: Mapping[int, Callable[[], None]] = field(default_factory=dict)  # what worker 0 does, by steps made
    drawn: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def draw(self) -> Tensor:
        with self.lock:
            self.drawn += BATCH
            return torch.arange(self.drawn - BATCH, self.drawn)

    def note(self, step: int, gradient: Tensor) -> None:
        (there,) = gradient.nonzero(as_tuple=True)
        torch.testing.assert_close(gradient[there], torch.full((len(there),), 1 / len(there), dtype=torch.float64))
        with self.lock:
            self.steps.setdefault(step, []).append(frozenset(there.tolist()))

    def check(self) -> list[int]:
        """How many samples each step had. All workers saw the same ones, and none in two steps."""
        found: set[int] = set()
        for step in range(1, STEPS + 1):
            (samples,) = set(self.steps[step])
            assert not found & samples, f"step {step} has samples of an earlier one"
            found |= samples
        return [len(self.steps[step][0]) for step in range(1, STEPS + 1)]


def trained(seen: Seen, recipe: str, worker: Worker) -> Tensor:
    model = OnePerSample()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    session = worker.attach(model, optimizer, recipe)
    session.track(scheduler=scheduler)
    while session.steps < STEPS:
        if worker.rank == 0 and not session.accumulating:
            seen.before.get(session.steps, lambda: None)()
        model(seen.draw()).mean().backward()
        if not session.accumulating:
            assert model.weight.grad is not None
            seen.note(session._synchronizer.step, model.weight.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
        if not session.accumulating:
            scheduler.step()
    assert scheduler.last_epoch == STEPS
    return model.weight.detach().clone()


def in_one_process(steps: dict[int, list[frozenset[int]]]) -> Tensor:
    """The same samples, a whole step's at once."""
    model = OnePerSample()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(1, STEPS + 1):
        model(torch.tensor(sorted(steps[step][0]))).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model.weight.detach()


def run(
    recipe: str, world: int, losses: Sequence[Loss] = (), join: Join | None = None, newcomers: int = 0
) -> tuple[Seen, list[int]]:
    elastic = ElasticRun(world, losses, newcomers, join)
    seen = Seen(before={} if join is not LATE else {STEPS // 2: elastic.members.invite})
    results = elastic(partial(trained, seen, recipe))
    here = [each for each in results if each is not None]
    sizes = seen.check()
    for each in here:
        assert torch.equal(each, here[0])
        torch.testing.assert_close(each, in_one_process(seen.steps))
    return seen, sizes


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_in_a_fixed_group_every_step_has_all_samples(world: int) -> None:
    seen = Seen()
    for each in cluster(partial(trained, seen, KEPT), world):
        torch.testing.assert_close(each, in_one_process(seen.steps))
    assert seen.check() == [GLOBAL] * STEPS
    assert all(len(told) == world for told in seen.steps.values())


def test_mutant_passes_that_do_not_follow_the_workers_are_seen() -> None:
    seen = Seen()
    cluster(partial(trained, seen, "EveryStep(accumulate=3)"), 3)
    assert seen.check() == [3 * 3 * BATCH] * STEPS


@pytest.mark.parametrize("op", [3, 5, 6])
@pytest.mark.parametrize("newcomers", [1, 2])
def test_a_step_has_as_many_samples_where_a_worker_comes(op: int, newcomers: int) -> None:
    seen, sizes = run(KEPT, 3, join=Join(op=op, member=op % 3), newcomers=newcomers)
    assert sizes == [GLOBAL] * STEPS
    assert len(seen.steps[STEPS]) == 3 + newcomers


def test_a_run_that_begins_with_one_worker() -> None:
    seen, sizes = run(KEPT, 1, join=Join(op=4), newcomers=3)
    assert sizes == [GLOBAL] * STEPS
    assert [len(seen.steps[step]) for step in (1, STEPS)] == [1, 4]


def test_mutant_a_worker_that_comes_into_the_exchange_of_a_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its passes are on top of all that the others have made."""
    init = AdmissionGate.__init__
    monkeypatch.setattr(AdmissionGate, "__init__", lambda self, context, *, gates: init(self, context, gates=False))
    _, sizes = run(KEPT, 3, join=Join(op=5), newcomers=1)
    assert max(sizes) > GLOBAL


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("op", [4, 5])
def test_four_workers_then_three_then_four(op: int, answered: bool) -> None:
    """The step from which a worker is lost lacks its share, and no other does."""
    losses = [Loss(victim=1, op=op, answered=answered, deaf=frozenset({2}))]
    seen, sizes = run(KEPT, 4, losses, LATE, 1)
    (short,) = [size for size in sizes if size != GLOBAL]
    assert short == GLOBAL * 3 // 4
    assert [len(seen.steps[step]) for step in (1, STEPS // 2, STEPS)] == [4, 3, 4]


def test_more_workers_than_batches_continue_and_it_is_reported() -> None:
    with notices() as said:
        _, sizes = run(f"EveryStep(global_batch={2 * BATCH}, batch={BATCH})", 2, join=Join(op=5), newcomers=1)
    assert {*sizes} == {2 * BATCH, 3 * BATCH}
    assert sum("too small for 3 workers" in each and "`gossamer resize 2`" in each for each in said) == 1
