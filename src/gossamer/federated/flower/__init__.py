"""Flower adapter, both ways: compression for people on Flower, and Flower's strategies and apps on devices of ours.

compression  a ClientApp's mod and a strategy's wrapper
grid         Grids of devices in virtual time, and of processes
traffic      bytes by round
installed    which Flower goes, and that it is there

Flower is imported when something is asked for that needs it (extra `flower`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gossamer.comm.environment.run_token import read_token
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.wire.authentication import Credentials
from gossamer.federated.flower.compression.client_mod import compression_mod
from gossamer.federated.flower.installed import FlowerMissing, need_flower
from gossamer.federated.flower.traffic import RoundTraffic
from gossamer.federated.messages import THE_SERVER

if TYPE_CHECKING:
    from gossamer.federated.flower.compression.strategy import CompressedStrategy
    from gossamer.federated.flower.grid.tcp_grid import TcpGrid, node_peer, serve_node
    from gossamer.federated.flower.grid.virtual_grid import VirtualGrid, simulate

__all__ = [
    "THE_SERVER",
    "CompressedStrategy",
    "Credentials",
    "EndpointOptions",
    "FlowerMissing",
    "RoundTraffic",
    "TcpEndpoint",
    "TcpGrid",
    "VirtualGrid",
    "compression_mod",
    "node_peer",
    "read_token",
    "serve_node",
    "simulate",
]
HOMES = {  # of what needs Flower
    "CompressedStrategy": "compression.strategy",
    "TcpGrid": "grid.tcp_grid",
    "VirtualGrid": "grid.virtual_grid",
    "node_peer": "grid.tcp_grid",
    "serve_node": "grid.tcp_grid",
    "simulate": "grid.virtual_grid",
}


def __getattr__(name: str) -> Any:
    """What needs Flower, on first use. Raises FlowerMissing."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    need_flower()
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
