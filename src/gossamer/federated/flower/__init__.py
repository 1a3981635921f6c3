"""Flower adapter, both ways: compression for people on Flower, and Flower's strategies and apps on devices of ours.

client_mod      compression_mod: a ClientApp's contributions travel compressed
strategy        CompressedStrategy: wraps a strategy, which sees plain arrays
virtual_grid    VirtualGrid: runs ClientApps in this process, in virtual time
virtual_device  when a device answers: its link, speed and hours
codec           contributions as bytes, with feedback
versions        compressed differences of what goes down
framing         a payload as the bytes of an Array
array_layout    a record's arrays as one flat tensor
records         Flower's records, made and read
notes           what travels beside arrays
node_state      what a node keeps between rounds
traffic         bytes by round
installed       which Flower goes, and that it is there

Only client_mod's callers, strategy and virtual_grid need Flower (extra `flower`); it is imported when they are asked
for.
"""

from typing import TYPE_CHECKING, Any

from gossamer.federated.flower.client_mod import compression_mod
from gossamer.federated.flower.installed import FlowerMissing, need_flower
from gossamer.federated.flower.traffic import RoundTraffic

if TYPE_CHECKING:
    from gossamer.federated.flower.strategy import CompressedStrategy
    from gossamer.federated.flower.virtual_grid import VirtualGrid, simulate

__all__ = ["CompressedStrategy", "FlowerMissing", "RoundTraffic", "VirtualGrid", "compression_mod", "simulate"]


def __getattr__(name: str) -> Any:
    """What needs Flower, on first use. Raises FlowerMissing."""
    if name == "CompressedStrategy":
        need_flower()
        from gossamer.federated.flower.strategy import CompressedStrategy

        return CompressedStrategy
    if name in ("VirtualGrid", "simulate"):
        need_flower()
        from gossamer.federated.flower import virtual_grid

        return getattr(virtual_grid, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
