"""A worker's half: beginning, being refused, clocks, and what no worker would say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from support.direct_server import DirectServer, same_state, same_tensors
from support.server_runs import SHAPES, flat, parameters, run, sgd, whole, whole_gradient
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, SGD, Adafactor, AdamW, SparseAdam

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.peer_ops import WORKER, Peer, PeerScript, Pulled, Push, Receipt, Stamp
from gossamer.errors import AttachError, MalformedError, MismatchError
from gossamer.train.parameter_server import Client, ServerShard
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


def test_what_no_server_can_hold_is_told_and_the_server_stays() -> None:
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
    assert json.loads(answer.about) == {"applied": 4, "late": 0, "staleness": ages, "missed": False}
