"""Requests of one worker to its servers: builds pushes and pulls, and reads the text of answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.base.ops import Payload
from gossamer.base.peer_ops import AtOnce, Pull, Pulled, Push, Receipt, Stamp
from gossamer.errors import GossamerError, PeerLost
from gossamer.train.parameter_server.client.shard_client import ShardClient


@dataclass(frozen=True)
class Requests:
    """Pushes and pulls between a worker and all its servers."""

    worker: int
    shard_clients: Sequence[ShardClient]
    within_seconds: float | None  # time limit, after which PeerLost is raised; None waits forever

    def push(self, shard_client: ShardClient, key: str, stamp: Stamp, about: str = "", payload: Payload = ()) -> Push:
        return Push(
            to=shard_client.peer,
            key=key,
            stamp=stamp,
            payload=tuple(tensor.cpu() for tensor in payload),
            about=about,
            within_seconds=self.within_seconds,
        )

    def pull(self, shard_client: ShardClient, key: str, at_least: int = 0) -> Pull:
        return Pull(
            of=shard_client.peer,
            key=key,
            known=shard_client.replica.version,
            at_least=at_least,
            within_seconds=self.within_seconds,
        )

    def pull_all(self, key: str, at_least: int = 0) -> AtOnce:
        return AtOnce(tuple(self.pull(each, key, at_least) for each in self.shard_clients))


def about(answer: Receipt | Pulled) -> dict[str, Any]:
    """The JSON text of an answer."""
    read: dict[str, Any] = json.loads(answer.about or "{}")
    return read


def check(answers: Sequence[Receipt | Pulled], error: type[GossamerError]) -> None:
    """Raise `error` if a server refused a request, PeerLost if one has lost its state."""
    for description in map(about, answers):
        if "refused" in description:
            raise error(f"A parameter server refused a request of this worker: {description['refused']}")
        if "forgot" in description:
            raise PeerLost(
                "A parameter server restarted without its state, so this run cannot continue from the parameters of "
                "its workers. Give the servers a directory for a journal."
            )
