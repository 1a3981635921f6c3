"""Strategy, its three families, and the stages that a training passes through, each of one of four kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NoReturn, Self

import torch
from torch import Tensor
from torch.optim import Adam

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.compressors.ownership import Ownership, UpdateRule
from gossamer.algorithms.gossip.rules import Memory as Memory
from gossamer.algorithms.gossip.rules import MixingRule
from gossamer.algorithms.strategies.global_batch import dealt
from gossamer.algorithms.strategies.moment_rounds import ALWAYS, AVERAGE, KEEP, NEVER, MomentRounds
from gossamer.algorithms.strategies.schedule import PeriodicSchedule, SyncRound
from gossamer.algorithms.topologies import Topology
from gossamer.base.term import Term
from gossamer.errors import AttachError, RecipeError

AGREED = "agreed"  # the key of the parameters that all workers hold alike
FROM = "from"  # where this worker's parameters would be without the steps that it has not offered yet


class Strategy(Term, ABC):
    """When workers synchronize. Subclasses are plain hyperparameters and pure rules; the session acts on them."""

    kind = "strategy"

    @property
    @abstractmethod
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the training, by their first backward pass; the first begins at 0."""

    @property
    def steady_stage(self) -> Stage:
        """The last stage, which goes on until the end."""
        return self.stages[-1]

    @property
    def resends_losses(self) -> bool:
        """Whether a compressor's losses are offered again anyway, to each receiver by itself: recipes then add neither
        Feedback nor Sharded."""
        return False

    @property
    def agrees_on_means(self) -> bool:
        """Whether all workers agree on means, of which each could average a part for all: a recipe may add Sharded."""
        return True

    @property
    def ownership(self) -> Ownership | None:
        """The rule by which parameters move in the optimizer's place; None leaves its step to the optimizer."""
        return None

    def among(self, world: int) -> Self:
        """As so many workers train, for estimates: where the schedule follows their number, that of this one."""
        return self

    def caution(self, compressor: Compressor) -> str | None:
        """What to tell who combines it with this compressor: it runs, and may end worse than either alone."""
        return None

    def check(self, compressor: Compressor, topology: Topology) -> None:
        """Raise RecipeError where these do not go together with it."""
        if not topology.agrees:
            raise RecipeError(
                f"{topology!r} says who is whose neighbour, and with {self!r} all workers agree on one mean, for which "
                f"there is no such collective. Write Gossip() + {topology!r}, or {self!r} + Ring(), Exponential() or "
                "Hierarchy(), or leave it out."
            )


class AveragingStrategy(Strategy):
    """Local training with parameter averaging: all workers agree on parameters from time to time.

    Its rules see flat tensors (n,), the parameters of one bucket side by side. Pseudo-gradients travel, differences to
    parameters that all workers know, since those are small and may be compressed; subtracting the mean difference is
    averaging the parameters.
    """

    @property
    @abstractmethod
    def schedule(self) -> PeriodicSchedule:
        """When which fragment of the parameters leaves and lands."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (AveragingStage(0, self),)

    @property
    def needs_own(self) -> bool:
        """Whether `land` asks for this worker's own contribution."""
        return False

    def merges_own(self, compressor: Compressor) -> bool:
        """Whether what this compressor leaves out stays in the parameters of the worker that made it, so that what is
        merged is the mean of their own: `AGREED` lags behind it by all that was never sent."""
        return False

    @property
    def radial(self) -> bool:
        """Whether lengths and directions of pseudo-gradients are averaged apart: see `radial_mean`."""
        return False

    @property
    def on_merge(self) -> str:
        """The fate of the optimizer's momenta when parameters land: KEEP, ALIGN, AVERAGE or RESET."""
        return KEEP

    @property
    def moments(self) -> MomentRounds:
        """In which rounds momenta are averaged."""
        return ALWAYS if self.on_merge == AVERAGE else NEVER

    @property
    def ownership(self) -> Ownership | None:
        if not self.moments.shared_divisor:
            return None
        return Ownership(optimizers=(Adam,), rule=UpdateRule.SHARED_VARIANCE)

    @property
    def kept_share(self) -> float:
        """How much of its own averaged state, such as BatchNorm's statistics, a worker keeps."""
        return 0.0

    @abstractmethod
    def begin(self, parameters: Tensor) -> Memory:
        """A worker's first memory; `AGREED` among it, which is the same on every worker at all times."""

    def offer(self, parameters: Tensor, memory: Memory) -> None:
        """Overwrite `parameters`, a copy, with the pseudo-gradient that leaves: positive is downhill."""
        torch.sub(memory[AGREED], parameters, out=parameters)

    @abstractmethod
    def land(self, parameters: Tensor, memory: Memory, mean: Tensor, own: Tensor | None) -> None:
        """Overwrite `parameters` with what they become now that the mean of what was offered is here."""

    def restart(self, parameters: Tensor, memory: Memory) -> None:
        """Another set of workers goes on from the same parameters."""
        memory.update(self.begin(parameters))

    def undo(self, memory: Memory, offered: Tensor) -> None:
        """Revert an offer that was not agreed upon: it is offered again."""


class GossipStrategy(Strategy):
    """Local training with gossip: workers average their parameters with neighbors of a topology."""

    period: int

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (GossipStage(0, self),)

    @property
    def resends_losses(self) -> bool:
        return True

    @property
    def schedule(self) -> PeriodicSchedule:
        """When parameters are mixed."""
        return PeriodicSchedule(self.period)

    def rounds_apart(self, world: int) -> int:
        """In every how many rounds all workers hear of each other: about every `world` steps, in which a
        worker then sends as many messages more as it would to one more neighbor."""
        return -(-world // self.period)

    @property
    @abstractmethod
    def in_lock_step(self) -> bool:
        """Whether all workers make the same rounds."""

    @abstractmethod
    def rule(self, compressor: Compressor) -> MixingRule:
        """How neighbors mix each other's parameters."""


class ServerStrategy(Strategy):
    """Training on parameter servers: workers push gradients and pull parameters."""

    mode: str
    staleness: int | None
    shards: int | None  # servers over which the parameters are spread; None: one per worker or server

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (ServerStage(0, self),)

    @property
    def agrees_on_means(self) -> bool:
        return False


@dataclass(frozen=True)
class _AnyStage(ABC):
    """Properties that every kind of stage has."""

    start: int  # its first backward pass

    local_parameters: ClassVar[bool] = False  # whether workers hold different parameters between rounds
    communicates: ClassVar[bool] = True  # whether anything is sent for training

    @property
    @abstractmethod
    def schedule(self) -> PeriodicSchedule:
        """When rounds leave and land; gradients that nothing delays do both within one backward pass."""

    @property
    def period_rounds(self) -> list[SyncRound]:
        """One period of its schedule, in steps since the training began."""
        return [
            each._replace(launch=each.launch + self.start, landing=each.landing + self.start)
            for each in self.schedule.period_rounds
        ]

    @property
    def scheduled(self) -> bool:
        """Whether its rounds leave and land between steps, and not within a backward pass."""
        return self.local_parameters

    @property
    def averages_gradients_at_once(self) -> bool:
        """Whether gradients are averaged within their own backward pass, by all workers or by those of a site."""
        return self.per_site is not None

    @property
    def in_lock_step(self) -> bool:
        """Whether all workers issue the same collective operations together."""
        return True

    @property
    def per_site(self) -> int | None:
        """By how many neighboring workers gradients are averaged in every step beside the schedule, if so."""
        return None

    @property
    def passes_per_step(self) -> int:
        """How many backward passes one step of the optimizer sees."""
        return 1

    @property
    def averages_optimizer_state(self) -> bool:
        """Whether the optimizer's per-parameter state is averaged along with the parameters."""
        return False

    def gradient_group(self, world: int) -> int:
        """How many of `world` workers average their gradients in a step; 1: each uses its own."""
        return 1 if self.per_site is None else min(world, self.per_site)


@dataclass(frozen=True)
class GradientStage(_AnyStage):
    """Gradients are averaged by all workers in every step."""

    accumulate: int = 1  # backward passes per step
    delay: int = 0  # steps between computing a mean and using it
    batches: int | None = None  # of a step, dealt out among all workers; None: each makes `accumulate`

    @property
    def accumulates(self) -> bool:
        """Whether some workers make several backward passes for a step."""
        return self.batches is not None or self.accumulate > 1

    def passes(self, world: int, step: int) -> tuple[int, ...]:
        """Backward passes for a step, by rank; 1 at least, without which a worker's loop could take no part in it."""
        if self.batches is None:
            return (self.accumulate,) * world
        return tuple(max(each, 1) for each in dealt(self.batches, world, step))

    def crowded(self, world: int) -> str | None:
        """What to tell where a step has more samples than it should, since so many workers are there."""
        if self.batches is None or world <= self.batches:
            return None
        return (
            f"a global batch of {self.batches} batches is too small for {world} workers: each makes one backward pass "
            f"a step, which has {world} batches while they are there. `gossamer resize {self.batches}` makes it fit"
        )

    @property
    def schedule(self) -> PeriodicSchedule:
        return PeriodicSchedule(self.accumulate, delay=self.delay)

    @property
    def scheduled(self) -> bool:
        return self.delay > 0

    @property
    def averages_gradients_at_once(self) -> bool:
        return self.delay == 0

    @property
    def passes_per_step(self) -> int:
        return self.accumulate

    def gradient_group(self, world: int) -> int:
        return world


@dataclass(frozen=True)
class AveragingStage(_AnyStage):
    """Parameters are averaged by all workers from time to time."""

    strategy: AveragingStrategy
    per_site: int | None = None

    local_parameters = True

    @property
    def schedule(self) -> PeriodicSchedule:
        return self.strategy.schedule

    @property
    def averages_optimizer_state(self) -> bool:
        return self.strategy.moments.any

    def site_size(self, world: int) -> int:
        """How many workers average their gradients. Raises AttachError where sites would have different sizes."""
        if self.per_site is None or world % self.per_site:
            raise AttachError(
                f"{world} workers do not make sites of {self.per_site} each, and some would average over fewer. Run a "
                f"multiple of {self.per_site} workers, or choose another per_site."
            )
        return self.per_site


@dataclass(frozen=True)
class GossipStage(_AnyStage):
    """Parameters are averaged with neighbors only."""

    strategy: GossipStrategy

    local_parameters = True

    @property
    def schedule(self) -> PeriodicSchedule:
        return self.strategy.schedule

    @property
    def in_lock_step(self) -> bool:
        return self.strategy.in_lock_step


@dataclass(frozen=True)
class SilentStage(_AnyStage):
    """Each worker trains by itself, as in a world of one."""

    local_parameters = True
    communicates = False

    @property
    def schedule(self) -> PeriodicSchedule:
        return PeriodicSchedule(1)


@dataclass(frozen=True)
class ServerStage(_AnyStage):
    """Parameters are held by servers."""

    strategy: ServerStrategy

    @property
    def schedule(self) -> PeriodicSchedule:
        return PeriodicSchedule(1)

    @property
    def in_lock_step(self) -> bool:
        return False


@dataclass(frozen=True)
class FederatedStage(_AnyStage):
    """Parameters are held by a server, and trained by devices that come and go; no session takes part in it."""

    strategy: Strategy

    local_parameters = True

    @property
    def schedule(self) -> PeriodicSchedule:
        return PeriodicSchedule(1)

    @property
    def in_lock_step(self) -> bool:
        return False

    def refuse(self) -> NoReturn:
        """Raise AttachError: what a session would do, a federation does by itself."""
        raise AttachError(
            f"{self.strategy!r} is for devices that keep their data and come and go, and a session is attached to "
            "workers that stay. Run `gossamer federate --recipe ... SCRIPT`, or write LocalSGD(period=8) here."
        )


Stage = GradientStage | AveragingStage | GossipStage | SilentStage | ServerStage | FederatedStage
