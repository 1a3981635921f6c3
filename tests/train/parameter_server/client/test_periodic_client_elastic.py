"""Workers of AsyncDiLoCo that come and go in virtual time, each with a number of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.async_diloco_runs import LocalRun, ballots, local_run, vote
from support.server_runs import CALM

from gossamer.base.peer_ops import SERVER, WORKER, Peer, PeerScript, Push, Receipt, Stamp
from gossamer.comm.simulation import compute
from gossamer.comm.simulation.faulty_network import Kill, Restart, VirtualNetwork
from gossamer.train.parameter_server.client.periodic_client import PeriodicClient
from gossamer.train.parameter_server.client.requests import about
from gossamer.train.parameter_server.deduplication import REMEMBERED_OF_LOST, AnswerLog
from gossamer.train.parameter_server.journal_entry import Entry
from gossamer.train.parameter_server.update_policy import GRADIENT, WANTED

NUMBERS = {worker: 2**62 + worker for worker in range(4)}
COLUMNS, TEXT = 60, "AsyncDiLoCo(period=3, outer_learning_rate=1.0, outer_momentum=0.0)"


def elastic(text: str = TEXT, world: int = 3, **options: Any) -> LocalRun:
    return local_run(
        text, world=world, steps=30, make=ballots(world, COLUMNS), local_step=vote(COLUMNS), numbers=NUMBERS, **options
    )


def restarted(lost_at: float, back_at: float) -> VirtualNetwork:
    """All servers are killed and restarted."""
    servers = [Peer(SERVER, number) for number in range(2)]
    faults = (*(Kill(peer, lost_at) for peer in servers), *(Restart(peer, back_at) for peer in servers))
    return VirtualNetwork(round_trip_seconds=0.01, dead_after_seconds=5.0, faults=faults)


def test_a_newcomer_begins_at_the_steps_that_the_others_have_sent() -> None:
    done = elastic(arrivals={2: 1.55})  # after about 15 steps of 0.1 s
    done.in_background()
    assert done.first_steps[0] == done.first_steps[1] == 0
    assert 9 <= done.first_steps[2] <= 15
    assert done.counted[2] == 30 - done.first_steps[2], "all sessions end at 30 steps"
    assert done.shards[0].merged == sum(done.counted.values())


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("servers", [1, 4])
def test_a_newcomer_begins_at_the_steps_that_the_others_have_sent_to_any_number_of_servers(
    servers: int, fragments: int
) -> None:
    done = elastic(f"AsyncDiLoCo(period={fragments}, fragments={fragments})", servers=servers, arrivals={2: 1.55})
    done.make = ballots(3, COLUMNS, tensors=4)
    done.in_background()
    assert 12 <= done.first_steps[2] <= 15, "the others have made 14 or 15 steps"


def test_a_newcomer_begins_with_those_that_train_and_not_with_one_that_has_ended() -> None:
    done = elastic(seconds=lambda worker, step: (0.5, 0.05, 0.5)[worker], arrivals={2: 3.4})
    done.in_background(most_seconds=200.0)
    assert done.finished[1] < 2.0
    assert 3 <= done.first_steps[2] <= 6, "the slower worker has made six steps"
    assert done.shards[0].merged == sum(done.counted.values())


def test_a_newcomer_after_a_restart_of_the_servers_begins_at_the_steps_that_the_others_have_sent(
    tmp_path: Path,
) -> None:
    done = elastic(arrivals={2: 2.0}, directory=tmp_path)
    done.in_background(restarted(1.05, 1.45))  # from about step 10 to step 14
    assert 9 <= done.first_steps[2] <= 20, "9 steps were sent before the restart"
    assert done.counted[2] == 30 - done.first_steps[2], "all sessions end at 30 steps"
    assert all(shard.merged == sum(done.counted.values()) for shard in done.shards.values())


@pytest.mark.parametrize(("server_lost_at", "sent"), [(1.6, 3), (1.72, 16)])
def test_steps_that_a_killed_worker_has_sent_count_once_over_a_restart_of_the_servers(
    tmp_path: Path, server_lost_at: float, sent: int
) -> None:
    """Worker 0 sends 3 steps, waits until 1.6 s for the slower worker, and sends its next 13 steps."""
    done = elastic(
        "AsyncDiLoCo(period=3, quorum=2, outer_learning_rate=1.0, outer_momentum=0.0)",
        world=2,
        directory=tmp_path,
        seconds=lambda worker, step: (0.1, 0.5)[worker],
        departures={0: 1.74},
    )
    done.in_background(restarted(server_lost_at, 1.9), most_seconds=200.0)
    assert done.counted[0] == 16
    assert [shard.merged for shard in done.shards.values()] == [sent + 30] * done.servers


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_newcomer_begins_at_the_last_step_of_those_that_have_left(fragments: int) -> None:
    done = elastic(f"AsyncDiLoCo(period=30, fragments={fragments})")
    done.make = ballots(3, COLUMNS, tensors=3)

    def leaves(number: int) -> PeerScript:
        client, _ = done.local_client(number)
        yield from client.begin()
        client.apply_pull()
        for _ in range(10):
            client.count()
        yield from client.send_rest()
        yield from client.leave()

    def newcomer(number: int) -> PeerScript:
        yield from compute(20.0)
        client, _ = done.local_client(number)
        yield from client.begin()
        return client.local_steps

    trace = done.simulate({NUMBERS[0]: partial(leaves, 0), NUMBERS[1]: partial(newcomer, 1)})
    assert trace.result(Peer(WORKER, NUMBERS[1])) == 10


def test_a_merge_needs_no_more_workers_than_are_present() -> None:
    done = elastic("AsyncDiLoCo(period=3, quorum=3)", departures={1: 0.95, 2: 0.95})
    done.in_background(most_seconds=100.0)
    assert done.counted[0] == 30
    assert done.shards[0].merged >= 30 + 2 * 3, "all that the last worker and the lost ones have sent"
    assert not any(done.shards[0].pending.values())


def test_only_one_worker_sends_the_initial_parameters() -> None:
    done = elastic()
    trace = done.in_background()
    sent = [nbytes for (sender, receiver), nbytes in trace.sent_bytes.items() if receiver.kind == SERVER]
    model = sum(tensor.nbytes for tensor in done.make().values())
    messages = sum(10 * model for _ in range(3))  # ten periods of three workers, uncompressed
    assert sum(sent) == messages + model


def test_a_worker_takes_over_for_one_that_was_lost_before_it_sent_the_initial_parameters() -> None:
    done = elastic(departures={0: 0.012})  # its question was answered at 0.01 s, and its parameters arrive at 0.015 s
    done.in_background(CALM, most_seconds=100.0)
    assert done.counted[1] == done.counted[2] == 30


def test_a_worker_that_comes_after_the_end_receives_the_parameters_of_the_others() -> None:
    done = elastic()

    def late(number: int) -> PeerScript:
        yield from compute(50.0)
        client, _ = done.local_client(number)
        yield from client.begin()
        client.apply_pull()
        assert client.stopping
        client.count()
        yield from client.send_rest()
        totals = yield from client.end()
        client.apply_final()
        return totals.missed

    scripts = {NUMBERS[worker]: partial(done.at_once, worker) for worker in range(2)}
    trace = done.simulate({**scripts, NUMBERS[3]: partial(late, 3)})
    assert trace.result(Peer(WORKER, NUMBERS[3])) is True
    first, last = (done.clients[worker] for worker in (0, 3))
    assert isinstance(first, PeriodicClient)
    for ours, theirs in zip(first._tensors.values(), last._tensors.values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_contribution_of_a_lost_worker_that_returns_is_not_merged_again() -> None:
    done = elastic(world=2)
    answers: list[Receipt] = []

    def repeated(worker: int) -> PeerScript:
        client, tensors = done.local_client(worker)
        yield from client.begin()
        client.apply_pull()
        for number in range(3 * (REMEMBERED_OF_LOST + 2)):
            vote(COLUMNS)(tensors, worker, number)
            client.count()
            for server in client.due():
                script = client.exchange(server)
                push = next(script)
                assert isinstance(push, Push)
                answers.append((yield push))
                script.close()
                client._unsent[server].awaits = False
        for shard in done.shards.values():
            shard.lose(NUMBERS[worker])
        again = yield push
        assert again == answers[-1]
        yield from client.end()

    done.simulate({NUMBERS[0]: partial(repeated, 0)})
    shard = done.shards[0]
    assert shard.merged == 3 * (REMEMBERED_OF_LOST + 2)
    assert shard.staleness.total() == REMEMBERED_OF_LOST + 2


def test_the_answers_to_a_lost_worker_take_a_bounded_amount_of_memory() -> None:
    log = AnswerLog()
    for step in range(100):
        log.record(Stamp(2**62, step), step)
    log.shorten(2**62)
    assert len(log.state_dict()[2**62]) == REMEMBERED_OF_LOST
    assert log.version_of(Stamp(2**62, 99)) == 99
    assert log.version_of(Stamp(2**62, 100)) is None


def test_a_push_with_the_number_of_another_worker_is_refused() -> None:
    done = elastic()
    receipts: list[Receipt] = []

    def impostor() -> PeerScript:
        client, _ = done.local_client(1)
        yield from client.begin()
        receipts.append((yield Push(to=Peer(SERVER, 0), key=GRADIENT, stamp=Stamp(NUMBERS[0], 0))))
        yield from client.end()

    done.simulate({NUMBERS[1]: impostor})
    assert "refused" in receipts[0].about


def test_a_worker_that_was_lost_when_the_others_ended_contributes_nothing_later() -> None:
    done = elastic()

    def lost(number: int) -> PeerScript:
        client, tensors = done.local_client(number)
        yield from client.begin()
        client.apply_pull()
        for shard in done.shards.values():
            shard.lose(NUMBERS[number])
        yield from compute(50.0)
        vote(COLUMNS)(tensors, number, 0)
        client.count()
        yield from client.send_rest()
        return (yield from client.end())

    trace = done.simulate({NUMBERS[0]: partial(done.at_once, 0), NUMBERS[2]: partial(lost, 2)})
    totals = trace.result(Peer(WORKER, NUMBERS[2]))
    assert (totals.missed, totals.late) == (True, 1)
    assert done.shards[0].merged == 30


def test_a_worker_whose_order_to_send_the_parameters_was_lost_receives_it_again() -> None:
    done = elastic()

    def twice(number: int) -> PeerScript:
        client, _ = done.local_client(number)
        question = client._requests.pull(client.shard_clients[0], WANTED)
        first = yield question
        second = yield question
        yield from client.begin()
        yield from client.end()
        return [about(answer)[WANTED] for answer in (first, second)]

    def other(number: int) -> PeerScript:
        yield from compute(0.001)
        client, _ = done.local_client(number)
        answer = yield client._requests.pull(client.shard_clients[0], WANTED)
        return about(answer)[WANTED]

    trace = done.simulate({NUMBERS[0]: partial(twice, 0), NUMBERS[1]: partial(other, 1)})
    assert trace.result(Peer(WORKER, NUMBERS[0])) == [True, True]
    assert trace.result(Peer(WORKER, NUMBERS[1])) is False


def test_a_restarted_server_keeps_that_a_worker_missed_the_end() -> None:
    done = elastic()
    done.simulate({NUMBERS[0]: partial(done.at_once, 0)})
    done.shards[0].replay(Entry(command="miss", stamp=Stamp(NUMBERS[3], -1)))
    assert done.shards[0].missed == {NUMBERS[3]}


def test_a_worker_that_ends_again_does_not_keep_those_waiting_that_missed_the_end() -> None:
    done = elastic()

    def again(number: int) -> PeerScript:
        yield from done.at_once(number)
        client, _ = done.local_client(number)
        yield from client.begin()
        yield from compute(20.0)
        totals = yield from client.end()
        return totals.missed

    def lost(number: int) -> PeerScript:
        client, _ = done.local_client(number)
        yield from client.begin()
        for shard in done.shards.values():
            shard.lose(NUMBERS[number])
        yield from compute(10.0)
        return (yield from client.end()).missed

    trace = done.simulate({NUMBERS[0]: partial(again, 0), NUMBERS[1]: partial(lost, 1)})
    assert trace.result(Peer(WORKER, NUMBERS[0])) is True
    assert trace.result(Peer(WORKER, NUMBERS[1])) is True
