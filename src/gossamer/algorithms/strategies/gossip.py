"""Gossip: local training with parameter averaging among neighbors of a topology."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.algorithms.compressors import Compressor, DeMo, Dense, Feedback, Sharded, SparseSum
from gossamer.algorithms.compressors.distortion import kept_share
from gossamer.algorithms.gossip.partner import refuse_loss
from gossamer.algorithms.gossip.rules import Averaging, Choco, MixingRule, PushSum
from gossamer.algorithms.strategies.base import GossipStrategy
from gossamer.algorithms.topologies import Topology
from gossamer.errors import RecipeError, require

SYMMETRIC, PUSH_SUM, PAIRWISE = "symmetric", "push-sum", "pairwise"
MANY = 64, 10_007  # workers; with one of these, every topology shows whether its edges change


@dataclass(frozen=True, repr=False)
class Gossip(GossipStrategy):
    """Decentralized SGD: local steps, and parameter averaging with the neighbors of a topology every `period` steps.

    x_i <- x_i + step_size sum_j W_ij (x_j - x_i), after the optimizer's own step
    law:    the mean over workers is preserved; the distance to it shrinks by |lambda_2| of the topology in each round
    bytes:  the compressor's message to each neighbor, and 32; every `world` steps, 32 to every worker
    source: Lian et al. 2017, NeurIPS; Koloskova et al. 2019, ICML, with a compressor; Assran et al. 2019, ICML

    W is the papers' mixing matrix, |lambda_2| the absolute value of its second eigenvalue, and step_size the consensus
    step size gamma of CHOCO-SGD (Koloskova et al.).

    "symmetric" mixing uses doubly stochastic weights. "push-sum" works on any directed graph; parameters are de-biased
    for the forward pass (SGP, Assran et al.). "pairwise" averages with one neighbor at a time and without lock step
    (AD-PSGD, Lian et al. 2018, ICML).

    The optimizer steps first, then averages with neighbors that have stepped from their own parameters (adapt, then
    combine). D-PSGD's Algorithm 1 combines, then adapts: it applies gradients of the old parameters to the mean of the
    old ones, so that both can run concurrently. Here messages include the step, and evaluation uses mixed parameters.

    With a compressor, workers send differences to public copies (CHOCO). The errors are in the next difference, so
    recipes add no Feedback. The steps of all workers have equal weights, regardless of session.set_batch_weight.

    Args:
        mixing: "symmetric", "push-sum" or "pairwise".
        period: optimizer steps per round.
        step_size: step towards the neighbors, in (0, 1]; None: 1 with Dense(), otherwise half of the energy share that
            the compressor keeps of a Gaussian matrix (0.5 for Int8).

    Example:
        >>> gossamer.Gossip(period=4) + gossamer.Ring()
        Gossip(period=4) + Ring()
    """

    mixing: str = SYMMETRIC
    period: int = 1
    step_size: float | None = None

    def __post_init__(self) -> None:
        require(
            self.mixing in (SYMMETRIC, PUSH_SUM, PAIRWISE),
            f'mixing must be "symmetric", "push-sum" or "pairwise", got {self.mixing!r}. Write Gossip("symmetric").',
        )
        require(self.period >= 1, f"period must be a number of steps, 1 or more, got {self.period}")
        require(
            self.step_size is None or 0 < self.step_size <= 1,
            f"step_size must be the step towards the neighbors, in (0, 1], got {self.step_size}",
        )
        require(
            self.step_size is None or self.mixing == SYMMETRIC,
            f"{self.mixing} mixing transfers whole shares of the parameters, so a step_size would lose a part. Write "
            f'Gossip("{self.mixing}"), or Gossip(step_size={self.step_size}).',
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
                f"push-sum sends whole shares of the parameters, so entries that {compressor!r} omits would be "
                'lost. Write Gossip("push-sum") + Dense(), or Gossip() with a compressor.'
            )
        if any(isinstance(term, Feedback | DeMo | Sharded | SparseSum) for term in compressor.held()):
            raise RecipeError(
                f"with {self!r} workers send differences to copies, which include earlier errors, to each neighbor "
                f"separately: in {compressor!r}, Feedback and DeMo would send errors twice, and Sharded and SparseSum "
                "have no group to divide the work among. Write Gossip() + TopK(density=0.01), without them."
            )
        if any(topology.rounds(world) > 1 for world in MANY):
            raise RecipeError(
                f"with a compressor a neighbor must receive every message, and the neighbors of {topology!r} change. "
                "Write Gossip() + Ring() with a compressor, or Dense() with this topology."
            )
        if kept_share(compressor) <= 0:
            raise RecipeError(
                f"a message of {compressor!r} has a larger error than sending nothing, so copies would diverge. "
                "Write Gossip() + Int8(), or Gossip() + TopK(density=0.01)."
            )


def safe_step_size(compressor: Compressor) -> float:
    """Return half of the energy share that a message keeps, rounded to so few digits that all machines agree on it."""
    return float(f"{kept_share(compressor) / 2:.2g}")
