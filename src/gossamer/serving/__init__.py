"""Parameter servers: the rules, the state of a server, and the worker's half. No sockets, no sessions.

server   host()                                    a script that waits to be told what to hold, and serves it
worker   Client(...)  begin()  push_pull()         scripts, one at a time
         .gather(gradients)  .land()               what the training thread does in between
"""

from gossamer.serving.client import Client, Exchanged
from gossamer.serving.host import host, serve
from gossamer.serving.journal import keep, restore
from gossamer.serving.partition import Part, gather, scatter, split
from gossamer.serving.rules import OnArrival, Rounds, Rule, rule_of
from gossamer.serving.shard import Shard

__all__ = [
    "Client",
    "Exchanged",
    "OnArrival",
    "Part",
    "Rounds",
    "Rule",
    "Shard",
    "gather",
    "host",
    "keep",
    "restore",
    "rule_of",
    "scatter",
    "serve",
    "split",
]
