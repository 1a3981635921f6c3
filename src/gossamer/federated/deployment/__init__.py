"""Deployment: a federation's server and its devices as processes that talk over TCP; devices connect out only.

server               FederationServer: one process that holds the model and waits for devices
reception            the server's script: who joins, and for how long whom it waits; the rest is the rounds'
enrollment           which device has which number, also after a restart
federation_identity  what makes two starts of a server the same federation
round_report         progress lines, and the record of every round
gathering            says who is waited for while a round cannot begin
evaluation           evaluates versions by the user's function, beside the rounds
device               FederationDevice: one process that joins, trains and sends
server_link          watches a device's connection: what it says, and when it gives up
device_directory     a device's identity and lock on disk
invitations          what a device asks when it joins, and what it is told
limits               largest frames, asks and handshakes at once, file descriptors
files                small files that are replaced as a whole
"""

from gossamer.federated.deployment.device import FederationDevice
from gossamer.federated.deployment.server import FederationServer

__all__ = ["FederationDevice", "FederationServer"]
