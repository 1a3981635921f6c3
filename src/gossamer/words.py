"""The words an algorithm may say, and where it stands when it says them.

An algorithm is a generator: it yields a word ("I need the mean of this tensor") and receives the answer. It never
touches a network. Everything that runs algorithms (a process group, a simulation, a price list) only answers words.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gossamer.layout import Packed

Payload = tuple[Tensor, ...]
State = dict[str, Packed]


@dataclass(frozen=True)
class Mean:
    """Ask for the elementwise mean of `tensor` over the group, in the tensor's shape and dtype.

    Half-precision tensors travel as they are, are summed in float32 and rounded once (NCCL sums them its own way). The
    answer is written to `out`
    where one is given; `out` may be `tensor` itself.
    """

    tensor: Tensor
    out: Tensor | None = None


@dataclass(frozen=True)
class Gather:
    """Ask for everyone's `payload`, by rank. Shapes and dtypes are the same on every rank."""

    payload: Payload


@dataclass(frozen=True)
class Exchange:
    """Send `parts[j]` to rank j; ask for what each rank addressed to me.

    What is addressed to rank j has the same shapes and dtypes whoever sends it.
    """

    parts: tuple[Payload, ...]


@dataclass(frozen=True)
class Mix:
    """Ask for my neighbours' payloads, in the order of `edges` = ((peer, weight), ...). Edges are mutual.

    The weights are for the asker: a transport reads only the peers.
    """

    payload: Payload
    edges: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Together:
    """Ask for several words at once, none of which waits for another; the answers come in the same order."""

    words: tuple[Mean | Gather | Exchange | Mix, ...]


Word = Mean | Gather | Exchange | Mix | Together


def payload_bytes(payload: Payload) -> int:
    return sum(tensor.nbytes for tensor in payload)


def bytes_sent(word: Word, world: int, rank: int = 0) -> float:
    """Payload bytes that one of `world` workers sends to have `word` answered; headers are not counted.

    A mean costs what a reduce-scatter and an all-gather cost, on average over the workers: 2 (n-1)/n of its bytes.
    """
    match word:
        case Mean(tensor):
            return 2 * (world - 1) * tensor.nbytes / world
        case Gather(payload):
            return float((world - 1) * payload_bytes(payload))
        case Exchange(parts):
            return float(sum(payload_bytes(part) for peer, part in enumerate(parts) if peer != rank))
        case Mix(payload, edges):
            return float(sum(peer != rank for peer, _ in edges) * payload_bytes(payload))
        case Together(words):
            return sum(bytes_sent(each, world, rank) for each in words)


@dataclass(frozen=True, kw_only=True)
class At:
    """Where an aggregation stands. Randomness is addressed by it, and no hyperparameter differs between ranks."""

    step: int = 0
    seed: int = 0
    rank: int = 0
    world: int = 1


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What an aggregation returns; nothing is committed until the whole step is.

    mean        what the group agreed on, the same bits on every rank
    own         this worker's part in it
    owed        what the group still owes itself because of rounding after the exchange; None means nothing
    next_state  the state to commit
    finite      False where the group agreed on a number that is not finite, for instance because one left a format's
                range; the same on every rank, and the step must then be skipped

    LAW: mean over workers of own = mean + owed' - owed.
    """

    mean: Tensor
    own: Tensor
    owed: Tensor | None = None
    next_state: State = field(default_factory=dict)
    finite: bool = True


Script = Generator[Word, Any, Any]
Aggregation = Generator[Word, Any, Staged]
