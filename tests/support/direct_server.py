"""A server without time and network: pushes and pulls are handed to its policy directly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import torch
from support.server_runs import SHAPES, Shapes, parameters, sgd, whole
from torch import Tensor

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.peer_ops import WORKER, Answer, Arrived, Ask, Peer, PeerLeft, Pull, Push, Reply, Stamp
from gossamer.train.checkpoint import flatten
from gossamer.train.parameter_server import ServerShard, UpdatePolicy
from gossamer.train.parameter_server.client.shard_client import ShardClient, shard_clients
from gossamer.train.parameter_server.from_recipe import make_shard, policy_for, push_pull_codecs
from gossamer.train.parameter_server.update_policy import GRADIENT, PARAMETERS


class DirectServer:
    """A shard and its policy, and its workers' pushes and pulls. answers: (number of the ask, answer), in order."""

    def __init__(self, text: str, world: int = 2, shapes: Shapes = SHAPES, optimizer: Any = None) -> None:
        recipe = resolve(text)
        tensors = parameters(shapes)
        self._make = lambda: shard_clients(
            tensors, (optimizer or sgd())(tensors.values()), push_pull_codecs(recipe),
            recipe=repr(recipe), world=world, seed=0, shards=1,
        )[0]  # fmt: skip
        self.workers: dict[int, ShardClient] = {worker: self._make() for worker in range(world)}
        self._options = self.workers[0].spec.groups
        first = self.workers[0]
        self.shard = make_shard(first.spec.to_json(), first.parameters_of(tensors))
        self.shapes, self._tokens = shapes, count()
        self.ops: dict[int, Ask] = {}
        self.answers: list[tuple[int, Answer]] = []

    @property
    def policy(self) -> UpdatePolicy:
        return policy_for(self.shard)

    def push(self, worker: int, step: int, known: int = 0) -> Push:
        """A worker's gradient of whole numbers, encoded."""
        shard_client, stamp = self.workers[worker], Stamp(worker, step, known)
        shard_client.gather(whole(self.shapes, 1000 * worker + step + 1))
        message = shard_client.encode(stamp)
        shard_client.commit(message)
        payload = tuple(tensor.clone() for tensor in message.payload)
        about = shard_client.about(self._options, 1.0, message.counts)
        return Push(to=shard_client.peer, key=GRADIENT, stamp=stamp, payload=payload, about=about)

    def pull(self, worker: int, at_least: int = 0, known: int | None = None) -> Pull:
        shard_client = self.workers[worker]
        known = shard_client.replica.version if known is None else known
        return Pull(of=shard_client.peer, key=PARAMETERS, known=known, at_least=at_least)

    def say(self, worker: int, op: Ask) -> list[Answer]:
        """The answers that are given now, to this ask or to others that waited."""
        token = next(self._tokens)
        self.ops[token] = op
        return self.hear(Arrived(moment=0.0, token=token, sender=Peer(WORKER, worker), op=op))

    def lose(self, worker: int) -> list[Answer]:
        return self.hear(PeerLeft(moment=0.0, peer=Peer(WORKER, worker)))

    def hear(self, event: Any) -> list[Answer]:
        return self.note(self.policy.react(self.shard, event))

    def note(self, replies: Iterable[Reply]) -> list[Answer]:
        given = [(reply.token, reply.answer) for reply in replies]
        self.answers += given
        return [answer for _, answer in given]


def same_state(one: ServerShard, other: ServerShard) -> None:
    """Bit for bit, and in every count."""
    (text, tensors), (other_text, others) = flatten(one.state_dict()), flatten(other.state_dict())
    assert text == other_text
    same_tensors(list(tensors.values()), list(others.values()))


def same_tensors(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), "other bits"
