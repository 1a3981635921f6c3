"""Timeline: tracks, slices, arrows and counters of all processes of a run, on the first machine's clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np

from gossamer.base.spans.record_format import ABOUT, EVERYONE, MOST_PEERS, NO_RANK, SpanKind, operation_text
from gossamer.base.spans.step_range import StepRange
from gossamer.errors import GossamerError
from gossamer.observe.trace.clock_alignment import AlignedClock, align, received_from
from gossamer.observe.trace.span_files import Key, ProcessSpans, Records, read_operators

TRACKS = {
    "steps": (SpanKind.STEP,),
    "training": (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER, SpanKind.WAITING),
    "communication": (SpanKind.ENCODE, SpanKind.WIRE, SpanKind.DECODE),
}
SERVER = "server"

NAMES = {SpanKind.WAITING: "waiting", SpanKind.WIRE: "wire: waiting for an answer"}
IN_FLIGHT = "bytes in flight"


@dataclass
class Slice:
    """A span from `begin` to `end`, in seconds of the timeline."""

    name: str
    begin: float
    end: float
    about: dict[str, int | str] = field(default_factory=dict)
    sends: list[int] = field(default_factory=list)  # arrows that begin at its begin
    receives: list[int] = field(default_factory=list)  # arrows that end at its end
    category: str = ""  # category of torch's profiler, if any


@dataclass
class SpanTrack:
    """Consecutive or nested slices, ordered by begin."""

    name: str
    slices: list[Slice]


@dataclass
class ProcessTimeline:
    """One process: its tracks, and its bytes in flight over time."""

    name: str
    label: str  # its machine, and the error of its clock
    tracks: list[SpanTrack]
    in_flight: list[tuple[float, int]]


@dataclass(frozen=True)
class Timeline:
    """All processes. `began`: unix time of second zero on the first machine's clock."""

    processes: list[ProcessTimeline]
    began: float
    clocks: dict[str, AlignedClock]
    arrows: int

    def slices(self) -> Iterator[Slice]:
        return (each for process in self.processes for track in process.tracks for each in track.slices)


def build(processes: Sequence[ProcessSpans], steps: StepRange | None = None) -> Timeline:
    """Build the timeline. steps: only these; None for all. Raises GossamerError if none of them was recorded."""
    clocks = align(processes)
    windows = {each.path: _window(each, steps) for each in processes}
    shown = [each for each in processes if windows[each.path] is not None]
    if not shown:
        raise GossamerError(_none_of(steps, processes))
    start = min(clocks[each.clock](_begins(each, windows[each.path])) for each in shown)
    made: dict[Key, list[tuple[ProcessSpans, Slice]]] = defaultdict(list)
    timelines = []
    for each in shown:
        recorded = _within(each.records, windows[each.path])
        view = _View(clocks[each.clock], start)
        tracks = [
            SpanTrack(name, slices)
            for title, kinds in TRACKS.items()
            for name, slices in _lanes(title, _slices(recorded, kinds, view), nests=True)
        ]
        if len(served := _slices(recorded, (SpanKind.SERVE,), view)):
            tracks += [SpanTrack(name, slices) for name, slices in _lanes(SERVER, served, nests=True)]
        operations, relayed = recorded[recorded["kind"] == SpanKind.OPERATION], each.of(SpanKind.RELAYED)
        sent = [_operation(record, view, relayed) for record in operations]
        for record, each_slice in zip(operations, sent, strict=True):
            made[each.key_of(record)].append((each, each_slice))
        tracks += [SpanTrack(name, slices) for name, slices in _lanes("wire", sent, nests=False)]
        tracks += _operator_tracks(each, windows[each.path], view)
        timelines.append(ProcessTimeline(_name_of(each, shown), _label(each, clocks), tracks, _in_flight(sent)))
    first = processes[0]
    return Timeline(timelines, start + first.wall - first.moment, clocks, _draw_arrows(made))


@dataclass(frozen=True)
class _View:
    clock: AlignedClock
    start: float

    def __call__(self, moment: float) -> float:
        return self.clock(moment) - self.start


# -- which steps -------------------------------------------------------------------------------------------------------

Window = tuple[float, float]  # of the process's own clock


def _window(each: ProcessSpans, steps: StepRange | None) -> Window | None:
    if steps is None:
        return (-np.inf, np.inf) if len(_spans(each.records)) else None
    made = each.of(SpanKind.STEP)
    chosen = made[(made["number"] >= steps.first) & (made["number"] <= steps.last)]
    return (float(chosen["begin"].min()), float(chosen["end"].max())) if len(chosen) else None


def _spans(records: Records) -> Records:
    spans: Records = records[~np.isin(records["kind"], ABOUT)]
    return spans


def _within(records: Records, window: Window | None) -> Records:
    assert window is not None
    spans = _spans(records)
    return spans[(spans["end"] > window[0]) & (spans["begin"] < window[1])]


def _begins(each: ProcessSpans, window: Window | None) -> float:
    return float(_within(each.records, window)["begin"].min())


def _none_of(steps: StepRange | None, processes: Sequence[ProcessSpans]) -> str:
    made = np.concatenate([each.of(SpanKind.STEP)["number"] for each in processes])
    if not len(made):
        return "the trace has no step: the run ended before its first step was complete"
    return f"none of the steps {steps} was recorded: the trace has {made.min()} to {made.max()}. Write --steps " + (
        f"{made.min()}:{made.max()}"
    )


def _name_of(each: ProcessSpans, others: Sequence[ProcessSpans]) -> str:
    """Name of a process. In an elastic run a newcomer may have the number of a rank that left, and gets a suffix."""
    place = [other.path for other in others if other.name == each.name].index(each.path) + 1
    return each.name if place == 1 else f"{each.name} ({place})"


# -- slices ------------------------------------------------------------------------------------------------------------


def _slices(records: Records, kinds: Iterable[SpanKind], view: _View) -> list[Slice]:
    chosen = records[np.isin(records["kind"], list(kinds))]
    return [Slice(_name(each), view(each["begin"]), view(each["end"])) for each in chosen]


def _name(record: Any) -> str:
    kind = SpanKind(int(record["kind"]))
    if kind == SpanKind.SERVE:
        return f"serves worker {record['number']}"
    return f"step {record['number']}" if kind == SpanKind.STEP else NAMES.get(kind, kind.name.lower())


def _operation(record: Any, view: _View, relayed: Records) -> Slice:
    """relayed: the process's records of relays, of which the newest before an operation's end apply to it."""
    peers, nbytes = int(record["peers"]), int(record["nbytes"])
    args: dict[str, int | str] = {"bytes sent": nbytes}
    if peers != EVERYONE:
        args["from places"] = ", ".join(str(place) for place in range(MOST_PEERS) if peers >> place & 1)
    known = relayed[(relayed["channel"] == record["channel"]) & (relayed["begin"] <= record["end"])]
    newest = known[known["begin"] == known["begin"].max()] if len(known) else known
    if links := [_relayed(each) for each in newest if each["peers"]]:
        args["relayed links"] = "; ".join(links)
    return Slice(operation_text(int(record["code"])), view(record["begin"]), view(record["end"]), args)


def _relayed(record: Any) -> str:
    places = ", ".join(str(place) for place in range(MOST_PEERS) if int(record["peers"]) >> place & 1)
    relay = int(record["number"])
    return f"to places {places} through {'a relay' if relay == NO_RANK else f'place {relay}'}"


def _operator_tracks(each: ProcessSpans, window: Window | None, view: _View) -> Iterator[SpanTrack]:
    """Operators of torch.profiler in a process, one track per thread, the one with most operators first."""
    assert window is not None
    threads = read_operators(each.path).values()
    for number, operators in enumerate(sorted(threads, key=len, reverse=True), 1):
        shown = [
            Slice(one.name, view(one.begin), view(one.end), category=one.category)
            for one in operators
            if one.end > window[0] and one.begin < window[1]
        ]
        title = "operators" if number == 1 else f"operators of thread {number}"
        yield from (SpanTrack(name, slices) for name, slices in _lanes(title, shown, nests=True) if slices)


def _lanes(title: str, slices: list[Slice], *, nests: bool) -> Iterator[tuple[str, list[Slice]]]:
    """Slices in as many tracks as needed to avoid partial overlaps; or any overlap, if they do not nest."""
    lanes: list[list[Slice]] = []
    open_: list[list[float]] = []  # ends of open slices by lane
    for each in sorted(slices, key=lambda one: (one.begin, -one.end)):
        for lane, ends in zip(lanes, open_, strict=True):
            while ends and ends[-1] <= each.begin:
                ends.pop()
            if not ends or (nests and each.end <= ends[-1]):
                lane.append(each)
                ends.append(each.end)
                break
        else:
            lanes.append([each])
            open_.append([each.end])
    for number, lane in enumerate(lanes or [[]], 1):
        yield (title if number == 1 else f"{title} {number}"), lane


def _in_flight(sent: Sequence[Slice]) -> list[tuple[float, int]]:
    changes = [(each.begin, int(each.about["bytes sent"])) for each in sent]
    changes += [(each.end, -int(each.about["bytes sent"])) for each in sent]
    moments, total = [], 0
    for moment, change in sorted(changes, key=lambda one: (one[0], -one[1])):
        total += change
        moments.append((moment, total))
    return moments


def _label(each: ProcessSpans, clocks: dict[str, AlignedClock]) -> str:
    clock = clocks[each.clock]
    if clock == AlignedClock():
        known = "the clock of all"
    else:
        known = f"clock within {1000 * clock.error:.3g} ms" if isfinite(clock.error) else "clock not compared"
    return f"{each.host}, process {each.pid}, {known}"


# -- arrows ------------------------------------------------------------------------------------------------------------


def _draw_arrows(made: dict[Key, list[tuple[ProcessSpans, Slice]]]) -> int:
    """Draw arrows from the last rank in an operation to all that waited for it; or from each sender, if not all ranks
    contribute. If clocks contradict each other, draw none, since a message would arrive before it was sent."""
    count = 0
    for key, makers in made.items():
        first = key[-3] if key[0] >= 0 else None
        last = max((sent for _, sent in makers), key=lambda sent: sent.begin)
        for receiver, came in makers:
            peers = receiver.operations[key][2]
            received = [sent for sender, sent in makers if received_from(peers, sender.rank, first)]
            for sent in [last] if peers == EVERYONE else received:
                if sent is not came and sent.begin <= came.end:
                    sent.sends.append(count)
                    came.receives.append(count)
                    count += 1
    return count
