"""The end of a run on servers: whoever was not heard of when the others ended has their parameters, or an error."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.direct_server import DirectServer
from support.server_runs import CALM, Run, flat, run, whole_gradient
from torch import Tensor

from gossamer.base.peer_ops import SERVER, WORKER, Peer, PeerScript, Pulled, Push, Receipt, Stamp
from gossamer.comm.simulation import compute, simulate_peers
from gossamer.comm.simulation.faulty_network import Cut, Fault, Pause, VirtualNetwork
from gossamer.train.parameter_server import ServerShard, keep, restore
from gossamer.train.parameter_server.update_policy import END, ENDS, JOIN, LEAVE

WORLD, STEPS, DEAD_AFTER_SECONDS = 3, 6, 0.5
MODES = ["'async'", "'sync'", "'stale', staleness=1"]
WORKERS = tuple(Peer(WORKER, number) for number in range(WORLD))


def trained(job: Run, worker: int, ends: dict[int, Tensor], steps: int = STEPS) -> PeerScript:
    """What a session does, which goes on until it has made its steps or is told to stop."""
    client, tensors = job.client(worker)
    yield from client.begin()
    client.apply_pull()
    made = 0
    while made < steps and not client.stopping:
        yield from compute(0.1 + 0.01 * worker)
        client.gather(whole_gradient(tensors, worker, client.step))
        yield from client.push_pull()
        client.apply_pull()
        made += 1
    yield from client.end()
    client.apply_final()
    ends[worker] = flat(tensors)


def silence(seed: int) -> Fault:
    """Near the end: one is stopped, or cut off from some or all others, for less or more than it takes to be lost."""
    random = Random(seed)
    at, seconds = 0.3 + 0.7 * random.random(), 2.0 * random.random()
    one = Peer(WORKER, random.randrange(WORLD))
    if random.random() < 0.4:
        return Pause(one, at, seconds)
    servers = [Peer(SERVER, number) for number in range(2)]
    return Cut((one,), tuple(random.sample(servers, random.choice((1, 2, 2)))), at, at + seconds)


def ends_of(mode: str, seed: int, directory: Path | None = None) -> dict[int, Tensor]:
    job, ends = run(f"ParameterServer({mode})", world=WORLD, seed=seed, directory=directory), dict[int, Tensor]()
    net = VirtualNetwork(
        round_trip_seconds=0.01,
        jitter_seconds=0.005,
        dead_after_seconds=DEAD_AFTER_SECONDS,
        resend_seconds=0.05,
        faults=(silence(seed),),
    )
    trace = job.simulate({worker: partial(trained, job, worker, ends) for worker in range(WORLD)}, net)
    for worker in WORKERS:
        trace.result(worker)
    assert len(ends) == WORLD
    return ends


def differ(mode: str, seeds: range) -> int:
    """In how many runs workers end with other bits, and no error."""
    runs = (list(ends_of(mode, seed).values()) for seed in seeds)
    return sum(not all(torch.equal(end, ends[0]) for end in ends) for ends in runs)


@pytest.mark.parametrize("mode", MODES)
def test_after_a_silence_all_end_with_the_same_bits(mode: str) -> None:
    assert differ(mode, range(30)) == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_server_that_goes_on_after_the_end_is_found_out(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerShard, "finish", lambda shard: None)
    assert differ(mode, range(12)) > 0


def test_nobody_ends_before_those_that_go_on_to_another_epoch() -> None:
    """Worker 0 has one epoch, the others two: it waits for their end, since all are to have the same parameters."""
    for mode in MODES:
        job, ends = run(f"ParameterServer({mode})", world=WORLD), dict[int, Tensor]()

        def two_epochs(job: Run, worker: int, ends: dict[int, Tensor]) -> PeerScript:
            client, tensors = job.client(worker)
            yield from client.begin()
            for epoch in range(2):
                for _ in range(2):
                    yield from compute(0.1)
                    client.gather(whole_gradient(tensors, worker, client.step))
                    yield from client.push_pull()
                    client.apply_pull()
                if epoch == 0:
                    yield from client.barrier()
            yield from client.end()
            client.apply_final()
            ends[worker] = flat(tensors)

        scripts = {worker: partial(two_epochs, job, worker, ends) for worker in (1, 2)}
        job.simulate({0: partial(trained, job, 0, ends, steps=2), **scripts}, CALM)
        assert all(torch.equal(end, ends[0]) for end in ends.values())
        assert job.shards[0].staleness.total() == 2 + 4 + 4


# -- one worker after the other ---------------------------------------------------------------------------------------


def said(server: DirectServer, worker: int, key: str, step: int, number: int, about: str | None = None) -> Any:
    text = server.shard.spec.agreed_settings() if about is None else about
    return server.say(worker, Push(to=Peer(SERVER, 0), key=key, stamp=Stamp(worker, step, number), about=text))


def asked(server: DirectServer, worker: int, key: str) -> list[Any]:
    return server.say(worker, replace(server.pull(worker), key=key))


def ended() -> DirectServer:
    """Worker 1 is lost, and worker 0 has the last parameters."""
    server = DirectServer("ParameterServer('async')")
    for worker in range(2):
        said(server, worker, JOIN, 0, 1)
        server.say(worker, server.push(worker, 0))
    server.lose(1)
    said(server, 0, LEAVE, 1, 2, ENDS)
    (answer,) = asked(server, 0, END)
    assert isinstance(answer, Pulled)
    return server


def check_over(server: DirectServer, before: Tensor) -> None:
    """Worker 1 hears that all is over, and what the others have."""
    (pulled,) = server.say(1, server.pull(1))
    assert '"stop": true' in pulled.about
    said(server, 1, LEAVE, 2, 3, ENDS)
    (answer,) = asked(server, 1, END)
    assert torch.equal(answer.payload[0], before)
    assert '"missed": true' in answer.about
    assert server.shard.missed == set()


def test_what_comes_after_the_end_is_late_and_its_sender_is_told_to_stop() -> None:
    server = ended()
    before = server.shard.blocks[0].flat.clone()
    assert server.say(1, server.push(1, 1)) == [Receipt(version=-1)]
    assert said(server, 1, JOIN, 2, 2) == [Receipt(version=2)]
    assert (server.shard.dropped, server.shard.version, server.shard.members) == (1, 2, {})
    check_over(server, before)


def test_whoever_is_first_heard_after_the_end_is_told_to_stop() -> None:
    """Its attach came too late."""
    server = DirectServer("ParameterServer('async')")
    server.lose(1)
    said(server, 0, JOIN, 0, 1)
    server.say(0, server.push(0, 0))
    said(server, 0, LEAVE, 1, 2, ENDS)
    asked(server, 0, END)
    assert said(server, 1, JOIN, 0, 1) == [Receipt(version=1)]
    assert server.say(1, server.push(1, 0)) == [Receipt(version=-1)]
    check_over(server, server.shard.blocks[0].flat.clone())


def test_whoever_attaches_anew_takes_part_again() -> None:
    """A second session on the same servers begins where the first ended, also for one that missed its end."""
    server = ended()
    check_over(server, server.shard.blocks[0].flat.clone())
    for worker in range(2):
        said(server, worker, JOIN, 2, 4)
        assert server.say(worker, server.push(worker, 2)) == [Receipt(version=3 + worker)]
    assert server.shard.members == {0: 3, 1: 3}


def test_once_the_others_attach_anew_nobody_is_left_out() -> None:
    server = ended()
    said(server, 0, JOIN, 2, 4)
    said(server, 1, JOIN, 2, 4)
    assert server.shard.members == {0: 2, 1: 2}


def test_a_restored_server_knows_who_missed_the_end(tmp_path: Path) -> None:
    for save in (False, True):
        server = DirectServer("ParameterServer('async')")
        journal = keep(tmp_path / str(save), server.shard)
        for worker in range(2):
            said(server, worker, JOIN, 0, 1)
        server.lose(1)
        said(server, 0, LEAVE, 0, 2, ENDS)
        asked(server, 0, END)
        if save:
            journal.save()
        journal.close()
        shard = restore(tmp_path / str(save), 0)
        assert shard is not None
        shard.journal.close()
        server.shard = shard
        assert server.say(1, server.push(1, 0)) == [Receipt(version=-1)]


def test_a_run_whose_workers_are_all_heard_misses_nobody() -> None:
    job = run("ParameterServer('sync')", world=WORLD)
    scripts = {Peer(WORKER, number): partial(job.worker, number) for number in range(WORLD)}
    servers = {Peer(SERVER, number): partial(job.server, number) for number in range(2)}
    simulate_peers({**scripts, **servers}, CALM, 0)
    assert [shard.missed for shard in job.shards.values()] == [set(), set()]
