"""Threads that share a call's work: the same bits and the same errors for any number of them."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support.kernel_codecs import CODECS, KEY, MALFORMED, bits, compiled, numbers
from torch import Tensor

from gossamer.base.kernels import blocks, quantize, select
from gossamer.base.kernels.library import KernelsError
from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.threads import MOST, share_among, thread_limit
from gossamer.errors import MalformedError, NotFinite

PART = 2**16  # kLeastPart in kernels-src/parts.hpp: smaller calls are not shared
LAYOUTS = {
    "one tensor": (2 * PART,),
    "ends within a byte": (2 * PART - 1, 1, PART + 3),
    "at the boundary": (PART, PART, PART + 5, PART - 5),
    "small and large": (1, 37, 0, 4096, 300_003, 0, 70_001, 12),
}
THREADS = (2, 3, 4)
every_layout = pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS.keys())
pytestmark = compiled

Encoded = Sequence[Tensor]
Way = tuple[Callable[..., Any], Callable[..., Any]]  # encode(x, sizes, residual), decode(payloads, sizes, out, divisor)


def coded(codec: Any) -> Way:
    return (
        lambda x, sizes, residual: codec.encode(x, sizes, residual, plain=False),
        lambda payloads, sizes, out, divisor: codec.decode(payloads, sizes, out, divisor, plain=False),
    )


def largest(x: Tensor, sizes: Sequence[int], residual: Residual) -> Encoded:
    return select.largest(x, sizes, [size // 50 for size in sizes], residual)


def with_momentum(x: Tensor, sizes: Sequence[int], residual: Residual) -> Encoded:
    momentum = Residual(residual.before.flip(0).contiguous(), torch.full_like(x, math.nan))
    counts = [size // 100 for size in sizes]
    return (*select.largest_with_momentum(x, sizes, counts, 0.9, momentum, residual), momentum.after)


def nothing(payloads: Sequence[Encoded], sizes: Sequence[int], out: Tensor, divisor: int) -> None:
    out.zero_()


def halves(dtype: torch.dtype) -> Way:
    return (
        lambda x, sizes, residual: (residual.after.zero_(), quantize.half_encode(x, dtype))[1:],
        lambda payloads, sizes, out, divisor: quantize.half_decode([each for (each,) in payloads], out, divisor),
    )


WAYS: dict[str, Way] = {
    **{name: coded(codec) for name, codec in CODECS.items()},
    "float4": (
        lambda x, sizes, residual: quantize.float4_encode(x, sizes, 34, residual),
        lambda payloads, sizes, out, divisor: quantize.float4_decode(payloads, sizes, 34, out, divisor),
    ),
    "sign and magnitude": (
        lambda x, sizes, residual: quantize.sign_magnitude_encode(x, sizes, 256, residual),
        lambda payloads, sizes, out, divisor: quantize.sign_magnitude_decode(payloads, sizes, 256, out, divisor),
    ),
    "squares": (lambda x, sizes, residual: (residual.after.zero_(), quantize.squares(x, sizes, 512))[1:], nothing),
    "largest": (largest, nothing),
    "largest with momentum": (with_momentum, nothing),
    "bfloat16": halves(torch.bfloat16),
    "float16": halves(torch.float16),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


@pytest.fixture(autouse=True)
def one_thread_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And memory that never holds what an earlier call has written there."""

    def spoilt(numel: int, dtype: torch.dtype) -> Tensor:
        return torch.full((numel * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype)

    for module in (blocks, quantize, select):
        monkeypatch.setattr(module, "empty", spoilt)
    yield
    share_among(1)


def everything(way: Way, x: Tensor, sizes: Sequence[int], threads: int) -> list[Tensor]:
    """Payload, residual and the mean of three payloads."""
    encode, decode = way
    share_among(threads)
    residual = Residual(numbers("plain", len(x), 1), torch.full_like(x, math.nan))
    payload = encode(x, sizes, residual)
    other = encode(-x, sizes, Residual(residual.before, torch.empty_like(x)))
    mean = torch.full_like(x, math.nan)
    decode([payload, other, payload], sizes, mean, 3)
    return [*payload, residual.after, mean]


def equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True))


@every_way
@every_layout
def test_any_number_of_threads_makes_the_same_bits(way: Way, sizes: Sequence[int]) -> None:
    x = numbers("plain", sum(sizes))
    alone = everything(way, x, sizes, 1)
    assert not any(tensor.isnan().any() for tensor in alone if tensor.is_floating_point())
    for threads in THREADS:
        assert equal(everything(way, x, sizes, threads), alone), threads


@every_layout
def test_magnitudes_are_those_of_whole_tensors(sizes: Sequence[int]) -> None:
    x = numbers("plain", sum(sizes))
    alone = quantize.magnitudes(x, sizes)
    assert torch.equal(alone, torch.stack([torch.cat([part.abs(), x.new_zeros(1)]).amax() for part in x.split(sizes)]))
    for threads in THREADS:
        share_among(threads)
        assert torch.equal(quantize.magnitudes(x, sizes), alone)


@pytest.mark.parametrize("threads", THREADS)
@every_way
def test_a_residual_may_be_written_where_it_was_read(way: Way, threads: int) -> None:
    encode, _ = way
    if way is WAYS["largest with momentum"] or "half" in getattr(encode, "__qualname__", ""):
        return  # no buffer is another one; none is read
    sizes = LAYOUTS["small and large"]
    x, before = numbers("plain", sum(sizes)), numbers("plain", sum(sizes), 1)
    apart = Residual(before, torch.empty_like(before))
    payload = encode(x, sizes, apart)
    share_among(threads)
    within = before.clone()
    assert equal(encode(x, sizes, Residual(within, within)), payload)
    assert equal([within], [apart.after])


@pytest.mark.parametrize("place", [0, PART - 1, PART, 2 * PART + 7, 4 * PART - 1])
@pytest.mark.parametrize("name", ["int8", "onebit", "levels 7", "float4", "sign and magnitude", "largest", "bfloat16"])
def test_one_number_that_is_not_finite_is_told_of_wherever_it_is(name: str, place: int) -> None:
    sizes, (encode, _) = (4 * PART,), WAYS[name]
    x = numbers("plain", sum(sizes))
    x[place] = math.nan
    for threads in (1, *THREADS):
        share_among(threads)
        with pytest.raises(NotFinite):
            encode(x, sizes, Residual(torch.zeros_like(x), torch.empty_like(x)))


@pytest.mark.parametrize("name", MALFORMED)
def test_what_no_encoder_makes_is_told_of_before_anything_is_written(name: str) -> None:
    sizes, codec = LAYOUTS["ends within a byte"], CODECS[name]
    x = numbers("plain", sum(sizes))
    scales, codes = codec.encode(x, sizes, None, plain=False)
    codes[len(codes) // 2] = MALFORMED[name]
    for threads in (1, *THREADS):
        share_among(threads)
        out = torch.full_like(x, 7.0)
        with pytest.raises(MalformedError):
            codec.decode([(scales, codes)], sizes, out, 1, plain=False)
        assert bool((out == 7.0).all())


@pytest.mark.parametrize("name", ["int8", "onebit, large blocks", "float4", "levels 7", "ternary, five a byte"])
def test_the_check_catches_a_cut_within_a_block(name: str) -> None:
    """Twin: the same call in two halves, put together again, as if the cut were anywhere."""
    encode, _ = WAYS[name]
    n = 4 * PART
    x = numbers("plain", n)

    def halved(cut: int) -> list[Tensor]:
        pair = [
            encode(part, (len(part),), Residual(torch.zeros_like(part), torch.empty_like(part)))
            for part in (x[:cut].contiguous(), x[cut:].contiguous())
        ]
        return [torch.cat(both) for both in zip(*pair, strict=True)]

    whole = encode(x, (n,), Residual(torch.zeros_like(x), torch.empty_like(x)))
    found = halved(2 * PART - 3)
    assert [len(each) for each in found] != [len(each) for each in whole] or not equal(found, whole)


def test_several_callers_share_the_same_threads() -> None:
    sizes, way = LAYOUTS["small and large"], WAYS["onebit"]
    inputs = [numbers("plain", sum(sizes), seed) for seed in range(4)]
    truth = [everything(way, x, sizes, 1) for x in inputs]
    found: dict[int, list[bool]] = {}

    def call(number: int) -> None:
        found[number] = [
            equal(everything(way, inputs[number], sizes, 2 + number % 3), truth[number]) for _ in range(20)
        ]

    callers = [threading.Thread(target=call, args=(number,)) for number in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert found == {number: [True] * 20 for number in range(len(inputs))}


def running() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="a system that does not list threads")
def test_a_forked_child_has_threads_of_its_own() -> None:
    """Its parent's are not there: it would work alone for ever, and wait for them as it ends."""
    sizes, way = LAYOUTS["one tensor"], WAYS["onebit"]
    x = numbers("plain", sum(sizes))
    alone = everything(way, x, sizes, 1)
    assert equal(everything(way, x, sizes, 3), alone)
    child = os.fork()
    if not child:
        before = running()
        same = equal(everything(way, x, sizes, 3), alone)
        os._exit(0 if same and running() == before + 2 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert equal(everything(way, x, sizes, 3), alone)


def test_noise_belongs_to_places_and_not_to_parts() -> None:
    sizes = LAYOUTS["one tensor"]
    x = torch.full((sum(sizes),), 0.3)
    x[::256] = 1.0
    share_among(4)
    _, codes = quantize.int8_encode(x, sizes, 256, KEY)
    first, second = codes.view(2, -1)
    assert not torch.equal(first, second)  # as parts that begin at place 0 again would make them


# -- how many ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["abc", "0", "-2", "1.5", " 2", "٣"])
def test_a_count_that_is_none_is_told_of(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_THREADS", asked)
    with pytest.raises(
        KernelsError, match=f"GOSSAMER_THREADS .* got {asked!r}.* Write GOSSAMER_THREADS=2, or unset it"
    ):
        thread_limit(4)


def test_the_variable_counts_and_without_it_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_THREADS", raising=False)
    assert [thread_limit(count) for count in (1, 4, 64)] == [1, 4, MOST]
    monkeypatch.setenv("GOSSAMER_THREADS", "")
    assert thread_limit(3) == 3
    monkeypatch.setenv("GOSSAMER_THREADS", "12")
    assert thread_limit(3) == 12
