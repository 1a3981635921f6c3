"""Silent: independent training on every worker, the baseline that all communication is measured against."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.algorithms.compressors import Compressor, Dense
from gossamer.algorithms.strategies.base import SilentStage, Stage, Strategy
from gossamer.algorithms.topologies import Complete, Topology
from gossamer.errors import RecipeError


@dataclass(frozen=True, repr=False)
class Silent(Strategy):
    """Let every worker train by itself, from the same first parameters; nothing is sent.

    x_i <- x_i + step of worker i's optimizer for g_i
    law:    equal to one process that trains on worker i's data alone, bit for bit
    bytes:  0; memory: 0

    Held-out losses of Silent() and of Dense() span the scale of the retained benefit: see
    `gossamer.plan.retained_benefit`. `session.averaged_parameters` leaves each worker its own parameters.
    """

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (SilentStage(0),)

    @property
    def agrees_on_means(self) -> bool:
        return False

    def check(self, compressor: Compressor, topology: Topology) -> None:
        """Raise RecipeError for a compressor or a topology, which would have nothing to do."""
        if not isinstance(compressor, Dense) or not isinstance(topology, Complete):
            raise RecipeError(
                "Silent() sends nothing, so a compressor or a topology beside it would have no effect. Write Silent() "
                "alone."
            )
