"""Workloads: compressors with both kernel implementations, and copying, adding and matrix products."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gossamer.algorithms.compressors import Compressor
from gossamer.base.compiled import LIBRARY
from gossamer.base.kernels import encode_places, sparse_decode
from gossamer.base.kernels.library import wanted_kernels
from gossamer.base.layout import Layout
from gossamer.plan.bench.interleave import Timer, seconds_of
from gossamer.plan.bench.replay import ReplayedExchange, gradient, prepare

VARIABLE = "GOSSAMER_KERNELS"


@contextmanager
def using(name: str) -> Iterator[None]:
    """Context manager that sets GOSSAMER_KERNELS to `name`."""
    before = os.environ.get(VARIABLE)
    _ask_for(name)
    try:
        yield
    finally:
        _ask_for(before)


def available() -> list[str]:
    return ["native", "reference"] if LIBRARY.exists() else ["reference"]


def _ask_for(name: str | None) -> None:
    if name is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = name
    wanted_kernels.cache_clear()


# -- rows --------------------------------------------------------------------------------------------------------------

COPY, ADD, PRODUCTS, ONTO = "copy_", "add", "matrix products", "sparse_decode onto"
ENCODE, DECODE, WHOLE = "encode", "decode", "whole"
TENSORS, COLUMNS = 8, 1024  # of a large bucket
SMALLER = 16  # divisor of the elements, for plain torch and for many payloads
FEW, MANY = (1, 4), 64  # payloads
SMALL_TENSORS, SMALL_NUMEL = 200, 1000
SMALL_SECONDS = 0.01  # of repetitions; the fastest counts, since caches are cold at first
ONE_IN = 100  # density of a sparse payload


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One row of the table."""

    subject: str  # a compressor or yardstick
    kernels: str  # "native" or "reference"
    layout: Layout
    payloads: int  # number of decoded payloads
    entries: int  # of a sparse payload
    parts: tuple[tuple[str, int], ...]  # (part, minimum bytes to move), in the timer's order
    timer: Timer


def bucket(elements: int) -> Layout:
    """Matrices with about this many elements in total."""
    columns = min(COLUMNS, max(1, elements // TENSORS // 16))
    shape = (max(1, elements // TENSORS // columns), columns)
    return Layout.of({f"weight.{number}": shape for number in range(TENSORS)})


def many_tensors() -> Layout:
    return Layout.of({f"bias.{number}": (SMALL_NUMEL,) for number in range(SMALL_TENSORS)})


def one_tensor() -> Layout:
    return Layout.of({"weight": (SMALL_TENSORS * SMALL_NUMEL,)})


def rows_of(compressor: Compressor, layout: Layout) -> list[Workload]:
    """Compiled loops on `layout`; plain torch, and many payloads, on a smaller one; small tensors on both."""
    smaller = prepare(compressor, bucket(layout.numel // SMALLER), (*FEW, MANY))
    small = [*prepare(compressor, many_tensors(), (1,)), *prepare(compressor, one_tensor(), (1,))]
    rows = _rows(smaller, small, "reference")
    if "native" in available():
        rows += _rows([*prepare(compressor, layout, FEW), *smaller], small, "native")
    return rows


def _rows(large: Sequence[ReplayedExchange], small: Sequence[ReplayedExchange], kernels: str) -> list[Workload]:
    return [_row(each, kernels, 0.0) for each in large] + [_row(each, kernels, SMALL_SECONDS) for each in small]


def yardsticks(layout: Layout) -> list[Workload]:
    """Memory bandwidth: one read and one write; two reads and a write."""
    x = gradient(layout).flat
    y, out = torch.ones_like(x), torch.empty_like(x)
    return [
        _plain(COPY, layout, 2 * x.nbytes, lambda: out.copy_(x)),
        _plain(ADD, layout, 3 * x.nbytes, lambda: torch.add(x, y, out=out)),
    ]


def products(layout: Layout, rank: int) -> Workload:
    """The four products of PowerSGD with feedback: x q, x^T p, p q^T of the mean, and p q^T of this worker."""
    x = gradient(layout)
    whole = torch.empty_like(x.flat)
    matrices = [(slot.view(x.flat), slot.view(whole)) for slot in layout]
    factors = [(torch.randn(len(m), rank), torch.randn(m.shape[1], rank)) for m, _ in matrices]

    def multiply() -> None:
        for (matrix, into), (p, q) in zip(matrices, factors, strict=True):
            torch.mm(matrix, q, out=p)
            torch.mm(matrix.T, p, out=q)
            for _ in range(2):
                torch.mm(p, q.T, out=into)

    return _plain(PRODUCTS, layout, 4 * x.flat.nbytes, multiply)


def places(layout: Layout) -> list[Workload]:
    """Adding a sparse payload to a buffer: some entries, as many in a smaller buffer, and four times as many."""
    n = layout.numel
    few = max(1, n // 4 // ONE_IN)
    return [_onto(size, entries) for size, entries in ((n, few), (n // 4, few), (n, 4 * few))]


def _onto(n: int, entries: int) -> Workload:
    at = torch.arange(entries, dtype=torch.int32) * (n // entries)
    payload = (torch.ones(entries), encode_places(at, n))
    out = torch.zeros(n)
    least = sum(part.nbytes for part in payload) + 8 * entries
    row = _plain(ONTO, Layout.of({"weight": (n,)}), least, lambda: sparse_decode([payload], out, onto=True))
    return Workload(**{**vars(row), "payloads": 1, "entries": entries})


def _plain(subject: str, layout: Layout, least_bytes: int, work: Callable[[], object]) -> Workload:
    return Workload(
        subject=subject,
        kernels=available()[0],
        layout=layout,
        payloads=0,
        entries=0,
        parts=((WHOLE, least_bytes),),
        timer=seconds_of(work),
    )


def _row(exchange: ReplayedExchange, kernels: str, lasting_seconds: float) -> Workload:
    def timer() -> Sequence[float]:
        with using(kernels):
            spent = [exchange.run()]
            while sum(map(sum, spent)) < lasting_seconds:
                spent.append(exchange.run())
        return [min(part) for part in zip(*spent, strict=True)]

    return Workload(
        subject=repr(exchange.compressor),
        kernels=kernels,
        layout=exchange.x.layout,
        payloads=exchange.at.world,
        entries=0,
        parts=((ENCODE, exchange.least_encode_bytes), (DECODE, exchange.least_decode_bytes)),
        timer=timer,
    )
