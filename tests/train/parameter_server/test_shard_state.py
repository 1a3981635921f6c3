"""Shard states in pieces: any order, twice, and nothing malformed is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pytrees import alike, trees
from torch.optim import SGD

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.peer_ops import SERVER, WORKER, Arrived, Peer, Push, Receipt, Stamp
from gossamer.errors import MalformedError
from gossamer.train.parameter_server import journal, shard_state
from gossamer.train.parameter_server.client.client import Client
from gossamer.train.parameter_server.from_recipe import make_shard, policy_for
from gossamer.train.parameter_server.shard import ServerShard
from gossamer.train.parameter_server.shard_state import ReceivedPieces, described, file_of, state_of
from gossamer.train.parameter_server.update_policy import STATE


@settings(max_examples=50, deadline=None)
@given(trees)
def test_a_state_survives_the_way(tree: Any) -> None:
    assert alike(state_of(file_of({"tree": tree}))["tree"], tree)


@given(st.randoms(use_true_random=False), st.integers(1, 90))
def test_pieces_in_any_order_and_twice(draw: Any, size: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shard_state, "PIECE_BYTES", 50)
        state = {"x": torch.arange(size)}
        sent = list(described(file_of(state), "one")) * 2
        draw.shuffle(sent)
        received = ReceivedPieces(10)
        found = [whole for told, part in sent if (whole := received.add(told, (part,))) is not None]
        assert len(found) == 1
        assert torch.equal(found[0]["x"], state["x"])


def test_another_attempt_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_state, "PIECE_BYTES", 50)
    first, other = (
        list(described(file_of({"x": torch.full((20,), value)}), name)) for value, name in ((1, "a"), (2, "b"))
    )
    received = ReceivedPieces(10)
    found = [received.add(told, (part,)) for told, part in [*first[:-1], *other]]
    assert torch.equal(found[-1]["x"], torch.full((20,), 2))
    assert found[:-1] == [None] * (len(found) - 1)


def about(**changes: Any) -> str:
    return json.dumps({"name": "a", "index": 0, "nbytes": 4, **changes})


@pytest.mark.parametrize(
    ("told", "payload"),
    [
        ("{", [torch.zeros(4, dtype=torch.uint8)]),
        ("[]", [torch.zeros(4, dtype=torch.uint8)]),
        (about(index=1), [torch.zeros(4, dtype=torch.uint8)]),
        (about(index=-1), [torch.zeros(4, dtype=torch.uint8)]),
        (about(nbytes=10**15), [torch.zeros(1 << 20, dtype=torch.uint8)]),
        (about(nbytes="x"), [torch.zeros(4, dtype=torch.uint8)]),
        (about(), [torch.zeros(5, dtype=torch.uint8)]),
        (about(), [torch.zeros(4)]),
        (about(), []),
        (about(), [torch.zeros(4, dtype=torch.uint8)]),  # no state
    ],
)
def test_an_invalid_piece_is_refused(told: str, payload: list[torch.Tensor]) -> None:
    with pytest.raises(MalformedError):
        ReceivedPieces(10).add(told, tuple(payload))


# -- at a server -------------------------------------------------------------------------------------------------------


def shard_of(value: float) -> ServerShard:
    parameters = {"x": torch.nn.Parameter(torch.full((4,), value))}
    optimizer = SGD(parameters.values(), 0.1, momentum=0.9)
    client = Client(0, 1, parameters, optimizer, resolve("ParameterServer(mode='sync')"), shards=1)
    (each,) = client.shard_clients
    return make_shard(each.spec.to_json(), each.parameters_of(parameters))


def given_back(shard: ServerShard, state: dict[str, Any], name: str = "one") -> list[Receipt]:
    answers = []
    for told, part in described(file_of(state), name):
        push = Push(to=Peer(SERVER, 0), key=STATE, stamp=Stamp(0, 0), payload=(part,), about=told)
        event = Arrived(token=1, sender=Peer(WORKER, 0), op=push, moment=0.0)
        answers += [reply.answer for reply in policy_for(shard).react(shard, event)]
    return answers


def test_a_piece_that_comes_again_later_changes_nothing() -> None:
    shard = shard_of(1.0)
    saved = shard_of(2.0).state_dict()
    given_back(shard, saved)
    assert torch.equal(shard.blocks[0].flat, torch.full((4,), 2.0))
    shard.blocks[0].flat.fill_(3.0)  # trained on
    given_back(shard, saved)
    assert torch.equal(shard.blocks[0].flat, torch.full((4,), 3.0))
    given_back(shard, saved, "other")
    assert torch.equal(shard.blocks[0].flat, torch.full((4,), 2.0))


def test_a_state_of_something_else_is_refused() -> None:
    (*_, answer) = given_back(shard_of(1.0), {"parameters": [torch.zeros(9)]})
    assert "does not fit shard 0" in answer.about


def test_a_server_that_restarts_continues_from_what_it_was_given(tmp_path: Path) -> None:
    shard = shard_of(1.0)
    kept = journal.keep(tmp_path, shard)
    shard.publish()
    given_back(shard, shard_of(2.0).state_dict())
    kept.close()
    found = journal.restore(tmp_path, 0)
    assert found is not None
    assert torch.equal(found.blocks[0].flat, torch.full((4,), 2.0))
    found.journal.close()
