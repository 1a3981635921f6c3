"""Clocks of a simulated job: the network at a virtual second, the seconds of a step, and the end times of steps."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import GossipStage, GradientStage, ServerStage
from gossamer.base.ops import AllGather
from gossamer.base.units import parse_seconds
from gossamer.comm.network import Network, read_network
from gossamer.comm.network.cost.op_cost import seconds
from gossamer.comm.network.parse import NetworkError
from gossamer.plan.estimate.step_time import estimate_step_time, is_predictable, part_seconds, peer_step_seconds
from gossamer.plan.estimate.workload_profile import WorkloadProfile
from gossamer.plan.simulate.worker_isolation import SimulationError
from gossamer.train.traffic.traffic import estimate_traffic

CHANGE = re.compile(r"^(?P<network>.*?)\s+at\s+(?P<moment>.*)$", re.IGNORECASE)


@dataclass(frozen=True)
class NetworkSchedule:
    """Networks, each from a virtual second on: ((0, Network), (30, Network))."""

    changes: tuple[tuple[float, Network], ...]

    def __post_init__(self) -> None:
        moments = [since for since, _ in self.changes]
        if not moments or moments[0] != 0:
            raise NetworkError("a schedule must begin with a network at second 0: 100mbit,20ms; 10mbit at 30s")
        if any(later <= sooner for sooner, later in pairwise(moments)):
            raise NetworkError(
                f"networks change at {', '.join(f'{moment:g} s' for moment in moments[1:])}, which must be in "
                "ascending order. Write them in order: 100mbit; 10mbit at 30s; 100mbit at 60s."
            )

    @classmethod
    def read(cls, text: str, workers: int) -> NetworkSchedule:
        """Parse `100mbit,20ms; 10mbit,20ms at 30s`: a network as for read_network, then each with its time.

        A time is a number of s, min, h, ms or us. Raises NetworkError with the invalid part.
        """
        first, *later = text.split(";")
        return cls(((0.0, read_network(first.strip(), workers)), *(_change(part.strip(), workers) for part in later)))

    def at(self, seconds: float) -> Network:
        """The network at a virtual second."""
        return next(network for since, network in reversed(self.changes) if since <= seconds)


def _change(text: str, workers: int) -> tuple[float, Network]:
    found = CHANGE.match(text)
    try:
        moment = parse_seconds(found["moment"] if found else "")
    except ValueError as error:
        raise NetworkError(
            f"{text!r} has no time: {error} Write the network and its time: 10mbit,20ms at 30s"
        ) from None
    assert found is not None
    return moment, read_network(found["network"], workers)


# -- a step ------------------------------------------------------------------------------------------------------------


TEXT_BYTES = (8, 512)  # of a length, and of a text of usual length


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One step, long-term means over workers. Seconds are virtual."""

    seconds: float
    waiting_seconds: float = 0.0  # training thread waiting for the communication thread
    wire_seconds: float = 0.0  # communication thread on the network, hidden behind computation or not
    codec_seconds: float = 0.0  # communication thread compressing and decoding, hidden or not
    bytes_sent: float = 0.0  # payload
    exchange_seconds: float = 0.0  # of a short text from each worker to all others, between two steps
    part_seconds: tuple[
        float, ...
    ] = ()  # compute time of one part of a step, by rank; empty: as measured while it runs
    #: between the workers, and servers after them; for recipes without common steps. None: without limits
    lines: Network | None = None


class StepClock(Protocol):
    """Provides the step times of a simulated job."""

    def step(self, recipe: Recipe, at: float, shares: tuple[int, ...] | None = None) -> StepTimes:
        """A step that begins at virtual second `at`. Raises GossamerError if its time is unknown.

        shares: of all workers, by rank, of a recipe that divides the work by speed; None: those for their speeds.
        """


class ForecastClock:
    """Estimates of steady steps on the network at their begin.

    profile: measures one worker's step of a recipe, once per recipe; with the speeds of all workers.
    """

    def __init__(self, profile: Callable[[Recipe], WorkloadProfile], network: NetworkSchedule, workers: int) -> None:
        self._profile, self._network, self._workers = profile, network, workers
        self._profiles: dict[str, WorkloadProfile] = {}
        self._steps: dict[tuple[str, str, tuple[int, ...] | None], StepTimes] = {}

    def step(self, recipe: Recipe, at: float, shares: tuple[int, ...] | None = None) -> StepTimes:
        network = self._network.at(at)
        key = repr(recipe), network.text, shares
        if key not in self._steps:
            self._steps[key] = self._estimated(recipe, network, shares)
        return self._steps[key]

    def profile(self, recipe: Recipe) -> WorkloadProfile:
        """Profile of one worker's step of this recipe, without a network."""
        if repr(recipe) not in self._profiles:
            self._profiles[repr(recipe)] = self._profile(recipe)
        return self._profiles[repr(recipe)]

    def _estimated(self, recipe: Recipe, network: Network, shares: tuple[int, ...] | None) -> StepTimes:
        measured = self.profile(recipe)
        if runs_apart(recipe):
            seconds = peer_step_seconds(recipe, measured, self._workers)
            return StepTimes(
                seconds=min(seconds),
                exchange_seconds=self._exchange_seconds(network),
                part_seconds=seconds,
                lines=network,
            )
        found = estimate_step_time(recipe, measured, network, self._workers, shares=shares)
        return StepTimes(
            seconds=found.step_seconds,
            waiting_seconds=found.waiting_seconds,
            wire_seconds=found.wire_seconds,
            codec_seconds=found.codec_seconds,
            bytes_sent=estimate_traffic(recipe, measured.model, workers=self._workers).bytes_sent,
            exchange_seconds=self._exchange_seconds(network),
            part_seconds=part_seconds(recipe.strategy.steady_stage, measured, self._workers),
        )

    def _exchange_seconds(self, network: Network) -> float:
        """First all workers exchange the lengths of their texts, then the texts."""
        if self._workers == 1:
            return 0.0
        there = network.among(range(self._workers))
        return sum(seconds(AllGather((torch.empty(size // 4, device="meta"),)), there) for size in TEXT_BYTES)


def runs_apart(recipe: Recipe) -> bool:
    """Whether workers of a recipe exchange messages with servers or single peers, each in its own time.

    Raises SimulationError for a recipe that has neither these nor common steps.
    """
    stage = recipe.strategy.steady_stage
    if is_predictable(recipe):
        return False
    if isinstance(stage, ServerStage | GossipStage):
        return True
    raise SimulationError(f"{recipe} cannot be simulated: its clients are. Write gossamer federate SCRIPT")


# -- a job -------------------------------------------------------------------------------------------------------------


class JobClock:
    """One time for all workers, which are in lock step. `clock` gives the duration of a step at its begin.

    A step is one of the common schedule. Where local steps follow the speeds, a step of a slow worker covers several.

    recipe: the current one, which a session may change between two steps.
    """

    def __init__(self, clock: StepClock, recipe: Recipe, workers: int = 1) -> None:
        self._clock, self.recipe, self._workers = clock, recipe, workers
        self._steps: list[StepTimes] = []
        self._moments = [0.0]  # end times of steps, in virtual seconds
        self._shares: list[tuple[int, tuple[int, ...]]] = []  # (step after which they apply, by rank), in order
        self._exchanges: list[float] = []  # seconds of each exchange of all workers between steps
        self._counted = 0  # number of exchanges included in step times
        self._lock = threading.RLock()

    def moment(self, step: int) -> float:
        """The virtual second at which a step ends."""
        with self._lock:
            while len(self._moments) <= step:
                shares = self.shares(len(self._moments))
                self._steps.append(self._clock.step(self.recipe, self._moments[-1], shares))
                between = sum(self._exchanges[self._counted :])
                self._counted = len(self._exchanges)
                self._moments.append(self._moments[-1] + between + self._steps[-1].seconds)
            return self._moments[step]

    def shares(self, step: int) -> tuple[int, ...] | None:
        """The parts of a step of each worker, by rank; None for a recipe that does not divide the work by speed."""
        stage = self.recipe.strategy.steady_stage
        if not stage.follows_speed:
            return None
        equal = stage.parts_at([1.0] * self._workers)  # until the speeds are measured
        return next((shares for since, shares in reversed(self._shares) if since < step), equal)

    def change_shares(self, number: int, step: int, shares: tuple[int, ...]) -> None:
        """Every worker reports the same changes, in the same order. number: of the change, from 0."""
        with self._lock:
            if number == len(self._shares):
                self._shares.append((step, shares))

    @property
    def local_period(self) -> int | None:
        """The period of local steps by speed; None for another recipe."""
        stage = self.recipe.strategy.steady_stage
        return stage.schedule.period if stage.follows_speed and stage.local_parameters else None

    def parts(self, rank: int, step: int) -> int:
        """Parts of a step that a worker computes."""
        stage, shares = self.recipe.strategy.steady_stage, self.shares(step)
        if shares is None:
            shares = stage.shares(self._workers, step - 1) if isinstance(stage, GradientStage) else None
        return 1 if shares is None else shares[rank]

    def times(self, step: int) -> StepTimes:
        """Times of a step; the first one is 1."""
        with self._lock:
            self.moment(step)
            return self._steps[step - 1]

    def exchange(self, number: int) -> float:
        """Seconds of the exchange with this number, from 0, of all workers between two steps."""
        with self._lock:
            if len(self._exchanges) <= number:
                shares = self.shares(len(self._moments))
                self._exchanges.append(self._clock.step(self.recipe, self._moments[-1], shares).exchange_seconds)
            return self._exchanges[number]
