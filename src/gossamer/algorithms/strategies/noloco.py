"""NoLoCo: local training for long periods, and an outer optimizer that needs one peer per round."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.algorithms.compressors import Compressor, Dense
from gossamer.algorithms.gossip.rules import MixingRule, OuterMomentum
from gossamer.algorithms.strategies.base import GossipStrategy
from gossamer.algorithms.strategies.diloco import check_outer_step
from gossamer.algorithms.topologies import Topology
from gossamer.errors import RecipeError, require


@dataclass(frozen=True, repr=False)
class NoLoCo(GossipStrategy):
    """Local SGD with an outer momentum step on the mean over a worker and its neighbors, every `period` steps.

    Delta_i = x_i - slow_i;  mean_i(y): over worker i and its neighbors of this round
    delta_i <- outer_momentum delta_i + outer_learning_rate mean_i(Delta) + pull (mean_i(slow) - slow_i)
    slow_i <- slow_i + delta_i;  x_i <- slow_i
    law:    means over all workers follow momentum SGD, for any topology; differences between two workers decay by
            sqrt(outer_momentum) per round once they are small
    bytes:  8 N to each neighbor, and 32; every `world` steps, 32 to every worker; memory: 2 N
    source: Kolehmainen et al. 2025, arXiv:2506.10911; with the sign of its proof and program, which differs from its
            equation 2

    slow_i are the paper's slow weights phi, outer_momentum its alpha, outer_learning_rate its beta, pull its gamma.
    Write NoLoCo(period=50) + RandomPeers() for one random peer per round and no all-reduce. The workers' parameters
    always differ: evaluate in session.averaged_parameters. With Complete(), pull=1.0 and outer_momentum=0.0 it is
    DiLoCo without momentum.

    Args:
        period: optimizer steps per round.
        outer_learning_rate: factor of the mean pseudo-gradient.
        outer_momentum: decay of the outer momentum per round, in [0, 1).
        pull: step towards the neighbors' mean slow parameters; None means outer_learning_rate, as in the authors'
            program.

    Example:
        >>> gossamer.NoLoCo(period=50) + gossamer.RandomPeers()
        NoLoCo(period=50) + RandomPeers()
    """

    period: int
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.5
    pull: float | None = None

    def __post_init__(self) -> None:
        require(self.period >= 1, f"period must be a number of steps, 1 or more, got {self.period}")
        check_outer_step(self.outer_learning_rate, self.outer_momentum)
        limit = 2 + 2 * self.outer_momentum
        require(
            0 < self.towards_neighbors < limit,
            f"pull must be above 0 and below 2 + 2 outer_momentum = {limit:g}, got {self.towards_neighbors:g}: workers "
            f"would diverge otherwise. Write NoLoCo(period={self.period}, pull=1.0).",
        )

    @property
    def towards_neighbors(self) -> float:
        return self.outer_learning_rate if self.pull is None else self.pull

    @property
    def in_lock_step(self) -> bool:
        return True

    def rule(self, compressor: Compressor) -> MixingRule:
        return OuterMomentum(self.outer_learning_rate, self.outer_momentum, self.towards_neighbors)

    def check(self, compressor: Compressor, topology: Topology) -> None:
        if compressor != Dense():
            raise RecipeError(
                f"{self!r} sends slow parameters and differences to a peer that may never have received a message "
                f"before, so {compressor!r} would have no copy to start from. Write {self!r} + {topology!r} without a "
                f"compressor, or DiLoCo(period={self.period}) + {compressor!r}."
            )
