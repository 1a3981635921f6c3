"""State transfer: a restarted worker starts from a live peer's state, verified by a hash."""

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
from gossamer.base.layout import bytes_of
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import WORKER, Peer, PeerScript, Pull, Pulled
from gossamer.errors import ConnectError, GossamerError, MalformedError, PeerLost

STATE, STATUS = "state", "roll"
HASH_BYTES = 16
STATUS_SECONDS = 3.0  # no tensors
STATE_SECONDS = 60.0  # a model's worth of tensors
SEARCH_SECONDS = 60.0


class PeerStatus(NamedTuple):
    """A worker's report about itself and its peers."""

    incarnation: int  # of the reporting worker
    steps: int  # of the reporting worker
    done: bool  # whether it has finished training
    stop: bool  # whether a stop of the run was requested
    agreed: bool  # whether it has the final mean
    here: tuple[int, ...]  # the workers that it can reach, including itself

    def encoded(self) -> str:
        return json.dumps(self)


def decode_status(text: str) -> PeerStatus:
    """Decode a report. Raises MalformedError for any text that `encoded` does not return."""
    try:
        incarnation, steps, done, stop, agreed, here = json.loads(text)
        return PeerStatus(int(incarnation), int(steps), bool(done), bool(stop), bool(agreed), tuple(map(int, here)))
    except (TypeError, ValueError):
        raise MalformedError(f"expected a worker's status, got {text[:80]!r}") from None


class ReceivedState(NamedTuple):
    """The state of a live peer, to start from."""

    peer: int
    status: PeerStatus
    state: Payload  # empty if all workers have finished


def rejoin(others: Sequence[int], like: Payload, is_over: Callable[[], bool] = lambda: False) -> PeerScript:
    """Take the place of a lost worker: find a live peer and receive its state. Returns ReceivedState.

    Args:
        others: ranks of the peers, tried in turn, repeatedly.
        like: the shapes and dtypes that the state must have.
        is_over: whether to give up at the next failure.

    Raises:
        PeerLost: no peer sent a state.

    Pulls have no stamp, so peers do not count this worker until its first exchange.
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
        f"no state could be received from workers {', '.join(map(str, others))} ({failure}), and this worker's state "
        "is lost. If none of them trains any more, restart the run."
    )


def with_checksum(shown: Pulled) -> Pulled:
    """Return the payload with its hash, in reply to a pull of STATE."""
    return replace(shown, about=hash_of(shown.payload)) if shown.payload else shown


def receive_state(peer: int, like: Payload, within_seconds: float | None = None) -> PeerScript:
    """Pull the parameters, (n,), and further state of worker `peer`; return the payload.

    Run it before the first exchange: a worker that joins with other values than those shown would pull all others
    towards them.

    Args:
        peer: rank of the other worker.
        like: the shapes and dtypes that the payload must have.
        within_seconds: timeout of the reply.

    Raises:
        MalformedError: the payload has another shape, dtype or hash, or is not finite.
        PeerLost: no reply arrived in time.
    """
    pulled = yield Pull(of=Peer(WORKER, peer), key=STATE, within_seconds=within_seconds)
    return checked(pulled, peer, like)


def checked(pulled: Pulled, peer: int, like: Payload) -> Payload:
    """Return the payload if it matches the hash of `with_checksum`. Raises MalformedError otherwise."""
    if _kinds(pulled.payload) != _kinds(like):
        raise MalformedError(
            f"worker {peer} sent {_kinds(pulled.payload)}, and this worker has {_kinds(like)}. Run the same script on "
            "every worker."
        )
    if hash_of(pulled.payload) != pulled.about:
        raise MalformedError(
            f"worker {peer} sent parameters of hash {pulled.about[:40]!r}, and the received ones have hash "
            f"{hash_of(pulled.payload)!r}, so they are not used. Retry, or use another worker."
        )
    if not all_finite(pulled.payload[0]):
        raise MalformedError(f"the parameters of worker {peer} are not finite. Use another worker.")
    return pulled.payload


def _kinds(payload: Payload) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(each.shape), each.dtype) for each in payload]


def hash_of(payload: Payload) -> str:
    """Return a hash of bytes, dtypes and sizes; equal hashes mean equal bits."""
    found = hashlib.blake2b(repr(_kinds(payload)).encode(), digest_size=HASH_BYTES)
    for each in payload:
        found.update(_bytes(each))
    return found.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return bytes_of(tensor.detach().cpu().contiguous()).numpy().data
