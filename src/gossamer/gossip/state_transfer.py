"""Whoever joins begins from a live peer's state: what came is what that peer showed, or it contributes nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.ops import Payload
from gossamer.core.peer_ops import WORKER, Peer, PeerScript, Pull, Pulled
from gossamer.errors import ConnectError, GossamerError, MalformedError, PeerLost
from gossamer.kernels import all_finite

STATE, ROLL = "state", "roll"
HASH_BYTES = 16
ROLL_SECONDS = 3.0  # a word without numbers
STATE_SECONDS = 60.0  # a model's worth of them
SEARCH_SECONDS = 60.0


class PeerStatus(NamedTuple):
    """What a worker says of itself and the others. life, steps: its own; done: it waits for the end; stop: it knows
    that the run is asked to end; agreed: it has the last mean; here: the workers that it hears, itself included."""

    life: int
    steps: int
    done: bool
    stop: bool
    agreed: bool
    here: tuple[int, ...]

    def written(self) -> str:
        return json.dumps(self)


def decode_status(text: str) -> PeerStatus:
    """What `written` gave. Raises MalformedError for anything else."""
    try:
        life, steps, done, stop, agreed, here = json.loads(text)
        return PeerStatus(int(life), int(steps), bool(done), bool(stop), bool(agreed), tuple(map(int, here)))
    except (TypeError, ValueError):
        raise MalformedError(f"a worker said {text[:80]!r} of itself and the others, which is no roll") from None


class ReceivedState(NamedTuple):
    """From whom, what it said of itself, and what it has: nothing where all have come to the end."""

    peer: int
    roll: PeerStatus
    state: Payload


def rejoin(others: Sequence[int], like: Payload, is_over: Callable[[], bool] = lambda: False) -> PeerScript:
    """Begin to take the place of a worker that was lost: find somebody who is here, and take over what it has.

    others: asked one after the other, and again. like: of which shapes and dtypes that must be. is_over: whether nobody
    is waited for any longer. Returns TakenOver.
    Nothing is said under a stamp, so nobody takes part in anything before this worker does. Raises PeerLost where
    nobody has anything to give.
    """
    failure: GossamerError | None = None
    rounds = max(1, round(SEARCH_SECONDS / ROLL_SECONDS / max(1, len(others))))
    for peer in chain.from_iterable(repeat(others, rounds)):
        try:
            answer = yield Pull(of=Peer(WORKER, peer), key=ROLL, within_seconds=ROLL_SECONDS)
            roll = decode_status(answer.about)
            state = () if roll.agreed else (yield from receive_state(peer, like, STATE_SECONDS))
        except (PeerLost, MalformedError, ConnectError) as why:
            failure = why
            if is_over():
                break
        else:
            return ReceivedState(peer, roll, state)
    raise PeerLost(
        f"workers {', '.join(map(str, others))} give nothing to go on from ({failure}), and what this worker had is "
        "lost. Where none of them trains any more, begin again."
    )


def with_checksum(shown: Pulled) -> Pulled:
    """The same, with a hash of what it gives, for whoever asked for STATE."""
    return replace(shown, about=_hash(shown.payload)) if shown.payload else shown


def receive_state(peer: int, like: Payload, within_seconds: float | None = None) -> PeerScript:
    """Ask worker `peer` for its parameters, (n,), and what it keeps beside them; returns what is to be begun from.

    like: of which shapes and dtypes that must be. To be run before the first word of one's own: who joins from other
    numbers than were shown would pull everybody towards them. Raises MalformedError, and PeerLost where nobody answers
    within_seconds.
    """
    pulled = yield Pull(of=Peer(WORKER, peer), key=STATE, within_seconds=within_seconds)
    return checked(pulled, peer, like)


def checked(pulled: Pulled, peer: int, like: Payload) -> Payload:
    """What was sealed. Raises MalformedError for anything else."""
    if _kinds(pulled.payload) != _kinds(like):
        raise MalformedError(
            f"worker {peer} shows {_kinds(pulled.payload)}, and this worker has {_kinds(like)}. Run the same script on "
            "every worker."
        )
    if _hash(pulled.payload) != pulled.about:
        raise MalformedError(
            f"worker {peer} showed parameters of hash {pulled.about[:40]!r}, and {_hash(pulled.payload)!r} came, so "
            "this worker does not begin from them. Ask again, or ask another."
        )
    if not all_finite(pulled.payload[0]):
        raise MalformedError(f"worker {peer}'s parameters are not finite, and nobody can begin from them. Ask another.")
    return pulled.payload


def _kinds(payload: Payload) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(each.shape), each.dtype) for each in payload]


def _hash(payload: Payload) -> str:
    """Of bytes, dtypes and sizes; equal hashes mean equal bits."""
    found = hashlib.blake2b(repr(_kinds(payload)).encode(), digest_size=HASH_BYTES)
    for each in payload:
        found.update(_bytes(each))
    return found.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
