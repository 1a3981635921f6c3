"""Closing comparison: whether the ranks on all machines of a job end with the same model."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count

from gossamer import events
from gossamer.base.differing_tensor import differing_tensor
from gossamer.base.transport import Transport
from gossamer.comm.environment import here
from gossamer.comm.environment.closing_exchange import exchange_at_end
from gossamer.comm.environment.rendezvous import group_store

_endings = count()  # of sessions that were compared in this process, in the same order on every rank


def compared(closed: events.Closed, transport: Transport) -> events.Closed:
    """`closed`, with whether the ranks on other machines ended alike, where they told it within a few seconds.

    A launcher compares the ranks of its own machine.
    """
    store = group_store()
    if store is None:  # of an elastic run, whose workers do not know a place in a job
        return closed
    job = here()
    if job.local_world >= job.world or transport.world != job.world or closed.ended != "finished":
        return closed
    name, place = f"{next(_endings)}", (transport.rank, transport.world)
    digests = exchange_at_end(store, f"{name}/digest", *place, closed.digest)
    if digests is None or len({*digests}) == 1:
        return replace(closed, agrees=None if digests is None else True)
    texts = exchange_at_end(store, f"{name}/tensors", *place, json.dumps(dict(closed.tensors)))
    differing = None if texts is None else differing_tensor(dict(enumerate(map(json.loads, texts))))
    return replace(closed, agrees=False, differing=differing)
