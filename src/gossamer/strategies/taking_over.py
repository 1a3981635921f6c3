"""Whoever joins begins from a live peer's parameters: what came is what that peer showed, or it contributes nothing."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from gossamer.errors import MalformedError
from gossamer.kernels import all_finite
from gossamer.peers import WORKER, Peer, PeerScript, Pull, Pulled

STATE = "state"
HASH_BYTES = 16


def sealed(shown: Pulled) -> Pulled:
    """The same, with a hash of what it gives, for whoever asked for STATE."""
    return replace(shown, about=_hash(shown.payload[0])) if shown.payload else shown


def take_over(peer: int, like: Tensor, within_seconds: float | None = None) -> PeerScript:
    """Ask worker `peer` for its parameters; returns them: (n,), of like's shape and dtype, to begin from.

    To be run before the first word of one's own: who joins from other numbers than were shown would pull everybody
    towards them. Raises MalformedError, and PeerLost where nobody answers within_seconds.
    """
    pulled = yield Pull(of=Peer(WORKER, peer), key=STATE, within_seconds=within_seconds)
    return opened(pulled, peer, like)


def opened(pulled: Pulled, peer: int, like: Tensor) -> Tensor:
    """What was sealed. Raises MalformedError for anything else."""
    if [(each.shape, each.dtype) for each in pulled.payload] != [(like.shape, like.dtype)]:
        raise MalformedError(
            f"worker {peer} shows {[(tuple(each.shape), each.dtype) for each in pulled.payload]}, and this worker has "
            f"{tuple(like.shape)} of {like.dtype}. Run the same script on every worker."
        )
    (shown,) = pulled.payload
    if _hash(shown) != pulled.about:
        raise MalformedError(
            f"worker {peer} showed parameters of hash {pulled.about[:40]!r}, and {_hash(shown)!r} came, so this worker "
            "does not begin from them. Ask again, or ask another."
        )
    if not all_finite(shown):
        raise MalformedError(f"worker {peer}'s parameters are not finite, and nobody can begin from them. Ask another.")
    return shown


def _hash(shown: Tensor) -> str:
    """Of its bytes, dtype and size; equal hashes mean equal bits."""
    numbers = shown.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(numbers.data, digest_size=HASH_BYTES, salt=str(shown.dtype)[-16:].encode()).hexdigest()
