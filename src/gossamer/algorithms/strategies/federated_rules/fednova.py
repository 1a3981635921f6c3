"""FedNova: normalized averaging of updates with different numbers of local steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.strategies.federated_rules.base import CohortSummary, FederatedStrategy, LocalWork, Memory


@dataclass(frozen=True, repr=False)
class FedNova(FederatedStrategy):
    """FedAvg with normalized updates: each is divided by its local steps, and their mean is scaled by the mean steps.

    w <- w - t sum over the cohort of (n_k / m) (w - w_k) / t_k,  t = sum over the cohort of (n_k / m) t_k
    law:    with equal steps it is FedAvg (bit for bit with `local_steps` that all make); with constant gradients, a
            device's influence is proportional to its samples, for any number of steps
    bytes:  FedAvg's
    source: Wang et al. 2020, NeurIPS

    The paper calls t_k tau_i and t tau_eff. Devices train by SGD without momentum; t_k counts the steps that were made.
    Other optimizers would need other norms.

    Args:
        fraction: fraction of all clients that train in a round.
        local_steps, local_epochs, pull, aggregator, secure, privacy, stale_after: as for FedAvg.

    Example:
        >>> gossamer.FedNova(local_epochs=2)
        FedNova(local_epochs=2)
    """

    fraction: float = 0.1

    @property
    def why_plain_sgd(self) -> str | None:
        return "FedNova divides an update by its number of steps, assuming equal weights of all steps"

    @property
    def needs_steps(self) -> bool:
        return True

    def weight(self, work: LocalWork, staleness: int) -> float:
        """Return n_k / t_k, scaled so that it is n_k for a device that made the recipe's number of steps."""
        return work.samples * (self.local_steps or 1) / max(work.steps, 1)

    def apply(self, parameters: Tensor, memory: Memory, means: Sequence[Tensor], cohort: CohortSummary) -> None:
        """Scale the mean: with weights n_k / t_k it is the mean of normalized updates, except for the factor E[t^2] /
        E[t]^2.

        Both means use these weights; the factor is 1 if all t_k are equal.
        """
        square = cohort.steps**2
        mean_square = square if cohort.square_steps is None else cohort.square_steps
        parameters.sub_(means[0], alpha=mean_square / square if square else 1.0)
