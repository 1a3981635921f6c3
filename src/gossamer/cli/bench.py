"""`gossamer bench compressors`: times every compressor on one core, beside copying memory."""

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
from gossamer.cli.console import Say, progress, table, wide_console
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
from gossamer.version import __version__

SECONDS_EACH = 0.5  # of one process, or two, with one compressor in one round
PLAIN_SECONDS = 10.0  # between lines of progress that go into a file
WIDTH = 200  # of a table that goes into a file


@click.group("bench")
def bench() -> None:
    """Measure what this library does on this machine."""


@bench.command("compressors")
@click.option(
    "--elements",
    type=click.IntRange(100_000),
    default=25_000_000,
    show_default=True,
    help="Of the bucket; all compressors together need about 400 bytes of memory for each.",
)
@click.option("--repeat", type=click.IntRange(1), default=7, show_default=True, help="Rounds, after one that warms up.")
@click.option("--compressor", "names", multiple=True, metavar="NAME", help="Only this one; may be repeated.")
@click.option("--processes", type=click.IntRange(1, 2), default=1, show_default=True, help="2: two at once, over one.")
@output_option("json", "Also write every time there.")
def compressors(elements: int, repeat: int, names: tuple[str, ...], processes: int, json_file: Path | None) -> None:
    """Time every compressor on one core: encoding with feedback, and decoding what 1, 4 and 64 workers sent.

    Compiled loops and plain torch take turns with tensor.copy_ and torch.add in every round, so that all saw the same
    machine. With --processes 2: how much more two processes at once do than one.
    """
    chosen = _chosen(names)
    console = wide_console(WIDTH)
    work = _together if processes == 2 else _alone
    with _one_core(), progress("beginning", PLAIN_SECONDS) as say:
        found = work(chosen, elements, repeat, say)
    about = {"gossamer": __version__, "machine": machine(), "command": shlex.join(["gossamer", *sys.argv[1:]])}
    _show(found, about, console)
    if json_file is not None:
        record = {**about, "rounds": repeat, "measured": found.measured}
        json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _chosen(names: Sequence[str]) -> list[Compressor]:
    every = case_texts(KERNELS)
    known = {text.partition("(")[0] for text in every}
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is not measured here: {', '.join(sorted(known))} are.")
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
    """A table's lines by column, sentences below it, and everything as JSON."""

    lines: Sequence[dict[str, str]]
    sentences: Sequence[str]
    measured: Sequence[dict[str, Any]]


def _alone(chosen: Sequence[Compressor], elements: int, repeat: int, say: Say) -> _Found:
    rows = build(chosen, elements, lambda what: say(f"preparing {what}"))
    turns = len(rows) * (repeat + 1)
    turn = iter(range(1, turns + 1))
    found = run_benchmarks(rows, repeat, lambda what: say(f"{next(turn)} of {turns}: {what}"))
    return _Found(cells(found), [*remarks(found), ABOUT], [asdict(one) for one in found])


def _together(chosen: Sequence[Compressor], elements: int, repeat: int, say: Say) -> _Found:
    found = run_pair_benchmark([repr(each) for each in chosen], elements, repeat, SECONDS_EACH, say)
    return _Found(pair_cells(found), [ABOUT_PAIRS], [asdict(one) for one in found])


def _show(found: _Found, about: dict[str, Any], console: Console) -> None:
    console.print(_table(found.lines))
    console.print()
    on = ", ".join(f"{name} {value}" for name, value in about["machine"].items())
    for sentence in (*found.sentences, f"{on}; one thread a process", about["command"]):
        console.print(Text(sentence), soft_wrap=True)


def _table(lines: Sequence[dict[str, str]]) -> Table:
    shown = table(list(lines[0]), left=("compressor", "kernels"), no_wrap=lines[0].keys())
    for line in lines:
        shown.add_row(*(Text(value) for value in line.values()))
    return shown
