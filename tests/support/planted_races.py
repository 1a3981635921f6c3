"""Planted races: jobs whose loss curves are known, on the cost of a step that is known; no model, no network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gossamer.plan.advise.curves import Floats, LossCurve

MOST_STEPS = 4000


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A recipe's truth: loss(step) = floor + height / (1 + efficiency * step / scale) ** 0.7.

    efficiency: how much a step of it is worth, of one of Dense's. own_noise, batch_noise: standard deviations, the
    second shared by all recipes at the same step.
    """

    step_seconds: float
    efficiency: float = 1.0
    floor: float = 1.0
    height: float = 4.0
    scale: float = 30.0
    own_noise: float = 0.01
    batch_noise: float = 0.1
    ends_at: int = MOST_STEPS
    fails_at: int = 10 * MOST_STEPS
    bytes_per_step: float = 1e6
    best_factor: float = 1.0
    cost: float = 1.0  # of this machine's seconds, for a step

    def loss(self, steps: Floats, factor: float = 1.0) -> Floats:
        worth = self.efficiency * (1 - 0.15 * abs(np.log2(factor / self.best_factor)))
        return self.floor + self.height / (1 + worth * steps / self.scale) ** 0.7

    def speedup_over(self, other: Planted) -> float:
        """Seconds of the other over its own to the same loss: exact, since both curves are stretches of one."""
        return other.step_seconds / self.step_seconds * self.efficiency / other.efficiency


@dataclass(frozen=True)
class Draws:
    """Noise of one race: batches' by step, and each recipe's own."""

    seed: int

    @cached_property
    def batches(self) -> Floats:
        return np.random.default_rng([self.seed, 1]).normal(size=MOST_STEPS + 1)

    def own(self, name: str) -> Floats:
        key = sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 2**32
        return np.random.default_rng([self.seed, 2, key]).normal(size=MOST_STEPS + 1)

    def curve(self, name: str, planted: Planted, steps: int, factor: float = 1.0) -> LossCurve:
        made = np.arange(1, steps + 1, dtype=float)
        noise = planted.batch_noise * self.batches[1 : steps + 1] + planted.own_noise * self.own(name)[1 : steps + 1]
        return LossCurve(made, made * planted.step_seconds, planted.loss(made, factor) + noise)


@dataclass
class PlantedProgress:
    steps: int
    seconds: float
    metrics: Mapping[str, list[tuple[int, float, float]]]
    bytes_sent: float
    ended: bool
    failure: str | None
    recipe: str


@dataclass
class Ledger:
    """What all jobs of a race made together."""

    steps: int = 0
    seconds: float = 0.0
    open: set[str] = field(default_factory=set)
    most_open: int = 0


class PlantedJob:
    """The interface of a simulated job, with a planted curve."""

    def __init__(self, recipe: str, factor: float, planted: Planted, draws: Draws, ledger: Ledger) -> None:
        self.recipe, self.planted, self._ledger = recipe, planted, ledger
        self._name = f"{recipe} x {factor}"
        self._curve = draws.curve(recipe, planted, min(planted.ends_at, MOST_STEPS), factor).points
        self._made = 0
        ledger.open.add(self._name)
        ledger.most_open = max(ledger.most_open, len(ledger.open))

    def advance(self, *, steps: int | None = None, seconds: float | None = None) -> PlantedProgress:
        wanted = steps if steps is not None else int((seconds or 0.0) / self.planted.step_seconds + 1e-9)
        wanted = max(self._made, min(wanted, len(self._curve), self.planted.fails_at - 1))
        self._ledger.steps += wanted - self._made
        self._ledger.seconds += (wanted - self._made) * self.planted.cost
        self._made = wanted
        failed = wanted + 1 == self.planted.fails_at
        return PlantedProgress(
            steps=self._made,
            seconds=self._made * self.planted.step_seconds,
            metrics={"loss": self._curve[: self._made]},
            bytes_sent=self._made * self.planted.bytes_per_step,
            ended=self._made == len(self._curve),
            failure=f"loss is nan at step {wanted + 1}" if failed else None,
            recipe=self.recipe,
        )

    def close(self) -> None:
        self._ledger.open.discard(self._name)


@dataclass
class PlantedField:
    """A job factory, and the clock by which a race's budget is spent: a second a step, or what is planted."""

    recipes: Mapping[str, Planted]
    seed: int = 0
    ledger: Ledger = field(default_factory=Ledger)

    def start(self, recipe: str, factor: float) -> PlantedJob:
        return PlantedJob(recipe, factor, self.recipes[recipe], Draws(self.seed), self.ledger)

    def now(self) -> float:
        return self.ledger.seconds
