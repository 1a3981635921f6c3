"""State transfer: a worker that joins begins from a live peer's state, checked by a hash, or contributes nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.base.kernels import all_finite
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import WORKER, Peer, PeerScript, Pull, Pulled
from gossamer.errors import ConnectError, GossamerError, MalformedError, PeerLost

STATE, STATUS = "state", "roll"
HASH_BYTES = 16
STATUS_SECONDS = 3.0  # no tensors
STATE_SECONDS = 60.0  # a model's worth of tensors
SEARCH_SECONDS = 60.0


class PeerStatus(NamedTuple):
    """A worker's report of itself and the others."""

    incarnation: int  # its own
    steps: int  # its own
    done: bool  # it waits for the end
    stop: bool  # it knows that the run is asked to end
    agreed: bool  # it has the final mean
    here: tuple[int, ...]  # the workers that it hears, itself included

    def encoded(self) -> str:
        return json.dumps(self)


def decode_status(text: str) -> PeerStatus:
    """Raises MalformedError for any text that `encoded` does not give."""
    try:
        incarnation, steps, done, stop, agreed, here = json.loads(text)
        return PeerStatus(int(incarnation), int(steps), bool(done), bool(stop), bool(agreed), tuple(map(int, here)))
    except (TypeError, ValueError):
        raise MalformedError(f"a worker said {text[:80]!r} of itself and the others, which is no roll") from None


class ReceivedState(NamedTuple):
    """The state of a live peer, to begin from."""

    peer: int
    status: PeerStatus
    state: Payload  # nothing where all have come to the end


def rejoin(others: Sequence[int], like: Payload, is_over: Callable[[], bool] = lambda: False) -> PeerScript:
    """Begin to take the place of a worker that was lost: find a live peer and receive its state. Returns ReceivedState.

    others: asked one after the other, and again. like: the shapes and dtypes that the state must have. is_over: whether
    to give up at the next failure. Pulls carry no stamp, so no peer counts this worker before it takes part itself.
    Raises PeerLost where no peer has anything to give.
    """
    failure: GossamerError | None = None
    rounds = max(1, round(SEARCH_SECONDS / STATUS_SECONDS / max(1, len(others))))
    for peer in chain.from_iterable(repeat(others, rounds)):
        try:
            answer = yield Pull(of=Peer(WORKER, peer), key=STATUS, within_seconds=STATUS_SECONDS)
            status = decode_status(answer.about)
            state = () if status.agreed else (yield from receive_state(peer, like, STATE_SECONDS))
        except (PeerLost, MalformedError, ConnectError) as why:
            failure = why
            if is_over():
                break
        else:
            return ReceivedState(peer, status, state)
    raise PeerLost(
        f"workers {', '.join(map(str, others))} give nothing to go on from ({failure}), and what this worker had is "
        "lost. Where none of them trains any more, begin again."
    )


def with_checksum(shown: Pulled) -> Pulled:
    """The same with a hash of its payload, in reply to a pull of STATE."""
    return replace(shown, about=hash_of(shown.payload)) if shown.payload else shown


def receive_state(peer: int, like: Payload, within_seconds: float | None = None) -> PeerScript:
    """Pull from worker `peer` its parameters, (n,), and what it keeps beside them; returns what is to be begun from.

    like: the shapes and dtypes that it must have. To be run before the first exchange: a worker that joins from other
    numbers than were shown would pull all others towards them. Raises MalformedError, and PeerLost without a reply
    within_seconds.
    """
    pulled = yield Pull(of=Peer(WORKER, peer), key=STATE, within_seconds=within_seconds)
    return checked(pulled, peer, like)


def checked(pulled: Pulled, peer: int, like: Payload) -> Payload:
    """The payload, if it is what `with_checksum` gave the hash of. Raises MalformedError for anything else."""
    if _kinds(pulled.payload) != _kinds(like):
        raise MalformedError(
            f"worker {peer} shows {_kinds(pulled.payload)}, and this worker has {_kinds(like)}. Run the same script on "
            "every worker."
        )
    if hash_of(pulled.payload) != pulled.about:
        raise MalformedError(
            f"worker {peer} showed parameters of hash {pulled.about[:40]!r}, and {hash_of(pulled.payload)!r} came, so "
            "this worker does not begin from them. Ask again, or ask another."
        )
    if not all_finite(pulled.payload[0]):
        raise MalformedError(f"worker {peer}'s parameters are not finite, and nobody can begin from them. Ask another.")
    return pulled.payload


def _kinds(payload: Payload) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(each.shape), each.dtype) for each in payload]


def hash_of(payload: Payload) -> str:
    """Hash of bytes, dtypes and sizes; equal hashes mean equal bits."""
    found = hashlib.blake2b(repr(_kinds(payload)).encode(), digest_size=HASH_BYTES)
    for each in payload:
        found.update(_bytes(each))
    return found.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
