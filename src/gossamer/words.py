"""The words an algorithm may say, and where it stands when it says them.

An algorithm is a generator: it yields a word ("I need the mean of this tensor") and receives the answer. It never
touches a network. Everything that runs algorithms (a process group, a simulation, a price list) only answers words.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gossamer.layout import Packed

Payload = tuple[Tensor, ...]


class State(dict[str, Packed]):
    """What a compressor remembers between steps, and room to write what it will remember after the next.

    Nothing is overwritten before a step is committed. So two buffers of a kind take turns: `room` gives the one that
    was remembered before, and nobody needs its contents.
    """

    def __init__(self, items: Mapping[str, Packed] | None = None) -> None:
        super().__init__(items or {})
        self._room: dict[str, Packed] = {}
        self._prefix = ""

    def room(self, key: str) -> Packed:
        """Memory like self[key] with arbitrary contents, the same at every call until a step is committed."""
        now, place = self[key], self._prefix + key
        if place not in self._room or self._room[place].layout != now.layout:
            self._room[place] = Packed(torch.empty_like(now.flat), now.layout)
        return self._room[place]

    def part(self, prefix: str, without: str = "") -> State:
        """The entries that begin with `prefix`, under the rest of their names, except `without`."""
        found = State(
            {key.removeprefix(prefix): self[key] for key in self if key.startswith(prefix) and key != without}
        )
        found._room, found._prefix = self._room, self._prefix + prefix
        return found

    def after(self, before: State) -> State:
        """This state, committed after `before`, whose memory becomes room."""
        self._room = {
            key: packed
            for key, packed in before.items()
            if key in self and self[key].flat.data_ptr() != packed.flat.data_ptr()
        }
        return self


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


@dataclass(frozen=True, kw_only=True)
class At:
    """Where an aggregation stands. Randomness is addressed by it, and no hyperparameter differs between ranks.

    momentum, nesterov: the optimizer's at this moment (Adam's first beta), for compressors that apply it in its place.
    A rank that has run out of data may give old ones, so nothing that all ranks remember alike may follow from them.
    """

    step: int = 0
    seed: int = 0
    rank: int = 0
    world: int = 1
    momentum: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What an aggregation returns; nothing is committed until the whole step is.

    mean        what the group agreed on, the same bits on every rank
    mine        computes `own`, this worker's part in it: as large as the input, and not everyone asks for it
    owes        computes `owed`, this worker's share of what the group still owes itself because of rounding after the
                exchange, in units of the mean: the shares of all workers add up; None means nothing
    next_state  the state to commit
    finite      False where the group agreed on a number that is not finite, for instance because one left a format's
                range; the same on every rank, and the step must then be skipped

    LAW: mean over workers of own = mean + sum over workers of (owed' - owed).
    """

    mean: Tensor
    mine: Callable[[], Tensor]
    owes: Callable[[], Tensor] | None = None
    next_state: State = field(default_factory=State)
    finite: bool = True

    @property
    def own(self) -> Tensor:
        """This worker's part in the mean. Ask before the input, or the state it came from, is written again."""
        return self.mine()

    @property
    def owed(self) -> Tensor | None:
        """This worker's share of what is owed; None means nothing. To be asked as early as `own`."""
        return None if self.owes is None else self.owes()


Script = Generator[Word, Any, Any]
Aggregation = Generator[Word, Any, Staged]


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
