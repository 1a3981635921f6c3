"""The end of pairwise gossip: all leave with the same mean."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from support.pairwise_sessions import PATIENCE_SECONDS, RECIPE, die, exchange, settle, start_of, still, together
from support.virtual_workers import Worker, batch, cluster, heard, network, parameters
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer import events
from gossamer.algorithms.gossip import state_transfer
from gossamer.algorithms.gossip.final_mean import FinalMean, RunningMean
from gossamer.algorithms.gossip.partner import NO_EXCHANGE, Partner
from gossamer.base.layout import FlatTensors
from gossamer.base.peer_ops import WORKER, Arrived, Await, Peer, PeerEvent, PeerScript, Push, Receipt, Reply, Stamp
from gossamer.comm.detached import DetachedTransport
from gossamer.errors import ConnectError, PeerLost, Stopped
from gossamer.train.checkpoint import digest
from gossamer.train.session.session import Session
from gossamer.train.synchronizers import pairwise_gossip, peer_endpoints, termination
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


def test_merged_parameters_without_training_are_the_mean_of_all() -> None:
    for found, end in cluster(merged, 2):
        assert torch.equal(found, (start_of(0) + start_of(1)) / 2)
        assert torch.equal(found, end)


def test_running_mean_adds_in_order_and_returns_the_distance() -> None:
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
    one._reports[termination.DONE][1] = 0
    with pytest.raises(AttributeError):  # it is asked
        one._mean(nobody, termination.FINAL)


# -- Pairwise gossip with workers that are lost, come back, or are slow ------------------------------------------------


class Faithful(TerminationProtocol):
    """Waits for those that have left."""

    @property
    def live(self) -> list[int]:
        return [peer for peer in range(self._world) if peer != self._rank]


def survived(worker: Worker, victim: int, patience_seconds: float = PATIENCE_SECONDS) -> Tensor | None:
    session, model, optimizer = still(worker, start_of(worker.rank).tolist())
    for step in range(10):
        if worker.rank == victim and step == 3:
            die(session)
            return None
        optimizer.step()
    alarm = threading.Timer(patience_seconds, exchange(session)._me.close)
    alarm.start()
    session.close()
    alarm.cancel()
    alarm.join()
    return parameters(model)


def check_survivors(work: Callable[[Worker], Tensor | None], victim: int) -> list[Tensor]:
    found = [end for rank, end in enumerate(cluster(work, 3)) if rank != victim]
    assert all(torch.equal(end, found[0]) for end in found)
    return found


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank_does_not_block_the_others(victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_endpoints, "DEAD_AFTER_SECONDS", 1.0)
    check_survivors(partial(survived, victim=victim), victim)


def test_waiting_for_the_dead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_endpoints, "DEAD_AFTER_SECONDS", 0.2)
    monkeypatch.setattr(pairwise_gossip, "TerminationProtocol", Faithful)
    with pytest.raises(ConnectError, match="endpoint of worker"):
        check_survivors(partial(survived, victim=2, patience_seconds=1.0), 2)


class Watched(nn.Module):
    """Buffers of several kinds beside a weight."""

    def __init__(self, weight: Tensor, counts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.register_buffer("counts", torch.tensor(counts))
        self.register_buffer("turn", torch.full((2,), counts * 1j))
        self.register_buffer("mask", torch.tensor([counts > 9, True]))

    def held(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self.buffers()]


class Returns:
    """Three workers, of which the last is lost and comes back; what a launcher would have told them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.places: dict[int, Any] = {}
        self.back, self.incarnations = threading.Event(), threading.local()
        patch.setattr(peer_endpoints, "run_token", lambda: bytes(range(32)))
        patch.setattr(peer_endpoints, "publish", self.places.__setitem__)
        patch.setattr(peer_endpoints, "published", lambda world: dict(self.places))
        patch.setattr(pairwise_gossip, "comebacks", lambda: getattr(self.incarnations, "count", 0))

    def attach(self, worker: Worker, counts: int) -> tuple[Session, Watched, torch.optim.Optimizer]:
        model = Watched(start_of(worker.rank), counts)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return worker.attach(model, optimizer, RECIPE), model, optimizer

    def lose(self, worker: Worker, session: Session) -> Worker:
        """The worker again, in its next incarnation."""
        die(session)
        self.incarnations.count = 1
        return Worker(worker.rank, worker.world, DetachedTransport(worker.rank, worker.world), worker.sessions)

    def work(self, worker: Worker) -> tuple[Tensor, int, Tensor, list[Tensor], Tensor]:
        """What was shown when somebody came back, of which incarnation all think the last is, and how all end."""
        session, model, optimizer = self.attach(worker, 7)
        with torch.no_grad():
            model.weight.copy_(start_of(worker.rank))
        for _ in range(5):
            optimizer.step()
        settle(session)
        together(worker)
        exchange(session)._drain()
        together(worker)
        if worker.rank == 2:
            session, model, optimizer = self.attach(self.lose(worker, session), 99)
            assert session.steps == 5
            shown, buffers = parameters(model), model.held()
            self.back.set()
        else:
            assert self.back.wait(PATIENCE_SECONDS)
            shown, buffers = exchange(session)._partner.shown, model.held()
        for _ in range(20):
            optimizer.step()
            settle(session)
        session.close()
        return (
            shown,
            exchange(session)._partner.newest_incarnation(2),
            parameters(model),
            buffers,
            model.weight.detach(),
        )


def check_returns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(peer_endpoints, "DEAD_AFTER_SECONDS", 1.0)
    with heard() as found:
        *others, back = cluster(Returns(patch).work, 3)
    assert any(torch.equal(back[0], each[0]) for each in others), "it does not begin where anybody was"
    assert [each[1] for each in others] == [1, 1], "nobody has averaged with it"
    assert all(torch.equal(each[2], back[2]) for each in others)
    assert all(torch.equal(mine, its) for mine, its in zip(others[0][3], back[3], strict=True))
    said = [event.message for event in found if isinstance(event, events.Noticed)]
    assert [each for each in said if "worker 2 returned" in each and "after 5 steps" in each]


def test_restarted_worker_receives_the_state_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    check_returns(monkeypatch)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("unpack_statistics", lambda loop, taken: None),
        ("copy_parameters", lambda old, new: None),
    ],
)
def test_a_mutant_that_comes_back_to_something_else_is_found(
    name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairwise_gossip, name, broken)
    with pytest.raises(AssertionError):
        check_returns(monkeypatch)


@pytest.mark.parametrize("over", [True, False])
def test_worker_restarted_without_peers(over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the others have come to the end, nothing is left to be done; else all is lost."""
    returns = Returns(monkeypatch)
    monkeypatch.setattr(state_transfer, "STATUS_SECONDS", 0.05)
    monkeypatch.setattr(state_transfer, "SEARCH_SECONDS", 0.1)
    monkeypatch.setattr(pairwise_gossip, "has_ended", lambda: over)
    returns.incarnations.count = 1
    worker = Worker(2, 3, DetachedTransport(2, 3))
    with heard() as found, pytest.raises(Stopped if over else PeerLost):
        returns.attach(worker, 1)
    said = [event.message for event in found if isinstance(event, events.Noticed)]
    assert ["worker 2 returned after" in each for each in said] == over * [True]


def test_restart_without_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    returns = Returns(monkeypatch)
    monkeypatch.setattr(peer_endpoints, "run_token", lambda: None)
    returns.incarnations.count = 1
    with pytest.raises(ConnectError, match="without the run's token"):
        returns.attach(Worker(2, 3, DetachedTransport(2, 3)), 1)


class Forgetful(TerminationProtocol):
    """Does not tell whoever averages anew that it has a mean already."""

    def _answer(self, heard: PeerEvent) -> Reply | None:
        known, self._agreed = self._agreed, None
        try:
            return super()._answer(heard)
        finally:
            self._agreed = known


class Died(Exception):
    """Of a worker that dies on purpose."""


def outlived(worker: Worker) -> Tensor | None:
    """Worker 0 averages, hands the mean to worker 2 alone, and dies."""
    session, model, optimizer = still(worker, start_of(worker.rank).tolist())
    optimizer.step()
    ending = exchange(session)._termination
    tell = ending._push_to_all

    def only_to_the_last(me: Any, peers: Iterable[int], key: str, payload: tuple[Tensor, ...] = ()) -> Any:
        handles = tell(me, [2] if key == termination.FINAL_MEAN else peers, key, payload)
        if key == termination.FINAL_MEAN:
            handles[2].wait(PATIENCE_SECONDS)
            raise Died
        return handles

    if worker.rank == 0:
        ending._push_to_all = only_to_the_last  # type: ignore[method-assign]
        with suppress(Died):
            session.close()
        die(session)
        return None
    session.close()
    return parameters(model)


def check_outlived() -> None:
    found = check_survivors(outlived, 0)
    torch.testing.assert_close(found[0], sum(start_of(rank) for rank in range(3)) / 3)


def test_a_mean_that_one_worker_has_is_the_mean_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_endpoints, "DEAD_AFTER_SECONDS", 1.0)
    check_outlived()


def test_a_mean_that_is_made_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_endpoints, "DEAD_AFTER_SECONDS", 1.0)
    monkeypatch.setattr(pairwise_gossip, "TerminationProtocol", Forgetful)
    with pytest.raises((AssertionError, PeerLost)):  # either the first has the votes, or nobody has
        check_outlived()


class Deaf(Partner):
    """Takes part in no exchange that it has not begun."""

    def answer(self, stamp: Stamp, payload: tuple[Tensor, ...]) -> Receipt:
        return NO_EXCHANGE


def check_slow(recipe: str, patience_seconds: float) -> None:
    """Two workers make 20 steps while the third makes one, and average with it meanwhile."""
    ahead = threading.Semaphore(0)

    def work(worker: Worker) -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session = worker.attach(model, optimizer, recipe)
        for step in range(2 if worker.rank == 2 else 20):
            x, y = batch(step, worker.rank)
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            if worker.rank == 2 and step == 0:
                assert all(ahead.acquire(timeout=patience_seconds) for _ in range(2)), "they wait for the slow one"
                assert exchange(session)._partner.unapplied.norm() > 0, "nobody has averaged with it"
        ahead.release()
        session.close()

    cluster(work, 3)


def test_slow_worker_does_not_delay_the_others() -> None:
    check_slow(RECIPE, PATIENCE_SECONDS)


def test_workers_in_lock_step_wait_for_it() -> None:
    with pytest.raises(AssertionError, match="wait for the slow one"):
        check_slow("Gossip()", 0.5)


def test_a_worker_that_does_not_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise_gossip, "Partner", Deaf)
    with pytest.raises(AssertionError, match="nobody has averaged"):
        check_slow(RECIPE, PATIENCE_SECONDS)


def test_one_exchange_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an exchange is under way turns are left out, and the next one begins after it."""
    let_go = threading.Event()

    def held_up(script: PeerScript) -> PeerScript:
        yield from script
        assert let_go.wait(PATIENCE_SECONDS)
        return 0.0

    monkeypatch.setattr(pairwise_gossip, "_timed", held_up)

    def work(worker: Worker) -> None:
        session, _, optimizer = still(worker, [1.0])
        optimizer.step()
        (first,) = exchange(session)._exchanges.values()
        for _ in range(5):
            optimizer.step()
        assert list(exchange(session)._exchanges.values()) == [first]
        together(worker)
        let_go.set()
        settle(session)
        optimizer.step()
        assert first not in exchange(session)._exchanges.values()
        session.close()

    cluster(work, 2)
