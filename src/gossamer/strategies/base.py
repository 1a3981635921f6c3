"""What a strategy is: when workers talk, what they offer, what they do with the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from gossamer.compressors import Compressor, Dense, Hierarchical
from gossamer.core.term import Term
from gossamer.errors import RecipeError
from gossamer.gossip.rules import Memory as Memory
from gossamer.gossip.rules import MixingRule
from gossamer.strategies.schedule import PeriodicSchedule, SyncRound
from gossamer.topologies import Topology

if TYPE_CHECKING:
    from gossamer.strategies.parameter_server import ParameterServer

AGREED = "agreed"  # the key of what all workers hold alike
KEEP, AVERAGE, RESET = "keep", "average", "reset"


class Strategy(Term, ABC):
    """When the workers talk. Subclasses are plain hyperparameters and pure rules; the session acts on them."""

    kind = "strategy"

    @property
    @abstractmethod
    def stages(self) -> tuple[Stage, ...]:
        """What goes on, from which backward pass on; the first begins with the first."""

    @property
    def resends_losses(self) -> bool:
        """Whether what a compressor leaves out is offered again anyway, to somebody who hears each worker by itself: a
        recipe then adds neither Feedback nor Sharded."""
        return False

    @property
    def agrees_on_means(self) -> bool:
        """Whether all workers agree on means, of which each could average a part for all: a recipe may add Sharded."""
        return True

    def shared_by(self, compressor: Compressor, world: int | None) -> int | None:
        """How many of `world` workers could each average a part for all, if any: nodes share within themselves."""
        nodes = any(isinstance(term, Hierarchical) for term in compressor.held())
        return world if self.agrees_on_means and not nodes else None

    def carried(self, compressor: Compressor, topology: Topology) -> tuple[Compressor, Topology]:
        """A recipe's compressor and topology as written, then as used: what a topology compresses between nodes becomes
        the compressor. Raises RecipeError where no group is there that could be divided into nodes."""
        alone = compressor.held() if self.resends_losses or not self.agrees_on_means else ()
        for term in (*self.held(), *alone):
            if isinstance(term, Hierarchical):
                raise RecipeError(
                    f"{term!r} averages over a node before it compresses, and with {self!r} every message goes from "
                    f"one to another. Write {term.between!r} in its place."
                )
        if topology.crossing is None or not self.agrees_on_means:
            return compressor, topology
        between, per_node = topology.crossing
        if compressor != Dense():
            raise RecipeError(
                f"{topology!r} sends numbers as they are within a node, and {compressor!r} beside it would compress "
                f"them there, too. Write {self!r} + {topology!r} alone, or {self!r} + {compressor!r} + "
                f"{topology.plain!r}."
            )
        return Hierarchical(cast(Compressor, between), per_node=per_node), topology.plain

    def check(self, compressor: Compressor, topology: Topology) -> None:
        """Raise RecipeError where these do not go together with it."""
        if not topology.agrees:
            raise RecipeError(
                f"{topology!r} says who is whose neighbour, and with {self!r} all workers agree on one mean, for which "
                f"there is no such collective. Write Gossip() + {topology!r}, or {self!r} + Ring(), Exponential() or "
                "Hierarchy(), or leave it out."
            )


class AveragingStrategy(Strategy):
    """Workers train apart, and agree on parameters from time to time.

    Its rules see flat tensors (n,), the parameters of one bucket side by side. What travels are differences to
    something that all workers know, since those are small and may be compressed; subtracting the mean difference is
    averaging the parameters.
    """

    @property
    @abstractmethod
    def schedule(self) -> PeriodicSchedule:
        """When which fragment of the parameters leaves and lands."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Stage(0, merging=self),)

    @property
    def needs_own(self) -> bool:
        """Whether `land` asks for what this worker itself has sent."""
        return False

    @property
    def on_merge(self) -> str:
        """What becomes of the optimizer's momenta of parameters that land: KEEP, AVERAGE or RESET."""
        return KEEP

    @property
    def kept_share(self) -> float:
        """How much of other things that are averaged along, such as BatchNorm's statistics, a worker keeps."""
        return 0.0

    @abstractmethod
    def begin(self, parameters: Tensor) -> Memory:
        """What a worker remembers at first; `AGREED` among it, which is the same on every worker at all times."""

    def offer(self, parameters: Tensor, memory: Memory) -> None:
        """Overwrite `parameters`, a copy, with what leaves: how far they went, so that downhill is positive."""
        torch.sub(memory[AGREED], parameters, out=parameters)

    @abstractmethod
    def land(self, parameters: Tensor, memory: Memory, mean: Tensor, own: Tensor | None) -> None:
        """Overwrite `parameters` with what they become now that the mean of what was offered is here."""

    def restart(self, parameters: Tensor, memory: Memory) -> None:
        """Workers that are not those from before go on from the same parameters."""
        memory.update(self.begin(parameters))

    def undo(self, memory: Memory, offered: Tensor) -> None:
        """What was offered was not agreed upon, and is offered again."""


class GossipStrategy(Strategy):
    """Workers train apart, and average their parameters with neighbours of a topology."""

    period: int

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Stage(0, mixing=self),)

    @property
    def resends_losses(self) -> bool:
        return True

    def carried(self, compressor: Compressor, topology: Topology) -> tuple[Compressor, Topology]:
        if topology.crossing is not None:
            raise RecipeError(
                f"{topology!r} compresses the means of nodes, and with {self!r} every worker tells its neighbours by "
                "itself how far it is from their copies of it (CHOCO), within a node as between nodes. Write "
                f"{self!r} + {topology.crossing.by!r} + {topology.plain!r}."
            )
        return super().carried(compressor, topology)

    @property
    def schedule(self) -> PeriodicSchedule:
        """When parameters are mixed."""
        return PeriodicSchedule(self.period)

    def rounds_apart(self, world: int) -> int:
        """In every how many rounds all workers hear of each other: about every `world` backward passes, in which a
        worker then sends as many messages more as it would to one more neighbour."""
        return -(-world // self.period)

    @property
    @abstractmethod
    def in_lock_step(self) -> bool:
        """Whether all workers make the same rounds."""

    @abstractmethod
    def rule(self, compressor: Compressor) -> MixingRule:
        """What neighbours do with each other's parameters."""


@dataclass(frozen=True)
class Stage:
    """What goes on from backward pass `start` on.

    averages: gradients are averaged in every step, by all workers or by every `per_site` neighbouring ones;
    accumulate, delay: over so many backward passes, and used so many exchanges later; merging: parameters are averaged
    from time to time; serving: parameters are held by servers; mixing: they are averaged with neighbours only.
    """

    start: int
    averages: bool = False
    accumulate: int = 1
    delay: int = 0
    per_site: int | None = None
    merging: AveragingStrategy | None = None
    serving: ParameterServer | None = None
    mixing: GossipStrategy | None = None

    @property
    def apart(self) -> bool:
        """Whether parameters are averaged, and workers hold different ones meanwhile."""
        return self.merging is not None or self.mixing is not None


def schedule_of(stage: Stage) -> PeriodicSchedule:
    """When the turns of a stage leave and land; gradients that nothing delays do both within one backward pass."""
    for apart in (stage.merging, stage.mixing):
        if apart is not None:
            return apart.schedule
    return PeriodicSchedule(stage.accumulate, delay=stage.delay)


def cycle_of(stage: Stage) -> list[SyncRound]:
    """One period of a stage, in backward passes since the training began."""
    turns = schedule_of(stage).cycle
    return [SyncRound(fragment, launch + stage.start, landing + stage.start) for fragment, launch, landing in turns]
