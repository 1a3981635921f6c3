"""Update policies: whatever a worker with the token pushes, the server answers it and goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.direct_server import DirectServer
from torch.optim import Adam

from gossamer.base.peer_ops import SERVER, WORKER, Answer, Peer, PeerJoined, Pull, Push, Receipt, Stamp
from gossamer.errors import MalformedError
from gossamer.train.parameter_server.client.requests import check
from gossamer.train.parameter_server.deduplication import LATE
from gossamer.train.parameter_server.update_policy import GRADIENT, JOIN, LEAVE, SILENT

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
