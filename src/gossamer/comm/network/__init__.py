"""Networks as numbers: hosts, rates and round trips, and how long messages take on them.

model           Host, Path and Network
parse           a network as a user writes it: SPEC or a TOML file
site_detection  a network from measurements: hosts near each other are one site
tcp_model       headers, windows and loss of TCP
cost/           how long collective operations take on a network, and which collective is the fastest
"""

from gossamer.comm.network.model import Host, Network, Path
from gossamer.comm.network.parse import read_network

__all__ = ["Host", "Network", "Path", "read_network"]
