"""The end of pairwise gossip: all leave with the same mean."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.pairwise_sessions import RECIPE, settle, start_of, still, together
from support.virtual_workers import Worker, batch, cluster, heard, parameters
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer import events
from gossamer.algorithms.gossip.final_mean import FinalMean, RunningMean
from gossamer.algorithms.gossip.pairwise import Partner
from gossamer.base.layout import FlatTensors
from gossamer.base.peer_ops import WORKER, Arrived, Await, Peer, Push, Receipt, Reply, Stamp
from gossamer.train.checkpoint import digest
from gossamer.train.synchronizers import termination
from gossamer.train.synchronizers.termination import TerminationProtocol


class Norm(nn.Module):
    """Parameters of two dtypes, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)).to(torch.bfloat16))
        return out.float()


def ended(worker: Worker, recipe: str) -> tuple[str, str, Tensor]:
    torch.set_num_threads(1)
    model = Norm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = worker.attach(model, optimizer, recipe)
    for step in range(4 + worker.rank):
        x, y = batch(step, worker.rank, dtype=torch.float32)
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    session.close()
    assert isinstance(model.norm.num_batches_tracked, Tensor)
    return (
        digest(model.parameters()),
        digest([buffer for buffer in model.buffers() if buffer.is_floating_point()]),
        model.norm.num_batches_tracked,
    )


def check_agree(recipe: str = RECIPE) -> None:
    with heard() as found:
        workers = cluster(partial(ended, recipe=recipe), 3)
    assert len({numbers for numbers, _, _ in workers}) == 1
    assert len({statistics for _, statistics, _ in workers}) == 1
    assert [int(count) for _, _, count in workers] == 3 * [5]  # the rounded mean of 4, 5 and 6
    distances = [event.values["consensus_distance"] for event in found if isinstance(event, events.Logged)]
    assert [each > 0 for each in distances] == 3 * [True]
    assert len(set(distances)) == 1


@pytest.mark.parametrize(
    "recipe", [RECIPE, "Gossip('pairwise', period=2) + Ring() + Dense(dtype='bfloat16')", RECIPE + " + Int8()"]
)
def test_all_end_with_the_same_bits(recipe: str) -> None:
    check_agree(recipe)


def test_a_mean_of_ones_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(self: TerminationProtocol, me: object, along: tuple[Tensor, ...]) -> FinalMean:
        return FinalMean((*self._partner.snapshot(-1).payload, *along), 1.0)

    monkeypatch.setattr(TerminationProtocol, "end", own)
    with pytest.raises(AssertionError):
        check_agree()


def merged(worker: Worker) -> tuple[Tensor, Tensor]:
    session, model, optimizer = still(worker, start_of(worker.rank).tolist())
    for _ in range(100):  # two that ask each other at one moment may both be declined
        if len({*worker.transport.all_gather_text(str(parameters(model).tolist()))}) == 1:
            break  # all is shown, and what is begun moves nothing
        optimizer.step()
        settle(session)
        together(worker)
    kept = parameters(model)
    with session.averaged_parameters(model):
        found = parameters(model)
    together(worker)
    assert torch.equal(parameters(model), kept)  # as before the block
    session.close()
    return found, parameters(model)


def test_while_nobody_trains_what_is_merged_is_the_mean_of_all() -> None:
    for found, end in cluster(merged, 2):
        assert torch.equal(found, (start_of(0) + start_of(1)) / 2)
        assert torch.equal(found, end)


def test_a_mean_adds_in_order_and_tells_how_far_all_are_from_it() -> None:
    numbers = [torch.tensor([1.0, 5.0]), torch.tensor([4.0, 5.0]), torch.tensor([1.0, 2.0])]
    sums = RunningMean()
    for each in numbers:
        sums.add((each, each[:1]))
    mean, distance = sums.mean()
    assert [each.tolist() for each in mean] == [[2.0, 4.0], [2.0]]
    assert distance == pytest.approx(2.0)  # (2 + 5 + 5) / 3


class Credulous(TerminationProtocol):
    """Takes whatever it is told."""

    def _fits(self, payload: tuple[Tensor, ...]) -> bool:
        return True


def lonely(rule: type[TerminationProtocol] = TerminationProtocol) -> TerminationProtocol:
    """A worker whose only other is here."""
    return rule(Partner(FlatTensors.pack({"weight": start_of(0)}), 0), 2)


def check_taken(rule: type[TerminationProtocol]) -> None:
    one = lonely(rule)
    script = one.listen()
    next(script)
    distance, mean = torch.tensor([2.5], dtype=torch.float64), start_of(1)
    for payload in (distance, mean[:2]), (), (mean,), (distance.float(), mean), (mean, mean), (distance, mean):
        assert one._agreed is None
        op = Push(to=Peer(WORKER, 0), key=termination.FINAL_MEAN, stamp=Stamp(1, 0), payload=payload)
        reply = script.send(Arrived(moment=0.0, token=1, sender=Peer(WORKER, 1), op=op))
        assert reply == Reply(token=1, answer=Receipt(version=0 if one._agreed is not None else -1))
        assert next(script) == Await()
    assert one._agreed == FinalMean((mean,), 2.5)


def test_a_mean_that_does_not_fit_is_not_taken() -> None:
    check_taken(TerminationProtocol)
    with pytest.raises(AssertionError):
        check_taken(Credulous)


def test_the_last_mean_is_of_those_that_are_done() -> None:
    one = lonely()
    nobody: Any = None
    assert torch.equal(one._mean(nobody, termination.FINAL).payload[0], start_of(0))
    one._said[termination.DONE][1] = 0
    with pytest.raises(AttributeError):  # it is asked
        one._mean(nobody, termination.FINAL)
