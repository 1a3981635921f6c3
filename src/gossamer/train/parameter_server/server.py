"""Parameter server: a script that obtains its shard, from a worker or a journal, and serves it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence, Set
from math import inf
from typing import Any

from gossamer.base.peer_ops import (
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
    Pulled,
    Push,
    Reply,
    stopped_seconds,
)
from gossamer.base.spans import active
from gossamer.base.spans.record_format import SpanKind
from gossamer.errors import MalformedError
from gossamer.train.parameter_server.from_recipe import make_shard, policy_for
from gossamer.train.parameter_server.journal import keep, restore
from gossamer.train.parameter_server.shard import ServerShard
from gossamer.train.parameter_server.update_policy import BEGIN, WANTED, UpdatePolicy, forgot, refusal, wanted

Shown = Callable[[ServerShard], None]
START_SECONDS = 60.0  # a worker that has not connected by then, after the first one, counts as absent


def host(
    number: int | None = None,
    directory: str | os.PathLike[str] | None = None,
    *,
    absent_after_seconds: float = 5.0,
    keep_serving: bool = False,
    on_shard: Shown = lambda shard: None,
) -> PeerScript:
    """Restore the shard from the journal in `directory`, or receive it from a worker; then serve while it is needed.

    Args:
        number: number of this server; None accepts any shard, and means 0 with a journal.
        directory: folder of journals; None keeps no journal.
        absent_after_seconds: time after which a worker that does not connect to a restarted server has left.
        keep_serving: continue after all workers have left, since they may be restarted.
        on_shard: called once with the shard.

    Raises:
        CheckpointError: the journal is damaged.
    """
    shard = None if directory is None else restore(directory, number or 0)
    queued: Sequence[PeerEvent] = ()
    if shard is None:
        shard, queued = yield from _begin(number)
        absent_after_seconds = START_SECONDS
        if directory is not None:
            keep(directory, shard)
    on_shard(shard)
    try:
        yield from serve(
            shard, policy_for(shard), queued, absent_after_seconds=absent_after_seconds, keep_serving=keep_serving
        )
    finally:
        shard.journal.close()


def serve(
    shard: ServerShard,
    policy: UpdatePolicy,
    queued: Sequence[PeerEvent] = (),
    *,
    absent_after_seconds: float = inf,
    keep_serving: bool = True,
) -> PeerScript:
    """Handle `queued` events and then all further ones, until all workers have left; with `keep_serving`, forever.

    Args:
        absent_after_seconds: members that do not connect within this time have left.
    """
    yield from policy.settle(shard)  # work that was due when the server stopped
    events = deque(queued or [(yield Await(until=-inf))])
    present, silent = set[Peer](), {Peer(WORKER, worker) for worker in {*shard.members, *shard.leaving, *shard.left}}
    since = events[-1].moment
    until = since + absent_after_seconds
    while keep_serving or present or shard.members:
        deadlines = [*([until] if silent and until < inf else []), policy.wake_at(shard)]
        wake = min((each for each in deadlines if each is not None), default=None)
        if events:
            event = events.popleft()
        else:
            event = yield Await(until=wake)
            until += stopped_seconds(event, since, wake)
        since = event.moment
        match event:
            case PeerLeft(peer=peer):
                present.discard(peer)
                silent.discard(peer)
            case PeerJoined(peer=peer) if peer.kind == WORKER:
                present.add(peer)
                silent.discard(peer)
        began = time.perf_counter()
        yield from policy.react(shard, event)
        if active.recorder is not None and isinstance(event, Arrived):
            active.recorder.add(SpanKind.SERVE, began, time.perf_counter(), event.sender.number)
        if event.moment >= until:
            for each in sorted(silent):
                yield from policy.react(shard, PeerLeft(peer=each, moment=event.moment))
            silent.clear()


def _begin(number: int | None) -> Generator[PeerOp, Any, tuple[ServerShard, list[PeerEvent]]]:
    """Wait until a worker sends a shard. Returns it, and all other events, which are answered later.

    In an elastic run, workers ask whether they should send one. One of them at a time is asked to, so that only one
    sends the whole model.
    """
    queued: list[PeerEvent] = []
    asked: Peer | None = None
    away: set[Peer] = set()
    while True:
        if (candidate := _candidate(queued, asked, away)) is not None:
            queued = [each for each in queued if each is not candidate]
            asked = candidate.sender
            yield Reply(token=candidate.token, answer=Pulled(version=0, about=wanted(now=True)))
        event = yield Await()
        match event:
            case PeerLeft(peer=peer):
                away.add(peer)
                asked = None if asked == peer else asked
            case PeerJoined(peer=peer):
                away.discard(peer)
        match event:
            case Arrived(token=token, op=Push(key=key) as push) if key == BEGIN:
                try:
                    shard = make_shard(push.about, push.payload)
                    _check_number(shard, number)
                except MalformedError as error:
                    yield Reply(token=token, answer=refusal(str(error)))
                else:
                    return shard, [*queued, event]
            case Arrived(token=token, op=Push() as push):
                yield Reply(token=token, answer=forgot(push))
            case Arrived(token=token, op=Pull(known=known, key=key) as pull) if known >= 0 and key != WANTED:
                yield Reply(token=token, answer=forgot(pull))
            case _:
                queued.append(event)


def _candidate(queued: Sequence[PeerEvent], asked: Peer | None, away: Set[Peer]) -> Arrived | None:
    """The next question of a worker that should send a shard: of the one that was asked to, which may not have received
    that answer; or, if none was, of the first one that is connected."""
    for event in queued:
        match event:
            case Arrived(sender=peer, op=Pull(key=key)) if key == WANTED:
                if peer == asked or (asked is None and peer not in away):
                    return event
    return None


def _check_number(shard: ServerShard, number: int | None) -> None:
    if number not in (None, shard.spec.number):
        raise MalformedError(
            f"shard {shard.spec.number} was sent to server {number}: set the same GOSSAMER_SERVERS on every worker"
        )
