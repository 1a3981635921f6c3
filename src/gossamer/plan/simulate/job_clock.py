"""Job clock: the virtual seconds at which the steps of a simulated job end, by the recipe in force."""

from __future__ import annotations

import threading

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.plan.simulate.step_clock import StepClock, StepTimes


class JobClock:
    """One time for all workers, who move in lock step. A step takes what `clock` tells when it begins.

    recipe: in force, which a session may change between two steps.
    """

    def __init__(self, clock: StepClock, recipe: Recipe) -> None:
        self._clock, self.recipe = clock, recipe
        self._steps: list[StepTimes] = []
        self._moments = [0.0]  # at which steps end, in virtual seconds
        self._exchanges: list[float] = []  # seconds of each exchange between steps, which all workers make together
        self._counted = 0  # of them, those within a step's moments
        self._lock = threading.RLock()

    def moment(self, step: int) -> float:
        """The virtual second at which a step ends."""
        with self._lock:
            while len(self._moments) <= step:
                self._steps.append(self._clock.step(self.recipe, self._moments[-1]))
                between = sum(self._exchanges[self._counted :])
                self._counted = len(self._exchanges)
                self._moments.append(self._moments[-1] + between + self._steps[-1].seconds)
            return self._moments[step]

    def times(self, step: int) -> StepTimes:
        """What a step took, the first one being 1."""
        with self._lock:
            self.moment(step)
            return self._steps[step - 1]

    def exchange(self, number: int) -> float:
        """Seconds of the exchange of this number, from 0, that every worker makes between two steps."""
        with self._lock:
            if len(self._exchanges) <= number:
                self._exchanges.append(self._clock.step(self.recipe, self._moments[-1]).exchange_seconds)
            return self._exchanges[number]
