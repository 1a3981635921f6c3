"""Deployment: a federation's server and its devices as processes that talk over TCP; devices connect out only.

server     FederationServer: one process that holds the model and waits for devices
reception  the server's script: devices join, leave and return; the numbers that they have
device     FederationDevice: one process that joins, trains, sends, and connects again
report     progress lines, and the record of every round
files      the federation's folder: identity, lock, small files replaced as a whole
limits     largest frames, requests and handshakes at once, file descriptors
"""

from gossamer.federated.deployment.device import FederationDevice
from gossamer.federated.deployment.server import FederationServer

__all__ = ["FederationDevice", "FederationServer"]
