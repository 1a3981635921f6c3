"""A worker's half, interrupted: cut off, without a gradient that can be sent, out of data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.direct_server import same_tensors
from support.server_runs import CALM, Run, flat, parameters, run, whole_gradient
from torch import Tensor

from gossamer.base.peer_ops import SERVER, WORKER, Peer, PeerScript
from gossamer.comm.simulation import compute, simulate_peers
from gossamer.comm.simulation.faulty_network import Cut, Kill, Restart
from gossamer.errors import LoopError, PeerLost
from gossamer.train.parameter_server import host

# -- being cut off -----------------------------------------------------------------------------------------------------


def patient(job: Run, lost: list[int]) -> PeerScript:
    """A worker that runs push_pull again where nobody answers."""
    client, tensors = job.client(0)
    yield from client.begin()
    client.apply_pull()
    while client.step < job.steps:
        yield from compute(0.1)
        client.gather(whole_gradient(tensors, 0, client.step))
        done = False
        while not done:
            try:
                yield from client.push_pull()
                done = True
            except PeerLost:
                lost.append(client.step)
                with pytest.raises(LoopError, match=r"push_pull\(\) again first"):
                    client.gather(whole_gradient(tensors, 0, client.step))
        client.apply_pull()
    return flat(tensors)


@pytest.mark.parametrize("one_way", [False, True])
def test_after_a_cut_the_same_bytes_are_sent_again(one_way: bool) -> None:
    """One way: the servers hear the push, and the receipt is lost."""
    job, lost = (
        run("ParameterServer() + Route(Feedback(TopK(0.2)), smallest=0)", world=1, within_seconds=0.2),
        list[int](),
    )
    servers = tuple(Peer(SERVER, number) for number in range(2))
    cut = Cut(servers, (Peer(WORKER, 0),), 0.345, 1.0, one_way)
    net = replace(CALM, faults=(cut,), resend_seconds=0.05)
    end = job.simulate({0: lambda: patient(job, lost)}, net).result(Peer(WORKER, 0))
    assert len(lost) > 1
    calm = run("ParameterServer() + Route(Feedback(TopK(0.2)), smallest=0)", world=1)
    (expected,) = calm.go()
    assert torch.equal(end, expected)


def interrupted(job: Run, asked: int) -> PeerScript:
    """A worker of a round that is over, whose every `asked`-th ask is not answered; it runs push_pull again."""
    client, tensors = job.client(0)
    yield from client.begin()
    client.apply_pull()
    yield from compute(1.0)
    client.gather(whole_gradient(tensors, 0, client.step))
    script, heard, asks = client.push_pull(), None, 0
    while True:
        try:
            op = script.send(heard)
            asks += 1
            if asks == asked:
                with pytest.raises(PeerLost):
                    script.throw(PeerLost("nobody answered"))
                with pytest.raises(LoopError, match=r"push_pull\(\) again first"):
                    client.gather(whole_gradient(tensors, 0, client.step))
                script, heard = client.push_pull(), None
            else:
                heard = yield op
        except StopIteration as done:
            return asks, done.value


@pytest.mark.parametrize("asked", [1, 2, 3, 4])
def test_whatever_was_not_answered_push_pull_goes_on(asked: int) -> None:
    """The push, both halves of the join after it was late, the pull."""
    job = run('ParameterServer("sync", backup=1)')
    others = {worker: partial(job.worker, worker) for worker in (1, 2)}
    trace = job.simulate({0: lambda: interrupted(job, asked), **others})
    asks, result = trace.result(Peer(WORKER, 0))
    assert asks > 4
    assert (result.step, result.applied) == (0, (-1, -1))
    assert job.shards[0].dropped == 1
    assert job.clients[0].step == job.steps


def test_a_server_that_forgot_is_found_out() -> None:
    faults = (Kill(Peer(SERVER, 1), 0.35), Restart(Peer(SERVER, 1), 0.4))
    for mode in ("sync", "async"):
        job = run(f'ParameterServer("{mode}")')
        with pytest.raises(PeerLost, match=r"without its state.*directory"):
            job.go(replace(CALM, faults=faults, dead_after_seconds=0.2))


def test_a_server_that_remembers_goes_on(tmp_path: Path) -> None:
    faults = (Kill(Peer(SERVER, 1), 0.35), Restart(Peer(SERVER, 1), 0.4))
    calm, killed = run('ParameterServer("sync")'), run('ParameterServer("sync")', directory=tmp_path)
    same_tensors(calm.go(), killed.go(replace(CALM, faults=faults)))


# -- gradients that are not --------------------------------------------------------------------------------------------


def test_a_gradient_that_cannot_be_sent_counts_for_nobody() -> None:
    """In a round the others' mean is taken without it; and the worker knows."""

    def gradient(tensors: Mapping[str, Tensor], worker: int, step: int) -> Mapping[str, Tensor]:
        found = whole_gradient(tensors, worker, step)
        if (worker, step) == (1, 2):
            found["bias"][0] = float("nan")
        return found

    job = run('ParameterServer("sync")', gradient=gradient, steps=3)
    (end, *_) = job.go()
    assert [each.finite for each in job.done[1]] == [True, True, False]
    start = parameters()
    means = [
        sum((flat(whole_gradient(start, worker, step)) for worker in counted), flat(start) * 0) / len(counted)
        for step, counted in enumerate(([0, 1, 2], [0, 1, 2], [0, 2]))
    ]
    assert (end - (flat(start) - sum(means))).abs().max() < 1e-12
    assert all(shard.version == 3 for shard in job.shards.values())


# -- running out of data -----------------------------------------------------------------------------------------------


def epochs(job: Run, worker: int, lengths: list[int], seen: list[tuple[int, int, int]]) -> PeerScript:
    """Epochs of so many steps; seen: (epoch, worker, step) of each contribution."""
    client, tensors = job.client(worker)
    yield from client.begin()
    client.apply_pull()
    for epoch, length in enumerate(lengths):
        for _ in range(length):
            yield from compute(0.05 + 0.01 * worker)
            seen.append((epoch, worker, client.step))
            client.gather(whole_gradient(tensors, worker, client.step))
            exchanged = yield from client.push_pull()
            assert -1 not in exchanged.applied
            client.apply_pull()
        yield from client.barrier()
        client.apply_pull()
    yield from client.end()
    client.apply_final()
    return flat(tensors)


@pytest.mark.parametrize("mode", ['"sync"', '"stale", staleness=2', '"async"'])
@pytest.mark.parametrize("duplicate", [0.0, 1.0])
def test_who_runs_out_of_data_waits_and_all_go_on_together(mode: str, duplicate: float) -> None:
    job, seen = run(f"ParameterServer({mode})"), list[tuple[int, int, int]]()
    lengths = {0: [3, 2, 0], 1: [1, 4, 2], 2: [0, 1, 3]}
    net = replace(CALM, duplicate=duplicate, jitter_seconds=0.01 * duplicate, resend_seconds=0.2)
    trace = job.simulate({n: partial(epochs, job, n, lengths[n], seen) for n in range(3)}, net)
    ends = [trace.result(Peer(WORKER, n)) for n in range(3)]
    same_tensors([ends[0]] * 2, ends[1:])
    assert len(seen) == sum(map(sum, lengths.values()))
    if "async" not in mode:
        for epoch, start in enumerate((0, 3, 7)):
            for worker in range(3):
                steps = [step for e, w, step in seen if (e, w) == (epoch, worker)]
                assert steps == list(range(start, start + lengths[worker][epoch])), "not together"
        assert all(shard.answer_log.next_step == 10 for shard in job.shards.values())


def test_exact_parameters_while_pulls_are_not() -> None:
    found: list[Tensor] = []

    def worker(job: Run) -> PeerScript:
        client, tensors = job.client(0)
        yield from client.begin()
        client.gather(whole_gradient(tensors, 0, 0))
        yield from client.push_pull()
        client.apply_pull()
        found.append(flat(tensors))
        found.append(flat((yield from client.exact())))
        yield from client.end()
        client.apply_final()
        found.append(flat(tensors))

    job = run("ParameterServer(pull=Route(TopK(0.1), smallest=0))", world=1)
    job.simulate({0: partial(worker, job)}, checks=True).result(Peer(WORKER, 0))
    start = parameters()
    expected = flat(start) - flat(whole_gradient(start, 0, 0))
    assert not torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)
    assert torch.equal(found[2], expected)


def test_a_server_goes_when_nobody_needs_it() -> None:
    job = run("ParameterServer()")
    scripts = {Peer(WORKER, number): partial(job.worker, number) for number in range(3)}
    servers = {Peer(SERVER, number): partial(host, number) for number in range(2)}
    trace = simulate_peers({**scripts, **servers}, CALM, 0, servers=())
    assert trace.seconds < 2.0
    assert all(trace.result(peer) is None for peer in servers)
