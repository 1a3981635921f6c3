"""Networks as numbers: hosts, rates, round trips, and what sending over them takes."""

from gossamer.network.link import Host, Network, Path
from gossamer.network.spec import read_network

__all__ = ["Host", "Network", "Path", "read_network"]
