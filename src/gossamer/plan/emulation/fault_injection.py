"""Fault injection on a schedule, in the user's notation: `cut(2, at=10, for_seconds=5)`.

Faults: links that are cut, slow hosts (stragglers), stopped or killed processes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol

from gossamer.base.units import counted
from gossamer.errors import require
from gossamer.plan.emulation.namespaces import EmulationError

EXAMPLES = (
    '"cut(2, at=10, for_seconds=5)", "cut(0, 1, at=10)", "slow(1, factor=5, at=10, for_seconds=20)", '
    '"stop(3, at=10, for_seconds=2)" or "kill(1, at=10)"'
)


class FaultTarget(Protocol):
    """Hosts and their workers, both by number, for faults to act on."""

    def cut(self, host: int, other: int | None) -> None: ...
    def heal(self, host: int, other: int | None) -> None: ...
    def slow(self, host: int, factor: float) -> None: ...
    def stop(self, rank: int) -> None: ...
    def resume(self, rank: int) -> None: ...
    def kill(self, rank: int) -> None: ...


LARGEST_NUMBER = 1e9
SHOWN_CHARACTERS = 200  # of an invalid text

Action = Callable[[FaultTarget], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault with a begin and optionally an end."""

    kind: str  # a key of KINDS
    at: float  # seconds after training began
    for_seconds: float = inf
    numbers: tuple[int, ...]  # of hosts or workers
    needs_network: bool  # whether it needs emulated hosts
    begin: Action
    end: Action | None = None  # None: it happens at one moment
    text: str = ""

    def __post_init__(self) -> None:
        require(0 <= self.at < inf, f"a fault must begin at least 0 seconds after training began, got at={self.at}")
        require(self.for_seconds > 0, f"for_seconds of a fault must be above 0, got {self.for_seconds}")
        whole = all(isinstance(number, int) for number in self.numbers)
        require(whole, f"numbers of hosts and workers must be whole numbers, got {', '.join(map(str, self.numbers))}")


def _cut(host: int, other: int | None = None, *, at: float, for_seconds: float = inf) -> Fault:
    require(host != other, f"cut needs two different hosts, got {host} twice; cut({host}, at={at:g}) cuts it from all")
    return Fault(
        kind="cut",
        at=at,
        for_seconds=for_seconds,
        numbers=(host,) if other is None else (host, other),
        needs_network=True,
        begin=lambda target: target.cut(host, other),
        end=lambda target: target.heal(host, other),
    )


def _slow(host: int, factor: float, *, at: float, for_seconds: float = inf) -> Fault:
    require(0 < factor < inf, f"slow needs a positive, finite factor, got {factor}")
    return Fault(
        kind="slow",
        at=at,
        for_seconds=for_seconds,
        numbers=(host,),
        needs_network=True,
        begin=lambda target: target.slow(host, factor),
        end=lambda target: target.slow(host, 1.0),
    )


def _stop(*ranks: int, at: float, for_seconds: float = inf) -> Fault:
    require(bool(ranks), "stop needs a rank")
    return Fault(
        kind="stop",
        at=at,
        for_seconds=for_seconds,
        numbers=ranks,
        needs_network=False,
        begin=lambda target: _each(target.stop, ranks),
        end=lambda target: _each(target.resume, ranks),
    )


def _kill(*ranks: int, at: float) -> Fault:
    require(bool(ranks), "kill needs a rank")
    return Fault(kind="kill", at=at, numbers=ranks, needs_network=False, begin=lambda target: _each(target.kill, ranks))


def _each(action: Callable[[int], None], numbers: Iterable[int]) -> None:
    for number in numbers:
        action(number)


KINDS: Mapping[str, Callable[..., Fault]] = {"cut": _cut, "slow": _slow, "stop": _stop, "kill": _kill}


def read_fault(text: str, workers: int, servers: int = 0) -> Fault:
    """Parse a fault; the text is never evaluated. Numbers of servers follow those of workers. Raises EmulationError."""
    try:
        kind, arguments, options = _call(text)
        fault = replace(KINDS[kind](*arguments, **options), text=text)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as problem:
        reason = str(problem).removeprefix("_")  # a TypeError names the function
        raise EmulationError(
            f"{text[:SHOWN_CHARACTERS]!r} cannot be read as a fault ({reason}). Write {EXAMPLES}."
        ) from None
    absent = [number for number in fault.numbers if number not in range(workers + servers)]
    if absent:
        known = counted(workers, "worker") + (f" and {counted(servers, 'server')}" if servers else "")
        raise EmulationError(
            f"{text!r}: there is no {absent[0]}; {known} are numbered from 0 to {workers + servers - 1}."
        )
    return fault


def _call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    call = ast.parse(text.strip(), mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in KINDS:
        raise ValueError(f"a fault is one of {', '.join(KINDS)}")
    options = {str(option.arg): _number(option.value) for option in call.keywords}
    return call.func.id, [_number(argument) for argument in call.args], options


def _number(node: ast.expr) -> float:
    value = ast.literal_eval(node)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    if abs(value) > LARGEST_NUMBER and value != inf:
        raise ValueError("a number is too large")
    return value


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The begin or the end of a fault."""

    at: float
    fault: Fault
    verb: str


class Schedule:
    """Applies faults to a target when they are due, and reports each to `report`.

    Where faults of one kind overlap, the end of one leaves the others in force: they are applied again.
    """

    def __init__(self, faults: Iterable[Fault], target: FaultTarget, report: Callable[[str], None]) -> None:
        moments = [moment for fault in faults for moment in _moments(fault)]
        self._coming = sorted(moments, key=lambda moment: (moment.at, moment.verb == "begins"))  # ends first
        self._active: list[Fault] = []  # in order of their begins
        self._target = target
        self._report = report

    def tick(self, seconds: float) -> None:
        """Apply all that is due `seconds` after training began."""
        while self._coming and self._coming[0].at <= seconds:
            moment = self._coming.pop(0)
            if moment.verb == "begins":
                moment.fault.begin(self._target)
                self._active += [moment.fault] if moment.fault.end else []
            else:
                self._end(moment.fault)
            self._report(f"{moment.fault.text} {moment.verb} {seconds:.1f} s after training began.")

    def _end(self, fault: Fault) -> None:
        if fault.end is None:
            return
        self._active = [each for each in self._active if each is not fault]
        fault.end(self._target)
        for other in self._active:
            if other.kind == fault.kind:
                other.begin(self._target)

    @property
    def not_begun(self) -> list[str]:
        """Faults that did not begin, because the run was shorter."""
        return [moment.fault.text for moment in self._coming if moment.verb == "begins"]


def _moments(fault: Fault) -> tuple[Moment, Moment]:
    return (
        Moment(at=fault.at, fault=fault, verb="begins"),
        Moment(at=fault.at + fault.for_seconds, fault=fault, verb="ends"),
    )
