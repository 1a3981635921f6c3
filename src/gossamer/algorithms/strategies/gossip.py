"""Gossip: local training with parameter averaging among neighbors of a topology."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.algorithms.compressors import Compressor, DeMo, Dense, Feedback, Sharded, SparseSum
from gossamer.algorithms.compressors.distortion import kept_share
from gossamer.algorithms.gossip.pairwise import refuse_loss
from gossamer.algorithms.gossip.rules import Averaging, Choco, MixingRule, PushSum
from gossamer.algorithms.strategies.base import GossipStrategy
from gossamer.algorithms.topologies import Topology
from gossamer.errors import RecipeError, require

SYMMETRIC, PUSH_SUM, PAIRWISE = "symmetric", "push-sum", "pairwise"
MANY = 64  # workers: of so many every topology shows whether its edges change


@dataclass(frozen=True, repr=False)
class Gossip(GossipStrategy):
    """Let every worker make its own steps, and average parameters with its neighbours every `period` of them.

    x_i <- x_i + step_size sum_j W_ij (x_j - x_i), after the optimizer's own step
    law:    the mean over workers stays; the distance to it shrinks by |lambda_2| of the topology in each round
    bytes:  the compressor's message to each neighbor, and 32; every `world` steps, 32 to every worker
    source: Lian et al. 2017, NeurIPS; Koloskova et al. 2019, ICML, with a compressor; Assran et al. 2019, ICML

    mixing: "symmetric", with weights of which every row and column sums to 1; "push-sum", on any directed graph, where
    parameters are de-biased for the forward pass; "pairwise", with one neighbor at a time and no lock step (Lian et
    al. 2018, ICML). step_size None: 1 with Dense(), else half of the share of a Gaussian matrix that one message of the
    compressor holds (0.5 for Int8).

    Adapt, then combine: an optimizer's step, then the mean with neighbors, who made theirs from their own parameters.
    D-PSGD's Algorithm 1 combines, then adapts: gradients of the old parameters are taken off the mean of the old ones,
    so that both can go on at once. Here what travels holds the step already, and evaluation sees mixed parameters.

    With a compressor, differences to public copies travel (CHOCO), in which losses are offered again: no Feedback.
    Steps of all workers count alike, whatever session.set_batch_weight says.
    """

    mixing: str = SYMMETRIC
    period: int = 1  # steps of the optimizer
    step_size: float | None = None  # how far to go towards the neighbors

    def __post_init__(self) -> None:
        require(
            self.mixing in (SYMMETRIC, PUSH_SUM, PAIRWISE),
            f'mixing is "symmetric", "push-sum" or "pairwise", not {self.mixing!r}. Write Gossip("symmetric").',
        )
        require(self.period >= 1, f"period is a number of steps, 1 or more, not {self.period}")
        require(
            self.step_size is None or 0 < self.step_size <= 1,
            f"step_size is how far to go towards the neighbours, in (0, 1], not {self.step_size}",
        )
        require(
            self.step_size is None or self.mixing == SYMMETRIC,
            f"{self.mixing} gives away and takes as it is, so a step_size would lose some of it: write "
            f'Gossip("{self.mixing}"), or Gossip(step_size={self.step_size})',
        )

    @property
    def in_lock_step(self) -> bool:
        return self.mixing != PAIRWISE

    def rule(self, compressor: Compressor) -> MixingRule:
        if self.mixing == PUSH_SUM:
            return PushSum()
        if compressor == Dense():
            return Averaging(self.step_size or 1.0)
        return Choco(compressor, self.step_size or safe_step_size(compressor))

    def check(self, compressor: Compressor, topology: Topology) -> None:
        if compressor == Dense():
            return
        if not self.in_lock_step:
            refuse_loss(compressor)
            return
        if self.mixing == PUSH_SUM:
            raise RecipeError(
                f"push-sum gives whole shares of the parameters away, and what {compressor!r} leaves out of them would "
                'be lost. Write Gossip("push-sum") + Dense(), or Gossip() with a compressor.'
            )
        if any(isinstance(term, Feedback | DeMo | Sharded | SparseSum) for term in compressor.held()):
            raise RecipeError(
                f"with {self!r} differences to copies travel, in which whatever was left out is offered again, to each "
                f"neighbour by itself: in {compressor!r}, Feedback would send it twice, as would DeMo, and Sharded and "
                "SparseSum have no group to divide among. Write Gossip() + TopK(density=0.01), without them."
            )
        if topology.rounds(MANY) > 1:
            raise RecipeError(
                f"with a compressor every neighbour must hear every letter, and the neighbours of {topology!r} change. "
                "Write Gossip() + Ring() with a compressor, or Dense() with this topology."
            )
        if kept_share(compressor) <= 0:
            raise RecipeError(
                f"a letter of {compressor!r} is further from what it stands for than nothing would be, so copies would "
                "run away. Write Gossip() + Int8(), or Gossip() + TopK(density=0.01)."
            )


def safe_step_size(compressor: Compressor) -> float:
    """Half of the share that a message holds, rounded to so few digits that all machines agree on it."""
    return float(f"{kept_share(compressor) / 2:.2g}")
