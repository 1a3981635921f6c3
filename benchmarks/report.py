"""Report of benchmarks/convergence.py: tables and sentences."""

import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from benchmarks.losses import Losses, number
from benchmarks.studies import DENSE, EVERY, without_feedback
from benchmarks.training import Run

from gossamer.base.units import bytes_text

IMPROVED, WORSE = 10, 3  # spreads from which on a task can tell
FEW = 3  # seeds

ABOUT = (
    "Four simulated workers in one process, with real aggregations; mean over seeds ± standard deviation. The training "
    "loss is over fixed training samples. The gap is the distance to the loss of `Dense()` after the same number of "
    "steps with the same seeds, in SD, the standard deviation of `Dense()` over all its seeds. `Dense()` for the same "
    "bytes was stopped after as many bytes. All compressors use the same constant learning rate."
)


@dataclass(frozen=True)
class Table:
    """The runs of one task by compressor, in the order of seeds."""

    task: str
    runs: Mapping[str, Sequence[Run]]

    @property
    def spread(self) -> float:
        return self.losses(DENSE).spread

    def seeds(self, compressor: str) -> set[int]:
        return {run["seed"] for run in self.runs[compressor]}

    def losses(self, compressor: str, seeds: Container[int] = range(2**31)) -> Losses:
        return Losses(tuple(number(run["curve"][-1][2]) for run in self.runs[compressor] if run["seed"] in seeds))

    def held_out(self, compressor: str) -> Losses:
        return Losses(tuple(number(run["held_out"]) for run in self.runs[compressor]))

    def bytes_a_step(self, compressor: str) -> float:
        return statistics.fmean(run["curve"][-1][1] / run["curve"][-1][0] for run in self.runs[compressor])

    def gap(self, compressor: str) -> float:
        """Spreads by which it is worse than Dense() with the same seeds."""
        return (self.losses(compressor).mean - self.losses(DENSE, self.seeds(compressor)).mean) / self.spread

    def dense_at_equal_bytes(self, compressor: str) -> tuple[int, Losses]:
        """Steps that as many bytes pay for, at least one, and the losses after them."""
        dense = self.runs[DENSE]
        paid = int(self.bytes_a_step(compressor) * dense[0]["steps"] / self.bytes_a_step(DENSE))
        steps = min(max(1, paid), dense[0]["steps"])
        return steps, Losses(tuple(number(run["curve"][steps][2]) for run in dense))

    def twins(self) -> dict[str, str]:
        """Those without feedback, by the compressor that has it."""
        found = {text: without_feedback(text) for text in self.runs}
        return {text: twin for text, twin in found.items() if twin in self.runs and twin != text and twin is not None}

    @property
    def improvement(self) -> float:
        """Spreads by which Dense() improves from its start."""
        start = statistics.fmean(number(run["curve"][0][2]) for run in self.runs[DENSE])
        return (start - self.losses(DENSE).mean) / self.spread


def tables(runs: Sequence[Run]) -> Iterator[Table]:
    for task in dict.fromkeys(run["task"] for run in runs):
        mine = [run for run in runs if run["task"] == task]
        names = dict.fromkeys(run["compressor"] for run in mine)
        yield Table(task, {name: [run for run in mine if run["compressor"] == name] for name in names})


def page_part(runs: Sequence[Run], about: Sequence[str]) -> str:
    """A table and what it can tell for each task; compressors that forget stand beside those that do not."""
    parts = [ABOUT, *about]
    for table in tables(runs):
        first, seeds = table.runs[DENSE][0], len(table.runs[DENSE])
        others = min(map(len, table.runs.values()))
        counted = f"{seeds} seeds" if others == seeds else f"{seeds} seeds of `Dense()`, {others} of the others"
        parts.append(f"### {table.task}\n\n{EVERY[table.task].about}; {first['steps']} steps, {counted}.")
        twins = table.twins()
        shown = [text for text in table.runs if text not in twins.values()]
        parts.append(markdown([_cells(table, text, twins.get(text)) for text in shown]))
        parts.append(verdict(table, twins))
    return "\n\n".join(parts)


def markdown(lines: Sequence[Mapping[str, str]], texts: int = 1) -> str:
    """A table of (column: cell), its first `texts` columns text and the others numbers, without columns of nothing."""
    names = [name for name in lines[0] if any(line[name] for line in lines)]
    rows = [
        names,
        [*["---"] * texts, *["---:"] * (len(names) - texts)],
        *([line[name] for name in names] for line in lines),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(table: Table, text: str, twin: str | None) -> dict[str, str]:
    dense = text == DENSE
    return {
        "compressor": f"`{text}`",
        "training loss": str(table.losses(text)),
        "gap": "" if dense else spreads(table.gap(text)),
        "held-out loss": str(table.held_out(text)),
        **priced(table, text),
        "without feedback": "" if twin is None else str(table.losses(twin)),
        "its gap": "" if twin is None else spreads(table.gap(twin)),
    }


def priced(table: Table, text: str) -> dict[str, str]:
    """What it sends, and what Dense() would have made of that."""
    sent = table.bytes_a_step(text)
    steps, affordable = table.dense_at_equal_bytes(text)
    return {
        "sent a step and worker": bytes_text(sent),
        "of Dense()": f"1/{table.bytes_a_step(DENSE) / sent:.1f}",
        "Dense() for the same bytes": "" if text == DENSE else f"{affordable} ({steps} steps)",
    }


def spreads(gap: float) -> str:
    return f"{gap:+.1f}" if isfinite(gap) else "-"


def verdict(table: Table, twins: Mapping[str, str]) -> str:
    """What the task can tell, and what it cannot."""
    if not isfinite(table.spread):
        return "One seed has no standard deviation, so this table has no gaps."
    said = [f"From its start `Dense()` improves by {table.improvement:.0f} SD"]
    said[0] += (
        "."
        if table.improvement >= IMPROVED
        else f", less than {IMPROVED} SD: **this task cannot distinguish compressors.**"
    )
    worse = {text: table.gap(twin) - table.gap(text) for text, twin in twins.items()}
    telling = [f"`{text}`" for text, spreads in worse.items() if not spreads < WORSE]
    others = [f"`{text}`" for text, spreads in worse.items() if spreads < WORSE]
    if telling:
        said.append(f"At least {WORSE} SD worse without feedback: {', '.join(telling)}.")
    if len(table.runs[DENSE]) < FEW:
        said.append(f"SD of {len(table.runs[DENSE])} seeds is a rough estimate: compare losses instead of gaps.")
    if others:
        said.append(f"Less than {WORSE} SD worse without feedback: {', '.join(others)}.")
    return " ".join(said)


def sentences(runs: Sequence[Run]) -> Iterator[str]:
    """How long it took."""
    for table in tables(runs):
        seconds = sum(run["seconds"] for mine in table.runs.values() for run in mine)
        yield f"{table.task}: {seconds:.0f} s of training in {sum(map(len, table.runs.values()))} runs"


def write_page(page: Path, parts: Sequence[str]) -> None:
    """The whole page, which is printed as well; a blank line between parts."""
    text = "\n\n".join(parts)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text + "\n", encoding="utf-8")
    print(text)
