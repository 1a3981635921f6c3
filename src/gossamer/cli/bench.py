"""`gossamer bench compressors`: times every compressor on one core, and copying memory for comparison."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gossamer.algorithms.compressors import Compressor
from gossamer.base.units import bytes_text
from gossamer.cli.console import ShowText, progress, table, wide_console
from gossamer.cli.options import output_option
from gossamer.plan.bench import (
    ABOUT,
    ABOUT_PAIRS,
    KERNELS,
    build,
    case_texts,
    cells,
    machine,
    pair_cells,
    remarks,
    run_benchmarks,
    run_pair_benchmark,
    with_feedback,
)
from gossamer.plan.simulate.job import free_bytes
from gossamer.version import __version__

SECONDS_EACH = 0.5  # per compressor and round, with one process or two
PLAIN_SECONDS = 10.0  # between lines of progress in a file
WIDTH = 200  # columns of a table in a file
YARDSTICK_BYTES, ALL_BYTES = 12, 400  # for each element: of the vectors to copy and add, and of all compressors


@click.group("bench")
def bench() -> None:
    """Measure the speed of this library on this machine."""


@bench.command("compressors")
@click.option(
    "--elements",
    type=click.IntRange(100_000),
    default=25_000_000,
    show_default=True,
    help="Entries of the bucket. Each entry needs about 400 bytes of memory for all compressors together.",
)
@click.option("--repeat", type=click.IntRange(1), default=7, show_default=True, help="Rounds after a warm-up round.")
@click.option("--compressor", "names", multiple=True, metavar="NAME", help="Only this compressor; may be repeated.")
@click.option(
    "--processes", type=click.IntRange(1, 2), default=1, show_default=True, help="2: two at once against one."
)
@output_option("json", "Also write all times as JSON.")
def compressors(elements: int, repeat: int, names: tuple[str, ...], processes: int, json_file: Path | None) -> None:
    """Time every compressor on one core: encoding with feedback, and decoding the payloads of 1, 4 and 64 workers.

    Every round times the compiled loops, plain torch, tensor.copy_ and torch.add in turn, so that all see the same
    machine. --processes 2 reports the throughput of two concurrent processes relative to one.
    """
    chosen = _chosen(names)
    console = wide_console(WIDTH)
    if processes == 1:
        _check_memory(elements, len(chosen))
    work = _together if processes == 2 else _alone
    with _one_core(), progress("beginning", PLAIN_SECONDS) as print_text:
        found = work(chosen, elements, repeat, print_text)
    about = {"gossamer": __version__, "machine": machine(), "command": shlex.join(["gossamer", *sys.argv[1:]])}
    _show(found, about, console)
    if json_file is not None:
        record = {**about, "rounds": repeat, "measured": found.measured}
        json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _check_memory(elements: int, compressors: int) -> None:
    """Refuse a bucket for which this machine has too little memory."""
    needed = elements * (YARDSTICK_BYTES + ALL_BYTES * compressors / len(case_texts(KERNELS)))
    if needed > (free := free_bytes()):
        raise click.BadParameter(
            f"{elements:,} elements need about {bytes_text(needed)} of memory, and {bytes_text(free)} are free. Write "
            f"--elements {max(100_000, int(elements * free / needed / 2))}, or choose some: --compressor TopK"
        )


def _chosen(names: Sequence[str]) -> list[Compressor]:
    every = case_texts(KERNELS)
    known = {text.partition("(")[0] for text in every}
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is not in this benchmark. Choose from {', '.join(sorted(known))}.")
    return [with_feedback(text) for text in every if not names or text.partition("(")[0] in names]


@contextmanager
def _one_core() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Found:
    """Lines of a table by column, sentences below it, and all results as JSON."""

    lines: Sequence[dict[str, str]]
    sentences: Sequence[str]
    measured: Sequence[dict[str, Any]]


def _alone(chosen: Sequence[Compressor], elements: int, repeat: int, print_text: ShowText) -> _Found:
    rows = build(chosen, elements, lambda what: print_text(f"preparing {what}"))
    turns = len(rows) * (repeat + 1)
    turn = iter(range(1, turns + 1))
    found = run_benchmarks(rows, repeat, lambda what: print_text(f"{next(turn)} of {turns}: {what}"))
    return _Found(cells(found), [*remarks(found), ABOUT], [asdict(one) for one in found])


def _together(chosen: Sequence[Compressor], elements: int, repeat: int, print_text: ShowText) -> _Found:
    found = run_pair_benchmark([repr(each) for each in chosen], elements, repeat, SECONDS_EACH, print_text)
    return _Found(pair_cells(found), [ABOUT_PAIRS], [asdict(one) for one in found])


def _show(found: _Found, about: dict[str, Any], console: Console) -> None:
    console.print(_table(found.lines))
    console.print()
    on = ", ".join(f"{name} {value}" for name, value in about["machine"].items())
    for sentence in (*found.sentences, f"{on}; one thread per process", about["command"]):
        console.print(Text(sentence), soft_wrap=True)


def _table(lines: Sequence[dict[str, str]]) -> Table:
    shown = table(list(lines[0]), left=("compressor", "kernels"), no_wrap=lines[0].keys())
    for line in lines:
        shown.add_row(*(Text(value) for value in line.values()))
    return shown
