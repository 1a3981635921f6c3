"""Reference semantics of the collective operations: what each rank hears, computed in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.core.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    Payload,
)
from gossamer.errors import MismatchError


def answer_all(words: Sequence[CollectiveOp]) -> list[Any]:
    """What each rank hears when rank r said words[r]. Ranks that say different things are refused."""
    kinds = [type(word).__name__ for word in words]
    if len(set(kinds)) > 1:
        raise MismatchError(
            f"the ranks said different words at once: {', '.join(kinds)}. Scripts in lock step must say the same "
            "words in the same order: nothing a rank alone knows may decide what it asks."
        )
    match words[0]:
        case AllReduceMean():
            return _means(words)  # type: ignore[arg-type]
        case AllGather():
            return [[word.payload for word in words] for _ in words]  # type: ignore[union-attr]
        case AllToAll():
            return [[word.parts[rank] for word in words] for rank in range(len(words))]  # type: ignore[union-attr]
        case NeighborAllGather():
            return _mixed(words)  # type: ignore[arg-type]
        case InGroup():
            return _among(words)  # type: ignore[arg-type]
        case Coalesced():
            heard = [answer_all(same) for same in zip(*(word.words for word in words), strict=True)]  # type: ignore[union-attr]
            return [list(each) for each in zip(*heard, strict=True)]


def _means(words: Sequence[AllReduceMean]) -> list[Tensor]:
    mean = rank_order_mean([word.tensor for word in words])
    return [mean.clone() if word.out is None else word.out.copy_(mean.view(word.out.shape)) for word in words]


def _mixed(words: Sequence[NeighborAllGather]) -> list[list[Payload]]:
    heard = {(peer, rank) for rank, word in enumerate(words) for peer in word.hears if peer != rank}
    told = {(rank, peer) for rank, word in enumerate(words) for peer in word.told if peer != rank}
    if heard != told:
        edges = ", ".join(f"{sender} to {receiver}" for sender, receiver in sorted(heard ^ told))
        raise MismatchError(
            f"only one end of some edges means to use them ({edges}), and whoever waits there would wait for ever. "
            "Both ends must compute the same edges: from (rank, world, round, seed), and from nothing else."
        )
    return [[words[peer].payload for peer in word.hears] for word in words]


def _among(words: Sequence[InGroup]) -> list[Any]:
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
            for peer, answer in zip(ranks, answer_all([words[each].word for each in ranks]), strict=True):
                heard[peer] = answer
    return heard


def rank_order_mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean by rank order: one division after the sum; half precision is summed in float32 and rounded once."""
    first = tensors[0]
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return total.div_(len(tensors)).to(first.dtype)


def meta_answer(word: CollectiveOp, world: int, rank: int) -> Any:
    """An answer of the right shapes: everyone is taken to say what this rank says."""
    match word:
        case AllReduceMean(tensor, out):
            return tensor if out is None else out
        case AllGather(payload):
            return [payload] * world
        case AllToAll(parts):
            return [parts[rank]] * world
        case NeighborAllGather(payload, edges):
            return [payload] * len(edges)
        case InGroup(ranks, inner):
            return meta_answer(inner, len(ranks), ranks.index(rank))
        case Coalesced(words):
            return [meta_answer(each, world, rank) for each in words]
