"""Benchmark report: measurements as a table and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gossamer.plan.bench.suite import BenchmarkResult
from gossamer.plan.bench.two_process import PairResult
from gossamer.plan.bench.workloads import (
    ADD,
    COPY,
    DECODE,
    ENCODE,
    FEW,
    MANY,
    ONTO,
    PRODUCTS,
    SMALL_NUMEL,
    SMALL_TENSORS,
    SMALLER,
    TENSORS,
    WHOLE,
)

ABOUT = (
    "GB/s of gradient (4 bytes per element). x copy: time relative to tensor.copy_ of as many elements. of add: time "
    "of the minimum bytes that the compressor must read and write, at the rate of torch.add(x, y, out=z), over the "
    "measured time; loops that write past the caches move more than torch.add does, so it may exceed 100 %. "
    f"Decoding sums the given number of payloads; {MANY} of them in a bucket of 1/{SMALLER} of the size. Sharded's "
    "encoding includes encoding the mean of its part; with one worker that is everything a second time. "
    f"{SMALL_TENSORS} x {SMALL_NUMEL:,} / 1: time for {SMALL_TENSORS} tensors of {SMALL_NUMEL:,} elements relative to "
    "one tensor with as many."
)

ABOUT_PAIRS = "Whole aggregations of one payload per second: of one process, and of two at once together, interleaved."


def cells(measured: Sequence[BenchmarkResult]) -> list[dict[str, str]]:
    """Rows of the table by column."""
    about = {(one.subject, one.kernels): "" for one in measured if one.part == ENCODE}
    return [_line([one for one in measured if (one.subject, one.kernels) == key]) for key in about]


def _line(of: Sequence[BenchmarkResult]) -> dict[str, str]:
    encode = _largest(of, ENCODE, 1)
    line = {
        "compressor": encode.subject,
        "kernels": encode.kernels,
        "elements": f"{encode.elements:,}",
        "encode": _rate(encode),
        "x copy": f"{encode.copy_ratio:.1f}",
        "of add": f"{encode.add_rate_share:.0%}",
    }
    for payloads in (*FEW, MANY):
        decode = _largest(of, DECODE, payloads)
        line[f"decode {payloads}"] = _rate(decode)
        line["of add" + " " * payloads] = f"{decode.add_rate_share:.0%}"  # columns with one name differ in blanks
    line[f"{SMALL_TENSORS} x {SMALL_NUMEL:,} / 1"] = f"{_small_ratio(of):.2f}"
    line["spread"] = f"{max(one.spread for one in of if one.tensors == TENSORS):.0%}"
    return line


def _largest(of: Sequence[BenchmarkResult], part: str, payloads: int) -> BenchmarkResult:
    fitting = [one for one in of if one.tensors == TENSORS and one.part == part and one.payloads == payloads]
    return max(fitting, key=lambda one: one.elements)


def _rate(one: BenchmarkResult) -> str:
    return f"{one.gradient_bytes_per_second / 1e9:.2f}"


def _small_ratio(of: Sequence[BenchmarkResult]) -> float:
    """Encoding and decoding time of a bucket of many small tensors relative to one tensor with as many elements."""
    many, one = (sum(each.median_seconds for each in of if each.tensors == tensors) for tensors in (SMALL_TENSORS, 1))
    return many / one


def remarks(measured: Sequence[BenchmarkResult]) -> Iterator[str]:
    """Remarks on memory bandwidth, matrix products and sparse payloads."""
    for one in measured:
        if one.subject in (COPY, ADD):
            rate = one.least_bytes / one.median_seconds / 1e9
            yield f"{one.subject} of {one.elements:,} elements moves {rate:.1f} GB/s (spread {one.spread:.0%})."
    for products in (one for one in measured if one.subject == PRODUCTS):
        for name, seconds in _low_rank(measured, products.elements).items():
            over = seconds / products.median_seconds
            yield f"{name} takes {over:.2f}x as long as its own {PRODUCTS} ({products.median_seconds:.3g} s)."
    for one in measured:
        if one.subject == ONTO:
            each = 1e9 * one.median_seconds / one.entries
            yield f"{ONTO} {one.elements:,} elements, {one.entries:,} entries: {each:.1f} ns per entry."


def _low_rank(measured: Sequence[BenchmarkResult], elements: int) -> dict[str, float]:
    """Seconds of the whole aggregation of each compressor with matrix products, on the large bucket."""
    found: dict[str, float] = {}
    for one in measured:
        if "PowerSGD" in one.subject and one.elements == elements and one.payloads == 1 and one.part != WHOLE:
            name = f"{one.subject} ({one.kernels})"
            found[name] = found.get(name, 0.0) + one.median_seconds
    return found


def pair_cells(paired: Sequence[PairResult]) -> list[dict[str, str]]:
    return [
        {
            "compressor": one.subject,
            "one alone": f"{_middle(one.alone):.2f} /s",
            "two at once": f"{_middle(one.together):.2f} /s",
            "two over one": f"{one.gain:.2f}",
            "spread": f"{one.spread:.0%}",
        }
        for one in paired
    ]


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
