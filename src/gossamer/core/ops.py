"""The words an algorithm may say, and where it stands when it says them.

An algorithm is a generator: it yields a word ("I need the mean of this tensor") and receives the answer. It never
touches a network. Everything that runs algorithms (a process group, a simulation, a price list) only answers words.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Payload = tuple[Tensor, ...]


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
    """Ask for the payloads of those whom I hear, in the order of `edges` = ((peer, weight), ...); I may hear myself.

    tells: whom mine goes to; None: the same peers. i tells j exactly where j hears i. Shapes and dtypes are the same on
    every rank. The weights are for the asker: a transport reads only the peers.
    """

    payload: Payload
    edges: tuple[tuple[int, float], ...]
    tells: tuple[int, ...] | None = None

    @property
    def hears(self) -> tuple[int, ...]:
        return tuple(peer for peer, _ in self.edges)

    @property
    def told(self) -> tuple[int, ...]:
        """Whom the payload goes to."""
        return self.hears if self.tells is None else self.tells


@dataclass(frozen=True)
class Among:
    """Ask for `word`, said only by `ranks`: ascending, this one among them. Within it, ranks are places in `ranks`.

    Everyone says an Among at the same moment, in groups that do not overlap, and each group its own word.
    """

    ranks: tuple[int, ...]
    word: Mean | Gather | Exchange | Mix

    def group_of(self, rank: int, world: int) -> tuple[int, ...]:
        """Those among whom `rank` speaks meanwhile, if all groups are alike: blocks of neighbours, or every k-th rank.

        Alone, where there is no such group left for it.
        """
        if rank in self.ranks:
            return self.ranks
        step = self.ranks[1] - self.ranks[0] if len(self.ranks) > 1 else 1
        reach = step * len(self.ranks)
        first = rank // reach * reach + rank % step
        group = tuple(range(first, first + reach, step))
        return group if group[-1] < world and not set(group) & set(self.ranks) else (rank,)


@dataclass(frozen=True)
class Together:
    """Ask for several words at once, none of which waits for another; the answers come in the same order."""

    words: tuple[Mean | Gather | Exchange | Mix | Among, ...]


Word = Mean | Gather | Exchange | Mix | Among | Together


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
        case Mix(payload):
            return float(sum(peer != rank for peer in word.told) * payload_bytes(payload))
        case Among(ranks, inner):
            return bytes_sent(inner, len(ranks), ranks.index(rank))
        case Together(words):
            return sum(bytes_sent(each, world, rank) for each in words)


Script = Generator[Word, Any, Any]


def among(ranks: tuple[int, ...], script: Script) -> Script:
    """What a group of as many as `ranks` says, said among these of a larger one."""
    answer: Any = None
    while True:
        try:
            word = script.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield _among(ranks, word)


def _among(ranks: tuple[int, ...], word: Word) -> Word:
    """Groups within groups are groups, and an Among holds one word."""
    match word:
        case Together(words):
            return Together(tuple(_among(ranks, each) for each in words))  # type: ignore[misc]
        case Among(places, inner):
            return Among(tuple(ranks[place] for place in places), inner)
        case _:
            return Among(ranks, word)
