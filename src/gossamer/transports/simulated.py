"""Words answered inside one process: for all workers at once, or for one thread per worker. No sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import MismatchError, PeerLost
from gossamer.words import Among, Exchange, Gather, Mean, Mix, Payload, Together, Word


def answers(words: Sequence[Word]) -> list[Any]:
    """What each rank hears when rank r said words[r]. Ranks that say different things are refused."""
    kinds = [type(word).__name__ for word in words]
    if len(set(kinds)) > 1:
        raise MismatchError(
            f"the ranks said different words at once: {', '.join(kinds)}. Scripts in lock step must say the same "
            "words in the same order: nothing a rank alone knows may decide what it asks."
        )
    match words[0]:
        case Mean():
            return _means(words)  # type: ignore[arg-type]
        case Gather():
            return [[word.payload for word in words] for _ in words]  # type: ignore[union-attr]
        case Exchange():
            return [[word.parts[rank] for word in words] for rank in range(len(words))]  # type: ignore[union-attr]
        case Mix():
            return _mixed(words)  # type: ignore[arg-type]
        case Among():
            return _among(words)  # type: ignore[arg-type]
        case Together():
            heard = [answers(same) for same in zip(*(word.words for word in words), strict=True)]  # type: ignore[union-attr]
            return [list(each) for each in zip(*heard, strict=True)]


def _means(words: Sequence[Mean]) -> list[Tensor]:
    mean = mean_of([word.tensor for word in words])
    return [mean.clone() if word.out is None else word.out.copy_(mean.view(word.out.shape)) for word in words]


def _mixed(words: Sequence[Mix]) -> list[list[Payload]]:
    heard = {(peer, rank) for rank, word in enumerate(words) for peer in word.hears if peer != rank}
    told = {(rank, peer) for rank, word in enumerate(words) for peer in word.told if peer != rank}
    if heard != told:
        edges = ", ".join(f"{sender} to {receiver}" for sender, receiver in sorted(heard ^ told))
        raise MismatchError(
            f"only one end of some edges means to use them ({edges}), and whoever waits there would wait for ever. "
            "Both ends must compute the same edges: from (rank, world, round, seed), and from nothing else."
        )
    return [[words[peer].payload for peer in word.hears] for word in words]


def _among(words: Sequence[Among]) -> list[Any]:
    """Each group answers its own word."""
    heard: list[Any] = [None] * len(words)
    for rank, word in enumerate(words):
        ranks = word.ranks
        fits = rank in ranks and list(ranks) == sorted(set(ranks)) and ranks[0] >= 0 and ranks[-1] < len(words)
        if not fits or any(words[peer].ranks != ranks for peer in ranks):
            groups = "; ".join(f"rank {each} among {other.ranks}" for each, other in enumerate(words))
            raise MismatchError(
                f"ranks spoke in groups that are not each other's ({groups}), and whoever waits there would wait for "
                "ever. A group is ascending, holds whoever names it, and is named alike by all of it: compute it from "
                "(rank, world), and from nothing else."
            )
        if rank == ranks[0]:
            for peer, answer in zip(ranks, answers([words[each].word for each in ranks]), strict=True):
                heard[peer] = answer
    return heard


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    """The mean by rank order: one division after the sum; half precision is summed in float32 and rounded once."""
    first = tensors[0]
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return total.div_(len(tensors)).to(first.dtype)


def meta_answer(word: Word, world: int, rank: int) -> Any:
    """An answer of the right shapes: everyone is taken to say what this rank says."""
    match word:
        case Mean(tensor, out):
            return tensor if out is None else out
        case Gather(payload):
            return [payload] * world
        case Exchange(parts):
            return [parts[rank]] * world
        case Mix(payload, edges):
            return [payload] * len(edges)
        case Among(ranks, inner):
            return meta_answer(inner, len(ranks), ranks.index(rank))
        case Together(words):
            return [meta_answer(each, world, rank) for each in words]


class SimulatedGroup:
    """`world` transports that meet in this process, each to be used by a thread of its own.

    A worker that lets the others wait for more than `patience_seconds` has left.
    """

    def __init__(self, world: int, patience_seconds: float = 60.0) -> None:
        self.world, self._patience_seconds = world, patience_seconds
        self._said: list[Any] = [None] * world
        self._heard: list[Any] = [None] * world
        self._failure: BaseException | None = None
        self._answered = 0
        self._parts: dict[int, dict[int, SimulatedGroup]] = {}
        self._dividing = threading.Lock()
        self._barrier = threading.Barrier(world, action=self._answer)
        self.transports = [SimulatedTransport(self, rank) for rank in range(world)]

    def meet(self, rank: int, said: tuple[Callable[[list[Any]], list[Any]], Any]) -> Any:
        """Wait until every rank has said something; all of them combine it in the same way."""
        self._said[rank] = said
        answered = self._answered
        try:
            self._barrier.wait(self._patience_seconds)
        except threading.BrokenBarrierError:
            if self._answered > answered:  # somebody left right after this round, before this thread awoke
                return self._heard[rank]
            raise self._failure or PeerLost(f"a worker left while rank {rank} waited for it") from None
        return self._heard[rank]

    def _answer(self) -> None:
        try:
            combine = self._said[0][0]
            self._heard = combine([said for _, said in self._said])
            self._answered += 1
        except MismatchError as failure:
            self._failure = failure
            raise

    def part(self, rank: int, size: int) -> SimulatedTransport:
        with self._dividing:
            blocks = self._parts.setdefault(size, {})
            block = blocks.setdefault(rank // size, SimulatedGroup(size, self._patience_seconds))
        return block.transports[rank % size]

    def leave(self) -> None:
        self._barrier.abort()
        for blocks in self._parts.values():
            for block in blocks.values():
                block.leave()


class SimulatedTransport:
    """One worker's end of a SimulatedGroup."""

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.world = group.world
        self.links = ""

    def answer(self, word: Word) -> Any:
        return self._group.meet(self.rank, (answers, word))

    def begin(self, word: Word) -> Callable[[], Any]:
        answer = self.answer(word)
        return lambda: answer

    def move_on(self) -> bool:
        """Everything is answered at once."""
        return False

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        def hand_out(said: list[Any]) -> list[Any]:
            for theirs in said:
                for mine, original in zip(theirs, said[source], strict=True):
                    mine.copy_(original)
            return said

        with torch.no_grad():
            self._group.meet(self.rank, (hand_out, list(tensors)))

    def gather_text(self, text: str) -> list[str]:
        return list(self._group.meet(self.rank, (lambda said: [said] * len(said), text)))

    def part(self, size: int) -> SimulatedTransport:
        return self._group.part(self.rank, size)

    def close(self) -> None:
        self._group.leave()
