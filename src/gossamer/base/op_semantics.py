"""Reference semantics of the collective operations: the answers of all ranks, computed in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    Payload,
    payload_form,
)
from gossamer.errors import MismatchError


def answer_all(ops: Sequence[CollectiveOp]) -> list[Any]:
    """The answer of each rank when rank r asks for ops[r]. Ranks that ask for different operations are refused."""
    kinds = [type(op).__name__ for op in ops]
    if len(set(kinds)) > 1:
        raise MismatchError(
            f"the ranks asked for different operations at once: {', '.join(kinds)}, by rank. Scripts in lock step must "
            "ask for the same operations in the same order: state that differs between ranks must not decide it."
        )
    match ops[0]:
        case AllReduceMean():
            return _means(ops)  # type: ignore[arg-type]
        case AllGather():
            return _gathered(ops)  # type: ignore[arg-type]
        case AllToAll():
            return _exchanged(ops)  # type: ignore[arg-type]
        case NeighborAllGather():
            return _mixed(ops)  # type: ignore[arg-type]
        case InGroup():
            return _among(ops)  # type: ignore[arg-type]
        case Coalesced():
            received = [answer_all(same) for same in zip(*(op.ops for op in ops), strict=True)]  # type: ignore[union-attr]
            return [list(each) for each in zip(*received, strict=True)]


def _exchanged(ops: Sequence[AllToAll]) -> list[list[Payload]]:
    answers = [[op.parts[rank] for op in ops] for rank in range(len(ops))]
    for rank, (op, received) in enumerate(zip(ops, answers, strict=True)):
        found = tuple(map(payload_form, received))
        if op.forms is not None and op.forms != found:
            raise MismatchError(
                f"rank {rank} expected the parts {op.forms} of an all-to-all, by rank, and the ranks sent {found}. "
                "Ranks disagree on the codec of a worker: pass the same recipe on every rank."
            )
    return answers


def _gathered(ops: Sequence[AllGather]) -> list[list[Payload]]:
    forms = tuple([tuple([(tuple(tensor.shape), tensor.dtype) for tensor in op.payload]) for op in ops])
    if any((op.forms or forms[:1] * len(forms)) != forms for op in ops):
        raise MismatchError(
            "the ranks gathered payloads of different shapes or dtypes at once: "
            f"{'; '.join(f'rank {rank}: {form}' for rank, form in enumerate(forms))}. One rank made another call, or a "
            "step, than the others. Make the same calls in the same order on every rank."
        )
    return [[op.payload for op in ops] for _ in ops]


def _means(ops: Sequence[AllReduceMean]) -> list[Tensor]:
    mean = rank_order_mean([op.tensor for op in ops])
    return [mean.clone() if op.out is None else op.out.copy_(mean.view(op.out.shape)) for op in ops]


def _mixed(ops: Sequence[NeighborAllGather]) -> list[list[Payload]]:
    received = {(peer, rank) for rank, op in enumerate(ops) for peer in op.senders if peer != rank}
    sent_edges = {(rank, peer) for rank, op in enumerate(ops) for peer in op.receivers if peer != rank}
    if received != sent_edges:
        edges = ", ".join(f"{sender} to {receiver}" for sender, receiver in sorted(received ^ sent_edges))
        raise MismatchError(
            f"only one end of some edges means to use them ({edges}), and a rank that waits there would wait for ever. "
            "Both ends must compute the same edges: from (rank, world, round, seed), and from nothing else."
        )
    return [[ops[peer].payload for peer in op.senders] for op in ops]


def _among(ops: Sequence[InGroup]) -> list[Any]:
    """Each group answers its own operation."""
    received: list[Any] = [None] * len(ops)
    for rank, op in enumerate(ops):
        ranks = op.ranks
        fits = rank in ranks and list(ranks) == sorted(set(ranks)) and ranks[0] >= 0 and ranks[-1] < len(ops)
        if not fits or any(ops[peer].ranks != ranks for peer in ranks):
            groups = "; ".join(f"rank {each} among {other.ranks}" for each, other in enumerate(ops))
            raise MismatchError(
                f"ranks named groups that are not each other's ({groups}), and would wait there for ever. A group is "
                "ascending, holds each rank that names it, and is named alike by all of them: compute it from (rank, "
                "world), and from nothing else."
            )
        if rank == ranks[0]:
            for peer, answer in zip(ranks, answer_all([ops[each].op for each in ranks]), strict=True):
                received[peer] = answer
    return received


def rank_order_mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean, summed by rank order and divided once; half precision is summed in float32 and rounded once, integers
    in float64 and truncated."""
    first = tensors[0]
    whole = not (first.is_floating_point() or first.is_complex())
    total = first.to(torch.float64 if whole else torch.promote_types(first.dtype, torch.float32), copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return total.div_(len(tensors)).to(first.dtype)
