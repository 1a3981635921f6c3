"""FedNova: devices that made more steps do not pull harder in their own direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.strategies.federated.base import CohortSummary, FederatedStrategy, LocalWork, Memory


@dataclass(frozen=True, repr=False)
class FedNova(FederatedStrategy):
    """FedAvg of directions: what a device learned is divided by its steps, and their mean goes as far as steps did.

    w <- w - t sum over the cohort of (n_k / m) (w - w_k) / t_k,  t = sum over the cohort of (n_k / m) t_k
    law:    equal steps are FedAvg (bit for bit with `local_steps` that all make); where gradients stay as they are, a
            device pulls by its samples, however many steps it made
    bytes:  FedAvg's
    source: Wang et al. 2020, NeurIPS

    The steps are those that were made, t_k of them, by SGD without momentum: other optimizers have other norms.
    """

    fraction: float = 0.1  # of all clients that train in a round

    @property
    def why_plain_sgd(self) -> str | None:
        return "FedNova divides what a device learned by its number of steps, as if all of them weighed alike"

    @property
    def needs_steps(self) -> bool:
        return True

    def weight(self, work: LocalWork, staleness: int) -> float:
        """n_k / t_k, in units in which it is n_k for who made as many steps as the recipe says."""
        return work.samples * (self.local_steps or 1) / max(work.steps, 1)

    def apply(self, parameters: Tensor, memory: Memory, means: Sequence[Tensor], cohort: CohortSummary) -> None:
        """With weights n_k / t_k the mean is the one of directions up to a factor: E[t^2] / E[t]^2, both means by these
        weights, is 1 where all t_k are equal."""
        square = cohort.steps**2
        mean_square = square if cohort.square_steps is None else cohort.square_steps
        parameters.sub_(means[0], alpha=mean_square / square if square else 1.0)
