"""A worker's half: beginning, being refused, clocks, and what no worker would say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support.direct_server import DirectServer, same_state, same_tensors
from support.server_runs import CALM, SHAPES, Run, flat, parameters, run, sgd, whole, whole_gradient
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, SGD, Adafactor, AdamW, SparseAdam

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.peer_ops import SERVER, WORKER, Peer, PeerScript, Pulled, Push, Receipt, Stamp
from gossamer.comm.simulation import compute, simulate_peers
from gossamer.comm.simulation.faulty_network import Cut, Kill, Restart
from gossamer.errors import AttachError, LoopError, MalformedError, MismatchError, PeerLost
from gossamer.train.parameter_server import Client, ServerShard, host
from gossamer.train.parameter_server.from_recipe import push_pull_codecs
from gossamer.train.parameter_server.shard_spec import ShardSpec
from gossamer.train.parameter_server.update_policy import BEGIN, JOIN

# -- beginning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"recipe": resolve('ParameterServer("sync") + Int8()')}, ["Int8", "Dense"]),
        ({"seed": 5}, ['"seed": 5', '"seed": 0']),
        ({"optimizer": lambda tensors: AdamW(list(tensors))}, ["AdamW", "SGD"]),
        ({"make": lambda: parameters({**SHAPES, "more": (2,)})}, ["layout"]),
    ],
)
def test_a_worker_that_runs_something_else_is_refused(change: dict[str, Any], named: list[str]) -> None:
    job = run('ParameterServer("sync")', world=2)
    odd = replace(job, **change)
    trace = job.simulate({0: partial(job.worker, 0), 1: partial(odd.worker, 1)}, checks=True)
    with pytest.raises(MismatchError) as refusal:
        trace.result(Peer(WORKER, 1))
    assert all(name in str(refusal.value) for name in named)
    trace.result(Peer(WORKER, 0))


def test_all_begin_from_the_first_workers_parameters() -> None:
    starts = iter(range(3))
    job = run("ParameterServer()", steps=0, make=lambda: tensors_of(whole(SHAPES, next(starts))))
    job.go()
    first = flat(whole(SHAPES, 0))
    assert all(torch.equal(path[0], first) for path in job.paths.values())


def tensors_of(values: Mapping[str, Tensor]) -> dict[str, Parameter]:
    return {name: Parameter(value) for name, value in values.items()}


def test_dtypes_and_groups_live_side_by_side() -> None:
    """Each in its own dtype, by its own group's settings, on any number of servers."""

    def make() -> dict[str, Parameter]:
        found = parameters()
        found["weight"] = Parameter(found["weight"].detach().to(torch.bfloat16))
        found["scale"] = Parameter(found["scale"].detach().to(torch.float32))
        return found

    def optimizer(tensors: Any) -> SGD:
        embedding, *others = tensors
        return SGD([{"params": [embedding], "lr": 2.0}, {"params": others}], lr=1.0)

    for servers in (1, 3):
        job = run("ParameterServer()", world=1, servers=servers, steps=2, make=make, optimizer=optimizer)
        job.go()
        expected = {name: tensor.detach().double() for name, tensor in make().items()}
        for step in range(2):
            for name, gradient in whole_gradient(make(), 0, step).items():
                expected[name] = expected[name] - gradient.double() * (2.0 if name == "embedding" else 1.0)
        (client,) = job.clients.values()
        for name, tensor in client._tensors.items():
            assert tensor.dtype == make()[name].dtype
            assert torch.equal(tensor.detach().double(), expected[name])


def refused_at_first() -> None:
    """A learning rate that no optimizer takes is told to the worker, and the servers wait for another beginning."""
    job, server = run("ParameterServer()", world=1), list[str]()

    def worker() -> PeerScript:
        client, _ = job.client(0)
        client.shard_clients[0].spec.groups[0]["lr"] = -1.0
        try:
            yield from client.begin()
        except MismatchError as error:
            server.append(str(error))
        return (yield from job.worker(0))

    end = job.simulate({0: worker}, checks=True).result(Peer(WORKER, 0))
    (calm,) = run("ParameterServer()", world=1).go()
    assert torch.equal(end, calm)
    (said,) = server
    assert "refused a request of this worker" in said
    assert "with SGD" in said
    assert "Invalid learning rate: -1.0" in said


def test_what_no_server_can_hold_is_reported_and_the_server_stays() -> None:
    refused_at_first()


def test_a_server_that_breaks_instead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(text: str, values: tuple[Tensor, ...]) -> ServerShard:
        spec = ShardSpec.from_json(text)
        codecs = push_pull_codecs(resolve(spec.recipe))
        return ServerShard(spec, values, codecs.push, codecs.pull)

    monkeypatch.setattr(import_module("gossamer.train.parameter_server.server"), "make_shard", careless)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        refused_at_first()


# -- optimizers --------------------------------------------------------------------------------------------------------


class Own(SGD):
    """Somebody's own optimizer."""


@pytest.mark.parametrize("kind", [LBFGS, Adafactor, SparseAdam, Own])
def test_optimizers_that_are_not_elementwise_are_refused(kind: Any) -> None:
    job = run("ParameterServer()", optimizer=lambda tensors: kind(list(tensors), lr=0.1))
    with pytest.raises(AttachError, match=rf"{kind.__name__} cannot run on parameter servers.*EveryStep"):
        job.client(0)


def test_parameters_that_nobody_trains_are_refused() -> None:
    job = run("ParameterServer()", optimizer=lambda tensors: SGD(list(tensors)[:-1], 0.1))
    with pytest.raises(AttachError, match=r'"scale" is not in this optimizer.*requires_grad_\(False\)'):
        job.client(0)


def test_settings_are_plain_numbers() -> None:
    AdamW([Parameter(torch.zeros(1))], lr=torch.tensor(0.1))
    client, _ = run("ParameterServer()", optimizer=lambda t: AdamW(list(t), lr=torch.tensor(0.5))).client(0)
    assert client.shard_clients[0].spec.groups[0]["lr"] == 0.5
    client._optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(AttachError, match="lr is 'fast'"):
        client.gather(parameters())


@pytest.mark.parametrize(
    "name", ["NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adam"]
)
def test_elementwise_optimizers_are_themselves_on_servers(name: str) -> None:
    kind = getattr(torch.optim, name)
    job = run("ParameterServer()", world=1, steps=3, optimizer=lambda tensors: kind(list(tensors), lr=0.1))
    (end,) = job.go()
    tensors = parameters()
    optimizer = kind(tensors.values(), lr=0.1)
    for step in range(3):
        for tensor, gradient in zip(tensors.values(), whole_gradient(tensors, 0, step).values(), strict=True):
            tensor.grad = gradient
        optimizer.step()
    assert (end - flat(tensors)).abs().max() < 1e-12


# -- clocks and checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "clocks"),
    [
        ('ParameterServer("sync")', [0, 1, 2, 3, 4]),
        ('ParameterServer("stale", staleness=2)', [0, 0, 0, 1, 2]),
        ('ParameterServer("stale")', [0, 0, 0, 0, 0]),
        ("ParameterServer()", [0, 0, 0, 0, 0]),
    ],
)
def test_what_servers_must_have_reached_before_a_step(text: str, clocks: list[int]) -> None:
    tensors = parameters()
    client = Client(0, 2, tensors, sgd()(tensors.values()), resolve(text), shards=1)
    found = []
    for client.step in range(5):
        found.append(client._clock)
    assert found == clocks


def test_a_worker_remembers_what_it_owes() -> None:
    job = run("ParameterServer() + Route(Feedback(TopK(0.2)), smallest=0)", steps=2)
    job.go()
    client, other = job.clients[0], job.client(0)[0]
    other.load_state_dict(client.state_dict())
    assert other.step == client.step
    for mine, theirs in zip(client.shard_clients, other.shard_clients, strict=True):
        for one, two in zip(mine.states, theirs.states, strict=True):
            assert one.keys() == two.keys()
            same_tensors([packed.flat for packed in one.values()], [two[key].flat for key in one])
    assert any(float(packed.flat.abs().max()) > 0 for packed in client.shard_clients[0].states[0].values())


# -- what no worker would say ------------------------------------------------------------------------------------------


def nonsense(push: Push) -> list[Push]:
    about = json.loads(push.about)
    return [
        replace(push, payload=push.payload[:-1]),
        replace(push, payload=()),
        replace(push, payload=(*push.payload, torch.zeros(3))),
        replace(push, payload=tuple(tensor[:-1] for tensor in push.payload)),
        replace(push, payload=tuple(tensor.to(torch.float32) for tensor in push.payload)),
        replace(push, payload=tuple(torch.full_like(tensor, float("nan")) for tensor in push.payload)),
        replace(push, about=""),
        replace(push, about="[" * 100_000),
        replace(push, about=json.dumps(about | {"weight": -1.0})),
        replace(push, about=json.dumps(about | {"weight": float("nan")})),
        replace(push, about=json.dumps(about | {"weight": 10**400})),
        replace(push, about=json.dumps(about | {"tensors": [float("inf"), 2]})),
        replace(push, about=json.dumps(about | {"tensors": [-1, 2]})),
        replace(push, about=json.dumps(about | {"groups": []})),
        replace(push, about=json.dumps(about | {"groups": [{"lr": "0.1"}]})),
        replace(push, stamp=Stamp(1, 0)),
        replace(push, key="delete"),
        replace(push, key=JOIN),
        replace(push, key=BEGIN),
    ]


def test_nonsense_is_refused_and_changes_nothing() -> None:
    server, untouched = DirectServer('ParameterServer("sync")'), DirectServer('ParameterServer("sync")')
    push = server.push(0, 0)
    for each in nonsense(push):
        (answer,) = server.say(0, each)
        assert isinstance(answer, Receipt)
        assert "refused" in json.loads(answer.about), each
        same_state(server.shard, untouched.shard)
    server.say(0, push)
    with pytest.raises(AssertionError):
        same_state(server.shard, untouched.shard)


def test_what_a_server_refuses_is_raised() -> None:
    job = run("ParameterServer()", world=1)

    def worker() -> PeerScript:
        client, tensors = job.client(0)
        yield from client.begin()
        client.gather(whole_gradient(tensors, 0, 0))
        client.shard_clients[0].gradients[0].flat[0] = 1e308
        client._optimizer.param_groups.append(client._optimizer.param_groups[0])
        client.gather(whole_gradient(tensors, 0, 0))
        yield from client.push_pull()

    with pytest.raises(MalformedError, match="2 groups"):
        job.simulate({0: worker}).result(Peer(WORKER, 0))


def test_ages_and_counts_are_told_at_the_end() -> None:
    server = DirectServer("ParameterServer()")
    for step in range(2):
        for worker in range(2):
            server.say(worker, server.push(worker, step))
    for worker, shard_client in server.workers.items():
        server.say(worker, Push(to=shard_client.peer, key="leave", stamp=Stamp(worker, 2, 1), about="ends"))
    (answer,) = server.say(0, replace(server.pull(0), key="end"))
    assert isinstance(answer, Pulled)
    ages = {"0": 1, "1": 1, "2": 1, "3": 1}
    expected = {"applied": 4, "late": 0, "staleness": ages, "missed": False, "samples": 4.0}
    assert json.loads(answer.about) == expected


# -- A worker's half, interrupted: cut off, without a gradient that can be sent, out of data ---------------------------

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
def test_whatever_was_not_answered_push_pull_continues(asked: int) -> None:
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


def test_a_server_that_remembers_continues(tmp_path: Path) -> None:
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
def test_who_runs_out_of_data_waits_and_all_continue_together(mode: str, duplicate: float) -> None:
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
