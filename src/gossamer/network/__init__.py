"""Networks as numbers: hosts, rates, round trips, and what sending over them takes."""

from gossamer.network.model import Host, Network, Path
from gossamer.network.parse import read_network

__all__ = ["Host", "Network", "Path", "read_network"]
