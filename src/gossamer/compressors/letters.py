"""What one worker says alone, to be read elsewhere: any compressor between two peers.

A compressor is written for a group. A group of one hears what it said itself, so what it said is all that another needs
to come to the same mean: the reader runs the same script over numbers of its own, which do not count, and hears the
writer's words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer import seeds
from gossamer.compressors.base import Compressor
from gossamer.errors import MalformedError
from gossamer.layout import Layout, Packed
from gossamer.words import Aggregation, At, Exchange, Gather, Mean, Mix, Payload, Staged, State, Together, Word


class Letter(NamedTuple):
    """payload: what travels, perhaps in memory of x; own: what it stands for; next_state: for once it was sent."""

    payload: Payload
    own: Callable[[], Tensor]
    next_state: State


def begin(compressor: Compressor, like: Packed, at: At) -> State:
    """What a writer remembers at first."""
    return compressor.init(like, _by_itself(at))


def write(compressor: Compressor, x: Packed, state: State, at: At) -> Letter:
    """Encode x. x.flat: (n,), only read; at: of the writer. own() is (n,) and must be asked before x is written.

    Raises NotFinite.
    """
    said: list[Tensor] = []

    def hear_oneself(word: Word) -> Any:
        spoken = _spoken(word)
        said.extend(spoken)
        return _heard(word, iter(spoken))

    staged = _alone(compressor.aggregate(x, state, _by_itself(at)), hear_oneself)
    return Letter(tuple(said), staged.mine, staged.next_state)


def read(compressor: Compressor, payload: Payload, layout: Layout, at: At, out: Tensor) -> None:
    """Overwrite out: (n,) with what a letter stands for; at: of its writer, `state` of either does not matter.

    Raises MalformedError for what no writer has written; what `out` holds is then undefined.
    """
    rest = iter(payload)
    device = torch.device("meta") if compressor.reads_blind else out.device
    x = Packed.zeros(layout, dtype=out.dtype, device=device)
    script = compressor.aggregate(x, begin(compressor, x, at), _by_itself(at), out)
    staged = _alone(script, lambda word: _heard(word, rest))
    if next(rest, None) is not None:
        raise MalformedError(f"a letter of {len(payload)} tensors came, and {compressor!r} writes fewer")
    if not staged.finite:
        raise MalformedError("a letter came whose numbers are not finite")


def _by_itself(at: At) -> At:
    """Where a worker stands that is a group of its own; its draws are still no other worker's."""
    return replace(at, world=1, rank=0, seed=seeds.address("letter", at.seed, at.rank))


def _alone(script: Aggregation, answered: Callable[[Word], Any]) -> Staged:
    word = next(script)
    while True:
        try:
            word = script.send(answered(word))
        except StopIteration as stop:
            staged: Staged = stop.value
            return staged


def _spoken(word: Word) -> Payload:
    """The tensors in a word, in order."""
    match word:
        case Mean(tensor):
            return (tensor,)
        case Gather(payload) | Mix(payload):
            return payload
        case Exchange(parts):
            return tuple(tensor for part in parts for tensor in part)
        case Together(words):
            return tuple(tensor for each in words for tensor in _spoken(each))


def _heard(word: Word, said: Iterator[Tensor]) -> Any:
    """The answer to a word in a group of one that has `said` these tensors."""
    match word:
        case Mean(tensor, out):
            (heard,) = _taken((tensor,), said)
            if heard.shape != tensor.shape or heard.dtype != tensor.dtype:
                raise MalformedError(
                    f"{tuple(tensor.shape)} numbers of {tensor.dtype} were due, and {tuple(heard.shape)} of "
                    f"{heard.dtype} came"
                )
            return heard.clone() if out is None else _into(heard, out)
        case Gather(payload) | Mix(payload):
            return [_taken(payload, said)]
        case Exchange(parts):
            return [_taken(part, said) for part in parts]
        case Together(words):
            return [_heard(each, said) for each in words]


def _into(heard: Tensor, out: Tensor) -> Tensor:
    return heard if out.is_meta and not heard.is_meta else out.copy_(heard)


def _taken(like: Payload, said: Iterator[Tensor]) -> Payload:
    taken = tuple(tensor for _, tensor in zip(like, said, strict=False))
    if len(taken) < len(like):
        raise MalformedError(f"a letter ended after {len(taken)} of {len(like)} tensors")
    return taken
