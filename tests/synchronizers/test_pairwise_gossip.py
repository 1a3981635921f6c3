"""Sessions that average with one neighbour at a time, each at its own pace: real endpoints, one thread a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from support.virtual import Worker, batch, cluster, network, parameters
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer import events
from gossamer.checkpoint import digest
from gossamer.core.aggregation import AggregationContext
from gossamer.core.layout import FlatTensors
from gossamer.core.peer_ops import WORKER, Arrived, Await, Peer, PeerEvent, PeerScript, Push, Receipt, Reply, Stamp
from gossamer.errors import AttachError, ConnectError, LoopError, NonFiniteError, PeerLost, RecipeError, Stopped
from gossamer.estimate.traffic import estimate_traffic
from gossamer.gossip import state_transfer, termination
from gossamer.gossip.pairwise import NO_EXCHANGE, Partner
from gossamer.gossip.termination import FinalMean, RunningMean, TerminationProtocol
from gossamer.recipes.recipe import resolve
from gossamer.session.lifecycle_events import begun
from gossamer.session.session import Session
from gossamer.synchronizers import pairwise_gossip, peer_endpoints, rejoin
from gossamer.synchronizers.pairwise_gossip import PairwiseGossip
from gossamer.synchronizers.stages import bucket_fragments
from gossamer.topologies import Topology
from gossamer.transports.detached import DetachedTransport
from gossamer.transports.simulated import SimulatedGroup

RECIPE = "Gossip('pairwise')"
UNIT = 2**20  # whole multiples of it may be halved dozens of times, and their sums stay exact
PATIENCE_SECONDS = 30.0


def exchange(session: Session) -> PairwiseGossip:
    assert isinstance(session._synchronizer, PairwiseGossip)
    return session._synchronizer


def settle(session: Session) -> None:
    """Wait for the exchange that this worker has begun, so that many take place in few steps."""
    for talk in exchange(session)._talks.values():
        talk.wait(PATIENCE_SECONDS)


def together(worker: Worker) -> None:
    worker.transport.all_gather_text("")


@contextmanager
def heard() -> Iterator[list[events.Event]]:
    found: list[events.Event] = []
    unsubscribe = events.subscribe(found.append)
    try:
        yield found
    finally:
        unsubscribe()


def still(worker: Worker, values: Sequence[float], **options: Any) -> tuple[Session, nn.Linear, torch.optim.Optimizer]:
    """A worker whose optimizer moves nothing, with parameters of its own."""
    model = nn.Linear(len(values), 1, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = worker.attach(model, optimizer, RECIPE, **options)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([values], dtype=torch.float64))
    exchange(session)._drain()
    together(worker)  # or somebody is still shown where all began
    return session, model, optimizer


# -- what is conserved -------------------------------------------------------------------------------------------------


class Keeps(Partner):
    """Every other worker takes part in exchanges, and keeps what it has."""

    def _move(self, theirs: Tensor, sent: Tensor) -> None:
        if self.rank % 2:
            super()._move(theirs, sent)


class Drops(Partner):
    """Every other worker publishes its progress over what has landed meanwhile."""

    def drain_each(self, parameters: Sequence[Tensor]) -> None:
        if self.rank % 2:
            self.owed.zero_()
        super().drain_each(parameters)


def start_of(rank: int) -> Tensor:
    return UNIT * torch.tensor([rank + 1.0, 7.0 * rank - 3.0, float(rank == 1)], dtype=torch.float64)


def held(worker: Worker) -> tuple[Tensor, Tensor, Tensor]:
    """Before the end what this worker has and is owed, and what it has after it."""
    session, model, optimizer = still(worker, start_of(worker.rank).tolist())
    for _ in range(8):
        optimizer.step()
        settle(session)
    together(worker)
    kept, owed = parameters(model), exchange(session)._partner.owed.clone()
    together(worker)
    session.close()
    return kept, owed, parameters(model)


def check_conserved(world: int) -> None:
    found = cluster(held, world)
    given = sum(start_of(rank) for rank in range(world))
    assert torch.equal(sum(kept + owed for kept, owed, _ in found), given)
    assert all(torch.equal(end, given / world) for _, _, end in found)
    apart = torch.stack([kept + owed for kept, owed, _ in found])
    first = torch.stack([start_of(rank) for rank in range(world)])
    assert apart.std(0).norm() < first.std(0).norm() / 4


@pytest.mark.parametrize("world", [2, 4])
def test_exchanges_move_nothing_in_sum(world: int) -> None:
    check_conserved(world)


@pytest.mark.parametrize("broken", [Keeps, Drops])
def test_rules_that_lose_something_are_found(broken: type[Partner], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise_gossip, "Partner", broken)
    with pytest.raises(AssertionError):
        [check_conserved(2) for _ in range(4)]  # threads may meet in an order in which nothing is lost


# -- what training comes to --------------------------------------------------------------------------------------------


class Alone(Partner):
    """Asks nobody."""

    def neighbor(self, topology: Topology, world: int, step: int) -> int | None:
        return None


FEATURES, ROWS = 6, 3  # of each worker: too few to find the answer alone


def rows(ranks: Iterable[int]) -> tuple[Tensor, Tensor]:
    x = torch.cat([torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(rank)) for rank in ranks])
    return x, x @ torch.arange(1.0, 1 + FEATURES)[:, None]


def taught(worker: Worker, recipe: str, steps: int) -> float:
    """The loss over everybody's rows before the end, by this worker's own parameters."""
    model = nn.Linear(FEATURES, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = worker.attach(model, optimizer, recipe)
    x, y = rows([worker.rank])
    for _ in range(steps):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        if recipe == RECIPE:
            settle(session)
        together(worker)
    with torch.no_grad():
        everyones_x, everyones_y = rows(range(worker.world))
        loss = mse_loss(model(everyones_x), everyones_y).item()
    session.close()
    return loss


def check_learns() -> None:
    """No worker can find the answer alone: together they do, in twice as many steps at most as with every gradient."""
    dense = cluster(partial(taught, recipe="Dense()", steps=60), 3)[0]
    assert max(cluster(partial(taught, recipe=RECIPE, steps=120), 3)) < dense


def test_workers_learn_what_they_would_by_averaging_gradients() -> None:
    check_learns()


def test_workers_apart_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise_gossip, "Partner", Alone)
    with pytest.raises(AssertionError):
        check_learns()


# -- the end -----------------------------------------------------------------------------------------------------------


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
    assert [int(count) for _, _, count in workers] == [4, 5, 6]
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
    with session.merged(model):
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
        op = Push(to=Peer(WORKER, 0), key=termination.AGREED, stamp=Stamp(1, 0), payload=payload)
        reply = script.send(Arrived(moment=0.0, token=1, sender=Peer(WORKER, 1), op=op))
        assert reply == Reply(token=1, answer=Receipt(version=0))
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


# -- workers that are lost, or slow ------------------------------------------------------------------------------------


def die(session: Session) -> None:
    """Fall silent without a goodbye, as a process that is killed does."""
    me = exchange(session)._me

    def end() -> None:
        me._dispatcher._close_at = -inf  # the thread that serves the connections ends, and says nothing more

    me._dispatcher.loop.post(end)
    me._thread.join()


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
def test_who_dies_keeps_nobody_waiting(victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_endpoints, "DEAD_AFTER_SECONDS", 1.0)
    check_survivors(partial(survived, victim=victim), victim)


def test_waiting_for_the_dead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_endpoints, "DEAD_AFTER_SECONDS", 0.2)
    monkeypatch.setattr(pairwise_gossip, "TerminationProtocol", Faithful)
    with pytest.raises(ConnectError, match="hears nobody"):
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
        self.back, self.lives = threading.Event(), threading.local()
        patch.setattr(peer_endpoints, "run_token", lambda: bytes(range(32)))
        patch.setattr(peer_endpoints, "publish", self.places.__setitem__)
        patch.setattr(peer_endpoints, "published", lambda world: dict(self.places))
        patch.setattr(pairwise_gossip, "comebacks", lambda: getattr(self.lives, "count", 0))

    def attach(self, worker: Worker, counts: int) -> tuple[Session, Watched, torch.optim.Optimizer]:
        model = Watched(start_of(worker.rank), counts)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return worker.attach(model, optimizer, RECIPE), model, optimizer

    def lose(self, worker: Worker, session: Session) -> Worker:
        """The worker again, in its next life."""
        die(session)
        self.lives.count = 1
        return Worker(worker.rank, worker.world, DetachedTransport(worker.rank, worker.world), worker.sessions)

    def work(self, worker: Worker) -> tuple[Tensor, int, Tensor, list[Tensor], Tensor]:
        """What was shown when somebody came back, of which life all think the last is, and how all end."""
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
        return shown, exchange(session)._partner.life_of(2), parameters(model), buffers, model.weight.detach()


def check_returns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(peer_endpoints, "DEAD_AFTER_SECONDS", 1.0)
    with heard() as found:
        *others, back = cluster(Returns(patch).work, 3)
    assert any(torch.equal(back[0], each[0]) for each in others), "it does not begin where anybody was"
    assert [each[1] for each in others] == [1, 1], "nobody has averaged with it"
    assert all(torch.equal(each[2], back[2]) for each in others)
    assert all(torch.equal(mine, its) for mine, its in zip(others[0][3], back[3], strict=True))
    said = [event.message for event in found if isinstance(event, events.Noticed)]
    assert [
        each for each in said if "worker 2 came back and goes on from what worker" in each and "after 5 steps" in each
    ]


def test_a_lost_worker_comes_back_to_what_another_has(monkeypatch: pytest.MonkeyPatch) -> None:
    check_returns(monkeypatch)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("unpack_statistics", lambda loop, taken: None),
        ("copy_parameters", lambda old, new: None),
    ],
)
def test_who_comes_back_to_something_else_is_found(name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejoin, name, broken)
    with pytest.raises(AssertionError):
        check_returns(monkeypatch)


@pytest.mark.parametrize("over", [True, False])
def test_who_comes_back_to_nobody(over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the others have come to the end, nothing is left to be done; else all is lost."""
    returns = Returns(monkeypatch)
    monkeypatch.setattr(state_transfer, "ROLL_SECONDS", 0.05)
    monkeypatch.setattr(state_transfer, "SEARCH_SECONDS", 0.1)
    monkeypatch.setattr(rejoin, "has_ended", lambda: over)
    returns.lives.count = 1
    worker = Worker(2, 3, DetachedTransport(2, 3))
    with heard() as found, pytest.raises(Stopped if over else PeerLost):
        returns.attach(worker, 1)
    assert [event.message for event in found if isinstance(event, events.Noticed)] == over * [
        "worker 2 came back when the others had come to the end: nothing is left to be done"
    ]


def test_without_a_launcher_nobody_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    returns = Returns(monkeypatch)
    monkeypatch.setattr(peer_endpoints, "run_token", lambda: None)
    returns.lives.count = 1
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
    tell = ending._tell

    def only_to_the_last(me: Any, peers: Iterable[int], key: str, payload: tuple[Tensor, ...] = ()) -> Any:
        handles = tell(me, [2] if key == termination.AGREED else peers, key, payload)
        if key == termination.AGREED:
            handles[2].wait(PATIENCE_SECONDS)
            raise Died
        return handles

    if worker.rank == 0:
        ending._tell = only_to_the_last  # type: ignore[method-assign]
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
    with pytest.raises(AssertionError):
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
                assert exchange(session)._partner.owed.norm() > 0, "nobody has averaged with it"
        ahead.release()
        session.close()

    cluster(work, 3)


def test_a_slow_worker_slows_nobody() -> None:
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
        (first,) = exchange(session)._talks.values()
        for _ in range(5):
            optimizer.step()
        assert list(exchange(session)._talks.values()) == [first]
        together(worker)
        let_go.set()
        settle(session)
        optimizer.step()
        assert first not in exchange(session)._talks.values()
        session.close()

    cluster(work, 2)


# -- numbers that are not finite ---------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_stays_where_it_is() -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        session = worker.attach(model, optimizer, "Gossip('pairwise', period=100)")
        before = parameters(model)
        x, y = batch(0, worker.rank)
        mse_loss(model(x * (float("inf") if worker.rank == 1 else 1.0)), y).backward()
        optimizer.step()
        after = parameters(model)
        session.close()
        assert torch.isfinite(parameters(model)).all()
        return before, after

    with heard() as found:
        (before, after), (start, same) = cluster(work, 2)
    assert not torch.equal(before, after)
    assert torch.equal(start, same)
    assert [(event.rank, event.step) for event in found if isinstance(event, events.Skipped)] == [(1, 1)]


def test_parameters_that_are_not_finite_are_shown_to_nobody() -> None:
    def work(worker: Worker) -> Tensor:
        session, model, optimizer = still(worker, [float(UNIT), float("nan") if worker.rank else 1.0])
        optimizer.step()
        settle(session)
        session.close()
        return parameters(model)

    with heard() as found:
        ends = cluster(work, 2)
    assert [end.tolist() for end in ends] == 2 * [[UNIT, 1.0]]
    assert [event.message for event in found if isinstance(event, events.Noticed) if "worker 1" in event.message]
    assert {event.rank for event in found if isinstance(event, events.Skipped)} == {1}


def test_a_worker_that_stays_spoilt_says_so() -> None:
    def work(worker: Worker) -> None:
        session, _, optimizer = still(worker, [float("nan") if worker.rank else 1.0])
        failure = pytest.raises(NonFiniteError, match="rank 1") if worker.rank else nullcontext()
        with failure, session:
            for _ in range(5):
                optimizer.step()

    cluster(work, 2)


# -- the loop's other words --------------------------------------------------------------------------------------------


def test_who_is_asked_to_stop_asks_the_others() -> None:
    def work(worker: Worker) -> tuple[int, Tensor]:
        session, model, optimizer = still(worker, start_of(worker.rank).tolist())
        if worker.rank == 1:
            session.ask_to_stop()
        with suppress(Stopped), session:
            while True:
                optimizer.step()
        return session.steps, parameters(model)

    (_, one), (steps, other) = cluster(work, 2)
    assert steps == 1
    assert torch.equal(one, other)


def test_an_epoch_ends_for_each_worker_by_itself() -> None:
    def work(worker: Worker) -> int:
        session, _, optimizer = still(worker, [1.0])
        for _ in range(2):
            with session.epoch():
                for _ in range(1 + worker.rank):
                    optimizer.step()
        session.close()
        return session.steps

    assert cluster(work, 3) == [2, 4, 6]


def test_backward_passes_are_counted() -> None:
    """Muted ones add up; a step without one counts as one; of many in a closure one does."""

    def work(worker: Worker) -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session = worker.attach(model, optimizer, RECIPE)
        x, y = batch(0, worker.rank)

        def closure() -> float:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss.item()

        with session.no_sync():
            closure()
        closure()
        optimizer.step()
        assert session.steps == 1
        optimizer.step()
        optimizer.step(closure)
        assert session.steps == 3
        session.close()

    cluster(work, 2)


def test_what_cannot_be_is_refused(tmp_path: Any) -> None:
    def work(worker: Worker) -> None:
        session, _, _ = still(worker, [1.0])
        with pytest.raises(LoopError, match="save it on one rank"):
            session.save(tmp_path)
        with pytest.raises(LoopError, match="Attach a new session"):
            session.reset("weight")
        session.close()

    cluster(work, 2)


def test_what_one_worker_saved_many_go_on_from(tmp_path: Any) -> None:
    def alone(worker: Worker) -> None:
        model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        session = worker.attach(model, optimizer, RECIPE)
        with torch.no_grad():
            model.weight.copy_(start_of(2)[None])
        for _ in range(3):
            optimizer.step()
        session.save(tmp_path)

    def work(worker: Worker) -> tuple[int, Tensor]:
        session, model, optimizer = still(worker, start_of(worker.rank).tolist())
        session.load(tmp_path)
        optimizer.step()
        settle(session)
        session.close()
        return session.steps, parameters(model)

    cluster(alone, 1)
    for steps, end in cluster(work, 2):
        assert steps == 4
        assert torch.equal(end, start_of(2))


@pytest.mark.parametrize(
    ("recipe", "options", "failure", "message"),
    [
        (RECIPE + " + TopK(density=0.1)", {}, RecipeError, "never agree"),
        (RECIPE, {"scaler": torch.amp.GradScaler("cpu")}, AttachError, "GradScaler"),
    ],
)
def test_what_cannot_be_attached_is_refused(
    recipe: str, options: dict[str, Any], failure: type[Exception], message: str
) -> None:
    def work(worker: Worker) -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(failure, match=message):
            worker.attach(model, optimizer, recipe, **options)

    cluster(work, 2)


def test_costs_are_told() -> None:
    """Each of two workers sends its letter once for every exchange, whoever began it."""

    def work(worker: Worker) -> None:
        session, _, optimizer = still(worker, [1.0] * 100)
        for _ in range(3):
            optimizer.step()
            settle(session)
        together(worker)
        optimizer.step()
        settle(session)
        session.close()

    with heard() as found:
        cluster(work, 2)
    steps = [event for event in found if isinstance(event, events.StepEnded)]
    assert len(steps) == 8
    assert sum(event.bytes_sent for event in steps) % 800 == 0
    assert 6 * 800 <= sum(event.bytes_sent for event in steps) <= 16 * 800
    assert any(event.wire_seconds > 0 for event in steps)


@pytest.mark.parametrize(
    ("recipe", "letter_bytes"), [(RECIPE, 4 * 104), (RECIPE + " + Dense(dtype='bfloat16')", 2 * 104)]
)
def test_bytes_are_those_explained(recipe: str, letter_bytes: int) -> None:
    """Parameters in half precision are shown in single precision, in which the sum stays."""
    model, found = nn.Linear(51, 2, dtype=torch.bfloat16), resolve(recipe, 2)

    def work(worker: Worker) -> None:
        mine = nn.Linear(51, 2, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.0)
        session = worker.attach(mine, optimizer, recipe)
        for _ in range(2):
            optimizer.step()
            settle(session)
            together(worker)
        optimizer.step()
        settle(session)
        together(worker)
        optimizer.step()
        session.close()

    with heard() as told:
        cluster(work, 2)
    sent = [event.bytes_sent for event in told if isinstance(event, events.StepEnded)]
    assert sum(sent) > 0
    assert sum(sent) % letter_bytes == 0
    fragments = bucket_fragments(
        found.strategy.stages[-1], dict(model.named_parameters()), found.compressor, AggregationContext()
    )
    said = estimate_traffic(found, begun(model, None, found, fragments, SimulatedGroup(1).transports[0]), workers=4)
    assert said.bytes_sent == 2 * letter_bytes  # its own, and its answer to another's
    assert said.strategy_bytes == 2 * 4 * 104 + 4 * letter_bytes  # one under way, and an answer to each of three


def test_an_endpoint_that_is_lost_says_so() -> None:
    """A worker whose own endpoint is gone does not wait for the end for ever."""

    def work(worker: Worker) -> None:
        session, _, optimizer = still(worker, [1.0])
        optimizer.step()
        if worker.rank == 1:
            die(session)
            with pytest.raises(ConnectError, match="hears nobody"):
                session.close()
        else:
            session.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_endpoints, "DEAD_AFTER_SECONDS", 1.0)
        cluster(work, 2)
