"""Flower adapter, both ways: compression for people on Flower, and Flower's strategies and apps on devices of ours.

compression  a ClientApp's mod and a strategy's wrapper
grid         a Grid of devices in virtual time
traffic      bytes by round
installed    which Flower goes, and that it is there

Flower is imported when something is asked for that needs it (extra `flower`).
"""

from typing import TYPE_CHECKING, Any

from gossamer.federated.flower.compression.client_mod import compression_mod
from gossamer.federated.flower.installed import FlowerMissing, need_flower
from gossamer.federated.flower.traffic import RoundTraffic

if TYPE_CHECKING:
    from gossamer.federated.flower.compression.strategy import CompressedStrategy
    from gossamer.federated.flower.grid.virtual_grid import VirtualGrid, simulate

__all__ = ["CompressedStrategy", "FlowerMissing", "RoundTraffic", "VirtualGrid", "compression_mod", "simulate"]


def __getattr__(name: str) -> Any:
    """What needs Flower, on first use. Raises FlowerMissing."""
    if name == "CompressedStrategy":
        need_flower()
        from gossamer.federated.flower.compression.strategy import CompressedStrategy

        return CompressedStrategy
    if name in ("VirtualGrid", "simulate"):
        need_flower()
        from gossamer.federated.flower.grid import virtual_grid

        return getattr(virtual_grid, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
