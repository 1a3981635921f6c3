"""Flower adapter in both directions: compression for Flower's apps, and Flower's apps on Gossamer's devices.

client_mod    compression_mod: compresses the contributions of a ClientApp
strategy      CompressedStrategy: wraps a strategy, which sees plain arrays
codec         contributions and differences between versions as bytes; the state of a node between rounds
arrays        a record's arrays as one flat tensor; a payload as the bytes of an Array
records       Flower's records and notes; RoundTraffic: their bytes
virtual_grid  a Grid of simulated devices in virtual time
tcp_grid      a Grid of processes; desk: queues of messages for nodes that poll
messages      Flower's messages as bytes

Flower is imported on first use of an object that needs it (extra `flower`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gossamer.comm.environment.run_token import read_token
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.federated.flower.client_mod import compression_mod
from gossamer.federated.flower.records import FlowerMissing, RoundTraffic, need_flower
from gossamer.federated.messages import THE_SERVER

if TYPE_CHECKING:
    from gossamer.federated.flower.strategy import CompressedStrategy
    from gossamer.federated.flower.tcp_grid import TcpGrid, node_peer, serve_node
    from gossamer.federated.flower.virtual_grid import VirtualGrid, simulate

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
HOMES = {  # modules of the objects that need Flower
    "CompressedStrategy": "strategy",
    "TcpGrid": "tcp_grid",
    "VirtualGrid": "virtual_grid",
    "node_peer": "tcp_grid",
    "serve_node": "tcp_grid",
    "simulate": "virtual_grid",
}


def __getattr__(name: str) -> Any:
    """Import an object that needs Flower on first use. Raises FlowerMissing."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    need_flower()
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
