"""Flower adapter, both ways: compression for people on Flower, and Flower's strategies and apps on devices of ours.

compression  a ClientApp's mod and a strategy's wrapper
grid         Grids of devices in virtual time, and of processes
traffic      bytes by round
installed    which Flower goes, and that it is there

Flower is imported when something is asked for that needs it (extra `flower`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gossamer.federated.flower.compression.client_mod import compression_mod
from gossamer.federated.flower.installed import FlowerMissing, need_flower
from gossamer.federated.flower.traffic import RoundTraffic

if TYPE_CHECKING:
    from gossamer.federated.flower.compression.strategy import CompressedStrategy
    from gossamer.federated.flower.grid.tcp_grid import TcpGrid, serve_node
    from gossamer.federated.flower.grid.virtual_grid import VirtualGrid, simulate

__all__ = [
    "CompressedStrategy",
    "FlowerMissing",
    "RoundTraffic",
    "TcpGrid",
    "VirtualGrid",
    "compression_mod",
    "serve_node",
    "simulate",
]
HOMES = {  # of what needs Flower
    "CompressedStrategy": "compression.strategy",
    "TcpGrid": "grid.tcp_grid",
    "VirtualGrid": "grid.virtual_grid",
    "serve_node": "grid.tcp_grid",
    "simulate": "grid.virtual_grid",
}


def __getattr__(name: str) -> Any:
    """What needs Flower, on first use. Raises FlowerMissing."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    need_flower()
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
