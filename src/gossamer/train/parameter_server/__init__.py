"""Parameter servers: keep a model's shards, apply workers' gradients, publish parameters. Scripts without sockets.

A push to a server and back:
 1  client/client           gather: gradients into the shard clients' buffers (partition); push_pull begins
 2  client/shard_client     encode: the buffer's blocks become a ShardMessage (shard_message, compressors)
 3  base/peer_ops           Push, with stamp (worker, step, version) and a header (weight, hyperparameters)
 4  comm/rpc, wire          to the server's process and back; in tests: simulation
 5  server                  serve: passes each event to the policy
 6  update_policy           receive: a duplicate (deduplication) gets the same answer; others as the policy decides
 7  shard                   take, apply, publish: each is first in the journal as a journal_entry
 8  delta_chain             the published parameters, as deltas to the version that a worker has
 9  update_policy           settle: answers pushes at once, pulls once their clock is reached
10  client/client           pull: replicas apply the deltas; apply_pull writes them to the parameters

AsyncDiLoCo: client/periodic_client sends the change of several local steps, and the quorum policy merges changes with
delayed_nesterov, the outer optimizer.

shard_spec describes a shard as text, from_recipe builds it; standby is a spare server process. shard_state transfers a
shard's state into a checkpoint and back, in pieces.
"""

from gossamer.train.parameter_server.client.client import Client, StepResult
from gossamer.train.parameter_server.client.partition import ShardSlice, gather, scatter, split
from gossamer.train.parameter_server.journal import keep, restore
from gossamer.train.parameter_server.server import host, serve
from gossamer.train.parameter_server.shard import ServerShard
from gossamer.train.parameter_server.update_policy import (
    AsynchronousPolicy,
    StaleSynchronousPolicy,
    SynchronousPolicy,
    UpdatePolicy,
    policy_of,
)

__all__ = [
    "AsynchronousPolicy",
    "Client",
    "ServerShard",
    "ShardSlice",
    "StaleSynchronousPolicy",
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
