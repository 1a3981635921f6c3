"""Pairwise gossip sessions, each worker at its own pace: real endpoints, one thread a worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from support.pairwise_sessions import RECIPE, UNIT, die, exchange, settle, start_of, still, together
from support.virtual_workers import Worker, batch, cluster, heard, network, parameters
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer import events
from gossamer.algorithms.gossip.partner import Partner
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.topologies import Topology
from gossamer.base.aggregation import AggregationContext
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import AttachError, ConnectError, LoopError, NonFiniteError, RecipeError, Stopped
from gossamer.train.session.lifecycle_events import begun
from gossamer.train.synchronizers import pairwise_gossip, peer_endpoints
from gossamer.train.synchronizers.stages import bucket_fragments
from gossamer.train.traffic.traffic import estimate_traffic

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
            self.unapplied.zero_()
        super().drain_each(parameters)


def held(worker: Worker) -> tuple[Tensor, Tensor, Tensor]:
    """Before the end what this worker has and is owed, and what it has after it."""
    session, model, optimizer = still(worker, start_of(worker.rank).tolist())
    for _ in range(8):
        optimizer.step()
        settle(session)
    together(worker)
    kept, owed = parameters(model), exchange(session)._partner.unapplied.clone()
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


def test_workers_learn_as_with_averaged_gradients() -> None:
    check_learns()


def test_workers_apart_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise_gossip, "Partner", Alone)
    with pytest.raises(AssertionError):
        check_learns()


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


def test_parameters_that_are_not_finite_are_not_sent() -> None:
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


def test_a_worker_that_stays_spoilt_reports_it() -> None:
    def work(worker: Worker) -> None:
        session, _, optimizer = still(worker, [float("nan") if worker.rank == 1 else 1.0])
        failure = pytest.raises(NonFiniteError, match="rank 1") if worker.rank == 1 else nullcontext()
        with failure, session:
            for _ in range(5):
                optimizer.step()

    cluster(work, 3)  # two go on, which are the most


# -- what else a loop may call -----------------------------------------------------------------------------------------


def test_a_rank_that_is_asked_to_stop_asks_the_others() -> None:
    def work(worker: Worker) -> tuple[int, Tensor]:
        session, model, optimizer = still(worker, start_of(worker.rank).tolist())
        if worker.rank == 1:
            session.request_stop()
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


def test_save_and_reset_are_refused(tmp_path: Any) -> None:
    def work(worker: Worker) -> None:
        session, _, _ = still(worker, [1.0])
        with pytest.raises(LoopError, match="save it on one rank"):
            session.save(tmp_path)
        with pytest.raises(LoopError, match=r"gossamer\.attach"):
            session.reset_compressor_state("weight")
        session.close()

    cluster(work, 2)


def test_checkpoint_of_one_worker_is_loaded_by_several(tmp_path: Any) -> None:
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
        (RECIPE + " + TopK(density=0.1)", {}, RecipeError, "never reach consensus"),
        (RECIPE, {"scaler": torch.amp.GradScaler("cpu")}, AttachError, "GradScaler"),
    ],
)
def test_unsupported_recipes_and_options_are_refused(
    recipe: str, options: dict[str, Any], failure: type[Exception], message: str
) -> None:
    def work(worker: Worker) -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(failure, match=message):
            worker.attach(model, optimizer, recipe, **options)

    cluster(work, 2)


def test_costs_are_reported() -> None:
    """Each of two workers sends its encoded message once for every exchange, whoever began it."""

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
        found.strategy.steady_stage, dict(model.named_parameters()), found.compressor, AggregationContext()
    )
    said = estimate_traffic(found, begun(model, None, found, fragments, SimulatedGroup(1).transports[0]), workers=4)
    assert said.bytes_sent == 2 * letter_bytes  # its own, and its answer to another's
    assert said.strategy_bytes == 2 * 4 * 104 + 4 * letter_bytes  # one under way, and an answer to each of three


def test_an_endpoint_that_is_lost_reports_it() -> None:
    """A worker whose own endpoint is gone does not wait for the end for ever."""

    def work(worker: Worker) -> None:
        session, _, optimizer = still(worker, [1.0])
        optimizer.step()
        if worker.rank == 1:
            die(session)
            with pytest.raises(ConnectError, match="endpoint of worker"):
                session.close()
        else:
            session.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_endpoints, "DEAD_AFTER_SECONDS", 1.0)
        cluster(work, 3)  # two are left, which are the most
