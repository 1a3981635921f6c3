"""Verdict: one line on whether these machines can train together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from gossamer.plan.doctor.report import DoctorReport, HostReport, PairReport

RATES = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0))
NOTABLE_FACTOR = 2.0
NOTABLE_ROUND_TRIP_SECONDS = 0.001
NOTABLE_CLOCK_SECONDS = 0.5
VERSIONS = ("gossamer", "torch", "python", "nccl")

Directed = Mapping[tuple[int, int], float]  # (from, to) -> seconds; lower is better


def verdict(report: DoctorReport) -> str:
    """For example: 4 hosts, 94 Mbit/s, 21 ms, host 3 is 5x slower."""
    noun = "host" if _machines(report.hosts) == len(report.hosts) else "rank"
    parts = (_count(report.hosts), *_speeds(report.pairs, noun), *_obstacles(report), *_differences(report.hosts))
    return ", ".join(parts)


def rate_text(bits_per_second: float) -> str:
    """In decimal units, as usual for networks: 94 Mbit/s."""
    name, size = next((unit for unit in RATES if bits_per_second >= 0.9995 * unit[1]), RATES[-1])
    number = bits_per_second / size
    return f"{number:.0f} {name}" if number >= 9.95 else f"{number:.1f} {name}"


def round_trip_text(seconds: float) -> str:
    """Always in milliseconds, for comparable columns: 21 ms, 0.12 ms."""
    milliseconds = 1000 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 9.95 else f"{milliseconds:.2g} ms"


def differing(hosts: Sequence[HostReport]) -> tuple[str, ...]:
    """Packages with different versions between hosts."""
    return tuple(name for name in VERSIONS if len({getattr(host, name) for host in hosts}) > 1)


def slower(seconds_per_bit: Directed) -> dict[int, str]:
    """Ranks with a best link that is much slower than the others' best, each with a sentence."""
    sends, receives = (_notable(_best(seconds_per_bit, end)) for end in (0, 1))
    if len(seconds_per_bit) <= 2:
        # With two ranks, slow sending of one is slow receiving of the other: either may be the cause
        return {rank: f"sends {factor:.2g}x slower than it receives" for rank, factor in sends.items()}
    return {
        rank: f"{_verb(rank in sends, rank in receives)} {max(sends.get(rank, 0), receives.get(rank, 0)):.2g}x slower"
        for rank in sorted(sends.keys() | receives.keys())
    }


def farther(round_trip_seconds: Directed) -> dict[int, float]:
    """Ranks with a far nearest peer compared with the others; round trip in seconds."""
    nearest = _best(round_trip_seconds, 0)
    return {rank: nearest[rank] for rank in _notable(nearest) if nearest[rank] >= NOTABLE_ROUND_TRIP_SECONDS}


def _machines(hosts: Sequence[HostReport]) -> int:
    """Number of machines. Emulated hosts share a name; workers of one machine also share an address."""
    return len({(host.name, host.address) for host in hosts})


def _count(hosts: Sequence[HostReport]) -> str:
    machines = _machines(hosts)
    if machines == len(hosts):
        return f"{machines} hosts"
    return f"{len(hosts)} workers on {machines} host{'s' if machines > 1 else ''}"


def _speeds(pairs: Sequence[PairReport], noun: str) -> Iterator[str]:
    """The median pair, then the ranks that differ from it."""
    lines, paths = _seconds_per_bit(pairs), _round_trips(pairs)
    slow, far = slower(lines), farther(paths)
    if not paths:
        yield "no pair could be measured"
        return
    if lines:
        yield _between([1 / line for line in _without(lines, slow)], rate_text, 0.0)
    yield _between(_without(paths, far), round_trip_text, NOTABLE_ROUND_TRIP_SECONDS)
    yield from (f"{noun} {rank} {text}" for rank, text in slow.items())
    yield from (f"{noun} {rank} is {round_trip_text(seconds)} away" for rank, seconds in far.items())


def _seconds_per_bit(pairs: Sequence[PairReport]) -> Directed:
    forth = {pair.ranks: pair.forth_bits_per_second for pair in pairs}
    back = {pair.ranks[::-1]: pair.back_bits_per_second for pair in pairs}
    return {ends: 1 / rate for ends, rate in (forth | back).items() if rate}


def _round_trips(pairs: Sequence[PairReport]) -> Directed:
    forth = {pair.ranks: pair.minimum_round_trip_seconds for pair in pairs}
    back = {pair.ranks[::-1]: pair.minimum_round_trip_seconds for pair in pairs}
    return {ends: seconds for ends, seconds in (forth | back).items() if seconds is not None}


def _best(values: Directed, end: int) -> dict[int, float]:
    """Minimum by rank of the links that begin (end 0) or end (end 1) there."""
    found: dict[int, float] = {}
    for ends, value in values.items():
        found[ends[end]] = min(value, found.get(ends[end], value))
    return found


def _notable(best: Mapping[int, float]) -> dict[int, float]:
    """Ranks that are much worse than the others' median, with the factor."""
    found = {}
    for rank, value in best.items():
        others = [other for each, other in best.items() if each != rank]
        if others and value >= NOTABLE_FACTOR * median(others):
            found[rank] = value / median(others)
    return found


def _verb(sends: bool, receives: bool) -> str:
    if sends and receives:
        return "is"
    return "sends" if sends else "receives"


def _without(values: Directed, unlike: Mapping[int, object]) -> list[float]:
    """Values between ranks that are similar to the others; all values if there are no such ranks."""
    alike = [value for ends, value in values.items() if not unlike.keys() & set(ends)]
    return alike or list(values.values())


def _between(values: Sequence[float], text: Callable[[float], str], notable: float) -> str:
    low, high = min(values), max(values)
    if high >= NOTABLE_FACTOR * low and high >= notable:
        return f"{text(low)} to {text(high)}"
    return text(median(values))


def _obstacles(report: DoctorReport) -> Iterator[str]:
    broken = [f"{first}-{second}" for first, second in (pair.ranks for pair in report.pairs if pair.problems)]
    if broken:
        yield f"{'pair' if len(broken) == 1 else 'pairs'} {' '.join(broken)} cannot communicate"
    if report.join_problem is not None:
        yield "no process group was created"


def _differences(hosts: Sequence[HostReport]) -> Iterator[str]:
    for name in differing(hosts):
        yield f"versions of {name} differ"
    clocks = [host.clock_offset_seconds for host in hosts if host.clock_offset_seconds is not None]
    if clocks and max(clocks) - min(clocks) >= NOTABLE_CLOCK_SECONDS:
        yield f"clocks are {max(clocks) - min(clocks):.2g} s apart"
