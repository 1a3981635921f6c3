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
        words, asking = asking, {}
        joined = [_join([words[place] for place in places]) for places in together.values()]
        answers = (yield Coalesced(tuple(word for word, _ in joined))) if len(joined) > 1 else [(yield joined[0][0])]
        parts = {
            place: part
            for places, (_, split), answer in zip(together.values(), joined, answers, strict=True)
            for place, part in zip(places, split(answer), strict=True)
        }
        for place in sorted(parts):
            advance(place, parts[place])
    return results


def _kind(word: CollectiveOp) -> tuple[object, ...]:
    """Words of equal kind can be joined."""
    match word:
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
            return (type(word),)


def _devices(payload: Payload) -> frozenset[torch.device]:
    return frozenset(tensor.device for tensor in payload)


def _join(words: Sequence[Any]) -> tuple[Any, Callable[[Any], list[Any]]]:
    """One word that asks for all of them, and how its answer is split again."""
    if len(words) == 1:
        return words[0], lambda answer: [answer]
    if isinstance(words[0], InGroup):
        joint, split = _join([word.word for word in words])
        return replace(words[0], word=joint), split
    if isinstance(words[0], AllReduceMean):
        return _join_means(words)
    if isinstance(words[0], AllToAll):
        counts = [len(word.parts[0]) for word in words]
        parts = tuple(sum((word.parts[peer] for word in words), ()) for peer in range(len(words[0].parts)))
        return AllToAll(parts), lambda heard: _split_payloads(heard, counts)
    counts = [len(word.payload) for word in words]
    payload = sum((word.payload for word in words), ())
    joint = replace(words[0], payload=payload)
    return joint, lambda heard: _split_payloads(heard, counts)


def _join_means(words: Sequence[AllReduceMean]) -> tuple[Any, Callable[[Any], list[Any]]]:
    sizes = [word.tensor.numel() for word in words]
    flat = torch.cat([word.tensor.reshape(-1) for word in words])

    def split(answer: torch.Tensor) -> list[Any]:
        parts = [part.view(word.tensor.shape) for word, part in zip(words, answer.split(sizes), strict=True)]
        return [part if word.out is None else word.out.copy_(part) for word, part in zip(words, parts, strict=True)]

    return AllReduceMean(flat, out=flat), split


def _split_payloads(heard: Sequence[tuple[torch.Tensor, ...]], counts: Sequence[int]) -> list[Any]:
    answers: list[Any] = []
    at = 0
    for count in counts:
        answers.append([payload[at : at + count] for payload in heard])
        at += count
    return answers
