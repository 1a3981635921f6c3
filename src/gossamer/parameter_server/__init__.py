"""Parameter servers: the rules, the state of a server, and the worker's half. No sockets, no sessions.

server   host()                                    a script that waits to be told what to hold, and serves it
worker   Client(...)  begin()  push_pull()         scripts, one at a time
         .gather(gradients)  .land()               what the training thread does in between
"""

from gossamer.parameter_server.client.client import Client, StepResult
from gossamer.parameter_server.client.partition import ShardSlice, gather, scatter, split
from gossamer.parameter_server.journal import keep, restore
from gossamer.parameter_server.server import host, serve
from gossamer.parameter_server.shard import ServerShard
from gossamer.parameter_server.update_policy import AsynchronousPolicy, SynchronousPolicy, UpdatePolicy, policy_of

__all__ = [
    "AsynchronousPolicy",
    "Client",
    "ServerShard",
    "ShardSlice",
    "StepResult",
    "SynchronousPolicy",
    "UpdatePolicy",
    "gather",
    "host",
    "keep",
    "policy_of",
    "restore",
    "scatter",
    "serve",
    "split",
]
