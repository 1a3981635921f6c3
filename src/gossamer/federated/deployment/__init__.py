"""Deployment: a federation's server and its devices as processes over TCP. Devices only connect out.

server     FederationServer: one process that holds the model and waits for devices
reception  the server's script: devices join, leave and return; their numbers
device     FederationDevice: one process that joins, trains, sends, and reconnects
report     progress lines, and the record of every round
files      the federation's folder: identity, lock, atomically replaced files
limits     largest frames, concurrent requests and handshakes, file descriptors
"""

from gossamer.federated.deployment.device import FederationDevice
from gossamer.federated.deployment.server import FederationServer

__all__ = ["FederationDevice", "FederationServer"]
