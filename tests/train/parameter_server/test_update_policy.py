"""Update policies: whatever a worker with the token pushes, the server answers it and goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from support.direct_server import DirectServer
from support.server_runs import CALM, Run, flat, run, whole_gradient
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adam

from gossamer.base.peer_ops import (
    SERVER,
    WORKER,
    Answer,
    Peer,
    PeerJoined,
    PeerScript,
    Pull,
    Pulled,
    Push,
    Receipt,
    Stamp,
)
from gossamer.comm.simulation import compute, simulate_peers
from gossamer.comm.simulation.faulty_network import Cut, Fault, Pause, VirtualNetwork
from gossamer.errors import MalformedError
from gossamer.train.parameter_server import ServerShard, StaleSynchronousPolicy, SynchronousPolicy, keep, restore
from gossamer.train.parameter_server.client.requests import check
from gossamer.train.parameter_server.deduplication import LATE
from gossamer.train.parameter_server.update_policy import END, ENDS, GRADIENT, JOIN, LEAVE, SILENT, STOP

COLUMNS = "ParameterServer('async', push=Route(Feedback(OneBit(columns=True)), smallest=0))"
FAR = 2**40


def announced(server: DirectServer, key: str, stamp: Stamp) -> list[Answer]:
    about = server.shard.spec.agreed_settings() if key == JOIN else ""
    return server.say(stamp.worker, Push(to=Peer(SERVER, 0), key=key, stamp=stamp, about=about))


def refused(answers: list[Answer]) -> bool:
    """Whether the push was refused, by an error that its sender raises."""
    (answer,) = answers
    return isinstance(answer, Receipt) and answer.version == LATE and "refused" in json.loads(answer.about or "{}")


def check_goes_on(server: DirectServer) -> None:
    """The next contribution counts."""
    before = server.shard.staleness.total()
    server.say(0, server.push(0, 0))
    assert server.shard.staleness.total() == before + 1


# -- steps far ahead --------------------------------------------------------------------------------------------------


def test_rounds_that_nobody_contributes_to_pass_at_once() -> None:
    server = DirectServer("ParameterServer('sync')")
    for worker in range(2):
        announced(server, LEAVE, Stamp(worker, 0, 1))
    assert announced(server, JOIN, Stamp(1, FAR, 2)) == [Receipt(version=0)]
    assert server.shard.version == FAR
    server.say(1, server.push(1, FAR))
    assert server.shard.version == FAR + 1


def test_a_contribution_far_ahead_is_waited_for_no_longer() -> None:
    server = DirectServer("ParameterServer('sync')")
    server.say(1, server.push(1, FAR))
    assert server.shard.version == 0
    announced(server, LEAVE, Stamp(0, 0, 1))
    assert server.shard.version == FAR + 1
    assert server.shard.staleness == {FAR: 1}


# -- stamps, numbers and shapes that no worker sends ------------------------------------------------------------------


@pytest.mark.parametrize(
    "stamp",
    [Stamp(0, -5), Stamp(0, 2**53), Stamp(7, 0), Stamp(-1, 0), Stamp(0, 0, -1)],
    ids=lambda stamp: str(stamp[:]),
)
@pytest.mark.parametrize("key", [GRADIENT, JOIN, LEAVE])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_stamp_that_no_worker_writes_is_refused(mode: str, key: str, stamp: Stamp) -> None:
    server = DirectServer(f"ParameterServer('{mode}')")
    if key == GRADIENT:
        answers = server.say(stamp.worker, replace(server.push(0, 0), stamp=stamp))
    else:
        answers = announced(server, key, stamp)
    assert refused(answers)
    assert (server.shard.members, server.shard.announced) == ({0: 0, 1: 0}, {})
    check_goes_on(server)


def test_a_gradient_of_parameters_that_the_server_never_had_is_not_taken() -> None:
    server = DirectServer("ParameterServer('async')")
    (answer,) = server.say(0, server.push(0, 0, known=3))
    assert isinstance(answer, Receipt)
    assert json.loads(answer.about) == {"forgot": True}
    check_goes_on(server)


def test_a_message_of_another_shape_is_refused() -> None:
    """As many numbers, laid out otherwise."""
    server = DirectServer(COLUMNS, shapes={"weight": (64, 64), "bias": (64,)})
    push = server.push(0, 0)
    flat = tuple(tensor.reshape(1, -1) if tensor.dim() == 2 else tensor for tensor in push.payload)
    assert [tensor.shape for tensor in flat] != [tensor.shape for tensor in push.payload]
    answers = server.say(0, replace(push, payload=flat))
    assert refused(answers)
    with pytest.raises(MalformedError, match="rank 0 in step 0 cannot be decoded"):
        check(answers, MalformedError)
    check_goes_on(server)


@pytest.mark.parametrize(
    "options",
    [{"lr": None}, {"betas": 0.9}, {"betas": [2.0, 0.9]}, {"betas": [0.9]}, {"amsgrad": True}, {"eps": [1.0]}],
    ids=str,
)
def test_hyperparameters_that_no_optimizer_takes_are_refused(options: dict[str, Any]) -> None:
    server = DirectServer("ParameterServer('async')", optimizer=lambda tensors: Adam(list(tensors), 0.1))
    push = server.push(0, 0)
    header = json.loads(push.about)
    header["groups"][0].update(options)
    assert refused(server.say(0, replace(push, about=json.dumps(header))))
    check_goes_on(server)


# -- workers that are not heard ---------------------------------------------------------------------------------------


def silent(server: DirectServer) -> list[int]:
    (answer,) = server.say(0, Pull(of=Peer(SERVER, 0), key=SILENT))
    return list(json.loads(answer.about)["silent"])


@pytest.mark.parametrize("recipe", ["ParameterServer('async')", "ParameterServer('sync')"])
def test_a_server_names_the_workers_that_it_does_not_hear(recipe: str) -> None:
    server = DirectServer(recipe, world=3)
    assert silent(server) == []
    server.lose(2)
    assert silent(server) == [2]
    server.hear(PeerJoined(moment=0.0, peer=Peer(WORKER, 2)))
    assert silent(server) == []


# -- whoever was not heard of when the others ended has their parameters, or an error ----------------------------------


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
def test_a_server_that_continues_after_the_end_is_found_out(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerShard, "finish", lambda shard: None)
    assert differ(mode, range(12)) > 0


def test_nobody_ends_before_those_that_continue_to_another_epoch() -> None:
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


def stopped(server: DirectServer) -> bool:
    """Whether worker 1 is told to stop."""
    (pulled,) = server.say(1, server.pull(1))
    return '"stop": true' in pulled.about


@pytest.mark.parametrize("mode", MODES)
def test_a_session_after_one_that_was_stopped_is_not_stopped(mode: str, tmp_path: Path) -> None:
    """A restarted server has not forgotten the request."""
    server = DirectServer(f"ParameterServer({mode})")
    keep(tmp_path, server.shard)
    for worker in range(2):
        said(server, worker, JOIN, 0, 1)
    said(server, 0, STOP, 0, 0)
    server.shard.journal.close()
    shard = restore(tmp_path, 0)
    assert shard is not None
    server.shard = shard
    assert stopped(server)
    for worker in range(2):
        said(server, worker, LEAVE, 0, 2, ENDS)
    for worker in range(2):
        asked(server, worker, END)
    for worker in range(2):
        said(server, worker, JOIN, 1, 3)
    assert not stopped(server)


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


def test_whoever_attaches_again_takes_part_again() -> None:
    """A second session on the same servers begins where the first ended, also for one that missed its end."""
    server = ended()
    check_over(server, server.shard.blocks[0].flat.clone())
    for worker in range(2):
        said(server, worker, JOIN, 2, 4)
        assert server.say(worker, server.push(worker, 2)) == [Receipt(version=3 + worker)]
    assert server.shard.members == {0: 3, 1: 3}


def test_once_the_others_attach_again_nobody_is_left_out() -> None:
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


# -- what each worker sees at each of its clocks, in virtual time ------------------------------------------------------


WORLD_STALE, STEPS_STALE = 3, 9
BAD = VirtualNetwork(round_trip_seconds=0.02, jitter_seconds=0.02, loss=0.1, duplicate=0.2, resend_seconds=0.1)


def ballots() -> dict[str, Parameter]:
    """A row for each of two servers, a column for each contribution there may be."""
    return {"ballots": Parameter(torch.zeros(2, WORLD_STALE * STEPS_STALE, dtype=torch.float64))}


def vote(tensors: Mapping[str, Tensor], worker: int, step: int) -> dict[str, Tensor]:
    mark = torch.zeros(2, WORLD_STALE * STEPS_STALE, dtype=torch.float64)
    mark[:, worker * STEPS_STALE + step] = -1
    return {"ballots": mark}


class View(NamedTuple):
    """What a worker's parameters hold as it begins to compute its step `clock`."""

    worker: int
    clock: int
    moment: float
    seen: set[tuple[int, int]]  # contributions (worker, step)


def seen(tensors: Mapping[str, Tensor]) -> set[tuple[int, int]]:
    (rows,) = tensors.values()
    servers = [{divmod(int(place), STEPS_STALE) for place in row.nonzero()} for row in rows.detach()]
    return servers[0] & servers[1]


def watch(job: Run, worker: int, views: list[View], pushed: dict[tuple[int, int], float]) -> PeerScript:
    client, tensors = job.client(worker)
    yield from client.begin()
    client.apply_pull()
    while client.step < STEPS_STALE:
        step = client.step
        views.append(View(worker, step, (yield from compute(0)), seen(tensors)))
        yield from compute(job.seconds(worker, step))
        client.gather(vote(tensors, worker, step))
        pushed[worker, step] = yield from compute(0)
        yield from client.push_pull()
        client.apply_pull()
    yield from client.end()
    client.apply_final()
    return flat(tensors)


def random_seconds(seed: int) -> Any:
    return lambda worker, step: 0.01 + Random(seed * 10_000 + worker * 100 + step).random() ** 3


def views_of(job: Run, net: VirtualNetwork = CALM) -> tuple[list[View], dict[tuple[int, int], float]]:
    views, pushed = list[View](), dict[tuple[int, int], float]()
    trace = job.simulate({worker: partial(watch, job, worker, views, pushed) for worker in range(WORLD_STALE)}, net)
    ends = [trace.result(Peer(WORKER, worker)) for worker in range(WORLD_STALE)]
    assert all(torch.equal(end, ends[0]) for end in ends)
    torch.testing.assert_close(ends[0], torch.full_like(ends[0], 1 / WORLD_STALE))
    return views, pushed


def check_seen(staleness: int, seed: int, net: VirtualNetwork = CALM, **options: Any) -> None:
    """The law of Ho et al.: all of a worker's own before its clock, all others' before that less the staleness."""
    text = f'ParameterServer("stale", staleness={staleness})'
    job = run(text, seed=seed, make=ballots, seconds=random_seconds(seed), **options)
    views, pushed = views_of(job, net)
    assert len(views) == WORLD_STALE * STEPS_STALE
    for worker, clock, moment, found in views:
        own = {(worker, step) for step in range(clock)}
        assert own <= found, "a worker does not read its own writes"
        others = {(other, step) for other in range(WORLD_STALE) for step in range(clock - staleness)}
        assert others <= found, "a worker does not see what is older than the bound"
        if net is CALM:
            there = {each for each, sent in pushed.items() if sent < moment - net.round_trip_seconds - 1e-9}
            assert there <= found, "what has arrived is held back"


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_a_worker_sees_its_own_at_once_and_others_within_the_bound(staleness: int) -> None:
    for seed in range(6):
        check_seen(staleness, seed)
        check_seen(staleness, seed, BAD)


@dataclass(frozen=True)
class TooSoon(StaleSynchronousPolicy):
    """Lets workers go a clock too far."""

    def is_reached(self, shard: ServerShard, pull: Pull) -> bool:
        return super().is_reached(shard, replace(pull, at_least=pull.at_least - 1))


@dataclass(frozen=True)
class SeldomPublished(StaleSynchronousPolicy):
    """Shows parameters once a round."""

    def should_publish(self, shard: ServerShard) -> bool:
        return shard.version >= shard.public.version + WORLD_STALE


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (SynchronousPolicy, "its own writes"),
        (TooSoon, "older than the bound"),
        (SeldomPublished, "its own writes"),
    ],
    ids=["delayed lock step", "too soon", "seldom published"],
)
def test_what_is_not_that_is_found_out(policy: Callable[[], Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        [check_seen(2, seed, policy=lambda shard: policy()) for seed in range(6)]


def test_a_fast_workers_gradients_are_taken_at_parameters_that_move() -> None:
    """Up to the bound it waits for nobody, and there for the slowest."""
    job = run(
        'ParameterServer("stale", staleness=4)', make=ballots, seconds=lambda worker, step: 0.1 + 4.9 * (worker == 2)
    )
    views, _ = views_of(job)
    fast = [view for view in views if view.worker == 0]
    assert all(before.seen < after.seen for before, after in pairwise(fast))
    assert [view.moment < 5.0 for view in fast] == [True] * 5 + [False] * (STEPS_STALE - 5)
    assert all((2, view.clock - 5) in view.seen for view in fast[5:])


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 2.0, 5.0)])
def test_a_rounds_contributions_move_as_far_as_their_mean(weights: tuple[float, ...]) -> None:
    """Each has its share of the learning rate: with plain SGD and given gradients the end is that of lock step. What
    others weigh is known once they have contributed, so the first steps move nothing."""

    def gradient(tensors: Mapping[str, Tensor], worker: int, step: int) -> dict[str, Tensor]:
        return {name: values * (step > 4) for name, values in whole_gradient(tensors, worker, step).items()}

    stale, sync = (
        run(
            f"ParameterServer({mode})",
            seconds=random_seconds(1),
            weight=lambda worker, step: weights[worker],
            gradient=gradient,
            steps=9,
        )
        for mode in ('"stale"', '"sync"')
    )
    torch.testing.assert_close(stale.go()[0], sync.go()[0], rtol=0, atol=1e-12)


def test_a_rank_that_comes_back_too_late_continues_at_the_slowest_ones_clock() -> None:
    """Its gradient of before is older than the bound, and nobody waits until it has caught up."""
    job = run('ParameterServer("stale", staleness=1)', steps=12, seconds=lambda worker, step: 0.1)
    (client, tensors), seen_steps = job.client(2), list[int]()

    def away() -> PeerScript:
        yield from client.begin()
        client.apply_pull()
        while client.step < job.steps:
            yield from compute(0.1)
            client.gather(whole_gradient(tensors, 2, client.step))
            if len(seen_steps) == 2:
                yield from client.leave()  # as one that was taken for lost
                yield from compute(0.55)
            seen_steps.append((yield from client.push_pull()).step)
            client.apply_pull()
        yield from client.end()

    trace = job.simulate({0: partial(job.worker, 0), 1: partial(job.worker, 1), 2: away})
    trace.result(Peer(WORKER, 2))
    assert seen_steps[:3] == [0, 1, 2]
    assert seen_steps[3] > 5
    assert job.shards[0].dropped == 1
    assert [each.step for each in job.done[0]] == list(range(12))
