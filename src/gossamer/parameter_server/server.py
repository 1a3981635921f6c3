"""A server from its first moment: it knows nothing, or what its journal tells."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from math import inf
from typing import Any

from gossamer.core.peer_ops import (
    WORKER,
    Arrived,
    Await,
    Peer,
    PeerEvent,
    PeerJoined,
    PeerLeft,
    PeerOp,
    PeerScript,
    Pull,
    Push,
    Reply,
)
from gossamer.errors import MalformedError
from gossamer.parameter_server.from_recipe import policy_for, shard_of
from gossamer.parameter_server.journal import keep, restore
from gossamer.parameter_server.shard import ServerShard
from gossamer.parameter_server.update_policy import BEGIN, UpdatePolicy, forgotten, refused

Shown = Callable[[ServerShard], None]
START_SECONDS = 60.0  # a worker that is not heard of so long after the first has not come


def host(
    number: int | None = None,
    directory: str | os.PathLike[str] | None = None,
    *,
    patience_seconds: float = 5.0,
    stays: bool = False,
    shown: Shown = lambda shard: None,
) -> PeerScript:
    """A server: go on where its journal in `directory` ends, or wait to be told what to hold; serve while it is needed.

    number: which server this is; None holds what it is given, as 0 where there is a journal. patience_seconds: a worker
    of which a restarted server hears nothing for so long has left meanwhile. stays: go on when all workers have left,
    since they may be started again. shown: is given the shard as soon as there is one. Raises CheckpointError where the
    journal is damaged.
    """
    shard = None if directory is None else restore(directory, number or 0)
    held: Sequence[PeerEvent] = ()
    if shard is None:
        shard, held = yield from _begin(number)
        patience_seconds = START_SECONDS
        if directory is not None:
            keep(directory, shard)
    shown(shard)
    try:
        yield from serve(shard, policy_for(shard), held, patience_seconds=patience_seconds, stays=stays)
    finally:
        shard.journal.close()


def serve(
    shard: ServerShard,
    rule: UpdatePolicy,
    held: Sequence[PeerEvent] = (),
    *,
    patience_seconds: float = inf,
    stays: bool = True,
) -> PeerScript:
    """React to what was `held` and then to all that is heard, until all workers have left; with `stays`, for ever.

    patience_seconds: members that are not heard of for so long from now on have left.
    """
    yield from rule.settle(shard)  # what was due when it was last stopped
    heard = deque(held or [(yield Await(until=-inf))])
    here, silent = set[Peer](), {Peer(WORKER, worker) for worker in {*shard.members, *shard.leaving, *shard.met}}
    until = heard[-1].moment + patience_seconds
    while stays or here or shard.members:
        event = heard.popleft() if heard else (yield Await(until=until if silent and until < inf else None))
        match event:
            case PeerLeft(peer=peer):
                here.discard(peer)
                silent.discard(peer)
            case PeerJoined(peer=peer) if peer.kind == WORKER:
                here.add(peer)
                silent.discard(peer)
            case Arrived(sender=peer):  # perhaps long after it was sent, by somebody who has left
                silent.discard(peer)
        yield from rule.react(shard, event)
        if event.moment >= until:
            for each in sorted(silent):
                yield from rule.react(shard, PeerLeft(peer=each, moment=event.moment))
            silent.clear()


def _begin(number: int | None) -> Generator[PeerOp, Any, tuple[ServerShard, list[PeerEvent]]]:
    """Wait until somebody says what to hold; returns it, and what else was heard, which waits for an answer."""
    held: list[PeerEvent] = []
    while True:
        event = yield Await()
        match event:
            case Arrived(token=token, op=Push(key=key) as push) if key == BEGIN:
                try:
                    shard = shard_of(push.about, push.payload)
                    _check_number(shard, number)
                except MalformedError as error:
                    yield Reply(token=token, answer=refused(str(error)))
                else:
                    return shard, [*held, event]
            case Arrived(token=token, op=Push() as push):
                yield Reply(token=token, answer=forgotten(push))
            case Arrived(token=token, op=Pull(known=known) as pull) if known >= 0:
                yield Reply(token=token, answer=forgotten(pull))
            case _:
                held.append(event)


def _check_number(shard: ServerShard, number: int | None) -> None:
    if number not in (None, shard.description.number):
        raise MalformedError(f"shard {shard.description.number} was given to server {number}")
