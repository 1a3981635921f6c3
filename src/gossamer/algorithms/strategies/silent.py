"""Silent: independent training on every worker, the baseline for measuring the benefit of communication."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.algorithms.compressors import Compressor, Dense
from gossamer.algorithms.strategies.base import SilentStage, Stage, Strategy
from gossamer.algorithms.topologies import Complete, Topology
from gossamer.base.term import Inelastic
from gossamer.errors import RecipeError


@dataclass(frozen=True, repr=False)
class Silent(Strategy):
    """Independent training: all workers start from the same parameters and send nothing.

    x_i <- x_i + step of worker i's optimizer for g_i
    law:    equal to one process that trains on worker i's data alone, bit for bit
    bytes:  0; memory: 0

    The held-out losses of Silent() and Dense() are the ends of the retained-benefit scale: see
    `gossamer.algorithms.recipes.retained_benefit`. `session.averaged_parameters` leaves each worker its own parameters.

    Example:
        >>> gossamer.Silent()
        Silent()
    """

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (SilentStage(0),)

    @property
    def inelastic(self) -> Inelastic:
        return Inelastic("its workers have no common parameters for new workers", "Write Dense()")

    @property
    def agrees_on_means(self) -> bool:
        return False

    def check(self, compressor: Compressor, topology: Topology) -> None:
        """Raise RecipeError for a compressor or a topology, which would have no effect."""
        if not isinstance(compressor, Dense) or not isinstance(topology, Complete):
            raise RecipeError(
                "Silent() sends nothing, so a compressor or a topology would have no effect. Write Silent() without "
                "them."
            )
