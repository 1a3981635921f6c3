"""Many scripts, one conversation: in each round, what they ask of the same kind travels together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import torch

from gossamer.core.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    Payload,
    Script,
)

CoalescedScript = Generator[CollectiveOp, Any, list[Any]]


def coalesce(scripts: Sequence[Script]) -> CoalescedScript:
    """Advance many scripts together; returns their results in order.

    Two hundred small tensors then cost as many messages as one, and different kinds of words do not wait for each
    other. A word that is alone of its kind in a round travels as it is, without a copy.
    """
    results: list[Any] = [None] * len(scripts)
    asking: dict[int, CollectiveOp] = {}

    def advance(place: int, answer: Any) -> None:
        try:
            asking[place] = scripts[place].send(answer)
        except StopIteration as stop:
            results[place] = stop.value

    for place in range(len(scripts)):
        advance(place, None)
    while asking:
        together: dict[tuple[object, ...], list[int]] = {}
        for place in sorted(asking):
            together.setdefault(_kind(asking[place]), []).append(place)
        ops, asking = asking, {}
        joined = [_join([ops[place] for place in places]) for places in together.values()]
        answers = (yield Coalesced(tuple(op for op, _ in joined))) if len(joined) > 1 else [(yield joined[0][0])]
        parts = {
            place: part
            for places, (_, split), answer in zip(together.values(), joined, answers, strict=True)
            for place, part in zip(places, split(answer), strict=True)
        }
        for place in sorted(parts):
            advance(place, parts[place])
    return results


def _kind(op: CollectiveOp) -> tuple[object, ...]:
    """Words of equal kind can be joined."""
    match op:
        case AllReduceMean(tensor):
            return AllReduceMean, tensor.dtype, tensor.device
        case NeighborAllGather(payload, edges, tells):
            return NeighborAllGather, edges, tells, _devices(payload)
        case AllGather(payload):
            return AllGather, _devices(payload)
        case AllToAll(parts):
            return AllToAll, _devices(parts[0])
        case InGroup(ranks, inner):
            return InGroup, ranks, *_kind(inner)
        case _:
            return (type(op),)


def _devices(payload: Payload) -> frozenset[torch.device]:
    return frozenset(tensor.device for tensor in payload)


def _join(ops: Sequence[Any]) -> tuple[Any, Callable[[Any], list[Any]]]:
    """One word that asks for all of them, and how its answer is split again."""
    if len(ops) == 1:
        return ops[0], lambda answer: [answer]
    if isinstance(ops[0], InGroup):
        joint, split = _join([op.op for op in ops])
        return replace(ops[0], op=joint), split
    if isinstance(ops[0], AllReduceMean):
        return _join_means(ops)
    if isinstance(ops[0], AllToAll):
        counts = [len(op.parts[0]) for op in ops]
        parts = tuple(sum((op.parts[peer] for op in ops), ()) for peer in range(len(ops[0].parts)))
        return AllToAll(parts), lambda heard: _split_payloads(heard, counts)
    counts = [len(op.payload) for op in ops]
    payload = sum((op.payload for op in ops), ())
    joint = replace(ops[0], payload=payload)
    return joint, lambda heard: _split_payloads(heard, counts)


def _join_means(ops: Sequence[AllReduceMean]) -> tuple[Any, Callable[[Any], list[Any]]]:
    sizes = [op.tensor.numel() for op in ops]
    flat = torch.cat([op.tensor.reshape(-1) for op in ops])

    def split(answer: torch.Tensor) -> list[Any]:
        parts = [part.view(op.tensor.shape) for op, part in zip(ops, answer.split(sizes), strict=True)]
        return [part if op.out is None else op.out.copy_(part) for op, part in zip(ops, parts, strict=True)]

    return AllReduceMean(flat, out=flat), split


def _split_payloads(heard: Sequence[tuple[torch.Tensor, ...]], counts: Sequence[int]) -> list[Any]:
    answers: list[Any] = []
    at = 0
    for count in counts:
        answers.append([payload[at : at + count] for payload in heard])
        at += count
    return answers
