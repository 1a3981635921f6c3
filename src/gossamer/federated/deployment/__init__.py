"""Deployment: a federation's server and its devices as processes that talk over TCP; devices connect out only.

server             FederationServer: one process that holds the model and waits for devices
reception          the server's script: who joins, who is absent and how long that is forgiven; the rest is the rounds'
enrollment             Enrollment: which device has which number, also after a restart
server_journal     what a killed server goes on from
round_report       progress lines, and the record of every round
evaluation         evaluates versions by the user's function, beside the rounds
device             FederationDevice: one process that joins, trains and sends
server_link        watches a device's connection: what it says, and when it gives up
device_directory   a device's identity and lock on disk
invitations        what a device asks when it joins, and what it is told
recipe_terms       the strategy and the compressors of a recipe's text
limits             largest frames, most parts, file descriptors
files              small files that are replaced as a whole
"""

from gossamer.federated.deployment.device import FederationDevice
from gossamer.federated.deployment.server import FederationServer

__all__ = ["FederationDevice", "FederationServer"]
