"""Network models: hosts, bandwidths and round trips, and the time that messages take on them.

model           Host, Path and Network
parse           user descriptions of a network: SPEC or a TOML file
site_detection  a network from measurements: nearby hosts are one site
tcp_model       headers, windows and loss of TCP
cost/           time of collective operations on a network, and the fastest algorithm
"""

from gossamer.comm.network.model import Host, Network, Path
from gossamer.comm.network.parse import read_network

__all__ = ["Host", "Network", "Path", "read_network"]
