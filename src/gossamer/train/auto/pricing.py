"""Pricing: estimated seconds of a step on every rung, from its bytes and messages and the measured line.

busy    = codec + bytes * seconds_per_byte + trips * trip_seconds         of the communication thread
waiting = even_wait(busy, shares, hidden)          as in a simulated step of buckets with these shares
step    = computing + waiting                      with local steps: all of busy is waited for, once per period
loss    = step * steps of the rung to a loss, relative to Dense()

On a known line, steps are at most 6 % shorter than simulated ones, since headers are not counted. A fitted line
includes them, since it is fitted to the time per payload byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gossamer.comm.network.cost.step_simulator import BACKWARD_SHARE, even_wait
from gossamer.train.auto.network_fit import NO_FACTORS, Factors, FittedLine, StepWindow
from gossamer.train.auto.rung_cost import RungCost

#: Share of the communication thread's time: if more is waited for, the rest is all that can be hidden
SURE_WAITING = 0.1


@dataclass(frozen=True, kw_only=True)
class RungPrice:
    """Estimated times of a rung."""

    name: str
    step_seconds: float
    loss_seconds: float  # per step of Dense() towards a loss


def hidden_seconds(window: StepWindow, cost: RungCost) -> float:
    """Seconds of a step's communication that overlap with the backward pass."""
    assumed = BACKWARD_SHARE * window.computing * (1 - cost.shares[0])
    if cost.local:
        return assumed
    busy = window.wire + window.codec
    seen = max(0.0, busy - window.waiting)
    return seen if window.waiting > SURE_WAITING * busy else max(seen, assumed)


def step_seconds(
    cost: RungCost, line: FittedLine, computing: float, hidden: float, codec_seconds: float, factor: float = 1.0
) -> float:
    """Estimate a step. factor: for the wire time, calibrated when the rung was tried."""
    busy = codec_seconds + factor * line.wire_seconds(cost.bytes_sent, cost.trips)
    return computing + (busy if cost.local else even_wait(busy, cost.shares, hidden))


def price(
    costs: Sequence[RungCost],
    here: RungCost,
    window: StepWindow,
    line: FittedLine,
    codec_seconds: Mapping[str, float],
    caution: float = 1.0,
    factors: Factors = NO_FACTORS,
) -> list[RungPrice]:
    """Price all rungs, given a window measured on `here`.

    Args:
        codec_seconds, factors: of rungs that were tried in this run, by name.
        caution: factor for the additional steps of compressed gradients relative to Dense().
    """
    hidden, found = hidden_seconds(window, here), []
    for cost in costs:
        codec = codec_seconds.get(cost.name, cost.codec_seconds)
        seconds = step_seconds(cost, line, window.computing, hidden, codec, factors.get(cost.name, 1.0))
        steps = cost.steps if cost.local else 1 + caution * (cost.steps - 1)
        found.append(RungPrice(name=cost.name, step_seconds=seconds, loss_seconds=seconds * steps))
    return found
