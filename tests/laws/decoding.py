"""The law of decoders: whatever a peer sends is decoded to finite numbers, or refused by one typed error."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any

import torch
from laws.laws import LAYOUT, Group
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, point_to_point
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext, AggregationResult, State
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import AllGather, AllToAll, CollectiveOp, InGroup, Payload
from gossamer.base.runner import simulate
from gossamer.errors import MalformedError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.bool)
BAD = (math.nan, math.inf, -math.inf, 3e38, -3e38)


def corrupted(payload: Payload, seed: int) -> Payload:
    """The payload with one thing about it changed, drawn from `seed`."""
    draws = rng.generator("corrupted", seed)

    def drawn(below: int) -> int:
        return int(torch.randint(0, max(below, 1), (1,), generator=draws))

    place = drawn(len(payload))
    tensor = payload[place]
    changes: list[Callable[[], tuple[Tensor, ...]]] = [
        lambda: (),
        lambda: (tensor, tensor),
        lambda: (tensor.to(DTYPES[drawn(len(DTYPES))]),),
        lambda: (tensor.reshape(-1)[drawn(3) :],),
        lambda: (torch.cat([tensor.reshape(-1)] * 2),),
        lambda: (tensor[None],),
        lambda: (tensor.new_zeros(()),),
        lambda: (tensor.reshape(-1).repeat(2)[::2].view(tensor.shape),),
        lambda: (torch.randint(0, 256, (tensor.nbytes,), generator=draws, dtype=torch.uint8).view(tensor.dtype)
                 .view(tensor.shape),),
        lambda: (_with(tensor, drawn(tensor.numel()), BAD[drawn(len(BAD))]),),
        lambda: (torch.full_like(tensor, _number(tensor, BAD[drawn(len(BAD))])),),
    ]  # fmt: skip
    # Numbers that are none are what is hardest to see: as often as everything else together.
    change = changes[drawn(len(changes)) if drawn(2) else -2]
    return (*payload[:place], *change(), *payload[place + 1 :])


def _with(tensor: Tensor, place: int, number: float) -> Tensor:
    found = tensor.clone()
    if found.numel():
        found.view(-1)[place] = _number(tensor, number)
    return found


def _number(like: Tensor, number: float) -> float:
    """The number, where such a tensor can hold it."""
    if not like.is_floating_point():
        return 127
    return (
        max(-torch.finfo(like.dtype).max, min(torch.finfo(like.dtype).max, number)) if math.isfinite(number) else number
    )


def tampered(
    script: Generator[CollectiveOp, Any, AggregationResult], number: int, seed: int
) -> Generator[CollectiveOp, Any, AggregationResult]:
    """The script, which hears something else from its last peer in its number-th gather or exchange."""
    answer: Any = None
    heard = 0
    while True:
        try:
            op = script.send(answer)
        except StopIteration as stop:
            result: AggregationResult = stop.value
            return result
        answer = yield op
        if isinstance(op.op if isinstance(op, InGroup) else op, (AllGather, AllToAll)):
            if heard == number:
                answer = [*answer[:-1], corrupted(answer[-1], seed)]
            heard += 1


def check_scripts(compressor: Compressor, *, world: int, seed: int, step: int = 0) -> None:
    """In a group, of which all hear the same from one: all refuse it, call the step not finite, or have a mean."""
    group = Group(compressor, world, dtype=torch.float32)
    group.step = step
    inputs = [FlatTensors(x, LAYOUT) for x in group.gradients(seed)]
    scripts = [
        tampered(compressor.aggregate(x, group.states[rank], group.at(rank)), seed % 3, seed)
        for rank, x in enumerate(inputs)
    ]
    try:
        found = simulate(scripts)
    except MalformedError:
        return
    for staged in found:
        assert staged.mean.shape == (LAYOUT.numel,)
        assert not staged.finite or torch.isfinite(staged.mean).all(), "a mean that is not finite was called finite"


def check_messages(compressor: Compressor, *, seed: int, dtype: torch.dtype = torch.float32) -> bool:
    """Between two peers: what is no message is refused, and what is one becomes finite numbers. Whether it was read."""
    at = AggregationContext(step=3, seed=7, rank=2, world=5)
    x = FlatTensors(torch.randn(LAYOUT.numel, generator=rng.generator("message", seed)).to(dtype), LAYOUT)
    begun = point_to_point.begin(compressor, x, at)
    payload = point_to_point.encode(compressor, x, begun, at).payload
    out = torch.full((LAYOUT.numel,), math.nan, dtype=dtype)
    try:
        point_to_point.decode(compressor, corrupted(payload, seed), LAYOUT, at, out)
    except MalformedError:
        return False
    assert torch.isfinite(out).all(), "a message became numbers that are not finite"
    return True


def check_decoders(compressor: Compressor, *, seed: int) -> bool:
    """A decoder by itself: finite numbers, or an error before anything is written. Whether it was read."""
    at = AggregationContext()
    read = False
    for number, (decoder, layout) in enumerate(compressor.decoders(LAYOUT) or ()):
        x = FlatTensors(torch.randn(layout.numel, generator=rng.generator("decoder", seed, number)), layout)
        message = point_to_point.encode(decoder, x, State(), at).payload if isinstance(decoder, Compressor) else ()
        if not layout.numel or not message:
            continue
        out = torch.full((layout.numel,), math.nan)
        heard = [message, corrupted(message, seed + number), message]
        try:
            decoder.decode(heard, layout, out, 3)
        except MalformedError:
            assert out.isnan().all(), "something was written before the error"
            continue
        read = True
        assert torch.isfinite(out).all(), "a payload became numbers that are not finite"
    return read
