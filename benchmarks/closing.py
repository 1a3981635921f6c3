"""What closes the gap of a sparse choice under Adam: a table of what was tried, and what follows from it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import Table, markdown, priced, spreads, tables
from benchmarks.studies import ADAMW_TRIED, DENSE, DENSE_STEPS, TOP_K
from benchmarks.tasks import ADAMW, ADAMW_TASK, ADAMW_TASKS, SGD_TASK, TASKS
from benchmarks.training import Run

CLOSED = 3  # spreads: nearer than that is as good as Dense()
MUCH, LITTLE = 0.5, 0.1  # of the gap
AS_FEW = 1.02  # times the bytes: places cost a little more or less from run to run


@dataclass(frozen=True)
class Tried:
    """One compressor in the runs that its optimizer made; `usual`: those of the usual optimizer."""

    changed: str
    text: str
    table: Table
    usual: Table

    @property
    def gap(self) -> float:
        """Spreads to Dense() with the usual optimizer."""
        dense = self.usual.losses(DENSE, self.table.seeds(self.text))
        return (self.table.losses(self.text).mean - dense.mean) / self.usual.spread

    @property
    def bytes_a_step(self) -> float:
        return self.table.bytes_a_step(self.text)

    @property
    def name(self) -> str:
        return f"`{self.text}`" if self.table is self.usual else f"`{self.text}` with {self.changed}"

    def cells(self, start: "Tried") -> dict[str, str]:
        own = "" if self.table is self.usual else str(self.table.losses(DENSE))
        return {
            "what is changed": self.changed,
            "compressor": f"`{self.text}`",
            "training loss": str(self.table.losses(self.text)),
            "gap": spreads(self.gap),
            "closed": "" if self is start else f"{closed(self, start):.0%}",
            "Dense() with that optimizer": own,
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
        f"({len(usual.runs[DENSE])} seeds). All gaps are to that, in its spreads, whatever the optimizer was."
    )
    table = markdown([each.cells(start) for each in (start, *tried)])
    sentences = [*said(start, tried), *placement(start, tried), *beside_sgd(start, by_task.get(SGD_TASK))]
    return "\n\n".join([*about, head, table, " ".join(sentences)])


def _tried(by_task: Mapping[str, Table]) -> Iterator[Tried]:
    usual = by_task[ADAMW_TASK]
    for changed, texts in ADAMW_TRIED.items():
        yield from (Tried(changed, text, usual, usual) for text in texts if text in usual.runs)
    for task, changed in zip(ADAMW_TASKS, ADAMW, strict=True):
        if task in by_task:
            yield Tried(changed, TOP_K, by_task[task], usual)


def said(start: Tried, tried: Sequence[Tried]) -> Iterator[str]:
    """What closes the gap, what it costs, and what does not help: sentences that follow from the numbers."""
    yield f"{start.name} ends {start.gap:.0f} spreads above `Dense()`."
    ranked = sorted(tried, key=lambda each: each.gap)
    whole = [each for each in ranked if each.gap < CLOSED]
    much = [each for each in ranked if each.gap >= CLOSED and closed(each, start) >= MUCH]
    as_cheap = [each for each in ranked if each.bytes_a_step <= AS_FEW * start.bytes_a_step][:1]
    for opening, chosen in (
        (f"**What closes the gap**, to fewer than {CLOSED} spreads:", whole or None),
        (f"What closes at least {MUCH:.0%} of it:", much),
        ("Best for no more bytes:", as_cheap),
        (f"Less than {LITTLE:.0%} either way:", [each for each in ranked if abs(closed(each, start)) < LITTLE]),
        ("Worse than before:", [each for each in ranked if closed(each, start) <= -LITTLE]),
    ):
        if chosen is None:
            yield f"Nothing that was tried closes the gap, to fewer than {CLOSED} spreads."
        elif chosen:
            yield f"{opening} {', '.join(_told(each, start) for each in chosen)}."


def placement(start: Tried, tried: Sequence[Tried]) -> Iterator[str]:
    """Whether the gap comes from Adam's variance: after as many dense steps it stands still, or it does not."""
    gaps = {each.text: each.gap for each in tried if each.table is each.usual}
    for steps in DENSE_STEPS:
        moving, frozen = f"Warmup({TOP_K}, steps={steps})", f"OneBitAdam(warmup={steps}, inner={TOP_K})"
        if moving in gaps and frozen in gaps:
            part = (gaps[moving] - gaps[frozen]) / start.gap
            found = f"closes {part:.0%} more of the gap" if part >= LITTLE else "is not what closes the gap"
            yield (
                f"After {steps} dense steps either way, to freeze Adam's variance and send its momentum {found}: "
                f"{gaps[frozen]:+.1f} beside {gaps[moving]:+.1f}."
            )


def beside_sgd(start: Tried, sgd: Table | None) -> Iterator[str]:
    if sgd is not None:
        lost = [table.losses(TOP_K).mean - table.losses(DENSE, table.seeds(TOP_K)).mean for table in (sgd, start.table)]
        yield f"Under SGD with momentum {start.name} ends {lost[0]:.3f} above `Dense()`, under AdamW {lost[1]:.3f}."


def _told(each: Tried, start: Tried) -> str:
    return f"{each.name} ({each.gap:+.1f}, {each.bytes_a_step / start.bytes_a_step:.1f} times the bytes)"
