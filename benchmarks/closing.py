"""Closing the gap of TopK under Adam: a table of what was tried, and what follows from it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from benchmarks.losses import Losses
from benchmarks.report import Table, markdown, priced, spreads, tables
from benchmarks.studies import ADAMW_TRIED, DENSE, DENSE_STEPS, TOP_K
from benchmarks.tasks import ADAMW, ADAMW_TASK, ADAMW_TASKS, SGD_TASK, TASKS
from benchmarks.training import Run

CLOSED = 3  # spreads: nearer than that is as good as Dense()
LITTLE, MUCH = 0.1, 0.5  # of the gap
Item = TypeVar("Item")


@dataclass(frozen=True)
class Tried:
    """One compressor in the runs that its optimizer made; `usual`: those of the usual optimizer."""

    changed: str
    text: str
    table: Table
    usual: Table

    @property
    def gap(self) -> float:
        """To Dense() with the same optimizer, in spreads of the usual one: one yardstick for all."""
        return self.above_dense / self.usual.spread

    @property
    def dense(self) -> Losses:
        return self.table.losses(DENSE, self.table.seeds(self.text))

    @property
    def above_dense(self) -> float:
        return self.table.losses(self.text).mean - self.dense.mean

    @property
    def bytes_a_step(self) -> float:
        return self.table.bytes_a_step(self.text)

    @property
    def name(self) -> str:
        return f"`{self.text}`" if self.table is self.usual else f"`{self.text}` and {self.changed}"

    def cells(self, start: "Tried") -> dict[str, str]:
        return {
            "change": self.changed,
            "compressor": f"`{self.text}`",
            "training loss": str(self.table.losses(self.text)),
            "Dense()": str(self.dense),
            "gap": spreads(self.gap),
            "closed": "" if self is start else f"{closed(self, start):.0%}",
            **priced(self.table, self.text),
        }


def closed(tried: Tried, start: Tried) -> float:
    """The part of the gap at the start that is gone."""
    return 1 - tried.gap / start.gap


def closing_part(runs: Sequence[Run], about: Sequence[str]) -> str:
    by_task = {table.task: table for table in tables(runs)}
    usual = by_task[ADAMW_TASK]
    start, tried = Tried("nothing", TOP_K, usual, usual), list(_tried(by_task))
    steps, seeds = usual.runs[DENSE][0]["steps"], len(usual.runs[TOP_K])
    head = (
        f"{TASKS[ADAMW_TASK].about}; {steps} steps, {seeds} seeds. `Dense()` ends at {usual.losses(DENSE)} "
        f"({len(usual.runs[DENSE])} seeds); gaps are in its standard deviations (SD), relative to `Dense()` with the "
        "same optimizer and seeds, which is in the fourth column."
    )
    table = markdown([each.cells(start) for each in (start, *tried)], texts=2)
    sentences = [*said(start, tried), *placement(start, tried), *beside_sgd(start, tried)]
    return "\n\n".join([*about, head, table, " ".join(sentences)])


def _tried(by_task: Mapping[str, Table]) -> Iterator[Tried]:
    usual = by_task[ADAMW_TASK]
    for changed, texts in ADAMW_TRIED.items():
        yield from (Tried(changed, text, usual, usual) for text in texts if text in usual.runs)
    for task, changed in {**dict(zip(ADAMW_TASKS, ADAMW, strict=True)), SGD_TASK: "SGD with momentum instead"}.items():
        if task in by_task:
            yield Tried(changed, TOP_K, by_task[task], usual)


def said(start: Tried, tried: Sequence[Tried]) -> Iterator[str]:
    """Sentences about the changes that close the gap, their bytes, and the changes that do not help."""
    yield f"{start.name} ends {start.gap:.0f} SD above `Dense()`."
    ranked = sorted(tried, key=lambda each: each.gap)
    whole = [each for each in ranked if each.gap < CLOSED]
    if not whole:
        yield f"No change reduces the gap to less than {CLOSED} SD."
    for opening, chosen in (
        (f"**Gap below {CLOSED} SD**:", whole),
        ("Best for their bytes:", _nearest(tried, start)),
        (f"Change of less than {LITTLE:.0%}:", [each for each in ranked if abs(closed(each, start)) < LITTLE]),
        ("Larger gap:", [each for each in ranked if closed(each, start) <= -LITTLE]),
    ):
        if chosen:
            yield f"{opening} {', '.join(_told(each, start) for each in chosen)}."


def _nearest(tried: Sequence[Tried], start: Tried) -> list[Tried]:
    useful = [each for each in tried if closed(each, start) >= LITTLE]
    return pareto_front(useful, cost=lambda each: each.bytes_a_step, loss=lambda each: each.gap)


def pareto_front(items: Iterable[Item], *, cost: Callable[[Item], float], loss: Callable[[Item], float]) -> list[Item]:
    """Items with a lower loss than all items of the same or a lower cost, cheapest first; the first of equal items."""
    found: list[Item] = []
    least = inf
    for each in sorted(items, key=lambda item: (cost(item), loss(item))):
        if loss(each) < least:
            least = loss(each)
            found.append(each)
    return found


def placement(start: Tried, tried: Sequence[Tried]) -> Iterator[str]:
    """Whether the gap comes from Adam's variance: after as many dense steps it stands still, or it does not."""
    gaps = {each.text: each.gap for each in tried if each.table is each.usual}
    for steps in DENSE_STEPS:
        moving, frozen = f"Warmup({TOP_K}, steps={steps})", f"OneBitAdam(warmup={steps}, inner={TOP_K})"
        if moving in gaps and frozen in gaps:
            part = (gaps[moving] - gaps[frozen]) / start.gap
            found = f"closes {part:.0%} more of the gap" if part >= LITTLE else "does not close the gap"
            yield (
                f"Freezing Adam's variance after {steps} dense steps, and sending its momentum, {found}: "
                f"{gaps[frozen]:+.1f} versus {gaps[moving]:+.1f} after as many dense steps alone."
            )


def beside_sgd(start: Tried, tried: Sequence[Tried]) -> Iterator[str]:
    for sgd in (each for each in tried if each.table.task == SGD_TASK):
        lost = f"{sgd.above_dense:.3f} above `Dense()`, with AdamW {start.above_dense:.3f}"
        yield f"With SGD and momentum {start.name} ends {lost}."
        if closed(sgd, start) >= MUCH:
            yield "A likely reason: Adam moves all entries about equally far, so a few of them do not dominate."


def _told(each: Tried, start: Tried) -> str:
    return f"{each.name} ({each.gap:+.1f}, {each.bytes_a_step / start.bytes_a_step:.1f} times the bytes)"
