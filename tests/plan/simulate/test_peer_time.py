"""Simulated jobs of workers that are not in lock step: servers and pairwise gossip, by hand and against lock step."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from support.nightly import nightly
from support.simulated_scripts import finished, script, simulated

from gossamer import events
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.comm.network import read_network
from gossamer.comm.rpc_protocol.messages import encode_ask
from gossamer.plan.simulate import JobProgress, SimulatedJob, StepTimes, peer_network
from gossamer.plan.simulate.peer_time import PeerWorker

WORKERS, PART, SLOW = 4, 0.1, 0.5
WAITING_FOR_NONE = ["AsyncDiLoCo(period=4)", "ParameterServer('async')", "Gossip('pairwise')"]

TRAINING = """
    import sys
    import torch
    from torch import nn
    import gossamer

    world = gossamer.init()
    torch.manual_seed(7)
    model = nn.Linear(30, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = gossamer.attach(model, optimizer)
    torch.manual_seed(world.rank)
    while session.steps < int(sys.argv[1]):
        inputs = torch.randn(8, 30)
        loss = (model(inputs) - inputs[:, :20]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss.item(), rank=float(world.rank))
        if "mean" in sys.argv and session.steps % 5 == 0:
            session.log(mean=float(gossamer.mean(loss.item())))
    session.close()
    if world.is_first:
        print("sum", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
"""


class UnequalClock:
    """The last worker takes five times as long for a step. Lines: as named, with hosts for servers."""

    def __init__(self, network: str = "unlimited", servers: int = 0, slow: float = SLOW) -> None:
        self._slow, self._lines = slow, read_network(network, WORKERS + servers)

    def step(self, recipe: Recipe, at: float, shares: tuple[int, ...] | None = None) -> StepTimes:
        return StepTimes(seconds=PART, part_seconds=(PART, PART, PART, self._slow), lines=self._lines)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return script(tmp_path, TRAINING)


def job(file: Path, recipe: str, *arguments: object, clock: UnequalClock | None = None, servers: int = 0, **more):  # type: ignore[no-untyped-def]
    clock = clock or UnequalClock(servers=servers)
    return simulated(
        file, *(arguments or (100000,)), recipe=recipe, workers=WORKERS, clock=clock, servers=servers, **more
    )


def until(file: Path, recipe: str, seconds: float, **more) -> JobProgress:  # type: ignore[no-untyped-def]
    """Progress after so many virtual seconds."""
    running: SimulatedJob = job(file, recipe, **more)
    try:
        found = running.advance(seconds=seconds)
    finally:
        running.close()
    assert found.failure is None
    return found


# -- time by hand ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", WAITING_FOR_NONE)
def test_no_worker_waits_for_a_slow_one(file: Path, recipe: str) -> None:
    found = until(file, recipe, 3.05)
    assert (found.steps, found.parts) == (30, 3 * 30 + 6)
    assert found.seconds == 3.05
    assert found.speed_use == pytest.approx(96 / (3.05 * (3 / PART + 1 / SLOW)))


def test_synchronous_servers_wait_for_the_slowest(file: Path) -> None:
    found = until(file, "ParameterServer('sync')", 3.05)
    assert (found.steps, found.parts) == (6, 24)


@pytest.mark.parametrize("staleness", [0, 2, 4])
def test_a_stale_server_lets_workers_lead_by_its_bound(file: Path, staleness: int) -> None:
    """The slow worker has made 6 steps, the others have a lead of the bound, and wait in the step after it."""
    found = until(file, f"ParameterServer('stale', staleness={staleness})", 3.25)
    assert found.steps == 6 + staleness
    assert found.parts == 3 * found.steps + 6


def test_messages_take_the_time_of_their_bytes(file: Path) -> None:
    """Two messages of the whole model, of 620 numbers, per worker and step, on the line of one server."""
    recipe = "ParameterServer('sync', shards=1)"
    fast, slow = (
        until(file, recipe, seconds, clock=UnequalClock(network, servers=1, slow=PART), servers=1)
        for network, seconds in (("unlimited", 3.05), ("200kbit", 10.0))
    )
    assert fast.seconds / fast.steps == pytest.approx(PART, rel=0.02)
    transfers = 2 * WORKERS * 620 * 32 / 200e3
    assert slow.seconds / slow.steps == pytest.approx(PART + transfers, rel=0.2)


def test_a_server_on_a_host_of_its_own_leaves_the_lines_of_workers_alone(file: Path) -> None:
    """A worker that hosts the server of all others sends the replies of all on its own line."""
    recipe, network = "ParameterServer('sync', shards=1)", "200kbit"
    hosted = until(file, recipe, 10.0, clock=UnequalClock(network, slow=PART))
    apart = until(file, recipe, 10.0, clock=UnequalClock(network, servers=1, slow=PART), servers=1)
    assert apart.bytes_sent / apart.steps > hosted.bytes_sent / hosted.steps * 0.5
    assert hosted.steps > apart.steps  # one worker of four needs no line


def test_attaching_takes_no_virtual_time(file: Path) -> None:
    """On this line the first parameters take seconds to reach the servers and back."""
    found = until(file, "AsyncDiLoCo(period=1000)", 3.05, clock=UnequalClock("20kbit,1s"))
    assert found.steps >= 29
    step, second, _ = found.metrics["loss"][0]
    assert (step, second) == (1, pytest.approx(PART))


# -- the real algorithms -----------------------------------------------------------------------------------------------


def test_synchronous_servers_compute_what_lock_step_computes(tmp_path: Path) -> None:
    """Bit for bit, since sums of these gradients are exact in any order."""
    file = script(tmp_path)

    def trained(recipe: str) -> str:
        output = io.StringIO()
        assert finished(simulated(file, 6, recipe=recipe, workers=WORKERS, output=output)).failure is None
        return next(line for line in output.getvalue().splitlines() if "sums" in line)

    assert trained("ParameterServer('sync')") == trained("Dense()")
    assert trained("ParameterServer('async')") != trained("Dense()")


@pytest.mark.parametrize(
    "recipe",
    [
        "Gossip('pairwise')",
        "ParameterServer('stale')",
        "AsyncDiLoCo(4, quorum=2) + Int8()",
        *nightly("ParameterServer('async')", "AsyncDiLoCo(period=4)"),
    ],
)
def test_pauses_change_nothing_and_losses_fall(file: Path, recipe: str) -> None:
    whole = finished(job(file, recipe, 24, "mean"))
    assert whole.failure is None
    halting = job(file, recipe, 24, "mean")
    assert [halting.advance(steps=steps).steps for steps in (0, 1, 7)] == [0, 1, 7]
    assert halting.advance(seconds=4.2).seconds == 4.2
    assert finished(halting) == whole
    losses = [value for _, _, value in whole.metrics["loss"]]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert whole.parts == 24 * WORKERS
    assert whole.ended


def test_workers_of_one_moment_continue_by_rank(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = until(file, "ParameterServer('async')", 1.05).metrics
    resume, order = PeerWorker.resume, list[int]()

    def noted(worker: PeerWorker) -> None:
        order.append(worker.rank)
        resume(worker)

    monkeypatch.setattr(PeerWorker, "resume", noted)
    assert until(file, "ParameterServer('async')", 1.05).metrics == right
    starts = [rank for place, rank in enumerate(order) if rank not in order[:place]]
    assert starts == list(range(WORKERS))


def counts(file: Path, recipe: str) -> events.ContributionsCounted:
    """Of the first worker, at its end."""
    seen: list[events.ContributionsCounted] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.ContributionsCounted):
            seen.append(event)

    stop = events.subscribe(note)
    try:
        assert finished(job(file, recipe, 20)).failure is None
    finally:
        stop()
    return seen[0]


def test_every_contribution_is_applied_once(file: Path) -> None:
    """20 steps of each worker in rounds of 4, of one shard."""
    found = counts(file, "AsyncDiLoCo(period=4, shards=1)")
    assert found.samples == 20 * WORKERS
    assert found.late == 0


def test_a_grace_window_joins_contributions_of_one_merge(file: Path) -> None:
    """Three equally fast workers arrive together. With a window they are in one merge, so none of them is stale."""
    alone, joined = (counts(file, f"AsyncDiLoCo(period=4, shards=1, grace={grace})") for grace in (0.0, 1.0))
    assert sum(age * count for age, count in joined.staleness.items()) < sum(
        age * count for age, count in alone.staleness.items()
    )


def test_a_grace_window_ends_without_another_contribution(file: Path) -> None:
    """The slow worker sends at 2 s. Until then the others send as often as without a window."""
    alone, joined = (until(file, f"AsyncDiLoCo(period=4, shards=1, grace={grace})", 1.95) for grace in (0.0, 1.0))
    assert joined.bytes_sent > 0.7 * alone.bytes_sent


def test_a_quorum_of_all_delays_answers_until_the_slowest(file: Path) -> None:
    """No worker waits, but none sends to a server again before the answer to its last message."""
    one, all_of_them = (until(file, f"AsyncDiLoCo(period=4, quorum={quorum})", 4.05) for quorum in (1, WORKERS))
    assert one.parts == all_of_them.parts
    assert all_of_them.bytes_sent < 0.5 * one.bytes_sent


# -- losses over time --------------------------------------------------------------------------------------------------


def test_values_count_at_the_step_of_the_worker_that_is_ahead(file: Path) -> None:
    """The slow worker logs at the end of every fifth step of the others, and alone after their last one."""
    found = finished(job(file, "Gossip('pairwise')", 10))
    ranks = {step: (second, value) for step, second, value in found.metrics["rank"]}
    for step in range(1, 11):
        second, value = ranks[step]
        assert second == pytest.approx(step * PART, abs=1e-5)
        assert value == pytest.approx((0 + 1 + 2 + 3 * (step % 5 == 0)) / (3 + (step % 5 == 0)))
    late = [(second, value) for step, (second, value) in ranks.items() if step > 10]
    assert [value for _, value in late] == [3.0] * 8
    assert [second for second, _ in late] == pytest.approx([SLOW * step for step in range(3, 11)], abs=1e-5)


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_failure_of_one_worker_ends_the_job(tmp_path: Path) -> None:
    text = TRAINING.replace("loss.backward()", "assert world.rank != 2 or session.steps < 5; loss.backward()")
    found = finished(job(script(tmp_path, text), "AsyncDiLoCo(period=4)"))
    assert found.failure is not None
    assert "rank 2 failed after step 5: AssertionError" in found.failure


@pytest.mark.parametrize("recipe", ["ParameterServer('sync')", "AsyncDiLoCo(period=2)"])
def test_a_model_with_fewer_rows_than_servers_ends(tmp_path: Path, recipe: str) -> None:
    text = TRAINING.replace("nn.Linear(30, 20)", "nn.Linear(30, 1, bias=False)").replace("[:, :20]", "[:, :1]")
    assert finished(job(script(tmp_path, text), recipe, 4)).ended


def test_messages_that_never_arrive_are_reported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_network.VirtualEndpoint, "reply", lambda endpoint, token, answer: None)
    found = finished(job(file, "AsyncDiLoCo(period=4)", 4))
    assert found.failure is not None
    assert "wait for messages" in found.failure


def test_frames_have_the_bytes_of_real_ones(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[int] = []
    post = peer_network.PeerNetwork.post

    def noted(network, sender, to, nbytes, deliver):  # type: ignore[no-untyped-def]
        posted.append(nbytes)
        post(network, sender, to, nbytes, deliver)

    asked: list[int] = []

    def encoded(op, request):  # type: ignore[no-untyped-def]
        asked.append(encode_ask(op, request).frame_bytes)
        return encode_ask(op, request)

    monkeypatch.setattr(peer_network.PeerNetwork, "post", noted)
    monkeypatch.setattr(peer_network, "encode_ask", encoded)
    until(file, "ParameterServer('async')", 0.35)
    assert asked
    assert set(asked) <= set(posted)
