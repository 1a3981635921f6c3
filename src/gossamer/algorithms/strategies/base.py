"""Strategy, its three families, and the stages of a training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
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
from gossamer.algorithms.strategies.shares_by_speed import next_shares, next_steps
from gossamer.algorithms.topologies import Topology
from gossamer.base.term import Inelastic, Term
from gossamer.errors import AttachError, RecipeError

AGREED = "agreed"  # key of the parameters that are equal on all workers
FROM = "from"  # key of this worker's parameters without the steps that it has not offered yet


class Strategy(Term, ABC):
    """Base class of strategies: when workers synchronize.

    Subclasses are frozen dataclasses of hyperparameters with pure update rules; the session runs them. Add terms with
    `+`.

    Example:
        >>> gossamer.LocalSGD(period=8) + gossamer.Int8()
        LocalSGD(period=8) + Int8()
    """

    kind = "strategy"
    uses_servers: ClassVar[bool] = False  # whether servers hold the parameters

    @property
    @abstractmethod
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the training, by their first backward pass; the first starts at 0."""

    @property
    def steady_stage(self) -> Stage:
        """The last stage, which lasts until the end of the training."""
        return self.stages[-1]

    @property
    def resends_losses(self) -> bool:
        """Whether compression errors are sent again without Feedback, to each receiver separately.

        Recipes then add neither Feedback nor Sharded.
        """
        return False

    @property
    def agrees_on_means(self) -> bool:
        """Whether all workers use the same means, so that each could average a part for all: a recipe may then add
        Sharded.
        """
        return True

    @property
    def ownership(self) -> Ownership | None:
        """The rule that updates parameters in place of the optimizer; None leaves the step to the optimizer."""
        return None

    @property
    def local_parameters(self) -> bool:
        """Whether the workers' parameters differ between rounds, in one of the stages."""
        return any(stage.local_parameters for stage in self.stages)

    @property
    def inelastic(self) -> Inelastic | None:
        if any(stage.per_site is not None for stage in self.stages):
            return Inelastic("sites would change with every worker that joins or leaves", "Leave out per_site")
        return None

    def check_sizes(self, sizes: Collection[int], compressor: Compressor, topology: Topology) -> None:
        """Raise AttachError if an elastic run with one of these numbers of workers cannot use the strategy."""

    def among(self, world: int) -> Self:
        """Return the strategy as `world` workers run it, for estimates, if its schedule depends on their number."""
        return self

    def caution(self, compressor: Compressor) -> str | None:
        """Return a warning if the combination with this compressor may converge worse than either alone; otherwise
        None.
        """
        return None

    def check(self, compressor: Compressor, topology: Topology) -> None:
        """Raise RecipeError if the strategy cannot be combined with this compressor and topology."""
        if not topology.agrees:
            raise RecipeError(
                f"{topology!r} selects neighbors, and {self!r} needs one mean over all workers, for which "
                f"{topology!r} has no collective. Write Gossip() + {topology!r}, or {self!r} + Ring(), Exponential() "
                "or Hierarchy(), or omit the topology."
            )


class AveragingStrategy(Strategy):
    """Local training with parameter averaging: all workers periodically average their parameters.

    Its rules take flat tensors (n,), the concatenated parameters of one bucket. Workers send pseudo-gradients, the
    differences to parameters that are equal on all workers: they are small and can be compressed. Subtracting the mean
    pseudo-gradient averages the parameters.
    """

    @property
    @abstractmethod
    def schedule(self) -> PeriodicSchedule:
        """The steps at which each fragment of the parameters is sent and its mean applied."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (AveragingStage(0, self),)

    @property
    def needs_own(self) -> bool:
        """Whether `land` needs this worker's own contribution."""
        return False

    @property
    def reads_parameters(self) -> bool:
        """Whether `land` reads this worker's parameters. If not, the caller may pass the mean's memory for them."""
        return True

    def merges_own(self, compressor: Compressor) -> bool:
        """Whether entries that this compressor omits stay in the parameters of their worker.

        The merged parameters are then the mean of the workers' own; `AGREED` lags behind by all entries never sent.
        """
        return False

    @property
    def radial(self) -> bool:
        """Whether norms and directions of pseudo-gradients are averaged separately: see `diloco`."""
        return False

    @property
    def on_merge(self) -> str:
        """The handling of the optimizer's moments when parameters are merged: KEEP, ALIGN, AVERAGE or RESET."""
        return KEEP

    @property
    def moments(self) -> MomentRounds:
        """The rounds in which moments are averaged."""
        return ALWAYS if self.on_merge == AVERAGE else NEVER

    @property
    def ownership(self) -> Ownership | None:
        if not self.moments.shared_divisor:
            return None
        return Ownership(optimizers=(Adam,), rule=UpdateRule.SHARED_VARIANCE)

    @property
    def follows_speed(self) -> bool:
        """Whether workers make numbers of local steps in proportion to their speeds."""
        return False

    @property
    def kept_share(self) -> float:
        """The weight of a worker's own averaged buffers, such as BatchNorm's statistics, at a merge."""
        return 0.0

    @abstractmethod
    def begin(self, parameters: Tensor) -> Memory:
        """Return the initial state; its `AGREED` is equal on every worker at all times."""

    def offer(self, parameters: Tensor, memory: Memory) -> None:
        """Overwrite `parameters`, a copy, with the pseudo-gradient to send; positive is the descent direction."""
        torch.sub(memory[AGREED], parameters, out=parameters)

    @abstractmethod
    def land(self, parameters: Tensor, memory: Memory, mean: Tensor, own: Tensor | None) -> None:
        """Overwrite `parameters` with their update from the mean of the offered pseudo-gradients."""

    def restart(self, parameters: Tensor, memory: Memory) -> None:
        """Restart from the same parameters with another set of workers."""
        memory.update(self.begin(parameters))

    def undo(self, memory: Memory, offered: Tensor) -> None:
        """Revert an offer of a failed round, so that it is offered again."""


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
        """The steps at which parameters are mixed."""
        return PeriodicSchedule(self.period)

    def rounds_apart(self, world: int) -> int:
        """Return the number of rounds between exchanges of all workers' reports: about `world` steps.

        In such a round a worker sends about as many additional messages as for one more neighbor.
        """
        return -(-world // self.period)

    @property
    @abstractmethod
    def in_lock_step(self) -> bool:
        """Whether all workers make the same rounds."""

    @property
    def inelastic(self) -> Inelastic | None:
        if self.in_lock_step:
            return None
        return Inelastic(
            "pairs exchange without lock step, and tolerate losses without an elastic run",
            "Write gossamer run --workers 4 --max-restarts 3",
        )

    def check_sizes(self, sizes: Collection[int], compressor: Compressor, topology: Topology) -> None:
        rule = self.rule(compressor)
        for size in sizes:
            try:
                rule.check(topology, size, seed=0)
            except AttachError as error:
                raise AttachError(f"it may have {size} workers: {error}") from error

    @abstractmethod
    def rule(self, compressor: Compressor) -> MixingRule:
        """Return the rule by which neighbors mix their parameters."""


class ServerStrategy(Strategy):
    """Training on parameter servers: workers push gradients or changes of parameters, and pull parameters."""

    mode: str
    shards: int | None  # servers that share the parameters; None: one per worker or server
    push: Compressor | None  # None: the recipe's
    pull: Compressor | None  # of differences; None: uncompressed parameters

    uses_servers = True

    @property
    def inelastic(self) -> Inelastic | None:
        return Inelastic(
            "its servers count on workers that were there from the beginning",
            "Write AsyncDiLoCo(period=24) with --servers 1",
        )

    def check_sizes(self, sizes: Collection[int], compressor: Compressor, topology: Topology) -> None:
        self.check_workers(max(sizes))

    @property
    def rounds_ahead(self) -> int:
        """The staleness bound: the largest lead of a worker over the slowest, in steps."""
        return 0

    @property
    def schedule(self) -> PeriodicSchedule:
        """The steps after which a worker sends each fragment."""
        return PeriodicSchedule(1)

    def deltas_per_pull(self, workers: int) -> int:
        """Return the number of compressed differences in an answer to one of `workers` workers of equal speed."""
        return workers if self.rounds_ahead else 1

    def check_workers(self, world: int) -> None:
        """Raise AttachError if the strategy cannot run with `world` workers."""

    def parts_at(self, seconds: Sequence[float]) -> tuple[int, ...] | None:
        """Return the pushes of each worker in a round, by rank; None if no worker waits for another.

        seconds: compute time of a step, by rank.
        """
        return None

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (ServerStage(0, self),)

    @property
    def agrees_on_means(self) -> bool:
        return False


@dataclass(frozen=True)
class _AnyStage(ABC):
    """Properties of every kind of stage."""

    start: int  # first backward pass

    local_parameters: ClassVar[bool] = False  # whether the workers' parameters differ between rounds
    communicates: ClassVar[bool] = True  # whether anything is sent for training

    @property
    def follows_speed(self) -> bool:
        """Whether each worker's share of the work follows its measured speed."""
        return False

    @property
    @abstractmethod
    def schedule(self) -> PeriodicSchedule:
        """The steps at which rounds start and land; without a delay, both are in one backward pass."""

    @property
    def period_rounds(self) -> list[SyncRound]:
        """One period of the schedule, in steps since the start of the training."""
        return [
            each._replace(launch=each.launch + self.start, landing=each.landing + self.start)
            for each in self.schedule.period_rounds
        ]

    @property
    def scheduled(self) -> bool:
        """Whether rounds start and land between steps, instead of in a backward pass."""
        return self.local_parameters

    @property
    def averages_gradients_at_once(self) -> bool:
        """Whether gradients are averaged in their own backward pass, by all workers or by those of a site."""
        return self.per_site is not None

    @property
    def in_lock_step(self) -> bool:
        """Whether all workers issue the same collective operations together."""
        return True

    @property
    def per_site(self) -> int | None:
        """The number of adjacent workers that average gradients in every step in addition to the schedule; None: no
        sites.
        """
        return None

    @property
    def passes_per_step(self) -> int:
        """Backward passes per optimizer step."""
        return 1

    @property
    def averages_optimizer_state(self) -> bool:
        """Whether the optimizer's per-parameter state is averaged with the parameters."""
        return False

    def gradient_group(self, world: int) -> int:
        """Return the number of `world` workers that average their gradients in a step; 1: each uses its own."""
        return 1 if self.per_site is None else min(world, self.per_site)

    def parts_at(self, seconds: Sequence[float]) -> tuple[int, ...] | None:
        """Return the parts of a step, or the local steps of a period, of each worker, by rank, once their speeds are
        known; None if no worker waits for another.

        seconds: compute time of one part, by rank.
        """
        return (self.schedule.period,) * len(seconds)


@dataclass(frozen=True)
class GradientStage(_AnyStage):
    """All workers average their gradients in every step."""

    accumulate: int = 1  # backward passes per step
    delay: int = 0  # steps between computing a mean and using it
    batches: int | None = None  # per step, dealt out among all workers; None: each makes `accumulate`
    batch: int = 1  # samples of one of `batches`
    balance: bool = False  # whether a worker's share of `batches` follows its speed
    in_one_pass: bool = False  # whether a worker computes its whole share in one backward pass

    @property
    def follows_speed(self) -> bool:
        return self.balance

    @property
    def accumulates(self) -> bool:
        """Whether a worker may make several backward passes per step."""
        return (self.batches is not None and not self.in_one_pass) or self.accumulate > 1

    def shares(self, world: int, step: int) -> tuple[int, ...]:
        """Return the parts of a step, by rank, of workers with equal speeds: backward passes, or samples of the one
        pass. At least 1, in which the worker's loop communicates."""
        if self.batches is None:
            return (self.accumulate,) * world
        return tuple(max(each, 1) for each in dealt(self.batches, world, step))

    def parts_at(self, seconds: Sequence[float]) -> tuple[int, ...]:
        equal = self.shares(len(seconds), 0)
        return next_shares(equal, seconds) if self.balance else equal

    def crowded(self, world: int) -> str | None:
        """Return a warning if a step has more samples than the global batch, because of the number of workers."""
        if self.batches is None or world <= self.batches:
            return None
        return (
            f"a global batch of {self.batches} batches is too small for {world} workers: each makes at least one "
            f"backward pass per step, so a step has {world} batches. Run `gossamer resize {self.batches}` to fit it"
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
    """All workers average their parameters periodically."""

    strategy: AveragingStrategy
    per_site: int | None = None

    local_parameters = True

    @property
    def schedule(self) -> PeriodicSchedule:
        return self.strategy.schedule

    @property
    def averages_optimizer_state(self) -> bool:
        return self.strategy.moments.any

    @property
    def follows_speed(self) -> bool:
        return self.strategy.follows_speed

    def parts_at(self, seconds: Sequence[float]) -> tuple[int, ...]:
        equal = (self.schedule.period,) * len(seconds)
        return next_steps(equal, seconds, self.schedule.period) if self.follows_speed else equal

    def site_size(self, world: int) -> int:
        """Return the number of workers of a site. Raises AttachError if sites would have different sizes."""
        if self.per_site is None or world % self.per_site:
            raise AttachError(
                f"{world} workers cannot be divided into sites of {self.per_site}. Run a multiple of {self.per_site} "
                "workers, or choose another per_site."
            )
        return self.per_site


@dataclass(frozen=True)
class GossipStage(_AnyStage):
    """Workers average their parameters with neighbors only."""

    strategy: GossipStrategy

    local_parameters = True

    @property
    def schedule(self) -> PeriodicSchedule:
        return self.strategy.schedule

    @property
    def in_lock_step(self) -> bool:
        return self.strategy.in_lock_step

    def parts_at(self, seconds: Sequence[float]) -> tuple[int, ...] | None:
        return super().parts_at(seconds) if self.in_lock_step else None


@dataclass(frozen=True)
class SilentStage(_AnyStage):
    """Each worker trains independently, as in a world of one."""

    local_parameters = True
    communicates = False

    @property
    def schedule(self) -> PeriodicSchedule:
        return PeriodicSchedule(1)

    def parts_at(self, seconds: Sequence[float]) -> None:
        return None


@dataclass(frozen=True)
class ServerStage(_AnyStage):
    """Servers hold the parameters."""

    strategy: ServerStrategy

    @property
    def schedule(self) -> PeriodicSchedule:
        return self.strategy.schedule

    @property
    def in_lock_step(self) -> bool:
        return False

    def parts_at(self, seconds: Sequence[float]) -> tuple[int, ...] | None:
        return self.strategy.parts_at(seconds)


@dataclass(frozen=True)
class LocalServerStage(ServerStage):
    """Servers hold the common parameters, and workers train their own between two messages."""

    local_parameters = True


@dataclass(frozen=True)
class FederatedStage(_AnyStage):
    """A server holds the parameters, and devices that join and leave train them; it cannot run in a session."""

    strategy: Strategy

    local_parameters = True

    @property
    def schedule(self) -> PeriodicSchedule:
        return PeriodicSchedule(1)

    @property
    def in_lock_step(self) -> bool:
        return False

    def parts_at(self, seconds: Sequence[float]) -> None:
        return None

    def refuse(self) -> NoReturn:
        """Raise AttachError: a federation runs without a session."""
        raise AttachError(
            f"{self.strategy!r} is a federated strategy, for devices that join and leave, and cannot be attached to "
            "workers. Run `gossamer federate --recipe ... SCRIPT`, or write LocalSGD(period=8) here."
        )


Stage = GradientStage | AveragingStage | GossipStage | SilentStage | ServerStage | FederatedStage
